//! Work that blocks, on threads of its own: files, names of hosts, and what opens and closes images elsewhere.
//!
//! The runtime has a pool for that as well, which panics, or never starts the work, if the system has no room for
//! another thread.

use std::io;
use std::thread::Builder;

use futures_channel::oneshot;
use vellum_io::error::io_text;
#[cfg(any(feature = "rbd", feature = "ssh"))]
use vellum_io::{Error, ErrorKind, Result};

const THREAD_NAME: &str = "vellum-remote";

/// Runs work on a thread of its own, for which nobody waits.
///
/// # Errors
/// If there can be no thread; nothing is done then.
pub(crate) fn start(work: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let thread = Builder::new().name(THREAD_NAME.to_owned());
    let started = thread.spawn(work).map(drop);
    started.map_err(|error| {
        let message = format!("cannot start a thread: {}", io_text(&error));
        io::Error::new(error.kind(), message)
    })
}

/// Starts work on a thread of its own. Its result is the future's.
///
/// # Errors
/// Those of the work; if there can be no thread.
pub(crate) fn run_io<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> impl Future<Output = io::Result<T>> + Send {
    let (send, receive) = oneshot::channel();
    let started = start(move || {
        // Nobody waits any more: the result goes.
        let _ = send.send(work());
    });
    async move {
        started?;
        let done = receive.await;
        done.unwrap_or_else(|_| Err(io::Error::other("a thread has panicked")))
    }
}

/// Runs work on a thread of its own, and waits for it here, on a lane.
///
/// # Errors
/// What the work says.
#[cfg(any(feature = "rbd", feature = "ssh"))]
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let done = run_io(move || Ok(work())).await;
    done.unwrap_or_else(|error| Err(Error::from_io("wait for a server", &error)))
}

/// As [`run`], for work that may never end: after `limit` it is left to itself.
///
/// # Errors
/// What the work says; that the server is silent.
#[cfg(feature = "rbd")]
pub(crate) async fn run_within<T: Send + 'static>(
    limit: std::time::Duration,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    use std::sync::mpsc::{self, RecvTimeoutError};

    let failed = |message: String| Error::new(ErrorKind::Io, "wait for a server", message);
    run(move || {
        let (send, receive) = mpsc::channel();
        let started = start(move || {
            // The caller may have stopped waiting.
            let _ = send.send(work());
        });
        started.map_err(|error| failed(error.to_string()))?;
        receive.recv_timeout(limit).unwrap_or_else(|error| {
            let message = match error {
                RecvTimeoutError::Timeout => {
                    format!("no answer for {} seconds", limit.as_secs())
                }
                RecvTimeoutError::Disconnected => "a thread has panicked".to_owned(),
            };
            Err(failed(message).with_errno(libc::ETIMEDOUT))
        })
    })
    .await
}
