//! [`Layout`]: what a format says of where guest bytes lie, for [`MappedDevice`](crate::MappedDevice),
//! which does everything else.
//!
//! Only the device calls these methods. It sees to it that
//! - of two requests that change the mapping of one block only one runs (block ranges are locked);
//! - nobody allocates before [`Layout::begin_changes`] has ended;
//! - what [`Layout::take_changes`] gave out is written after a barrier that makes durable all data that
//!   was complete when it was taken, and that another barrier follows.
//!
//! So a block's entry on disk never leads to bytes that are not there.

use std::fmt;
use std::future::Future;
use std::sync::Arc;

use crate::facts::{BackingName, Facts};
use vellum::luks::GuestEncryption;
use vellum::{Error, ErrorKind, Result, Storage};

/// Where a run of guest bytes is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The image holds nothing here: its backing file shows through, or zeroes do.
    Absent,
    /// Zeroes, whatever a backing file has.
    Zero,
    /// As they are, in one of the image's files.
    Data {
        /// Which of [`Layout::files`].
        file: usize,
        /// Where in it the run begins, in bytes.
        offset_bytes: u64,
    },
    /// In a block that [`Layout::inflate`] reads.
    Compressed,
}

/// A run of guest bytes of one kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Its length in bytes, from the offset that was asked for; never 0, never more than was asked for.
    pub len_bytes: u64,
    /// Where it is. A run of [`Place::Data`] lies in one piece.
    pub place: Place,
}

/// Host space for one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NewBlock {
    /// Which of [`Layout::files`].
    pub file: usize,
    /// Where in it, in bytes.
    pub offset_bytes: u64,
    /// What was never written there reads as zeroes, so a block without a backing file's bytes needs
    /// none around what the guest writes.
    pub reads_as_zeroes: bool,
}

/// What a format is to its device. Offsets and lengths are of the guest's view, in bytes, unless they
/// say otherwise. Every method may be called from several threads.
pub trait Layout: Send + Sync + fmt::Debug + 'static {
    /// Table entries, headers and the like that are to be written.
    type Changes: Send + fmt::Debug;

    /// The driver's name: `"vmdk"`.
    fn format(&self) -> &'static str;

    /// The files that hold the image; the first is the one that was opened.
    fn files(&self) -> &[Arc<dyn Storage>];

    /// What is told of the image; asked once, when the device is made.
    fn facts(&self) -> Facts {
        Facts::default()
    }

    /// How what lies at a [`Place::Data`] is encrypted. Blocks of an encrypted image are whole sectors.
    fn encryption(&self) -> &GuestEncryption {
        &GuestEncryption::None
    }

    /// The virtual size in bytes.
    fn size_bytes(&self) -> u64;

    /// What is allocated at once, in bytes: a power of two or not. The device's blocks begin at multiples
    /// of it; the last may end with the device.
    fn block_bytes(&self) -> u64;

    /// What users are told as the cluster size, if the format has one.
    fn cluster_size_bytes(&self) -> Option<u64> {
        Some(self.block_bytes())
    }

    /// Whether what was never written reads as zeroes, backing files aside.
    fn has_zero_init(&self) -> bool {
        true
    }

    /// Whether images of the format may have backing files: where none may, what was never written is the
    /// image's own zeroes.
    fn has_backing_files(&self) -> bool {
        true
    }

    /// Blocks have places before they are written, so that their files know better which of them are
    /// zeroes.
    fn is_preallocated(&self) -> bool {
        false
    }

    /// The run that begins at an offset inside the device; `None` if [`Layout::load`] has to come first.
    /// May go on over many blocks, and may end anywhere.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] for an entry that leads nowhere.
    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>>;

    /// Reads the table that [`Layout::lookup`] missed. A format that keeps its tables in memory has
    /// nothing to do.
    ///
    /// # Errors
    /// What the storage says.
    fn load(&self, offset_bytes: u64) -> impl Future<Output = Result<()>> {
        let _ = offset_bytes;
        async { Ok(()) }
    }

    /// The content of the compressed block at an offset (a multiple of the block size), whole: shorter
    /// only where the device ends.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] for what does not decompress.
    fn inflate(&self, offset_bytes: u64) -> impl Future<Output = Result<Vec<u8>>> {
        async move {
            let message = "the format has no compressed blocks";
            Err(Error::new(ErrorKind::Unsupported, "read", message).at(offset_bytes))
        }
    }

    /// What comes before the first change of an image, once (again after [`Layout::end_changes`]): a flag,
    /// an identifier that has to change. Must be durable when it ends, if the format wants it to be.
    ///
    /// # Errors
    /// What the storage says; no change is made then.
    fn begin_changes(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// As long as it is set, [`Layout::begin_changes`] leaves the identity by which images on top know this
    /// one as it is. Whether it was set before.
    fn keep_identity(&self, keep: bool) -> bool {
        let _ = keep;
        false
    }

    /// Gives the image another such identity, durably, alone with the image and after a flush.
    ///
    /// # Errors
    /// What the storage says.
    fn change_identity(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Finds host space for the block at an offset (a multiple of the block size) that is not wholly
    /// [`Place::Data`], and loads what [`Layout::link`] needs. A block that has space already, but holds
    /// only a part of its bytes, keeps its space. The device writes the whole block and links it
    /// then, or fails; space that is neither linked nor given back is lost until the image is closed.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`] or [`ErrorKind::Unsupported`] where there is none.
    fn allocate(&self, offset_bytes: u64) -> impl Future<Output = Result<NewBlock>>;

    /// From now on the block at an offset is where `allocate` said: in memory, and on disk after
    /// the changes that are taken next were written.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where the tables contradict themselves.
    fn link(&self, offset_bytes: u64, block: NewBlock) -> Result<()>;

    /// The block that `allocate` found space for, for the one at an offset, is not linked: what was to be
    /// written there failed, and nothing writes there any more.
    fn give_back(&self, offset_bytes: u64, block: NewBlock) {
        let _ = (offset_bytes, block);
    }

    /// Makes the whole block at an offset read as zeroes by its entry alone; `false` if the format cannot
    /// say that (`shows_backing`: zeroes would have to hide a backing file), or not of this block. Then
    /// nothing was done.
    ///
    /// # Errors
    /// What the storage says.
    fn zero(
        &self,
        offset_bytes: u64,
        shows_backing: bool,
        may_unmap: bool,
    ) -> impl Future<Output = Result<bool>> {
        let _ = (offset_bytes, shows_backing, may_unmap);
        async { Ok(false) }
    }

    /// Whether [`Layout::discard`] does anything: otherwise no change is begun for it.
    fn can_discard(&self) -> bool {
        false
    }

    /// Gives the whole block at an offset back, so that it reads as zeroes (or as anything, without a
    /// backing file); `false` if the format, or this block, cannot do that.
    ///
    /// # Errors
    /// What the storage says.
    fn discard(
        &self,
        offset_bytes: u64,
        shows_backing: bool,
    ) -> impl Future<Output = Result<bool>> {
        let _ = (offset_bytes, shows_backing);
        async { Ok(false) }
    }

    /// Stores a whole block compressed, if it gets smaller by that, and links it; `None` if the
    /// format has no compressed blocks, `false` if it is to be stored as it is.
    ///
    /// # Errors
    /// What the storage says.
    fn write_compressed(
        &self,
        offset_bytes: u64,
        content: &[u8],
    ) -> impl Future<Output = Result<Option<bool>>> {
        let _ = (offset_bytes, content);
        async { Ok(None) }
    }

    /// Compressed writes are taken, and are like all others: of any place and length, and stored as they are.
    fn never_compresses(&self) -> bool {
        false
    }

    /// Every write has to be one of whole blocks, for [`Layout::write_compressed`]: a stream.
    fn compresses_writes(&self) -> bool {
        false
    }

    /// Takes what was changed in memory and is not on disk; `None` if that is nothing. What is taken
    /// is as it was at that moment; what changes later is taken the next time.
    fn take_changes(&self) -> Option<Self::Changes>;

    /// How many bytes of memory [`Layout::take_changes`] would empty: the device flushes when that becomes
    /// too much.
    fn changed_bytes(&self) -> u64 {
        0
    }

    /// Writes what was taken. May use barriers of its own. After a failure the device takes no
    /// more changes; but after [`ErrorKind::NoSpace`], before anything else is taken, the same is written once more.
    ///
    /// # Errors
    /// What the storage says. [`ErrorKind::NoSpace`] only where nothing is lost by that.
    fn write_changes(&self, changes: &Self::Changes) -> impl Future<Output = Result<()>>;

    /// The last thing of a device that was changed, everything else being durable: flags are
    /// taken back, the file is cut to its length.
    ///
    /// # Errors
    /// What the storage says.
    fn end_changes(&self) -> impl Future<Output = Result<()>> {
        async { Ok(()) }
    }

    /// Whether [`Layout::set_backing_file`] does anything: otherwise no change is begun for it.
    fn can_set_backing_file(&self) -> bool {
        false
    }

    /// Has the image name another backing file, or none, durably; alone with the image and after a
    /// flush. What a cut leaves is the old name or the new one.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where names do not change, [`ErrorKind::NoSpace`] for one that has
    /// no room.
    fn set_backing_file(&self, backing: Option<&BackingName>) -> impl Future<Output = Result<()>> {
        let _ = backing;
        async {
            let message = "Operation not supported";
            Err(Error::new(ErrorKind::Unsupported, "rebase", message))
        }
    }

    /// Whether [`Layout::clear`] does anything: otherwise no change is begun for it.
    fn can_clear(&self) -> bool {
        false
    }

    /// Gives all blocks up, durably, so that the backing file shows everywhere; alone with the image
    /// and after a flush, but beside reads of what it gives up. A cut leaves some of the blocks.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the format does not do that.
    fn clear(&self) -> impl Future<Output = Result<()>> {
        async {
            let message = "Operation not supported";
            Err(Error::new(ErrorKind::Unsupported, "clear", message))
        }
    }

    /// Whether [`Layout::resize`] does anything: otherwise no change is begun for it.
    fn can_resize(&self) -> bool {
        false
    }

    /// Whether the image can have a size at all: asked before anything is done for it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] or [`ErrorKind::Unsupported`] where it cannot.
    fn check_size(&self, size_bytes: u64) -> Result<()> {
        let _ = size_bytes;
        Ok(())
    }

    /// Sets the virtual size, durably, alone with the image and after a flush.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the size is fixed.
    fn resize(&self, size_bytes: u64) -> impl Future<Output = Result<()>> {
        let _ = size_bytes;
        async {
            let message = "Image format driver does not support resize";
            Err(Error::new(ErrorKind::Unsupported, "resize", message))
        }
    }
}
