//! What becomes of a request that failed, and what is said of it.

use std::time::Duration;

use vellum_io::{Error, ErrorKind};

/// What an error of the client's says, with its causes.
pub(crate) fn told(error: &(dyn std::error::Error + 'static)) -> String {
    let mut next = error.source();
    let mut last = error.to_string();
    // The innermost has the reason; those around it say that there was one.
    while let Some(source) = next {
        last = match source.downcast_ref::<std::io::Error>() {
            Some(error) => vellum_io::error::io_text(error),
            None => source.to_string(),
        };
        next = source.source();
    }
    last
}

/// What becomes of a request that failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// There is no connection to the server.
    Unreachable(Error),
    /// It may be tried again, after this time if the server says one.
    Passing(Error, Option<Duration>),
    /// The server has no time for so many requests.
    Busy(Error, Option<Duration>),
    /// It would fail again.
    Final(Error),
}

impl Failure {
    pub(crate) fn into_error(self) -> Error {
        match self {
            Failure::Unreachable(error)
            | Failure::Passing(error, _)
            | Failure::Busy(error, _)
            | Failure::Final(error) => error,
        }
    }
}

/// A server that says nothing.
pub(crate) fn silent(name: &str, timeout: Duration) -> Failure {
    let seconds = timeout.as_secs_f32();
    let message = format!("the server has been silent for {seconds} seconds (option 'timeout')");
    Failure::Passing(
        Error::new(ErrorKind::Io, "read", message).target(name),
        None,
    )
}

/// Bytes drip in.
pub(crate) fn too_slow(name: &str) -> Failure {
    let message = "the server sends too little in its time (option 'timeout')";
    Failure::Passing(
        Error::new(ErrorKind::Io, "read", message).target(name),
        None,
    )
}

/// The file is not what it was when it was opened.
pub(crate) fn changed(name: &str, how: &str) -> Error {
    let message =
        format!("the file has changed on the server since it was opened ({how}); open it anew");
    Error::new(ErrorKind::Changed, "read", message).target(name)
}
