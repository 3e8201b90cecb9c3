//! Progress of long work: QEMU's `(50.00/100%)` with `-p`, a bar on a terminal
//! when called by our own name.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use vellum_jobs::copy::Observer;

use crate::report;

/// Whether a tool called `program` shows bars unasked.
pub fn has_bars(program: &str) -> bool {
    crate::report::is_own_name(program) && std::io::stderr().is_terminal()
}

/// Shows how far some work is.
pub enum Progress {
    /// Not at all, but when SIGUSR1 asks for it.
    Off(Asked),
    /// As QEMU's tools do.
    Percent {
        /// What was printed last.
        printed: Option<f64>,
        /// Smaller steps, in percent, are not printed.
        min_step: f64,
    },
    /// As a bar that vanishes in the end.
    Bar(ProgressBar),
}

impl Progress {
    /// The progress for a tool called `program`: `wanted` by `-p`, `quiet` by `-q`.
    /// Steps up to `min_step` percent are not printed.
    pub fn new(program: &str, wanted: bool, quiet: bool, min_step: f64) -> Progress {
        if quiet {
            return Progress::Off(Asked::listen());
        }
        if wanted {
            return Progress::Percent {
                printed: None,
                min_step,
            };
        }
        if !has_bars(program) {
            return Progress::Off(Asked::listen());
        }
        let bar = ProgressBar::new(1);
        // The template is a constant and valid; the default style would do too.
        if let Ok(style) = ProgressStyle::with_template(
            "{wide_bar} {percent:>3}% {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ) {
            bar.set_style(style);
        }
        Progress::Bar(bar)
    }

    /// Whether anything is shown.
    pub fn is_on(&self) -> bool {
        !matches!(self, Progress::Off(_))
    }

    /// `done` of `total` is done.
    pub fn show(&mut self, done: u64, total: u64) {
        let percent = match total {
            0 => 100.0,
            total => (done as f64 * 100.0 / total as f64).min(100.0),
        };
        match self {
            Progress::Off(asked) => asked.answer(percent),
            Progress::Percent { printed, min_step } => {
                let step = printed.map_or(f64::INFINITY, |last| (percent - last).abs());
                if step > *min_step || percent == 0.0 || percent >= 100.0 {
                    *printed = Some(percent);
                    report::print(format_args!("    ({percent:.2}/100%)\r"));
                }
            }
            Progress::Bar(bar) => {
                bar.set_length(total);
                bar.set_position(done);
            }
        }
    }

    /// `done` bytes are done, of nobody knows how many.
    pub fn count(&mut self, done: u64) {
        if let Progress::Bar(bar) = self {
            if bar.length() != Some(0) {
                bar.set_length(0);
                if let Ok(style) = ProgressStyle::with_template("{bytes} {bytes_per_sec}") {
                    bar.set_style(style);
                }
            }
            bar.set_position(done);
        }
    }

    /// Prints something while there may be a bar.
    pub fn beside(&self, print: impl FnOnce()) {
        match self {
            Progress::Bar(bar) => bar.suspend(print),
            Progress::Off(_) | Progress::Percent { .. } => print(),
        }
    }

    /// Takes a bar off the terminal, before the result is printed.
    pub fn clear(&self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }

    /// The work is over.
    pub fn end(self) {
        match self {
            Progress::Off(_) => {}
            Progress::Percent { printed: None, .. } => {}
            Progress::Percent { .. } => report::print("\n"),
            Progress::Bar(bar) => bar.finish_and_clear(),
        }
    }
}

/// Progress that several callers show, and that one of them ends.
#[derive(Clone)]
pub struct SharedProgress(Arc<Mutex<Option<Progress>>>);

impl SharedProgress {
    pub fn new(progress: Progress) -> SharedProgress {
        SharedProgress(Arc::new(Mutex::new(Some(progress))))
    }

    /// `done` of `total` is done; after the end nothing is shown.
    pub fn show(&self, done: u64, total: u64) {
        if let Some(progress) = self.0.lock().as_mut() {
            progress.show(done, total);
        }
    }

    /// The work is over.
    pub fn end(&self) {
        if let Some(progress) = self.0.lock().take() {
            progress.end();
        }
    }
}

/// Shows the user how far a job is.
pub struct ProgressReporter {
    pub progress: Progress,
    /// What is left to be written.
    pub left_bytes: u64,
}

impl ProgressReporter {
    /// Shows it as [`Progress::new`] says, in steps of a percent.
    pub fn new(program: &str, wanted: bool, quiet: bool) -> ProgressReporter {
        ProgressReporter {
            progress: Progress::new(program, wanted, quiet, 1.0),
            left_bytes: 0,
        }
    }
}

impl Observer for ProgressReporter {
    fn wants_progress(&self) -> bool {
        self.progress.is_on()
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        self.left_bytes = total_bytes.saturating_sub(done_bytes);
        self.progress.show(done_bytes, total_bytes);
    }
}

/// Whether somebody has asked how far it is, by a signal.
pub struct Asked(Arc<AtomicBool>);

impl Asked {
    /// From now on SIGUSR1 asks, and does not end the program.
    fn listen() -> Asked {
        let asked = Arc::new(AtomicBool::new(false));
        // Where no handler can be set, nobody gets an answer.
        let _ = signal_hook::flag::register(libc::SIGUSR1, asked.clone());
        Asked(asked)
    }

    fn answer(&self, percent: f64) {
        if self.0.swap(false, Ordering::Relaxed) {
            report::eprint_line(&format!("    ({percent:.2}/100%)"));
        }
    }
}
