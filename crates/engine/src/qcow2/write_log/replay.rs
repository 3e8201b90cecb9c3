//! What a log holds after a crash, and how it comes back into the image.
//!
//! Invariants:
//! - Only records of the image's own log count, in the order of their numbers, up to the first
//!   that is not whole. Where a later batch than the next one is whole, the log is damaged:
//!   a batch is appended only after the one before was durable. So it is where a record names a
//!   newer superblock than there is: an older one shows records as live that were given up.
//! - Done twice, or after a part of it, it comes to the same.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};
use vellum_format::features::Incompatible;
use vellum_format::write_log::{
    BLOCK_BYTES, RECORD_HEAD_BYTES, RING_START_BYTES, RecordHead, RecordKind, Superblock,
    WriteLogExtension,
};
use vellum_io::{Buffer, Error, ErrorKind, Result};
use vellum_storage::Storage;
use vellum_storage::mutants::{self, Mutant};

use crate::ZeroRequest;
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;

/// What is read of the log at a time.
const READ_BYTES: u64 = 4 << 20;
/// What is written to the image at a time.
const WRITE_BYTES: u64 = 1 << 20;
/// Writes to the image at the same time.
const WRITES_AT_ONCE: usize = 16;
/// What a log's content takes in memory at most where the image is only read.
const MAX_READ_ONLY_BYTES: u64 = 256 << 20;

/// Where the newest bytes of a guest range are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Content {
    /// In the ring as it was read, from this index on.
    Ring(usize),
    Zeroes,
    Discarded,
}

/// What a log holds: the newest content of guest ranges.
#[derive(Debug, Default)]
pub(super) struct Replay {
    ring: Vec<u8>,
    /// By first byte; they do not overlap.
    ranges: BTreeMap<u64, (u64, Content)>,
    /// Records, for messages.
    pub(super) records: u64,
}

/// What is left where nothing can be brought back.
const GIVE_UP: &str = "`vellum check -r drop-log` gives up the writes that it holds";

fn damaged(file: &Arc<dyn Storage>, message: String) -> Error {
    Error::new(ErrorKind::Corrupt, "replay write log", message).target(file.name())
}

/// The superblock of the log in `file`; `None` if it holds no log at all.
pub(super) async fn read_superblock(file: &Arc<dyn Storage>) -> Result<Option<Superblock>> {
    let found = read_superblocks(file).await?;
    Ok(found
        .into_iter()
        .flatten()
        .max_by_key(|found| found.generation))
}

/// What is in the two places of superblocks.
pub(super) async fn read_superblocks(file: &Arc<dyn Storage>) -> Result<[Option<Superblock>; 2]> {
    let bytes = read_bytes(file, 0, RING_START_BYTES).await?;
    let mut found = [None; 2];
    for (found, block) in found.iter_mut().zip(bytes.chunks(BLOCK_BYTES as usize)) {
        *found = Superblock::decode(block)
            .map_err(|error| bad_format("open write log", &error).target(file.name()))?;
    }
    Ok(found)
}

/// Reads the log that `extension` names, and its newest superblock, from `file`, whose batches are read
/// from the first of `batches` at offsets that begin at the second.
///
/// # Errors
/// [`ErrorKind::Corrupt`] if that is no log, another one, or one that is damaged; whatever
/// reading reports.
pub(super) async fn read_log(
    file: &Arc<dyn Storage>,
    batches: (&Arc<dyn Storage>, u64),
    extension: &WriteLogExtension,
) -> Result<(Superblock, Replay)> {
    let superblock = read_superblock(file).await?;
    let is_inside = extension.file_name().is_none();
    let Some(superblock) = superblock.filter(|superblock| superblock.id == extension.id) else {
        let message = match (superblock, is_inside) {
            (Some(_), _) => {
                "this is the write log of another image, or of another time; if a copy of this image \
                 was opened first, that has the last writes now"
            }
            (None, false) => "the file is empty or holds no write log",
            (None, true) => "the image was cut, or its write log is damaged",
        };
        let hint = match is_inside {
            false => "name the right file with journal=",
            true => GIVE_UP,
        };
        let hint = format!("the image's last writes are in its write log: {hint}");
        return Err(damaged(file, format!("{message}; {hint}")));
    };
    let there_bytes = file.len_bytes()?;
    if there_bytes < superblock.len_bytes {
        let message = format!(
            "the file was cut: {there_bytes} of the {} bytes of the write log are there ({GIVE_UP})",
            superblock.len_bytes
        );
        return Err(damaged(file, message));
    }
    let len_bytes = superblock.len_bytes - RING_START_BYTES;
    let mut ring = Vec::with_capacity(len_bytes as usize);
    while (ring.len() as u64) < len_bytes {
        let at = RING_START_BYTES + ring.len() as u64;
        let piece = READ_BYTES.min(len_bytes - ring.len() as u64);
        ring.extend_from_slice(&read_bytes(batches.0, batches.1 + at, piece).await?);
    }
    let mut replay = Replay {
        ring,
        ..Replay::default()
    };
    let end = replay.follow(&superblock);
    replay.refuse_losses(&superblock, end, file)?;
    Ok((superblock, replay))
}

/// The record that a reader looks for: that behind the last one, once there is none.
#[derive(Debug, Clone, Copy)]
struct Expected {
    sequence: u64,
    batch: u64,
}

impl Replay {
    /// Takes up all records in their order.
    fn follow(&mut self, superblock: &Superblock) -> Expected {
        let ring = std::mem::take(&mut self.ring);
        let mut expected = Expected {
            sequence: superblock.start_sequence,
            batch: superblock.start_batch,
        };
        let mut at = (superblock.start_bytes - RING_START_BYTES) as usize;
        let mut begins_batch = true;
        let found = |at: usize, expected: Expected| {
            let head = RecordHead::decode(ring.get(at..)?)?;
            let is_expected = head.id == superblock.id
                && (head.sequence, head.batch) == (expected.sequence, expected.batch);
            is_expected.then_some(head)
        };
        loop {
            let mut next = found(at, expected);
            if next.is_none() && begins_batch {
                next = found(0, expected);
                at = 0;
            }
            let Some(head) = next else {
                break;
            };
            self.take_up(&head, at + RECORD_HEAD_BYTES);
            at += RecordHead::record_bytes(head.payload_bytes());
            expected.sequence += 1;
            begins_batch = head.ends_batch;
            if begins_batch {
                at = at.next_multiple_of(BLOCK_BYTES as usize);
                expected.batch += 1;
            }
        }
        self.ring = ring;
        expected
    }

    /// Refuses a log that has lost what was durable: a batch that another one follows, or a
    /// superblock that a record names (W8).
    fn refuse_losses(
        &self,
        superblock: &Superblock,
        end: Expected,
        file: &Arc<dyn Storage>,
    ) -> Result<()> {
        for at in (0..self.ring.len()).step_by(BLOCK_BYTES as usize) {
            let Some(head) = RecordHead::decode(&self.ring[at..]) else {
                continue;
            };
            let lost = match &head {
                head if head.id != superblock.id => continue,
                head if head.generation > superblock.generation => {
                    format!("superblock {}", head.generation)
                }
                head if head.batch > end.batch => format!("record {}", end.sequence),
                _ => continue,
            };
            let message = format!(
                "{lost} cannot be read, and a later record at {:#x} is there: the file is damaged \
                 ({GIVE_UP})",
                RING_START_BYTES + at as u64,
            );
            return Err(damaged(file, message));
        }
        Ok(())
    }

    /// What a record changes.
    fn take_up(&mut self, head: &RecordHead, payload_at: usize) {
        let start = head.guest_offset_bytes;
        let end = start + head.len_bytes;
        self.cut_out(start..end);
        let content = match head.kind {
            RecordKind::Data => Content::Ring(payload_at),
            RecordKind::Zeroes => Content::Zeroes,
            RecordKind::Discard => Content::Discarded,
        };
        self.ranges.insert(start, (end, content));
        self.records += 1;
    }

    /// Forgets what is known of a range.
    fn cut_out(&mut self, range: Range<u64>) {
        let before = self.ranges.range(..range.start).next_back();
        let before = before.map(|(start, (end, content))| (*start, *end, content.clone()));
        if let Some((start, end, content)) = before
            && end > range.start
        {
            self.ranges.insert(start, (range.start, content.clone()));
            if end > range.end {
                let rest = content.after((range.end - start) as usize);
                self.ranges.insert(range.end, (end, rest));
                return;
            }
        }
        let inside: Vec<u64> = self
            .ranges
            .range(range.clone())
            .map(|(start, _)| *start)
            .collect();
        for start in inside {
            if let Some((end, content)) = self.ranges.remove(&start)
                && end > range.end
            {
                let rest = content.after((range.end - start) as usize);
                self.ranges.insert(range.end, (end, rest));
            }
        }
    }

    /// The bytes of a range that has some.
    fn bytes(&self, at: usize, len_bytes: u64) -> &[u8] {
        &self.ring[at..at + len_bytes as usize]
    }

    /// The ranges of data that lie side by side, as one write each.
    fn writes(&self) -> Vec<(u64, Buffer)> {
        let mut writes: Vec<(u64, Vec<u8>)> = Vec::new();
        for (start, (end, content)) in &self.ranges {
            let Content::Ring(at) = content else {
                continue;
            };
            let bytes = self.bytes(*at, end - start);
            match writes.last_mut() {
                Some((first, last))
                    if *first + last.len() as u64 == *start
                        && (last.len() as u64) < WRITE_BYTES =>
                {
                    last.extend_from_slice(bytes);
                }
                _ => writes.push((*start, bytes.to_vec())),
            }
        }
        let writes = writes.into_iter();
        writes
            .map(|(start, bytes)| (start, Buffer::copy_of(&bytes)))
            .collect()
    }

    /// Ranges that read as zeroes, and whether their space may be given back.
    fn zeroes(&self) -> impl Iterator<Item = (Range<u64>, bool)> {
        let ranges = self.ranges.iter();
        ranges.filter_map(|(start, (end, content))| match content {
            Content::Ring(_) => None,
            Content::Zeroes => Some((*start..*end, false)),
            Content::Discarded => Some((*start..*end, true)),
        })
    }

    /// The end of the last range.
    fn end_bytes(&self) -> u64 {
        self.ranges.last_key_value().map_or(0, |(_, (end, _))| *end)
    }

    /// The guest bytes that it says something about.
    fn len_bytes(&self) -> u64 {
        self.ranges
            .iter()
            .map(|(start, (end, _))| end - start)
            .sum()
    }
}

impl Content {
    /// The same from some bytes further on.
    fn after(&self, bytes: usize) -> Content {
        match self {
            Content::Ring(at) => Content::Ring(at + bytes),
            other => other.clone(),
        }
    }
}

impl Image {
    /// Refuses a log that writes where the image has nothing.
    fn check_replay(&self, replay: &Replay) -> Result<()> {
        if replay.end_bytes() <= self.size_bytes() {
            return Ok(());
        }
        let message = "the write log has records beyond the end of the disk";
        Err(self.name_error(Error::new(ErrorKind::Corrupt, "replay write log", message)))
    }

    /// Writes what a log holds to the image, durably, after which the log does not count.
    pub(super) async fn replay(self: &Arc<Self>, replay: Replay) -> Result<()> {
        self.check_replay(&replay)?;
        for (range, may_unmap) in replay.zeroes() {
            let request = ZeroRequest::default().may_unmap(may_unmap);
            self.zero(range.start, range.end - range.start, request)
                .await?;
        }
        let flags = crate::RequestFlags::default();
        let writes = replay.writes().into_iter();
        let mut running = stream::iter(writes.map(|(at, bytes)| self.write(at, bytes, flags)))
            .buffer_unordered(WRITES_AT_ONCE);
        let mut result = Ok(());
        while let Some(written) = running.next().await {
            result = result.and(written.map(drop));
        }
        drop(running);
        result?;
        // Rule W6: the image has everything before the log is given up.
        if !mutants::is(Mutant::ReplayUnflushed) {
            self.flush().await?;
        }
        self.change_incompatible(|bits| bits.without(Incompatible::WRITE_LOG))
            .await?;
        let writes = match replay.records {
            0 => return Ok(()),
            1 => "1 write was".to_owned(),
            many => format!("{many} writes were"),
        };
        self.messages.say(&format!(
            "{}: {writes} brought back from the write log",
            self.name
        ));
        Ok(())
    }

    /// Shows what a log holds over an image that is only read.
    pub(super) fn overlay_replay(self: &Arc<Self>, replay: &Replay) -> Result<()> {
        self.check_replay(replay)?;
        if replay.len_bytes() > MAX_READ_ONLY_BYTES {
            let message = "the write log holds too much to be kept in memory; open the image \
                           once for writing, or run `vellum check -r log`";
            let error = Error::new(ErrorKind::Unsupported, "replay write log", message);
            return Err(self.name_error(error));
        }
        for (range, _) in replay.zeroes() {
            self.overlay(range.start, &vec![0; (range.end - range.start) as usize]);
        }
        for (at, bytes) in replay.writes() {
            self.overlay(at, &bytes);
        }
        Ok(())
    }
}
