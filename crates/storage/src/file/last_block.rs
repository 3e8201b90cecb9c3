//! Writes of whole blocks, of which the last one may go on behind the end of the file.
//!
//! Direct I/O writes whole blocks only. A file that ends inside of one would get longer by that, and who looks
//! for something at its end (the footer of a VHD) would not find it any more, after a crash
//! if the file were cut to its length afterwards. So these bytes go through the page cache.
//!
//! Invariant: no page of it is dirty when the range's lock, which covers whole pages, is let go: the kernel would
//! put what it holds over what direct I/O has written beside it by then.

use std::ops::Range;
use std::os::unix::fs::FileExt as _;

use rustix::fs::OFlags;
use vellum_io::lane::{self, finish_unit};
use vellum_io::{Buffer, Buffers, Result};

use super::File;
use crate::sys;

impl File {
    /// Writes the blocks of `copy` that begin at an offset: a part of what the caller holds the lock of. What
    /// it wants to be written ends at `end_bytes`, in the last of them; what is behind that is what
    /// was read there.
    pub(super) async fn write_blocks(
        &self,
        offset_bytes: u64,
        end_bytes: u64,
        copy: Buffer,
        durable: bool,
    ) -> Result<()> {
        let copy_end = offset_bytes + copy.len() as u64;
        let is_inside =
            self.device.is_some() || copy_end == end_bytes || self.len_bytes()? >= copy_end;
        if is_inside {
            let buffers = Buffers::from_buf([copy]);
            return self.write(offset_bytes, buffers, durable).await.map(drop);
        }
        let last = copy_end - u64::from(self.alignment.request_bytes);
        let mut copy = copy;
        let before = copy.split_to((last - offset_bytes) as usize);
        if !before.is_empty() {
            let buffers = Buffers::from_buf([before]);
            self.write(offset_bytes, buffers, durable).await?;
        }
        self.write_through_cache(last..end_bytes, copy).await
    }

    /// Writes the first bytes of a block, durably.
    async fn write_through_cache(&self, range: Range<u64>, block: Buffer) -> Result<()> {
        let (file, cached) = (self.descriptor.clone(), self.through_cache.clone());
        let work = move || {
            let cached = match cached.get() {
                Some(cached) => cached,
                None => {
                    let path = format!("/proc/self/fd/{}", file.raw());
                    // What is written is durable then, and its page clean.
                    let flags = OFlags::RDWR | OFlags::DSYNC | OFlags::CLOEXEC;
                    let fd = sys::open(path.as_ref(), flags)?;
                    cached.get_or_init(|| fd.into())
                }
            };
            let bytes = &block[..(range.end - range.start) as usize];
            let written = cached.write_all_at(bytes, range.start);
            written.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
            Ok(0)
        };
        lane::call(&self.descriptor, "write", work, finish_unit).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{FileOptions, FileStorage, Storage, WriteFlags, ZeroFlags};
    use vellum_io::lane::block_on;

    /// What is written up to the end of a file, or a bit beyond it, on one whose blocks are of 4 KiB.
    #[test]
    fn a_file_that_ends_inside_a_block_gets_no_longer() {
        let program = std::env::current_exe().unwrap();
        let folder = tempfile::tempdir_in(program.parent().unwrap()).unwrap();
        let path = folder.path().join("file");
        for len in [512_usize, 5000, 4096 + 512, 70_001] {
            let old: Vec<u8> = (0..len).map(|at| at as u8 | 1).collect();
            std::fs::write(&path, &old).unwrap();
            let file = FileStorage::open(&path, &FileOptions::default().direct(true)).unwrap();
            let mut file = Arc::into_inner(file).unwrap();
            let inner = Arc::get_mut(&mut file.file).unwrap();
            inner.alignment.request_bytes = 4096;
            let mut expected = old.clone();
            block_on(async {
                for (from, to) in [
                    (len - 100, len),
                    (0, len),
                    (len - 300, len - 200),
                    (7, len + 9),
                ] {
                    let bytes = vec![from as u8 ^ to as u8; to - from];
                    expected.resize(expected.len().max(to), 0);
                    expected[from..to].copy_from_slice(&bytes);
                    let buffers = Buffers::from_buf([Buffer::copy_of(&bytes)]);
                    file.write(from as u64, buffers, WriteFlags::default())
                        .await
                        .unwrap();
                    assert!(
                        std::fs::read(&path).unwrap() == expected,
                        "{from}..{to} of {len}"
                    );
                }
                let zeroes = ZeroFlags::default();
                file.write_zeroes(len as u64 - 9, 18, zeroes).await.unwrap();
                expected[len - 9..len + 9].fill(0);
                assert!(std::fs::read(&path).unwrap() == expected, "zeroes at {len}");
            });
        }
    }
}
