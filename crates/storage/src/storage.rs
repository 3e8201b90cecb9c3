//! The [`Storage`] trait: bytes at offsets, with owned buffers.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::DiskIdentity;
use crate::SourceVersion;
use crate::event::EventListener;
use vellum_io::shared_memory::SharedBuffer;
use vellum_io::{Buffers, Io, Result};

/// What a storage can do and what it wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Offsets and lengths below this alignment cost a read-modify-write (they
    /// are always accepted). A power of two, 1 where there is no such cost.
    pub request_alignment_bytes: u32,
    /// Memory below this alignment costs a copy. A power of two.
    pub memory_alignment_bytes: u32,
    /// [`Storage::discard`] gives space back.
    pub can_punch: bool,
    /// [`Storage::write_zeroes`] is cheaper than writing zeroes.
    pub can_zero: bool,
    /// Bytes never written, and bytes that a growing `truncate` adds, read as zero.
    pub has_zero_init: bool,
    /// Writes are refused.
    pub read_only: bool,
    /// The length follows the writes (a regular file, not a device).
    pub growable: bool,
}

impl Default for Capabilities {
    /// Those of plain bytes that may be written: any alignment, no holes, a length that
    /// only [`Storage::truncate`] changes.
    fn default() -> Self {
        Capabilities {
            request_alignment_bytes: 1,
            memory_alignment_bytes: 1,
            can_punch: false,
            can_zero: false,
            has_zero_init: false,
            read_only: false,
            growable: false,
        }
    }
}

/// How a write is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WriteFlags {
    /// Durable when the request completes (force unit access).
    pub fua: bool,
}

/// How zeroes are to be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZeroFlags {
    /// The space may be given back.
    pub may_unmap: bool,
    /// Fail with [`vellum_io::ErrorKind::Unsupported`] rather than write zeroes out.
    pub no_fallback: bool,
    /// Durable when the request completes.
    pub fua: bool,
}

/// What a range of a storage holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockStatus {
    /// Bytes that were written, or must be taken to be.
    Data,
    /// A hole: reads as zeroes and takes no space.
    Hole,
    /// Space that reads as zeroes.
    Zeroes,
    /// Takes no space; what it reads as is not told.
    Unknown,
}

impl BlockStatus {
    /// Whether the range takes space.
    pub fn is_allocated(self) -> bool {
        matches!(self, BlockStatus::Data | BlockStatus::Zeroes)
    }

    /// Whether the range is known to read as zeroes.
    pub fn is_zero(self) -> bool {
        matches!(self, BlockStatus::Hole | BlockStatus::Zeroes)
    }
}

/// A run of one status, from the offset that was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageExtent {
    /// What the run holds.
    pub status: BlockStatus,
    /// Length of the run in bytes, never 0 and never beyond what was asked for.
    pub len_bytes: u64,
}

/// Bytes at offsets.
///
/// All offsets and lengths are in bytes. Any alignment is accepted; what is below
/// [`Capabilities::request_alignment_bytes`] costs more. Requests may run and
/// complete in any order; the caller keeps apart what must not overlap. Requests
/// must be made inside a lane or an [`vellum_io::executor::Executor`].
///
/// Embedders may implement this trait; [`delegate!`](crate::delegate!) helps where a storage
/// stands around another one.
///
/// # Errors
/// A request fails with what the system says, or the server. Changes fail with
/// [`vellum_io::ErrorKind::ReadOnly`] where [`Capabilities::read_only`] says so. Of a change
/// that fails any part may have happened.
pub trait Storage: Send + Sync + fmt::Debug {
    /// What this storage can do. Default: [`Capabilities::default`].
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }

    /// The name for messages: a path or a node name. Storages of one name may hold other bytes
    /// ([`StorageIdentity`](crate::StorageIdentity)).
    fn name(&self) -> &str;

    /// The version of the bytes that every read of this storage gives, for callers that keep copies of them. Default:
    /// unknown, as of every storage whose bytes may change while it is open
    /// ([`SourceVersion::of_storage`] also looks at files).
    fn version(&self) -> SourceVersion {
        SourceVersion::Unknown
    }

    /// The length in bytes now. Plain call: it may cost a system call, never a wait.
    ///
    /// # Errors
    /// What the system says where it has to be asked.
    fn len_bytes(&self) -> Result<u64>;

    /// Reads into `buffers` in order and gives them back; what lies beyond the
    /// end of the storage reads as zeroes.
    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers>;

    /// Writes `buffers` in order and gives them back; a growable storage grows.
    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers>;

    /// Reads straight into memory that others change at any time (a guest's), in order. `None`, the
    /// default: not from this storage, or not this range as it lies; then nothing was done, and
    /// whoever asks reads into buffers of its own and copies. For storages that move bytes without
    /// looking at them.
    fn read_into(&self, offset_bytes: u64, into: &[SharedBuffer]) -> Option<Io<()>> {
        let _ = (offset_bytes, into);
        None
    }

    /// Writes straight from such memory, as [`Storage::read_into`] reads: each byte is fetched
    /// once, some time before the end. `None`: as there.
    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: WriteFlags,
    ) -> Option<Io<()>> {
        let _ = (offset_bytes, from, flags);
        None
    }

    /// Makes a range read as zeroes; a growable storage grows if the range ends beyond it.
    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()>;

    /// Gives a range's space back. Its content is undefined afterwards (zeroes on
    /// every backend that can punch). A hint: unsupported is success, and the default.
    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let _ = (offset_bytes, len_bytes);
        Io::ready(Ok(()))
    }

    /// Reserves space for a range without changing what it reads as; grows a
    /// growable storage. Default: only that, for storages that know no holes.
    fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        let end_bytes = offset_bytes.saturating_add(len_bytes);
        match self.len_bytes() {
            Ok(now_bytes) if now_bytes < end_bytes => self.truncate(end_bytes),
            Ok(_) => Io::ready(Ok(())),
            Err(error) => Io::ready(Err(error)),
        }
    }

    /// Makes everything completed before this call durable. Fails, too, if a flush has failed that ran
    /// beside it: the kernel tells a loss to one of those who ask, and what was lost may be this one's.
    fn flush(&self) -> Io<()>;

    /// Sets the length; added bytes read as zeroes.
    fn truncate(&self, len_bytes: u64) -> Io<()>;

    /// The first run of one status at `offset_bytes`, at most `len_bytes` long.
    /// Beyond the end is a hole. Default: all up to the end is data.
    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        Io::ready(
            self.len_bytes()
                .map(|end_bytes| match end_bytes.saturating_sub(offset_bytes) {
                    0 => StorageExtent {
                        status: BlockStatus::Hole,
                        len_bytes,
                    },
                    inside_bytes => StorageExtent {
                        status: BlockStatus::Data,
                        len_bytes: len_bytes.min(inside_bytes),
                    },
                }),
        )
    }

    /// The space that the storage takes, in bytes, where known.
    ///
    /// # Errors
    /// What the system says where it has to be asked.
    fn allocated_bytes(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// How much the storage can take where nothing was ever written, in bytes: what is left of the file system
    /// that it lies on, for all who use that. `None`, the default: that is not told.
    fn free_bytes(&self) -> Io<Option<u64>> {
        Io::ready(Ok(None))
    }

    /// When the bytes were last changed, by this program or another: nanoseconds since 1970 by the clock of the file
    /// system, or what else grows with every change. `None`, the default: unknown. That is also the answer where a
    /// later change could have the same time: on a file system that notes whole seconds, and a moment after a change.
    ///
    /// # Errors
    /// What the system says where it has to be asked.
    fn modified_at(&self) -> Result<Option<u64>> {
        Ok(None)
    }

    /// Tries to copy a range of `source`, which may be this same storage, without
    /// moving bytes through the program's memory. The range must lie inside `source`
    /// and the two must not overlap.
    ///
    /// # Errors
    /// [`vellum_io::ErrorKind::Unsupported`] where that cannot be had; then any part of the
    /// range may have been copied.
    fn copy_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        let _ = (source, from_bytes, to_bytes, len_bytes);
        Io::ready(Err(vellum_io::Error::new(
            vellum_io::ErrorKind::Unsupported,
            "copy range",
            "the storage cannot copy by itself",
        )
        .target(self.name())))
    }

    /// Whether [`Storage::clone_range`] from `source` has not failed for good yet.
    /// Plain call, without a system call.
    fn may_clone_from(&self, source: &dyn Storage) -> bool {
        let _ = source;
        false
    }

    /// Has a range share the blocks of a range of `source`, which may be this same
    /// storage: as if it were copied, without moving a byte. Both ranges must be made
    /// of whole blocks of the file system and lie inside `source`; the two must not
    /// overlap.
    ///
    /// # Errors
    /// [`vellum_io::ErrorKind::Unsupported`] where that cannot be had, in general or for these
    /// ranges; then nothing has changed.
    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        let _ = (source, from_bytes, to_bytes, len_bytes);
        Io::ready(Err(vellum_io::Error::new(
            vellum_io::ErrorKind::Unsupported,
            "clone range",
            "the storage cannot share blocks",
        )
        .target(self.name())))
    }

    /// Which disk holds the bytes in the end, through all that stands around it, whatever that does to
    /// requests. Of two storages with other identities, a flush of one makes nothing durable of the
    /// other. `None`: that is not known. Default: this storage itself.
    fn disk(&self) -> Option<DiskIdentity> {
        Some(DiskIdentity::of(self))
    }

    /// Ends the use of the storage: what a node still has to write or to give back.
    /// Requests after it may fail.
    fn close(&self) -> Io<()> {
        Io::ready(Ok(()))
    }

    /// Who wants to be told of [`crate::Event`]s in the use of this storage.
    fn event_listener(&self) -> Option<Arc<dyn EventListener>> {
        None
    }

    /// This storage, or the one that holds the same bytes at the same offsets below it, as its
    /// own type: for [`AsFile`](crate::AsFile), and for storages of others, which recognize
    /// in [`Storage::copy_range`] a source of their own kind. `None` where there is nothing
    /// more to know than this trait says. A storage around another one passes this on only if
    /// reads may go past it: nothing that it does beside them would be missed.
    fn transparent_storage(&self) -> Option<&dyn Any> {
        None
    }
}
