//! [`VerifyStorage`]: two storages that must agree (`blkverify`).

use std::sync::Arc;

use crate::{DiskIdentity, Storage, StorageExtent, WriteFlags, ZeroFlags, delegate};
use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result, spawn};

/// Sends every request to both storages and compares what comes back. Where they
/// disagree the request fails, and `tell` hears why.
#[derive(Debug)]
pub struct VerifyStorage {
    /// The one under test; its answers are the ones given.
    inner: Arc<dyn Storage>,
    raw: Arc<dyn Storage>,
    tell: fn(&str),
}

impl VerifyStorage {
    /// Compares `test` with `raw`.
    pub fn new(raw: Arc<dyn Storage>, test: Arc<dyn Storage>, tell: fn(&str)) -> Self {
        VerifyStorage {
            inner: test,
            raw,
            tell,
        }
    }
}

/// One request, for what is told about it.
#[derive(Clone, Copy)]
struct Request {
    is_write: bool,
    offset_bytes: u64,
    len_bytes: u64,
    tell: fn(&str),
}

impl Request {
    fn disagree(self, what: String) -> Error {
        let verb = if self.is_write { "write" } else { "read" };
        let (offset, len) = (self.offset_bytes, self.len_bytes);
        (self.tell)(&format!(
            "blkverify: {verb} offset={offset} bytes={len} {what}\n"
        ));
        Error::new(ErrorKind::Io, "verify", what).at(offset)
    }

    /// The result of the test, if the other ended alike.
    fn agreed<T>(self, raw: Result<T>, test: Result<T>) -> Result<(T, T)> {
        let number = |result: &Result<T>| result.as_ref().err().map_or(0, |e| -e.errno());
        match (raw, test) {
            (Ok(raw), Ok(test)) => Ok((raw, test)),
            (Err(raw), Err(test)) if raw.errno() == test.errno() => Err(test),
            (raw, test) => {
                let (test, raw) = (number(&test), number(&raw));
                Err(self.disagree(format!("return value mismatch {test} != {raw}")))
            }
        }
    }
}

impl Storage for VerifyStorage {
    delegate!(inner: capabilities, name, len_bytes, modified_at, truncate, allocated_bytes, free_bytes);

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let request = Request {
            is_write: false,
            offset_bytes,
            len_bytes: total_len(&buffers),
            tell: self.tell,
        };
        let copy = Buffer::for_read(request.len_bytes as usize);
        let raw = self.raw.read(offset_bytes, Buffers::from_iter([copy]));
        let test = self.inner.read(offset_bytes, buffers);
        Io::task(spawn(async move {
            let (raw, test) = request.agreed(raw.await, test.await)?;
            let raw = raw.iter().flat_map(|buffer| buffer.iter());
            let test_bytes = test.iter().flat_map(|buffer| buffer.iter());
            match raw.zip(test_bytes).position(|(raw, test)| raw != test) {
                None => Ok(test),
                Some(at) => {
                    let at = offset_bytes + at as u64;
                    Err(request.disagree(format!("contents mismatch at offset {at}")))
                }
            }
        }))
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let request = Request {
            is_write: true,
            offset_bytes,
            len_bytes: total_len(&buffers),
            tell: self.tell,
        };
        let copies = buffers.iter().map(|buffer| Buffer::copy_of(buffer));
        let raw = self.raw.write(offset_bytes, copies.collect(), flags);
        let test = self.inner.write(offset_bytes, buffers, flags);
        Io::task(spawn(async move {
            let both = request.agreed(raw.await, test.await)?;
            Ok(both.1)
        }))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let request = Request {
            is_write: true,
            offset_bytes,
            len_bytes,
            tell: self.tell,
        };
        let raw = self.raw.write_zeroes(offset_bytes, len_bytes, flags);
        let test = self.inner.write_zeroes(offset_bytes, len_bytes, flags);
        Io::task(spawn(async move {
            request.agreed(raw.await, test.await).map(drop)
        }))
    }

    /// What a discard leaves behind is not the same everywhere, so it is not made.
    fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.inner.allocate(offset_bytes, len_bytes)
    }

    /// Only the storage under test: the other one is of no further use.
    fn flush(&self) -> Io<()> {
        self.inner.flush()
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        self.inner.block_status(offset_bytes, len_bytes)
    }

    /// There are two.
    fn disk(&self) -> Option<DiskIdentity> {
        None
    }

    fn close(&self) -> Io<()> {
        let (raw, test) = (self.raw.close(), self.inner.close());
        Io::task(spawn(async move { raw.await.and(test.await) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MemStorage;
    use crate::wrap::{FaultStorage, Matching, Operation, Times};
    use vellum_io::lane::block_on;

    fn told(text: &str) {
        assert!(text.starts_with("blkverify: "), "{text}");
    }

    #[test]
    fn what_differs_fails_and_what_agrees_passes() {
        let raw = Arc::new(MemStorage::with_bytes(vec![7; 1024]));
        let test = FaultStorage::new(Arc::new(MemStorage::with_bytes(vec![7; 1024])));
        let verify = VerifyStorage::new(raw.clone(), test.clone(), told);
        let buffers = || Buffers::from_iter([Buffer::copy_of(&[1; 512])]);
        let flags = WriteFlags::default();
        block_on(async {
            verify.write(0, buffers(), flags).await.unwrap();
            verify.read(0, buffers()).await.unwrap();
            raw.write(700, Buffers::from_iter([Buffer::zeroed(1)]), flags)
                .await
                .unwrap();
            let error = verify.read(512, buffers()).await.unwrap_err();
            assert_eq!(error.message(), "contents mismatch at offset 700");
            let writes = Matching::operation(Operation::Write);
            test.fail(writes, 0, Times::Once, libc::EIO);
            let error = verify.write(0, buffers(), flags).await.unwrap_err();
            assert_eq!(error.message(), "return value mismatch -5 != 0");
        });
    }
}
