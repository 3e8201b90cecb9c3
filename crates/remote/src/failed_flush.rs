//! [`FailedFlush`]: a flush that has failed is never followed by one that succeeds (rule 11).

use parking_lot::Mutex;
use vellum_io::{Error, Result};

/// Remembers the first flush that has failed: what it should have made durable may be lost, and servers and
/// libraries tell that once.
#[derive(Debug, Default)]
pub(crate) struct FailedFlush(Mutex<Option<Error>>);

impl FailedFlush {
    /// # Errors
    /// That of the flush that has failed.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.lock().clone().map_or(Ok(()), Err)
    }

    /// What a flush says; also fails if one beside it has.
    pub(crate) fn note(&self, flushed: Result<()>) -> Result<()> {
        let Err(error) = flushed else {
            return self.check();
        };
        let error = error.of_failed_sync();
        Err(self.0.lock().get_or_insert(error).clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flush_that_failed_is_never_followed_by_one_that_succeeds() {
        let failed = FailedFlush::default();
        assert!(failed.check().is_ok() && failed.note(Ok(())).is_ok());
        let lost = Err(Error::from_errno("flush", 5));
        assert_eq!(failed.note(lost).unwrap_err().errno(), 5);
        assert!(failed.check().is_err());
        // One that ran beside it.
        assert!(failed.note(Ok(())).is_err());
    }
}
