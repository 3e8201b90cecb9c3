//! What went wrong in a simulation.

use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use vellum_io::Error;

use crate::runtime::Deadlock;

/// The kind of a failure: a shrunk scenario must fail in the same way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum FailureKind {
    /// A sector held something that it must not hold.
    Content,
    /// The simulator's own audit found damage.
    Audit,
    /// The engine's check found damage, or could not be made.
    Check,
    /// A clean close has left clusters that are counted and that nobody uses.
    Leak,
    /// A request got ENOSPC although there would have been room.
    NoSpace,
    /// An image uses host clusters far beyond what it ever needed.
    Sprawl,
    /// The image could not be opened.
    Open,
    /// A bitmap calls clean what has changed, or cannot be read.
    Bitmap,
    /// A request failed.
    Request,
    /// Requests waited for ever.
    Stuck,
    /// The engine panicked.
    Panic,
    /// The image could not be prepared.
    Setup,
}

/// A broken promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// What kind of promise.
    pub kind: FailureKind,
    /// What was seen.
    pub message: String,
}

impl Failure {
    /// A failure of some kind.
    pub fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Failure {
            kind,
            message: message.into(),
        }
    }

    /// A request, or an open, that failed.
    pub fn error(kind: FailureKind, what: impl fmt::Debug, error: &Error) -> Self {
        Failure::new(kind, format!("{what:?}: {error}"))
    }

    /// The same failure, saying when it was seen.
    #[must_use]
    pub fn when(mut self, when: &str) -> Self {
        self.message = format!("{when}: {}", self.message);
        self
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {}", self.kind, self.message)
    }
}

impl std::error::Error for Failure {}

impl From<Deadlock> for Failure {
    fn from(_: Deadlock) -> Self {
        Failure::new(
            FailureKind::Stuck,
            "requests wait, and nothing is in flight",
        )
    }
}

/// Runs `work`; a panic in it is a failure.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(Failure::new(FailureKind::Panic, text_of(&*panic))))
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "a panic".to_owned())
}
