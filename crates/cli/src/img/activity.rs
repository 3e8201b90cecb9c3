//! An indicator for work that reports no progress itself: a bar that follows how much space the
//! file takes, or else a spinner with the time. It is shown only on a terminal, and only if the
//! work takes a while.

use std::fs::Metadata;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

use crate::progress::has_bars;

/// Work that is over sooner shows nothing.
const PATIENCE: Duration = Duration::from_millis(400);
const INTERVAL: Duration = Duration::from_millis(100);
/// Of `st_blocks`.
const BLOCK_BYTES: u64 = 512;

/// Shows that work goes on, until it is dropped.
pub struct ActivityIndicator {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A file that is going to take more space.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Growth {
    path: PathBuf,
    before_bytes: u64,
    total_bytes: u64,
}

impl Growth {
    /// The file `name` will take `total_bytes` more than now; `None`: nobody will see.
    pub fn of(name: &str, total_bytes: u64) -> Option<Growth> {
        let path = PathBuf::from(name.strip_prefix("file:").unwrap_or(name));
        Some(Growth {
            before_bytes: space(&path).unwrap_or(0),
            path,
            total_bytes,
        })
        .filter(|growth| growth.total_bytes > 0)
    }

    /// How much more it takes so far.
    fn done_bytes(&self) -> u64 {
        let now = space(&self.path).unwrap_or(0);
        let grown = now.saturating_sub(self.before_bytes);
        grown.min(self.total_bytes)
    }
}

/// The space that a regular file takes.
fn space(path: &std::path::Path) -> Option<u64> {
    let file = std::fs::metadata(path).ok().filter(Metadata::is_file)?;
    Some(file.blocks() * BLOCK_BYTES)
}

impl ActivityIndicator {
    /// Watches work of a tool called `program`; `what` says what is done.
    pub fn new(
        program: &str,
        quiet: bool,
        what: &'static str,
        growth: Option<Growth>,
    ) -> ActivityIndicator {
        if quiet || !has_bars(program) {
            return ActivityIndicator {
                stop: None,
                thread: None,
            };
        }
        let (stop, stopped) = channel();
        let show = move || {
            let goes_on = |time| stopped.recv_timeout(time) == Err(RecvTimeoutError::Timeout);
            if !goes_on(PATIENCE) {
                return;
            }
            let bar = bar(what, growth.as_ref());
            loop {
                match &growth {
                    Some(growth) => bar.set_position(growth.done_bytes()),
                    None => bar.tick(),
                }
                if !goes_on(INTERVAL) {
                    break;
                }
            }
            bar.finish_and_clear();
        };
        ActivityIndicator {
            stop: Some(stop),
            // Without a thread nothing is shown.
            thread: std::thread::Builder::new().spawn(show).ok(),
        }
    }
}

fn bar(what: &'static str, growth: Option<&Growth>) -> ProgressBar {
    let (bar, template) = match growth {
        Some(growth) => (
            ProgressBar::new(growth.total_bytes),
            "{msg} {wide_bar} {percent:>3}% {bytes}/{total_bytes} {bytes_per_sec} {eta}",
        ),
        None => (ProgressBar::new_spinner(), "{spinner} {msg} {elapsed}"),
    };
    // The templates are constants and valid; the default style would do too.
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar.with_message(what)
}

impl Drop for ActivityIndicator {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It only shows something: that it failed does not matter.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_as_far_as_the_space_that_it_takes_more() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let name = file.path().display().to_string();
        std::fs::write(&name, [1; 8192]).unwrap();
        let growth = Growth::of(&name, 1 << 20).unwrap();
        assert_eq!(growth.done_bytes(), 0);
        std::fs::write(&name, vec![1; 8192 + 65536]).unwrap();
        file.as_file().sync_all().unwrap();
        assert_eq!(growth.done_bytes(), 65536);
        std::fs::write(&name, vec![1; 2 << 20]).unwrap();
        file.as_file().sync_all().unwrap();
        assert_eq!(growth.done_bytes(), 1 << 20, "no more than all");
        assert_eq!(Growth::of(&name, 0), None);
    }
}
