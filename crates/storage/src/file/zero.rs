//! Zeroes, discards and reservations: `fallocate(2)` in its several ways, and
//! what to do where a file system or device does not know them.

use std::sync::atomic::{AtomicBool, Ordering};

use libc::{FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, FALLOC_FL_ZERO_RANGE};

use super::{File, Supports};
use crate::ZeroFlags;
use crate::sys;
use vellum_io::lane::{self, Op, finish_unit};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};

/// `BLKZEROOUT`: make a device's range zero; takes offset and length.
const BLKZEROOUT: libc::Ioctl = 0x127f;
/// `BLKDISCARD`: give a device's range back; takes offset and length.
const BLKDISCARD: libc::Ioctl = 0x1277;

/// How much memory is written at a time where zeroes must be written out.
const ZERO_CHUNK_BYTES: u64 = 1 << 20;

impl Supports {
    /// Everything is tried at least once.
    pub(super) fn new() -> Self {
        Supports {
            punch_hole: AtomicBool::new(true),
            zero_range: AtomicBool::new(true),
            allocate: AtomicBool::new(true),
            block_zero_out: AtomicBool::new(true),
            clone_inside: AtomicBool::new(true),
            clone_across: AtomicBool::new(true),
        }
    }
}

/// Turns "cannot" into `Ok(false)`, and remembers it where it will not change.
fn outcome(result: Result<()>, supported: &AtomicBool) -> Result<bool> {
    let Err(error) = result else { return Ok(true) };
    match error.errno() {
        libc::EOPNOTSUPP | libc::ENOSYS | libc::ENOTTY | libc::ENODEV => {
            supported.store(false, Ordering::Relaxed);
            Ok(false)
        }
        // This range or this device: some demand alignment, some answer EINVAL
        // for a mode that they do not know.
        libc::EINVAL => Ok(false),
        _ => Err(error),
    }
}

impl File {
    /// Whether zeroes are likely to cost less than writing them.
    pub(super) fn can_zero(&self) -> bool {
        let known = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        known(&self.supports.zero_range)
            || known(&self.supports.punch_hole)
            || (self.device.is_some() && known(&self.supports.block_zero_out))
    }

    /// Makes a range zero in the cheapest way that works.
    pub(super) async fn write_zeroes(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        flags: ZeroFlags,
    ) -> Result<()> {
        let _held = self
            .ranges
            .lock_for_write(self.alignment, offset_bytes, len_bytes)
            .await;
        self.extents.forget();
        let zeroed = match self.device {
            Some(_) => self.zero_device(offset_bytes, len_bytes, flags).await,
            None => self.zero_regular(offset_bytes, len_bytes, flags).await,
        };
        self.extents.forget();
        match zeroed? {
            true => {}
            false if flags.no_fallback => return Err(self.cannot("write zeroes")),
            false => self.write_out_zeroes(offset_bytes, len_bytes).await?,
        }
        match flags.fua {
            true => self.sync().await,
            false => Ok(()),
        }
    }

    async fn zero_regular(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        flags: ZeroFlags,
    ) -> Result<bool> {
        let end = offset_bytes + len_bytes;
        let file_end = self.len_bytes()?;
        if flags.may_unmap && self.discard && offset_bytes < file_end {
            let inside = end.min(file_end) - offset_bytes;
            if self.punch(offset_bytes, inside).await? {
                return match end > file_end {
                    true => self.grow_zeroed(file_end, end).await,
                    false => Ok(true),
                };
            }
        }
        if self.zero_range(offset_bytes, len_bytes).await? {
            return Ok(true);
        }
        // A hole, then space for it again: zeroes that are allocated.
        if offset_bytes < file_end
            && !self
                .punch(offset_bytes, end.min(file_end) - offset_bytes)
                .await?
        {
            return Ok(false);
        }
        self.reserve(offset_bytes, len_bytes).await
    }

    /// Makes the file longer. Never by `ftruncate`: a write that grows the file
    /// further at the same moment would be cut off.
    async fn grow_zeroed(&self, from_bytes: u64, to_bytes: u64) -> Result<bool> {
        let len_bytes = to_bytes - from_bytes;
        Ok(self.zero_range(from_bytes, len_bytes).await?
            || self.reserve(from_bytes, len_bytes).await?)
    }

    async fn zero_device(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        flags: ZeroFlags,
    ) -> Result<bool> {
        if flags.may_unmap && self.discard && self.punch(offset_bytes, len_bytes).await? {
            return Ok(true);
        }
        if self.zero_range(offset_bytes, len_bytes).await? {
            return Ok(true);
        }
        let supported = &self.supports.block_zero_out;
        self.block_ioctl(
            "write zeroes",
            BLKZEROOUT,
            offset_bytes,
            len_bytes,
            supported,
        )
        .await
    }

    /// Gives a range's space back; where that is not to be had, nothing.
    pub(super) async fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let range = match self.device {
            Some(device) => {
                // Blocks of which only a part is discarded stay.
                let end = (offset_bytes + len_bytes).min(device.len_bytes);
                device
                    .blocks
                    .inside(offset_bytes, end.saturating_sub(offset_bytes))
            }
            None => offset_bytes..offset_bytes + len_bytes,
        };
        let len_bytes = range.end - range.start;
        if len_bytes == 0 {
            return Ok(());
        }
        let _held = self
            .ranges
            .lock_for_write(self.alignment, range.start, len_bytes)
            .await;
        self.extents.forget();
        if !self.punch(range.start, len_bytes).await? && self.device.is_some() {
            // A last resort with nothing to remember: a hint may be ignored.
            let untried = AtomicBool::new(true);
            self.block_ioctl("discard", BLKDISCARD, range.start, len_bytes, &untried)
                .await?;
        }
        self.extents.forget();
        Ok(())
    }

    /// Reserves space for a range.
    pub(super) async fn allocate(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        if let Some(device) = self.device {
            return match offset_bytes + len_bytes <= device.len_bytes {
                true => Ok(()),
                false => Err(Error::from_errno("allocate", libc::ENOSPC).target(self.name())),
            };
        }
        match self.reserve(offset_bytes, len_bytes).await? {
            true => Ok(()),
            false => Err(self.cannot("allocate")),
        }
    }

    async fn punch(&self, offset_bytes: u64, len_bytes: u64) -> Result<bool> {
        let mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
        self.fallocate(mode, offset_bytes, len_bytes, &self.supports.punch_hole)
            .await
    }

    async fn zero_range(&self, offset_bytes: u64, len_bytes: u64) -> Result<bool> {
        // Devices take the mode only together with a promise not to grow.
        let keep = if self.device.is_some() {
            FALLOC_FL_KEEP_SIZE
        } else {
            0
        };
        let mode = FALLOC_FL_ZERO_RANGE | keep;
        self.fallocate(mode, offset_bytes, len_bytes, &self.supports.zero_range)
            .await
    }

    async fn reserve(&self, offset_bytes: u64, len_bytes: u64) -> Result<bool> {
        self.fallocate(0, offset_bytes, len_bytes, &self.supports.allocate)
            .await
    }

    async fn fallocate(
        &self,
        mode: i32,
        offset_bytes: u64,
        len_bytes: u64,
        supported: &AtomicBool,
    ) -> Result<bool> {
        if !supported.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let op = Op::Fallocate {
            mode,
            offset_bytes,
            len_bytes,
        };
        let result = lane::submit(self.request(op, Buffers::new()), finish_unit).await;
        outcome(result, supported)
    }

    async fn block_ioctl(
        &self,
        name: &'static str,
        request: libc::Ioctl,
        offset_bytes: u64,
        len_bytes: u64,
        supported: &AtomicBool,
    ) -> Result<bool> {
        if !supported.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let fd = self.descriptor.clone();
        let work = move || sys::ioctl_range(&*fd, request, offset_bytes, len_bytes);
        outcome(
            lane::call(&self.descriptor, name, work, finish_unit).await,
            supported,
        )
    }

    /// Writes zeroes like any other data. The caller holds the range if it is
    /// not aligned.
    async fn write_out_zeroes(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let end = offset_bytes + len_bytes;
        let inside = self.alignment.inside(offset_bytes, len_bytes);
        if inside.is_empty() {
            return self.write_held_zeroes(offset_bytes, end).await;
        }
        if offset_bytes < inside.start {
            self.write_held_zeroes(offset_bytes, inside.start).await?;
        }
        let chunk_bytes = (inside.end - inside.start).min(ZERO_CHUNK_BYTES);
        let mut chunk = Buffers::from_buf([Buffer::zeroed(chunk_bytes as usize)]);
        let mut at = inside.start;
        while at < inside.end {
            chunk[0].truncate((inside.end - at).min(ZERO_CHUNK_BYTES) as usize);
            let len = chunk[0].len() as u64;
            chunk = self.write(at, chunk, false).await?;
            at += len;
        }
        if inside.end < end {
            self.write_held_zeroes(inside.end, end).await?;
        }
        Ok(())
    }

    /// Writes zeroes to a part of one or two blocks whose range is held.
    async fn write_held_zeroes(&self, from_bytes: u64, to_bytes: u64) -> Result<()> {
        let around = self.alignment.around(from_bytes, to_bytes - from_bytes);
        let mut copy = self.read_range(around.clone()).await?;
        let skip = (from_bytes - around.start) as usize;
        copy[skip..skip + (to_bytes - from_bytes) as usize].fill(0);
        self.write_blocks(around.start, to_bytes, copy, false).await
    }

    pub(super) fn cannot(&self, operation: &'static str) -> Error {
        let message = vellum_io::error::errno_text(libc::EOPNOTSUPP);
        Error::new(ErrorKind::Unsupported, operation, message)
            .with_errno(libc::EOPNOTSUPP)
            .target(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FileOptions, FileStorage, Storage, WriteFlags};
    use vellum_io::lane::block_on;

    /// A file of ones on which no way of `fallocate` works any more.
    fn plain_file(folder: &std::path::Path, len_bytes: usize, direct: bool) -> FileStorage {
        std::fs::write(folder.join("file"), vec![1; len_bytes]).unwrap();
        let options = FileOptions {
            direct,
            ..FileOptions::default()
        };
        let file = FileStorage::open(folder.join("file"), &options).unwrap();
        let supports = &file.file.supports;
        for flag in [
            &supports.punch_hole,
            &supports.zero_range,
            &supports.allocate,
        ] {
            flag.store(false, Ordering::Relaxed);
        }
        std::sync::Arc::into_inner(file).unwrap()
    }

    #[test]
    fn zeroes_are_written_where_nothing_else_works() {
        // Beside this program: a temporary folder may be in memory, where direct
        // I/O is not to be had.
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let len = 3 << 20;
        for direct in [false, true] {
            let file = plain_file(folder.path(), len, direct);
            assert!(!file.capabilities().can_zero && !file.capabilities().can_punch);
            for (from, to) in [
                (5_usize, 10_usize),
                (1000, 2_500_000),
                (4096, 8192),
                (600, 5000),
            ] {
                block_on(async {
                    let ones = Buffers::from_buf([Buffer::copy_of(&vec![1; len])]);
                    let ones = file.write(0, ones, WriteFlags::default()).await.unwrap();
                    let flags = ZeroFlags {
                        may_unmap: true,
                        ..ZeroFlags::default()
                    };
                    file.write_zeroes(from as u64, (to - from) as u64, flags)
                        .await
                        .unwrap();
                    let bytes = file.read(0, ones).into_single().await.unwrap();
                    assert!(bytes[from..to].iter().all(|&byte| byte == 0));
                    assert!(
                        bytes[..from]
                            .iter()
                            .chain(&bytes[to..])
                            .all(|&byte| byte == 1)
                    );
                });
            }
        }
    }

    #[test]
    fn without_fallback_nothing_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let file = plain_file(folder.path(), 4096, false);
        let flags = ZeroFlags {
            no_fallback: true,
            ..ZeroFlags::default()
        };
        let error = block_on(file.write_zeroes(0, 4096, flags)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert_eq!(
            std::fs::read(folder.path().join("file")).unwrap(),
            [1; 4096]
        );
        assert!(block_on(file.discard(0, 4096)).is_ok());
        assert_eq!(
            block_on(file.allocate(0, 4096)).unwrap_err().kind(),
            ErrorKind::Unsupported
        );
    }
}
