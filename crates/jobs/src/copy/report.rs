//! What a copy tells: its progress, what it could not read, and where it failed.

use std::fmt;

use vellum::Error;

/// Hears what a copy has to tell: a type of the caller's, or [`Silent`].
pub trait Observer {
    /// Whether [`Observer::progress`] is wanted; it costs a walk over the source.
    fn wants_progress(&self) -> bool {
        false
    }

    /// `done_bytes` of `total_bytes` that have to be written are written.
    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        let _ = (done_bytes, total_bytes);
    }

    /// Nobody could tell what a sector of the source holds; it was read as data.
    fn unknown(&mut self, source_offset_bytes: u64, error: &Error) {
        let _ = (source_offset_bytes, error);
    }

    /// A sector could not be read and was taken as zeroes.
    fn unreadable(&mut self, offset_bytes: u64, error: &Error) {
        let _ = (offset_bytes, error);
    }
}

/// An observer that hears nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {}

/// Where a copy failed.
#[derive(Debug, Clone)]
pub struct CopyError {
    /// Which step failed.
    pub step: Step,
    /// Where in the target, in bytes.
    pub offset_bytes: u64,
    /// Why.
    pub cause: Error,
}

/// The steps of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// Asking the source what it holds.
    Status,
    /// Reading the source.
    Read,
    /// Reading what the target is going to show where it holds nothing itself.
    ReadShown,
    /// Writing the target.
    Write,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Status => "reading block status at offset",
            Step::Read | Step::ReadShown => "reading at byte",
            Step::Write => "writing at byte",
        })
    }
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "error while {} {}: {}",
            self.step,
            self.offset_bytes,
            self.cause.message()
        )
    }
}

impl std::error::Error for CopyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.cause)
    }
}
