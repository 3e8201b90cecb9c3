//! The log that `blklogwrites` keeps of an image's changes, and the image that a power cut
//! at any place of it may leave. It shares no code with what writes the log.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use crate::random::Random;

/// The unit of what is written and torn, in bytes.
pub const SECTOR_BYTES: u64 = 512;
const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
/// No image of the torture comes near.
const MOST_BYTES: u64 = 1 << 30;

/// One change, or a flush.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// Where it begins and ends in the log, in bytes.
    pub start: u64,
    /// The start of the next.
    pub end: u64,
    /// What it changes, in bytes.
    pub offset_bytes: u64,
    /// How much of it.
    pub len_bytes: u64,
    /// It makes durable what stands before it.
    pub flush: bool,
    /// It is durable itself.
    pub fua: bool,
    discard: bool,
    /// Of a flush: how many of the changes behind it had ended before it did.
    meanwhile: u64,
}

/// A log.
#[derive(Debug)]
pub struct Log {
    file: File,
    /// What stands in it whole.
    pub entries: Vec<Entry>,
}

/// What is durable for sure at a time, and what else may be on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Entries before this one are durable.
    pub durable: usize,
    /// Entries before this one had ended before the next flush did.
    pub last: usize,
    /// The next flush, or the number of entries.
    pub next: usize,
}

impl Log {
    /// Reads where the entries of a log are.
    pub fn read(path: &Path) -> Result<Self> {
        let file = File::open(path)?;
        let whole = file.metadata()?.len();
        let mut entries = Vec::new();
        let mut start = SECTOR_BYTES;
        while start + SECTOR_BYTES <= whole {
            let mut head = [0; 40];
            file.read_exact_at(&mut head, start)?;
            let (words, _) = head.as_chunks::<8>();
            let words: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
            let len_bytes = words[1].saturating_mul(SECTOR_BYTES);
            let offset_bytes = words[0].saturating_mul(SECTOR_BYTES);
            let (flush, discard) = (words[2] & FLUSH != 0, words[2] & DISCARD != 0);
            if !flush && len_bytes == 0 {
                break;
            }
            let end_bytes = offset_bytes.saturating_add(len_bytes);
            ensure!(end_bytes <= MOST_BYTES, "the log has an entry of {words:?}");
            let stored = if flush || discard { 0 } else { len_bytes };
            let end = start + SECTOR_BYTES + stored;
            if end > whole {
                // The server was killed while it wrote it.
                break;
            }
            entries.push(Entry {
                start,
                end,
                offset_bytes,
                len_bytes,
                flush,
                fua: words[2] & FUA != 0,
                discard,
                meanwhile: words[4],
            });
            start = end;
        }
        Ok(Log { file, entries })
    }

    /// How long the log was when it had only the entries before this one, in bytes.
    pub fn length_before(&self, entry: usize) -> u64 {
        match self.entries.get(entry) {
            Some(entry) => entry.start,
            None => self.entries.last().map_or(SECTOR_BYTES, |last| last.end),
        }
    }

    /// What may be on the disk between any flush and the next.
    pub fn windows(&self) -> Vec<Window> {
        let all = self.entries.len();
        let flushes: Vec<usize> = (0..all).filter(|at| self.entries[*at].flush).collect();
        let durable = std::iter::once(0).chain(flushes.iter().map(|at| at + 1));
        let next = flushes.iter().copied().chain([all]);
        durable
            .zip(next)
            .map(|(durable, next)| {
                let meanwhile = self.entries.get(next).map_or(0, |flush| flush.meanwhile);
                let changes = (next..all).filter(|at| !self.entries[*at].flush);
                let last = changes.take(meanwhile as usize).last();
                Window {
                    durable,
                    last: last.map_or(next, |last| last + 1),
                    next,
                }
            })
            .collect()
    }

    /// Makes a change, or those sectors of it that are wanted.
    pub fn apply(
        &self,
        entry: usize,
        image: &mut Vec<u8>,
        mut wanted: impl FnMut() -> bool,
    ) -> Result<()> {
        let entry = &self.entries[entry];
        if entry.flush {
            return Ok(());
        }
        let mut data = vec![0; entry.len_bytes as usize];
        if !entry.discard {
            self.file
                .read_exact_at(&mut data, entry.start + SECTOR_BYTES)
                .context("the log's data cannot be read")?;
        }
        let end = (entry.offset_bytes + entry.len_bytes) as usize;
        if image.len() < end {
            image.resize(end, 0);
        }
        let target = &mut image[entry.offset_bytes as usize..end];
        let sectors = target.chunks_mut(SECTOR_BYTES as usize);
        for (target, data) in sectors.zip(data.chunks(SECTOR_BYTES as usize)) {
            if wanted() {
                target.copy_from_slice(data);
            }
        }
        Ok(())
    }
}

/// How much of what no flush has covered a power cut keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Changes that are kept, of 100.
    pub percent: u64,
    /// Changes that are kept in part, of 100 kept ones among the last.
    pub torn_percent: u64,
}

impl Kept {
    /// Any.
    pub fn random(random: &mut Random) -> Self {
        Kept {
            percent: random.pick(&[0, 3, 15, 50, 50, 85, 97, 100]),
            torn_percent: random.pick(&[0, 0, 20, 60]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;

    /// A log of entries of (sector, sectors, flags, meanwhile), each with a byte of its own.
    fn log(entries: &[[u64; 4]]) -> Log {
        let mut bytes = vec![0; 512];
        for (number, [sector, sectors, flags, meanwhile]) in entries.iter().enumerate() {
            let mut head = [0; 512];
            for (at, word) in [sector, sectors, flags, &0, meanwhile].iter().enumerate() {
                head[at * 8..][..8].copy_from_slice(&word.to_le_bytes());
            }
            bytes.extend(head);
            if flags & (FLUSH | DISCARD) == 0 {
                bytes.resize(bytes.len() + *sectors as usize * 512, number as u8 + 1);
            }
        }
        let mut file = tempfile::NamedTempFile::new().expect("a file for a log");
        file.write_all(&bytes).expect("written");
        Log::read(file.path()).expect("a log")
    }

    #[test]
    fn a_window_ends_where_the_next_flush_had_ended() {
        let flush = |meanwhile| [0, 0, FLUSH, meanwhile];
        let write = [0, 1, 0, 0];
        let log = log(&[write, flush(2), write, flush(0), write, write]);
        let windows: Vec<_> = log.windows().iter().map(|w| (w.durable, w.last)).collect();
        assert_eq!(windows, [(0, 5), (2, 3), (4, 6)]);
        assert_eq!(log.length_before(1), 3 * 512);
        assert_eq!(log.length_before(6), 11 * 512);
    }

    #[test]
    fn changes_are_made_in_parts_and_half_an_entry_at_the_end_is_none() {
        let mut log = log(&[[1, 2, 0, 0], [0, 2, DISCARD, 0], [4, 1, FUA, 0]]);
        assert_eq!(log.entries.len(), 3);
        let mut image = vec![9; 1024];
        let mut odd = false;
        log.apply(0, &mut image, || std::mem::replace(&mut odd, true))
            .expect("applied");
        assert_eq!((image[512], image[1024]), (9, 1));
        log.apply(1, &mut image, || true).expect("applied");
        assert_eq!((image[0], image[512], image[1024]), (0, 0, 1));
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut bytes = vec![0; 6 * 512];
        log.file.read_exact_at(&mut bytes, 0).expect("read");
        std::fs::write(file.path(), &bytes[..6 * 512 - 1]).expect("written");
        log = Log::read(file.path()).expect("a log");
        assert_eq!(log.entries.len(), 2);
    }
}
