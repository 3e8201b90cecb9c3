//! Work that blocks, on threads of its own: what opens and closes images elsewhere.

use std::thread::Builder;

use futures_channel::oneshot;
use vellum_io::{Error, ErrorKind, Result};

const THREAD_NAME: &str = "vellum-remote";

/// Runs work on a thread of its own, for which nobody waits. Without a thread nothing is done.
pub(crate) fn start(work: impl FnOnce() + Send + 'static) -> bool {
    let thread = Builder::new().name(THREAD_NAME.to_owned());
    thread.spawn(work).is_ok()
}

/// Runs work on a thread of its own, and waits for it here, on a lane.
///
/// # Errors
/// What the work says.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (send, receive) = oneshot::channel();
    start(move || {
        // Nobody waits any more: the result goes.
        let _ = send.send(work());
    });
    receive.await.unwrap_or_else(|_| {
        let message = "no thread can be started";
        Err(Error::new(ErrorKind::Io, "wait for a server", message))
    })
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

    run(move || {
        let (send, receive) = mpsc::channel();
        start(move || {
            // Whoever waited may have given up.
            let _ = send.send(work());
        });
        receive.recv_timeout(limit).unwrap_or_else(|error| {
            let message = match error {
                RecvTimeoutError::Timeout => {
                    format!("no answer for {} seconds", limit.as_secs())
                }
                RecvTimeoutError::Disconnected => "no thread can be started".to_owned(),
            };
            Err(Error::new(ErrorKind::Io, "wait for a server", message).with_errno(libc::ETIMEDOUT))
        })
    })
    .await
}
