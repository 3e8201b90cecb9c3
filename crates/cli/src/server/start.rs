//! How a server starts: where it runs, and whom it tells that it does.

use std::path::PathBuf;

use vellum_export::nbd::Stop;
use vellum_io::error::io_text;
use vellum_io::{lane, spawn};

use super::{
    Failure, Process, Ready, allow_many_files, catch_signals, daemonize, stop_on_signal,
    write_pid_file,
};
use crate::hint;

/// Runs a server until it ends, or a signal asks it to; in the background if `fork` says so.
pub fn start(
    fork: bool,
    run: impl AsyncFnOnce(Option<Ready>, &Stop) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let Process::Server(ready) = daemonize(fork)? else {
        return Ok(());
    };
    allow_many_files();
    let stop = Stop::new();
    let signals = catch_signals()?;
    lane::block_on(async {
        drop(spawn(stop_on_signal(signals, stop.clone())));
        run(ready, &stop).await
    })
}

/// Writes the pid file and notifies the parent process, or a user at a terminal with a hint, that the disk is
/// served.
pub fn announce(
    pid_file: Option<&str>,
    ready: Option<Ready>,
    text: impl FnOnce() -> String,
) -> Result<(), Failure> {
    if let Some(path) = pid_file {
        write_pid_file(path)?;
    }
    match ready {
        Some(ready) => ready.notify_parent(false),
        None => {
            hint::give(&text());
            Ok(())
        }
    }
}

/// A path that holds in any folder.
pub fn absolute(path: &str) -> Result<PathBuf, Failure> {
    let failed = |error| Failure::message(format!("Failed to stat '{path}': {}", io_text(&error)));
    std::path::absolute(path).map_err(failed)
}
