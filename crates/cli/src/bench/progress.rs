//! The progress bar of `vellum bench` on standard error: how much is done, what is measured now,
//! and how long the rest takes.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::IsTerminal;

use super::plan::Row;

/// Shows how far the run is; nothing where standard error is no terminal.
#[derive(Debug)]
pub(super) struct Progress {
    bar: ProgressBar,
    steps: u64,
}

impl Progress {
    /// A bar of `steps` steps.
    pub(super) fn new(quiet: bool, steps: usize) -> Progress {
        let target = match quiet || !std::io::stderr().is_terminal() {
            true => ProgressDrawTarget::hidden(),
            false => ProgressDrawTarget::stderr(),
        };
        Progress {
            bar: ProgressBar::with_draw_target(None, target),
            steps: steps as u64,
        }
    }

    fn style(&self, template: &str) {
        // The templates are constants and valid; the default style would do too.
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style);
        }
    }

    /// The full image is being written.
    pub(super) fn fill(&self, size_bytes: u64) {
        self.style("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec}");
        self.bar.set_length(size_bytes);
        self.bar.set_message("Writing a full image");
    }

    pub(super) fn filled(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    /// Measuring begins.
    pub(super) fn begin(&self) {
        self.bar.reset();
        self.style("{msg:50!} {wide_bar} {percent:>3} %, {eta} left");
        self.bar.set_length(self.steps);
    }

    pub(super) fn row(&self, title: &str, row: &Row, round: usize, rounds: usize) {
        let title = title.split(',').next().unwrap_or(title);
        let name = format!("{} {}", row.series, row.x_label);
        let name = name.trim();
        self.bar
            .set_message(format!("{}/{rounds} {title}: {name}", round + 1));
    }

    pub(super) fn step(&self) {
        self.bar.inc(1);
    }

    /// Does something that prints.
    pub(super) fn hide<T>(&self, print: impl FnOnce() -> T) -> T {
        self.bar.suspend(print)
    }

    pub(super) fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.end();
    }
}
