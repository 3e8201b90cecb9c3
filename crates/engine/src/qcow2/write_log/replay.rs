//! What a log holds after a crash, and how it comes back into the image.
//!
//! Invariants:
//! - Only records of the image's own log count, in the order of their numbers, up to the first
//!   that is not whole. Where a later batch than the next one is whole, the log is damaged:
//!   a batch is appended only after the one before was durable. So it is where a record names a
//!   newer superblock than there is: an older one shows records as live that were given up.
//! - Done twice, or after a part of it, it comes to the same.
//! - Of the log's content only so much is in memory as is being written to the image; kept is where
//!   each record lies.

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

use super::ring_reader::{RingPlace, RingReader};

/// What is written to the image at a time.
const WRITE_BYTES: u64 = 1 << 20;
/// Records that make one write.
const MAX_PIECES: usize = 4096;
/// Writes to the image at the same time.
const WRITES_AT_ONCE: usize = 16;
/// What a log's content takes in memory at most where the image is only read.
const MAX_READ_ONLY_BYTES: u64 = 256 << 20;

/// Where the newest bytes of a guest range are.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Content {
    /// In the ring, from this byte on.
    Ring(u64),
    Zeroes,
    Discarded,
}

/// What a log holds: the newest content of guest ranges.
#[derive(Debug)]
pub(super) struct Replay {
    ring: RingPlace,
    /// By first byte; they do not overlap.
    ranges: BTreeMap<u64, (u64, Content)>,
    /// Records, for messages.
    pub(super) records: u64,
}

/// Neighbouring guest bytes, and where in the ring they are, in their order.
#[derive(Debug)]
struct GuestWrite {
    start: u64,
    end: u64,
    pieces: Vec<Range<u64>>,
}

/// What is left where nothing can be brought back.
const GIVE_UP: &str = "`vellum check -r drop-log` gives up the writes that it holds";

fn damaged(file: &Arc<dyn Storage>, message: String) -> Error {
    Error::new(ErrorKind::Corrupt, "replay write log", message).target(file.name())
}

/// Says where a replay has met a full disk what is to be done.
pub(super) fn tell_what_to_do(error: Error) -> Error {
    if error.kind() != ErrorKind::NoSpace {
        return error;
    }
    let message = "there is no room to bring the image's last writes back from its write log, which \
                   keeps them: make room and open it again, or open it read-only";
    error.context("replay write log", message)
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
    let mut replay = Replay {
        ring: RingPlace::new(batches, superblock.len_bytes),
        ranges: BTreeMap::new(),
        records: 0,
    };
    let end = replay.follow(&superblock).await?;
    replay.refuse_losses(&superblock, end, file).await?;
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
    async fn follow(&mut self, superblock: &Superblock) -> Result<Expected> {
        let ring = self.ring.clone();
        let mut reader = RingReader::new(&ring);
        let mut expected = Expected {
            sequence: superblock.start_sequence,
            batch: superblock.start_batch,
        };
        let mut at = superblock.start_bytes - RING_START_BYTES;
        let mut begins_batch = true;
        let is_expected = |head: &RecordHead, expected: Expected| {
            head.id == superblock.id
                && (head.sequence, head.batch) == (expected.sequence, expected.batch)
        };
        loop {
            let found = reader.record(at).await?;
            let mut next = found.filter(|head| is_expected(head, expected));
            if next.is_none() && begins_batch {
                at = 0;
                let found = reader.record(at).await?;
                next = found.filter(|head| is_expected(head, expected));
            }
            let Some(head) = next else {
                break;
            };
            self.take_up(&head, at + RECORD_HEAD_BYTES as u64);
            at += RecordHead::record_bytes(head.payload_bytes()) as u64;
            expected.sequence += 1;
            begins_batch = head.ends_batch;
            if begins_batch {
                at = at.next_multiple_of(BLOCK_BYTES);
                expected.batch += 1;
            }
        }
        Ok(expected)
    }

    /// Refuses a log that has lost what was durable: a batch that another one follows, or a
    /// superblock that a record names (W8).
    async fn refuse_losses(
        &self,
        superblock: &Superblock,
        end: Expected,
        file: &Arc<dyn Storage>,
    ) -> Result<()> {
        let mut reader = RingReader::new(&self.ring);
        for at in (0..self.ring.len_bytes).step_by(BLOCK_BYTES as usize) {
            let Some(head) = reader.record(at).await? else {
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
                RING_START_BYTES + at,
            );
            return Err(damaged(file, message));
        }
        Ok(())
    }

    /// What a record changes.
    fn take_up(&mut self, head: &RecordHead, payload_at: u64) {
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
                let rest = content.after(range.end - start);
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
                let rest = content.after(range.end - start);
                self.ranges.insert(range.end, (end, rest));
            }
        }
    }

    /// The ranges of data that lie side by side, as one write each.
    fn writes(&self) -> impl Iterator<Item = GuestWrite> {
        let mut ranges = self.data().peekable();
        std::iter::from_fn(move || {
            let (range, at) = ranges.next()?;
            let mut write = GuestWrite {
                start: range.start,
                end: range.end,
                pieces: vec![at..at + (range.end - range.start)],
            };
            while write.end - write.start < WRITE_BYTES
                && write.pieces.len() < MAX_PIECES
                && let Some((range, at)) = ranges.next_if(|(next, _)| next.start == write.end)
            {
                write.pieces.push(at..at + (range.end - range.start));
                write.end = range.end;
            }
            Some(write)
        })
    }

    /// Ranges with data, and where in the ring that is.
    fn data(&self) -> impl Iterator<Item = (Range<u64>, u64)> {
        let ranges = self.ranges.iter();
        ranges.filter_map(|(start, (end, content))| match content {
            Content::Ring(at) => Some((*start..*end, *at)),
            Content::Zeroes | Content::Discarded => None,
        })
    }

    /// Reads what is to be written. What lies close together in the ring is one read.
    async fn read(&self, write: &GuestWrite) -> Result<Buffer> {
        let mut bytes = Buffer::for_read((write.end - write.start) as usize);
        let mut filled = 0;
        let mut pieces = &write.pieces[..];
        while let Some(first) = pieces.first() {
            let mut span = first.clone();
            let is_close = |span: &Range<u64>, next: &Range<u64>| {
                (span.end..=span.end + BLOCK_BYTES).contains(&next.start)
                    && next.end - span.start <= WRITE_BYTES
            };
            let mut count = 1;
            while let Some(next) = pieces.get(count).filter(|next| is_close(&span, next)) {
                span.end = next.end;
                count += 1;
            }
            let read = self.ring.read(span.clone()).await?;
            let (these, others) = pieces.split_at(count);
            for piece in these {
                let len = (piece.end - piece.start) as usize;
                let at = (piece.start - span.start) as usize;
                bytes[filled..filled + len].copy_from_slice(&read[at..at + len]);
                filled += len;
            }
            pieces = others;
        }
        Ok(bytes)
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
    fn after(&self, bytes: u64) -> Content {
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
        let writes = replay.writes().map(|write| {
            let replay = &replay;
            async move {
                let bytes = replay.read(&write).await?;
                self.write(write.start, bytes, flags).await
            }
        });
        let mut running = stream::iter(writes).buffer_unordered(WRITES_AT_ONCE);
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
    pub(super) async fn overlay_replay(self: &Arc<Self>, replay: &Replay) -> Result<()> {
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
        for write in replay.writes() {
            self.overlay(write.start, &replay.read(&write).await?);
        }
        Ok(())
    }
}
