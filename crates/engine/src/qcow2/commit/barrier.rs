//! [`Barriers`]: the image file as metadata sees it, whose barriers are believed no more once
//! one has failed, and to which nothing is written any more.
//!
//! What a failed barrier should have made durable may be lost, though it can still be read, and
//! the next one would not tell. Many modules have barriers between their writes; this stands
//! before all of them, so that none goes on after one that failed. Guest data goes past it.

use std::sync::{Arc, OnceLock};

use vellum_io::{Error, Io, Result, spawn};
use vellum_storage::mutants::{self, Mutant};
use vellum_storage::{Storage, delegate};

/// The image file of one opening; see the module's head.
#[derive(Debug)]
pub(crate) struct Barriers {
    file: Arc<dyn Storage>,
    failed: Arc<OnceLock<Error>>,
}

/// With what a barrier of the image file has failed, if one has.
#[derive(Debug, Default)]
pub(crate) struct BarrierFailure(Arc<OnceLock<Error>>);

impl BarrierFailure {
    /// Fails if a barrier has.
    pub(crate) fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |error| Err(error.clone()))
    }
}

impl Barriers {
    /// `file`, opened anew.
    pub(crate) fn around(file: Arc<dyn Storage>) -> (Arc<dyn Storage>, BarrierFailure) {
        let failed: Arc<OnceLock<Error>> = Arc::default();
        let failure = BarrierFailure(failed.clone());
        (Arc::new(Barriers { file, failed }), failure)
    }

    /// Makes a change, unless a barrier has failed.
    fn change<T>(&self, start: impl FnOnce(&dyn Storage) -> Io<T>) -> Io<T> {
        // Rule 11: nothing is written after a barrier that failed.
        match self.failed.get() {
            None => start(&*self.file),
            Some(error) => Io::ready(Err(error.clone())),
        }
    }
}

impl Storage for Barriers {
    delegate!(
        file: capabilities, name, len_bytes, modified_at, read, block_status, allocated_bytes, free_bytes, disk, may_clone_from,
        close, event_listener, transparent_storage,
    );

    delegate!(self.change: write, write_zeroes, discard, allocate, truncate);

    fn flush(&self) -> Io<()> {
        let failed = self.failed.clone();
        if let Some(error) = failed.get() {
            return Io::ready(Err(error.clone()));
        }
        let flushed = self.file.flush();
        Io::task(spawn(async move {
            let flushed = flushed.await.map_err(Error::of_failed_sync);
            if let Err(error) = &flushed
                && !is_forgotten(error)
            {
                drop(failed.set(error.clone()));
            }
            match failed.get() {
                Some(error) => Err(error.clone()),
                None => flushed,
            }
        }))
    }
}

/// Whether a failure is forgotten: never, but in tests of what that leads to.
pub(crate) fn is_forgotten(error: &Error) -> bool {
    mutants::is(Mutant::ForgetFullBarriers) && FULL_ERRNOS.contains(&error.errno())
}

/// What a full disk, and a full quota, answer.
const FULL_ERRNOS: [i32; 2] = [28, 122];

#[cfg(test)]
mod tests {
    use vellum_io::lane::block_on;
    use vellum_io::{Buffer, Buffers};
    use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
    use vellum_storage::{MemStorage, WriteFlags};

    use super::*;

    #[test]
    fn after_one_that_failed_none_succeeds_until_the_file_is_opened_anew() {
        for errno in [5, 28, 122, 116] {
            let faults = FaultStorage::new(Arc::new(MemStorage::new()));
            let matching = Matching::operation(Operation::Flush);
            faults.fail(matching, 1, Times::Once, errno);
            let (file, failure) = Barriers::around(faults.clone());
            block_on(async {
                file.flush().await.expect("the first one is good");
                failure.check().expect("none has failed");
                assert_eq!(file.flush().await.unwrap_err().errno(), errno);
                assert_eq!(file.flush().await.unwrap_err().errno(), errno);
                assert_eq!(failure.check().unwrap_err().errno(), errno);
                let buffers = Buffers::from_iter([Buffer::zeroed(512)]);
                let written = file.write(0, buffers, WriteFlags::default()).await;
                assert_eq!(written.unwrap_err().errno(), errno);
                assert_eq!(file.truncate(4096).await.unwrap_err().errno(), errno);
                let (anew, _) = Barriers::around(faults.clone());
                anew.flush().await.expect("another opening");
            });
        }
    }
}
