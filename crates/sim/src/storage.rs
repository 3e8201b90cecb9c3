//! [`SimStorage`]: a file of a [`Disk`] behind the [`Storage`] trait.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use vellum_io::buffer::total_len;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{Capabilities, Storage, StorageExtent, WriteFlags, ZeroFlags};

use crate::disk::{Disk, Request};
use crate::disk_room::BlockUse;
use crate::record::{Payload, Record};
use crate::sparse_bytes::{SECTOR_BYTES, SparseBytes};

/// What a simulated file is like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SimFileOptions {
    /// Discards make zeroes; otherwise they do nothing.
    pub can_punch: bool,
    /// Zeroes can be written without writing them out.
    pub can_zero: bool,
    /// It grows (a file) or does not (a device).
    pub growable: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// Its file system shares blocks.
    pub can_clone: bool,
}

impl Default for SimFileOptions {
    fn default() -> Self {
        SimFileOptions {
            can_punch: true,
            can_zero: true,
            growable: true,
            read_only: false,
            can_clone: false,
        }
    }
}

/// A simulated file.
#[derive(Debug)]
pub struct SimStorage {
    disk: Arc<Disk>,
    file: usize,
    name: String,
    traits: SimFileOptions,
    /// The errno of a flush that has failed: no later one can know that everything is there.
    memory: Arc<AtomicI32>,
}

impl SimStorage {
    pub(crate) fn new(disk: Arc<Disk>, file: usize, name: &str, traits: SimFileOptions) -> Self {
        SimStorage {
            disk,
            file,
            name: name.to_owned(),
            traits,
            memory: Arc::default(),
        }
    }

    /// Where this descriptor remembers that a flush has failed.
    pub(crate) fn memory(&self) -> Arc<AtomicI32> {
        self.memory.clone()
    }

    /// What a reader of the file sees now.
    pub fn contents(&self) -> SparseBytes {
        self.disk.contents(self.file)
    }

    fn refuse<T>(&self, kind: ErrorKind, operation: &'static str, message: &str) -> Io<T> {
        Io::ready(Err(
            Error::new(kind, operation, message).target(self.name.clone())
        ))
    }

    /// Why a change that ends at `end_bytes` cannot be made.
    fn obstacle(&self, end_bytes: u64) -> Option<(ErrorKind, &'static str)> {
        if self.traits.read_only {
            return Some((ErrorKind::ReadOnly, "the file is read-only"));
        }
        if !self.traits.growable && end_bytes > self.disk.len_bytes(self.file) {
            return Some((ErrorKind::NoSpace, "No space left on device"));
        }
        None
    }

    fn change(&self, operation: &'static str, record: Record) -> Io<()> {
        let end = record
            .grows_to
            .unwrap_or(record.end_bytes())
            .max(record.end_bytes());
        match self.obstacle(end) {
            Some((kind, message)) => self.refuse(kind, operation, message),
            None => self
                .disk
                .submit(self.file, |reply| Request::Change { record, reply }),
        }
    }
}

impl Storage for SimStorage {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            request_alignment_bytes: 1,
            memory_alignment_bytes: 1,
            can_punch: self.traits.can_punch,
            can_zero: self.traits.can_zero,
            has_zero_init: self.traits.growable,
            read_only: self.traits.read_only,
            growable: self.traits.growable,
        }
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.disk.len_bytes(self.file))
    }

    fn modified_at(&self) -> Result<Option<u64>> {
        // No clock runs on over a power cut.
        Ok(Some(self.contents().digest()))
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.disk.submit(self.file, |reply| Request::Read {
            offset_bytes,
            buffers,
            reply,
        })
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        if let Some((kind, message)) = self.obstacle(offset_bytes + total_len(&buffers)) {
            return self.refuse(kind, "write", message);
        }
        let mut bytes = Vec::with_capacity(total_len(&buffers) as usize);
        buffers
            .iter()
            .for_each(|buffer| bytes.extend_from_slice(buffer));
        let grows = self.traits.growable;
        let mut record = Record::new(self.file, offset_bytes, Payload::Bytes(bytes.into()), grows);
        record.forced = flags.fua;
        self.disk.submit(self.file, |reply| Request::Write {
            record,
            buffers,
            reply,
        })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        if flags.no_fallback && !self.traits.can_zero {
            return self.refuse(ErrorKind::Unsupported, "write zeroes", "cannot zero");
        }
        let zeroes = Payload::Zeroes(len_bytes);
        let mut record = Record::new(self.file, offset_bytes, zeroes, self.traits.growable);
        record.forced = flags.fua;
        if flags.may_unmap && self.traits.can_punch {
            record.blocks = BlockUse::Frees(offset_bytes..offset_bytes + len_bytes);
        }
        self.change("write zeroes", record)
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        // Partial sectors are left alone, and so is what lies beyond the end.
        let end = (offset_bytes + len_bytes).min(self.disk.len_bytes(self.file));
        let start = offset_bytes.next_multiple_of(SECTOR_BYTES);
        let end = end / SECTOR_BYTES * SECTOR_BYTES;
        if !self.traits.can_punch || start >= end {
            return Io::ready(Ok(()));
        }
        self.change("discard", Record::punch(self.file, start..end))
    }

    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        if !self.traits.growable {
            return Io::ready(Ok(()));
        }
        let range = offset_bytes..offset_bytes + len_bytes;
        self.change("allocate", Record::allocate(self.file, range))
    }

    fn flush(&self) -> Io<()> {
        let memory = self.memory.clone();
        match memory.load(Ordering::Relaxed) {
            0 => self.disk.submit(self.file, |reply| Request::Flush {
                before: 0,
                memory,
                beside: None,
                reply,
            }),
            errno => Io::ready(Err(Error::from_errno("flush", errno))),
        }
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        if !self.traits.growable {
            return self.refuse(
                ErrorKind::Unsupported,
                "truncate",
                "a device keeps its length",
            );
        }
        self.change("truncate", Record::truncate(self.file, len_bytes))
    }

    fn may_clone_from(&self, _source: &dyn Storage) -> bool {
        self.traits.can_clone
    }

    /// To whoever looks at the file, a read and a write; blocks are of sectors here.
    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        let in_blocks = (from_bytes | to_bytes | len_bytes).is_multiple_of(SECTOR_BYTES);
        if !self.traits.can_clone || !in_blocks || len_bytes == 0 {
            return self.refuse(ErrorKind::Unsupported, "clone range", "cannot share");
        }
        let buffer = Buffer::zeroed(len_bytes as usize);
        let read = source.read(from_bytes, Buffers::from_iter([buffer]));
        let target = SimStorage::new(self.disk.clone(), self.file, &self.name, self.traits);
        Io::boxed(async move {
            let buffers = read.await?;
            let written = target.write(to_bytes, buffers, WriteFlags::default());
            written.await.map(drop)
        })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        self.disk.submit(self.file, |reply| Request::Status {
            offset_bytes,
            len_bytes,
            reply,
        })
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::Buffer;

    use super::*;
    use crate::disk::Mode;
    use crate::runtime::Runtime;
    use crate::schedule::Scheduler;

    fn buffers(byte: u8, len: usize) -> Buffers {
        let mut buffer = Buffer::zeroed(len);
        buffer.fill(byte);
        Buffers::from_iter([buffer])
    }

    #[test]
    fn a_flush_covers_exactly_what_was_complete_when_it_began() {
        let disk = Disk::new(Mode::Scheduled);
        let file = disk.add_file("image", SparseBytes::new(), SimFileOptions::default());
        let mut oldest = Scheduler::new(oldest_first());
        let first = file.write(0, buffers(1, 512), WriteFlags::default());
        assert!(disk.complete_one(&mut oldest));
        let in_flight = file.write(512, buffers(2, 512), WriteFlags::default());
        let flush = file.flush();
        assert_eq!(disk.cut_point().records.len(), 2);
        while disk.complete_one(&mut oldest) {}
        let point = disk.cut_point();
        assert_eq!(
            point.durable[0].bytes(0, 1024),
            [[1; 512], [0; 512]].concat()
        );
        assert_eq!(point.records.len(), 1);
        assert_eq!(point.volatile[0].bytes(512, 1), [2]);
        drop((first, in_flight, flush));
    }

    /// A seed whose schedule is plainly oldest first for the few steps of a test.
    fn oldest_first() -> u64 {
        use crate::schedule::RequestKind::Write;
        (0..)
            .find(|seed| (0..9).all(|_| Scheduler::new(*seed).pick(&[Write; 3]) == 0))
            .unwrap_or(0)
    }

    #[test]
    fn requests_run_inside_a_runtime() {
        let disk = Disk::new(Mode::Scheduled);
        let file = disk.add_file("image", SparseBytes::new(), SimFileOptions::default());
        let storage = file.clone();
        let mut runtime = Runtime::new(disk, 4);
        let read = runtime.block_on(async move {
            storage
                .write(100, buffers(3, 100), WriteFlags::default())
                .await?;
            storage.write_zeroes(150, 10, ZeroFlags::default()).await?;
            storage.flush().await?;
            storage.read(99, buffers(9, 102)).await
        });
        let mut expected = [3; 102];
        (expected[0], expected[101]) = (0, 0);
        expected[51..61].fill(0);
        assert_eq!(read.unwrap().unwrap()[0][..], expected);
        assert_eq!(file.len_bytes().unwrap(), 200);
    }

    #[test]
    fn devices_do_not_grow() {
        let disk = Disk::new(Mode::Instant);
        let traits = SimFileOptions {
            growable: false,
            ..SimFileOptions::default()
        };
        let device = disk.add_file("device", SparseBytes::device(1024, 0xe5), traits);
        let mut runtime = Runtime::new(disk, 0);
        let write = device.write(512, buffers(1, 1024), WriteFlags::default());
        assert!(runtime.block_on(write).unwrap().is_err());
        assert_eq!(device.contents().bytes(0, 2048)[1023..1025], [0xe5, 0]);
    }
}
