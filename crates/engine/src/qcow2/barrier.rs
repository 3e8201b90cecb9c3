//! [`Barriers`]: the image file as metadata sees it, whose barriers are believed no more once
//! one has failed.
//!
//! What a failed barrier should have made durable may be lost, and the next one would not tell.
//! Many rooms have barriers between their writes; this stands before all of them, so that
//! none goes on after what another one met. Guest data goes past it.

use std::sync::{Arc, OnceLock};

use vellum_storage::mutants::{self, Mutant};
use vellum_storage::{Error, ErrorKind, Io, Storage, pass_on, spawn};

/// The image file of one opening; see the module's head.
#[derive(Debug)]
pub(crate) struct Barriers {
    file: Arc<dyn Storage>,
    failed: Arc<OnceLock<Error>>,
}

impl Barriers {
    /// `file`, opened anew.
    pub(crate) fn around(file: Arc<dyn Storage>) -> Arc<dyn Storage> {
        Arc::new(Barriers {
            file,
            failed: Arc::default(),
        })
    }
}

impl Storage for Barriers {
    pass_on!(
        file: capabilities, name, len_bytes, read, write, write_zeroes, discard, allocate, truncate,
        block_status, allocated_bytes, may_clone_from, close, debugger, as_file,
    );

    fn flush(&self) -> Io<()> {
        let failed = self.failed.clone();
        if let Some(error) = failed.get() {
            return Io::ready(Err(error.clone()));
        }
        let flushed = self.file.flush();
        Io::task(spawn(async move {
            let flushed = flushed.await;
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
pub(super) fn is_forgotten(error: &Error) -> bool {
    mutants::is(Mutant::ForgetFullBarriers) && error.kind() == ErrorKind::NoSpace
}

#[cfg(test)]
mod tests {
    use vellum_storage::lane::block_on;
    use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
    use vellum_storage::{Buffer, Buffers, MemStorage, WriteFlags};

    use super::*;

    #[test]
    fn after_one_that_failed_none_succeeds_until_the_file_is_opened_anew() {
        for errno in [5, 28, 122, 116] {
            let faults = FaultStorage::new(Arc::new(MemStorage::new()));
            let matching = Matching::operation(Operation::Flush);
            faults.fail(matching, 1, Times::Once, errno);
            let file = Barriers::around(faults.clone());
            block_on(async {
                file.flush().await.expect("the first one is good");
                assert_eq!(file.flush().await.unwrap_err().errno(), errno);
                assert_eq!(file.flush().await.unwrap_err().errno(), errno);
                let buffers = Buffers::from_iter([Buffer::zeroed(512)]);
                let written = file.write(0, buffers, WriteFlags::default()).await;
                written.expect("what can be written is up to others");
                let anew = Barriers::around(faults.clone());
                anew.flush().await.expect("another opening");
            });
        }
    }
}
