//! [`Scrub`]: a scrub of an image, in steps; what the damaged bytes belong to, and their repair
//! from the backing file.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_format::checksums::{BLOCK_BYTES, sum_of};
use vellum_format::types::GuestOffset;
use vellum_io::{Buffer, Error, ErrorKind, Result, spawn_to_completion};

use super::pages::Checksums;
use super::scrub::{STEP_BYTES, Scrubbed};
use crate::qcow2::device::Qcow2;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{MappingRun, RunKind};
use crate::qcow2::read::data::read_padded;

/// Blocks that are written before a flush.
const BLOCKS_AT_ONCE: usize = 256;

/// A range of the image's file whose bytes have changed on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DamagedRange {
    /// Where it lies in the image's file, in bytes.
    pub file: Range<u64>,
    /// What the guest has there, in bytes of the disk; `None`: metadata, or what only a
    /// snapshot has.
    pub guest: Option<Range<u64>>,
    /// The backing file had the same bytes, and they are in the image again.
    pub is_repaired: bool,
}

/// What a scrub has found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// Bytes of the image's file that were compared with their checksums.
    pub compared_bytes: u64,
    /// Bytes that had no checksum, and have one now.
    pub new_bytes: u64,
    /// Bytes that have changed on disk.
    pub damaged_bytes: u64,
    /// Another program may have changed them: nothing was repaired.
    pub may_be_newer: bool,
    /// Where they are, in the order of the file: the first 10,000 ranges.
    pub damaged: Vec<DamagedRange>,
}

/// A scrub of an image that is open, and may be in use meanwhile.
#[derive(Debug)]
pub struct Scrub {
    image: Arc<Image>,
    checksums: Arc<Checksums>,
    next: u64,
    found: Scrubbed,
}

impl Qcow2 {
    /// Begins a scrub: all bytes of the image's file are compared with their checksums. Those that
    /// have none get one, unless the image is only read.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the image has no checksums.
    pub fn scrub(&self) -> Result<Scrub> {
        let Some(checksums) = self.image.checksums.clone() else {
            let message = "the image has no checksums; checksums=on begins to keep some";
            let error = Error::new(ErrorKind::Unsupported, "scrub", message);
            return Err(error.target(self.image.name.clone()));
        };
        Ok(Scrub {
            image: self.image.clone(),
            checksums,
            next: 0,
            found: Scrubbed::default(),
        })
    }
}

impl ScrubReport {
    /// Bytes that have changed on disk and are not repaired.
    pub fn left_bytes(&self) -> u64 {
        let repaired = self.damaged.iter().filter(|range| range.is_repaired);
        let repaired = repaired.map(|range| range.file.end - range.file.start);
        self.damaged_bytes.saturating_sub(repaired.sum())
    }
}

impl Scrub {
    /// Bytes that have been read: holes without checksums are not.
    pub fn read_bytes(&self) -> u64 {
        self.found.read_bytes
    }

    /// Bytes that are done.
    pub fn done_bytes(&self) -> u64 {
        self.next
    }

    /// Bytes of the image's file now.
    ///
    /// # Errors
    /// What the system says where it has to be asked.
    pub fn total_bytes(&self) -> Result<u64> {
        self.checksums.len_bytes()
    }

    /// Scrubs the next MiB, or goes past a hole without checksums; `false`: there is none.
    ///
    /// # Errors
    /// When the image's file or that of the checksums cannot be read or written.
    pub async fn step(&mut self) -> Result<bool> {
        if self.next >= self.checksums.len_bytes()? {
            return Ok(false);
        }
        let behind_hole = self.checksums.skip_hole(self.next).await?;
        if behind_hole > self.next {
            self.next = behind_hole;
            return Ok(true);
        }
        let adds = !self.image.read_only;
        let step = self.checksums.scrub_step(self.next, adds, &mut self.found);
        step.await?;
        self.next += STEP_BYTES;
        Ok(true)
    }

    /// Takes it that nobody has modified the image's file since Vellum closed it, although that is not known: then
    /// [`Self::finish`] repairs, and so do reads from now on. What another program has written is lost where the
    /// backing file has what was there before.
    pub fn assume_unmodified(&self) {
        self.checksums.is_as_left.store(true, Ordering::Relaxed);
    }

    /// Finds out what the damaged bytes belong to, and with `repairs` writes those anew that the
    /// backing file has as well, unless another program may have changed them ([`ScrubReport::may_be_newer`]).
    ///
    /// # Errors
    /// When the image cannot be written. What cannot be read of its mapping stays unknown.
    pub async fn finish(self, repairs: bool) -> Result<ScrubReport> {
        let Scrub {
            image,
            checksums,
            found,
            ..
        } = self;
        let mut damaged = split_by_guest(&image, &found.damaged).await;
        if found.damaged_bytes == 0 {
            // Whoever has written, it was not without sums.
            checksums.is_as_left.store(true, Ordering::Relaxed);
        }
        let may_be_newer = !checksums.may_repair();
        if repairs && !image.read_only && !may_be_newer {
            for range in &mut damaged {
                range.is_repaired = repair(&image, &checksums, range).await?;
            }
        }
        Ok(ScrubReport {
            compared_bytes: found.compared_bytes,
            new_bytes: found.new_bytes,
            damaged_bytes: found.damaged_bytes,
            may_be_newer,
            damaged,
        })
    }
}

/// Says of each damaged range what the guest has there.
async fn split_by_guest(image: &Image, damaged: &[Range<u64>]) -> Vec<DamagedRange> {
    let mut guests: Vec<(Range<u64>, Range<u64>)> = Vec::new();
    let mut at = 0;
    let per_table = image.geometry.l2_entries() * image.geometry.cluster_size_bytes();
    while !damaged.is_empty() && at < image.size_bytes() {
        let Ok(view) = image.view(GuestOffset(at), image.size_bytes() - at).await else {
            // Damage in the mapping itself: what it led to is not known.
            at = (at / per_table + 1) * per_table;
            continue;
        };
        for run in view {
            guests.extend(inside(&run, damaged));
            at = run.guest.bytes() + run.len_bytes;
        }
    }
    guests.sort_by_key(|(file, _)| file.start);
    let mut guests = guests.into_iter().peekable();
    let mut out = Vec::new();
    for range in damaged {
        let mut next = range.start;
        let unknown = |file: Range<u64>| DamagedRange {
            file,
            guest: None,
            is_repaired: false,
        };
        while let Some((file, guest)) = guests.next_if(|(file, _)| file.start < range.end) {
            if next < file.start {
                out.push(unknown(next..file.start));
            }
            next = next.max(file.end);
            out.push(DamagedRange {
                file,
                guest: Some(guest),
                is_repaired: false,
            });
        }
        if next < range.end {
            out.push(unknown(next..range.end));
        }
    }
    out
}

/// What of damaged ranges, which are in order, belongs to a run: in the file, and on the disk.
fn inside(
    run: &MappingRun,
    damaged: &[Range<u64>],
) -> impl Iterator<Item = (Range<u64>, Range<u64>)> {
    let guest = run.guest.bytes();
    let place = match &run.kind {
        RunKind::Data { host, .. } => host.bytes()..host.bytes() + run.len_bytes,
        RunKind::Compressed(data) => data.host_offset.bytes()..data.end().bytes(),
        _ => 0..0,
    };
    let is_data = matches!(run.kind, RunKind::Data { .. });
    let len_bytes = run.len_bytes;
    let first = damaged.partition_point(|range| range.end <= place.start);
    let end = place.end;
    let touching = damaged[first..]
        .iter()
        .take_while(move |range| range.start < end);
    touching.map(move |range| {
        let file = place.start.max(range.start)..place.end.min(range.end);
        let on_disk = match is_data {
            true => guest + (file.start - place.start)..guest + (file.end - place.start),
            false => guest..guest + len_bytes,
        };
        (file, on_disk)
    })
}

/// Writes what the backing file has where that is what the image had; whether all of the range is
/// as it was.
async fn repair(
    image: &Arc<Image>,
    checksums: &Arc<Checksums>,
    range: &DamagedRange,
) -> Result<bool> {
    let Some(guest) = range.guest.clone().filter(|_| !image.is_encrypted()) else {
        return Ok(false);
    };
    let is_whole = |range: &Range<u64>| (range.start | range.end).is_multiple_of(BLOCK_BYTES);
    if !is_whole(&range.file) || guest.end - guest.start != range.file.end - range.file.start {
        return Ok(false);
    }
    let mut all = true;
    let mut found = Vec::new();
    for block in range.file.clone().step_by(BLOCK_BYTES as usize) {
        let at = guest.start + (block - range.file.start);
        let buffer = Buffer::for_read(BLOCK_BYTES as usize);
        let bytes = read_padded(image.backing.as_ref(), at, buffer).await?;
        match checksums.sum(block).await? == sum_of([&bytes[..]]) {
            true => found.push((block, bytes)),
            false => all = false,
        }
        if found.len() >= BLOCKS_AT_ONCE || block + BLOCK_BYTES == range.file.end {
            let (checksums, blocks) = (checksums.clone(), std::mem::take(&mut found));
            // What is written is written to its end.
            all &=
                spawn_to_completion(async move { checksums.repair_blocks(blocks).await }).await?;
        }
    }
    Ok(all)
}
