//! Letting go of what was read: a copy or comparison of a large image reads each byte once, and
//! what that brings into the page cache is of no more use to anybody. It pushes out what is of use
//! (the disks of running machines), and memory that is taken anew, page by page, costs more than
//! the same memory used again and again.
//!
//! What was in the page cache when the file was opened stays there: a file that is there in part
//! is left to the kernel altogether. So is a small one, which pushes out little and may be wanted
//! again soon.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::AsFd;

use parking_lot::Mutex;

use crate::sys::{self, Errno};

/// What is large on a machine: this part of its memory.
const LARGE_PART_OF_MEMORY: u64 = 32;

/// A file of whose blocks one in so many is in the page cache is in use.
const CACHED_ONE_IN: u64 = 16;

/// What is kept of what was read last: requests of it may still be running, and the kernel reads
/// ahead.
const KEPT_BYTES: u64 = 16 << 20;

/// How much is let go at a time.
const BATCH_BYTES: u64 = 16 << 20;

/// The kernel lets go of no folio of which a part is asked for.
const FOLIO_BYTES: u64 = 2 << 20;

/// From which size on a file is large on this machine, in bytes: read as a whole, it would push
/// other files out of the page cache, and is not worth keeping there for whoever reads it next.
pub fn large_file_bytes() -> u64 {
    sys::memory_bytes() / LARGE_PART_OF_MEMORY
}

/// What was read of a file and is still in the page cache.
#[derive(Debug, Default)]
pub(super) struct DropBehind(Mutex<Read>);

#[derive(Debug, Default)]
struct Read {
    /// In the order of the requests; those that touch are one.
    ranges: VecDeque<Range<u64>>,
    bytes: u64,
    /// Where the range ends that was let go last.
    let_go_end: u64,
}

impl DropBehind {
    /// For a regular file whose reads go through the page cache; `None`: it is left to the
    /// kernel, as those are that take less than `min_bytes` on disk.
    pub(super) fn of(fd: impl AsFd, stat: &rustix::fs::Stat, min_bytes: u64) -> Option<Self> {
        let size_bytes = stat.st_blocks as u64 * 512;
        let small = size_bytes < min_bytes;
        let unused = || {
            let cached_bytes = sys::cached_bytes(&fd, 0..stat.st_size as u64);
            cached_bytes.is_ok_and(|bytes| bytes < size_bytes / CACHED_ONE_IN)
        };
        (!small && unused()).then(Self::default)
    }

    /// Notes a read; the ranges that are to be let go now.
    pub(super) fn note(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut read = self.0.lock();
        read.note(range)
    }
}

impl Read {
    fn note(&mut self, range: Range<u64>) -> Vec<Range<u64>> {
        self.bytes += range.end - range.start;
        match self.ranges.back_mut() {
            Some(last) if last.end == range.start => last.end = range.end,
            _ => self.ranges.push_back(range),
        }
        match self.bytes >= KEPT_BYTES + BATCH_BYTES {
            true => self.take(BATCH_BYTES),
            false => Vec::new(),
        }
    }

    /// Takes the oldest `bytes` out.
    fn take(&mut self, bytes: u64) -> Vec<Range<u64>> {
        let mut taken = Vec::new();
        let mut rest = bytes;
        while rest > 0
            && let Some(first) = self.ranges.front_mut()
        {
            let end = first.end.min(first.start + rest);
            rest -= end - first.start;
            // What goes on after the last batch begins with a folio of which that had a part.
            let start = match first.start == self.let_go_end {
                true => first.start / FOLIO_BYTES * FOLIO_BYTES,
                false => first.start,
            };
            taken.push(start..end);
            self.let_go_end = end;
            first.start = end;
            if first.is_empty() {
                self.ranges.pop_front();
            }
        }
        self.bytes -= bytes - rest;
        taken
    }
}

/// Lets go of ranges of a file. Where the kernel does not count what was just read as cached (on
/// overlayfs), it could not tell what was there before either, so all stays.
pub(super) fn drop_cached(fd: impl AsFd, ranges: &[Range<u64>]) -> Result<i64, Errno> {
    for range in ranges {
        if sys::cached_bytes(&fd, range.clone())? > 0 {
            sys::drop_cached(&fd, range.clone())?;
        }
    }
    Ok(0)
}

#[cfg(test)]
mod tests {
    use std::ops::RangeInclusive;
    use std::path::Path;

    use super::*;
    use crate::{FileOptions, FileStorage, Storage};
    use vellum_io::{Buffer, Buffers, lane};

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_oldest_reads_are_let_go_and_the_newest_kept() {
        let mut read = Read::default();
        for at in 0..31 {
            assert_eq!(read.note(at * MIB..(at + 1) * MIB), []);
        }
        assert_eq!(read.note(31 * MIB..32 * MIB), [0..16 * MIB]);
        assert_eq!(read.ranges, [16 * MIB..32 * MIB]);
        for at in 0..15 {
            assert_eq!(read.note((100 + 2 * at) * MIB..(101 + 2 * at) * MIB), []);
        }
        assert_eq!(read.note(51 * MIB..52 * MIB), [16 * MIB..32 * MIB]);
        assert_eq!(read.ranges.len(), 16);
        assert_eq!(read.bytes, 16 * MIB);
        for at in 0..16 {
            read.note((200 + 2 * at) * MIB..(201 + 2 * at) * MIB);
        }
        assert_eq!(read.bytes, 16 * MIB);
        assert_eq!(read.ranges.front(), Some(&(200 * MIB..201 * MIB)));
    }

    #[test]
    fn folios_between_two_batches_go_with_the_second() {
        let mut read = Read::default();
        assert_eq!(read.note(0..MIB / 2), []);
        assert_eq!(
            read.note(9 * MIB..41 * MIB),
            [0..MIB / 2, 9 * MIB..25 * MIB - MIB / 2]
        );
        let second = read.note(41 * MIB..57 * MIB);
        assert_eq!(second, [24 * MIB..41 * MIB - MIB / 2]);
    }

    /// Where the tests are built: on a disk, as the page cache of a memory disk is all there is.
    fn folder() -> tempfile::TempDir {
        let program = std::env::current_exe().expect("a program");
        tempfile::tempdir_in(program.parent().expect("a folder")).expect("a folder")
    }

    /// How much of a file is cached after all of it was read, of which nothing was cached before.
    fn cached_after_reading(path: &Path, read_once_min_bytes: Option<u64>) -> Result<u64, Errno> {
        let options = FileOptions {
            read_only: true,
            read_once_min_bytes,
            ..FileOptions::default()
        };
        let len_bytes = path.metadata().expect("the test's own").len();
        let path = path.to_owned();
        let read = move || {
            let file = FileStorage::open(path, &options).expect("the test's own file");
            lane::block_on(async {
                for at in (0..len_bytes).step_by(MIB as usize) {
                    let buffers = Buffers::from_buf([Buffer::for_read(MIB as usize)]);
                    file.read(at, buffers).await.expect("reads");
                }
            });
            file.file.descriptor.clone()
        };
        // A lane that ends has done all that it was asked for.
        let file = std::thread::spawn(read).join().expect("reads");
        sys::cached_bytes(&*file, 0..len_bytes)
    }

    /// Of 64 MiB that nobody let go of: a machine short of memory takes some pages back.
    const MOST: RangeInclusive<u64> = 48 * MIB..=64 * MIB;

    #[test]
    fn large_files_leave_the_page_cache_unless_they_were_there() {
        let folder = folder();
        let path = folder.path().join("file");
        std::fs::write(&path, vec![1; 64 << 20]).expect("room");
        let file = std::fs::File::open(&path).expect("just written");
        file.sync_all().expect("written");
        let forget = || sys::drop_cached(&file, 0..64 * MIB).expect("accepted");
        forget();
        match cached_after_reading(&path, None) {
            Ok(usual) if MOST.contains(&usual) => {}
            Ok(usual) => {
                assert_eq!(usual, 0, "a file system whose cache cannot be asked for");
                return;
            }
            Err(_) => {
                // Before Linux 6.5 nobody can ask, so nothing is let go.
                let stat = sys::stat(&file).expect("open");
                assert!(DropBehind::of(&file, &stat, 0).is_none());
                return;
            }
        }
        let there = cached_after_reading(&path, Some(MIB)).expect("as before");
        assert!(MOST.contains(&there), "it was there: {there} bytes");
        forget();
        let small = cached_after_reading(&path, Some(128 * MIB)).expect("as before");
        assert!(MOST.contains(&small), "it is small: {small} bytes");
        forget();
        let left = cached_after_reading(&path, Some(MIB)).expect("as before");
        assert!(left <= 34 * MIB, "{} MiB are left", left / MIB);
    }
}
