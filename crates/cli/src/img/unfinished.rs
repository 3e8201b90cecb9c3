//! What becomes of a target whose copy does not come to its end: by an error (a full disk),
//! or because the user asks for the end (Ctrl-C).
//!
//! QEMU's programs leave it as it is, and no check tells half an image from a whole one.
//! Called by our own name, a target that was not there before is removed, and of any other
//! it is said that it is not complete. The files of devices are never removed.
//!
//! Invariant: nothing is removed that the copy has not made and locked itself.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum_io::lane;
use vellum_options::filename;
use vellum_storage::{FileOptions, FileStorage};

use super::command::{Failure, Outcome};
use crate::report;

/// Signals that ask for the end.
const SIGNALS: [i32; 3] = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];

/// So often it is looked whether a file that was begun is still in use.
const ATTEMPTS: u32 = 100;
/// Between two looks.
const PAUSE: Duration = Duration::from_millis(10);

/// How far a target is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing of it was changed, or everything is in its place.
    Sound,
    /// It is open and being written.
    Written,
    /// The same, and a later copy goes on with it.
    GoneOnWith,
}

/// A target that is being made.
#[derive(Debug)]
pub struct Unfinished {
    state: Cell<State>,
    name: String,
    /// Files that the copy makes: those that were not there before.
    new: RefCell<Vec<PathBuf>>,
    /// Those of them that it has made, as device and inode.
    made: RefCell<Vec<(PathBuf, u64, u64)>>,
}

impl Unfinished {
    /// The target called `name`, before anything is done with it.
    pub fn new(name: &str) -> Unfinished {
        Unfinished {
            state: Cell::new(State::Sound),
            name: name.to_owned(),
            new: RefCell::default(),
            made: RefCell::default(),
        }
    }

    /// The file called `name` is going to be made, or emptied if it is there.
    pub fn makes(&self, name: &str) {
        if let Ok(path) = filename::local_path(name)
            && std::fs::symlink_metadata(&path).is_err()
        {
            self.new.borrow_mut().push(path.into());
        }
    }

    /// The target is there, open and locked; from now on it is written.
    pub fn is_written(&self) {
        self.state.set(State::Written);
        let new = self.new.take().into_iter();
        let made = new.filter_map(|path| {
            let file = std::fs::symlink_metadata(&path).ok()?;
            let place = (file.dev(), file.ino());
            file.is_file().then_some((path, place.0, place.1))
        });
        self.made.replace(made.collect());
    }

    /// As [`Unfinished::is_written`], by a copy that can be gone on with.
    pub fn is_gone_on_with(&self) {
        self.state.set(State::GoneOnWith);
    }

    /// Everything is in its place.
    pub fn is_done(&self) {
        self.state.set(State::Sound);
    }

    /// Removes what was made, or says that it is not complete.
    fn give_up(&self) -> Option<String> {
        let name = &self.name;
        match self.state.get() {
            State::Sound => None,
            State::GoneOnWith => Some(format!(
                "'{name}' is not complete; the same command goes on with it"
            )),
            State::Written => {
                let mut removed = false;
                for (path, device, inode) in self.made.take() {
                    removed |=
                        is_still(&path, device, inode) && std::fs::remove_file(&path).is_ok();
                }
                Some(match removed {
                    true => format!("'{name}' was not complete and is removed"),
                    false => format!("'{name}' is not complete"),
                })
            }
        }
    }

    /// Removes what was begun to be made when the work ended, once nobody uses it any more: the
    /// last requests for it may still run.
    async fn remove_begun(&self) -> Option<String> {
        let name = &self.name;
        let is_file =
            |path: &Path| std::fs::symlink_metadata(path).is_ok_and(|file| file.is_file());
        let begun: Vec<_> = self
            .new
            .take()
            .into_iter()
            .filter(|path| is_file(path))
            .collect();
        let mut left = begun.clone();
        for _ in 0..ATTEMPTS {
            left.retain(|path| {
                let is_unused = FileStorage::open(path, &FileOptions::default()).is_ok();
                !(is_unused && std::fs::remove_file(path).is_ok())
            });
            if left.is_empty() {
                break;
            }
            lane::sleep(PAUSE).await;
        }
        match (begun.is_empty(), left.is_empty()) {
            (true, _) => None,
            (false, true) => Some(format!("'{name}' was not complete and is removed")),
            (false, false) => Some(format!("'{name}' is not complete")),
        }
    }

    /// Does the work that makes the target; after a failure, or a signal that asks for the
    /// end, deals with what there is of it. Under the name of one of QEMU's programs it
    /// stays as it is.
    pub async fn guard(&self, program: &str, work: impl Future<Output = Outcome>) -> Outcome {
        if program.starts_with("qemu-") {
            return work.await;
        }
        let Ok(signals) = Signals::catch() else {
            return work.await.map_err(|failure| self.with_reason(failure));
        };
        let signal = {
            let work = pin!(work);
            match select(work, pin!(signals.arrives())).await {
                Either::Left((outcome, _)) => {
                    return outcome.map_err(|failure| self.with_reason(failure));
                }
                Either::Right((signal, _)) => signal,
            }
        };
        let lines = match self.remove_begun().await {
            Some(line) => Some(line),
            None => self.give_up(),
        };
        lines.into_iter().for_each(report::error);
        // Ends the process as if nobody had caught the signal.
        let _ = signal_hook::low_level::emulate_default_handler(signal);
        std::process::exit(128 + signal);
    }

    fn with_reason(&self, failure: Failure) -> Failure {
        match (failure, self.give_up()) {
            (Failure::Message(message), Some(line)) => {
                Failure::Message(format!("{message}\n{line}"))
            }
            (failure, _) => failure,
        }
    }
}

fn is_still(path: &Path, device: u64, inode: u64) -> bool {
    let file = std::fs::symlink_metadata(path);
    file.is_ok_and(|file| (file.dev(), file.ino()) == (device, inode))
}

/// The first signal that asks for the end is told; a second one ends the process at once.
struct Signals {
    socket: UnixStream,
    first: Arc<AtomicUsize>,
}

impl Signals {
    fn catch() -> std::io::Result<Signals> {
        let (socket, writer) = UnixStream::pair()?;
        socket.set_nonblocking(true)?;
        let first = Arc::new(AtomicUsize::new(0));
        let asked = Arc::new(AtomicBool::new(false));
        for signal in SIGNALS {
            if is_ignored(signal) {
                // As `nohup` and shells without job control want it.
                continue;
            }
            signal_hook::flag::register_conditional_default(signal, asked.clone())?;
            signal_hook::flag::register(signal, asked.clone())?;
            let number = usize::try_from(signal).unwrap_or_default();
            signal_hook::flag::register_usize(signal, first.clone(), number)?;
            signal_hook::low_level::pipe::register(signal, writer.try_clone()?)?;
        }
        Ok(Signals { socket, first })
    }

    async fn arrives(&self) -> i32 {
        let mut socket = &self.socket;
        while socket.read(&mut [0]).is_err() {
            if lane::poll_readable(self.socket.as_fd()).await.is_err() {
                // Nothing can arrive any more.
                std::future::pending::<()>().await;
            }
        }
        i32::try_from(self.first.load(Ordering::Relaxed)).unwrap_or(libc::SIGTERM)
    }
}

/// Whether the one who started this process has it ignore a signal.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|set| u64::from_str_radix(set.trim(), 16).ok());
    ignored.is_some_and(|set| set >> (signal - 1) & 1 != 0)
}
