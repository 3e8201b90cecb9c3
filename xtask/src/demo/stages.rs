//! The steps of the demo: shows each while it runs, and keeps what it measured.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};

use super::{MIB, outside};

const TICK: Duration = Duration::from_millis(100);

/// How the progress of a step can be seen.
pub enum Watch {
    /// Only that it goes on.
    Nothing,
    /// The step itself tells, up to this many bytes.
    Bytes(u64),
    /// A file grows to about this many bytes on disk.
    File(PathBuf, u64),
}

/// What a step has to say when it is done.
pub enum Outcome {
    /// Nothing but that it is done.
    Done,
    /// It moved so many bytes (their speed is shown), and perhaps a remark.
    Bytes(u64, String),
    /// A remark.
    Said(String),
}

/// The steps done so far.
#[derive(Default)]
pub struct Stages {
    rows: Vec<Row>,
}

struct Row {
    title: String,
    took: Duration,
    measured: String,
}

impl Stages {
    /// Runs one step, showing its progress, and keeps its time and outcome.
    pub fn run<T>(
        &mut self,
        title: &str,
        watch: Watch,
        work: impl FnOnce(&ProgressBar) -> Result<(T, Outcome)>,
    ) -> Result<T> {
        let bar = progress_bar(title, &watch);
        let start = Instant::now();
        let done = AtomicBool::new(false);
        let result = std::thread::scope(|scope| {
            if let Watch::File(path, _) = &watch {
                scope.spawn(|| follow(path, &bar, &done));
            }
            // A panic in `work` must not leave the scope waiting for the follower.
            let _end = SetOnDrop(&done);
            work(&bar)
        });
        let took = start.elapsed();
        bar.finish_and_clear();
        let (value, outcome) = result.with_context(|| format!("the step '{title}' failed"))?;
        let measured = outcome.measured(took);
        println!("  {title:<48} {:>7.2} s  {measured}", took.as_secs_f64());
        self.rows.push(Row {
            title: title.to_owned(),
            took,
            measured,
        });
        Ok(value)
    }

    /// All steps as a Markdown table.
    pub fn table(&self) -> String {
        let mut text = String::from("| step | time | measured |\n| --- | ---: | --- |\n");
        for row in &self.rows {
            let seconds = row.took.as_secs_f64();
            writeln!(
                text,
                "| {} | {seconds:.2} s | {} |",
                row.title, row.measured
            )
            .expect("writing to a string does not fail");
        }
        text
    }
}

impl Outcome {
    fn measured(self, took: Duration) -> String {
        match self {
            Outcome::Done => String::new(),
            Outcome::Said(text) => text,
            Outcome::Bytes(bytes, remark) => {
                let mib = bytes as f64 / MIB as f64;
                let speed = mib / took.as_secs_f64();
                let separator = if remark.is_empty() { "" } else { ", " };
                format!("{mib:.0} MiB, {speed:.0} MiB/s{separator}{remark}")
            }
        }
    }
}

fn progress_bar(title: &str, watch: &Watch) -> ProgressBar {
    let (bar, template) = match watch {
        Watch::Nothing => (ProgressBar::new_spinner(), "{spinner} {msg} {elapsed}"),
        Watch::Bytes(total) | Watch::File(_, total) => (
            ProgressBar::new(*total),
            "{spinner} {msg} {wide_bar} {binary_bytes} of {binary_total_bytes} {elapsed}",
        ),
    };
    let style = ProgressStyle::with_template(template).expect("the template is one of two above");
    bar.set_style(style);
    bar.set_message(title.to_owned());
    bar.enable_steady_tick(TICK);
    bar
}

/// Shows how a file grows until `done`.
fn follow(path: &std::path::Path, bar: &ProgressBar, done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        if let Ok(bytes) = outside::allocated_bytes(path) {
            bar.set_position(bytes);
        }
        std::thread::sleep(TICK);
    }
}

struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_tells_times_and_speeds() -> Result<()> {
        let mut stages = Stages::default();
        stages.run("look", Watch::Nothing, |_| {
            Ok(((), Outcome::Said("fine".into())))
        })?;
        let table = stages.table();
        assert!(table.contains("| look | 0.00 s | fine |"), "{table}");
        let outcome = Outcome::Bytes(64 * MIB, "3 files".into());
        assert_eq!(
            outcome.measured(Duration::from_secs(2)),
            "64 MiB, 32 MiB/s, 3 files"
        );
        Ok(())
    }

    #[test]
    fn a_failed_step_is_named() {
        let result: Result<()> =
            Stages::default().run("jump", Watch::Nothing, |_| anyhow::bail!("too high"));
        let text = format!("{:#}", result.expect_err("it bails"));
        assert_eq!(text, "the step 'jump' failed: too high");
    }
}
