//! A power cut: which unflushed records survive, and which parts of them.

use std::ops::Range;

use crate::exhaustive::ExhaustiveChoices;
use crate::record::{CutPoint, Record};
use crate::rng::Rng;
use crate::sparse_bytes::{SECTOR_BYTES, SparseBytes};

/// What survives of one record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SurvivingPart {
    /// The record's place in [`CutPoint::records`].
    pub record: usize,
    /// The sectors that survive, counted from the record's first.
    pub sectors: Vec<Range<u64>>,
    /// The file grows as far as the record needs.
    pub grows: bool,
}

impl SurvivingPart {
    /// All of a record.
    pub fn whole(record: usize, of: &Record) -> Self {
        let sectors = 0..of.sectors();
        SurvivingPart {
            record,
            sectors: vec![sectors],
            grows: true,
        }
    }
}

/// What survives of all records, in the order in which it takes effect.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PowerCut {
    /// The survivors; records that are not named are lost.
    pub kept: Vec<SurvivingPart>,
}

impl PowerCut {
    /// Chooses what survives.
    pub fn random(point: &CutPoint, rng: &mut Rng) -> PowerCut {
        let order = order_of(point, rng);
        let style = rng.below(8);
        let chosen = rng.below(order.len() as u64) as usize;
        let mut kept = Vec::new();
        for (place, &record) in order.iter().enumerate() {
            let of = &point.records[record];
            let keep = of.forced
                || match style {
                    0 => false,
                    1 => true,
                    2 => place == chosen,
                    3 => place != chosen,
                    4 => place < chosen,
                    5 => place >= chosen,
                    _ => rng.chance(1, 2),
                };
            if keep && (of.forced || rng.chance(2, 3)) {
                kept.push(SurvivingPart::whole(record, of));
            } else if keep {
                kept.push(torn(record, of, rng));
            }
        }
        PowerCut { kept }
    }

    /// The next of all cuts of a point: every subset of the records, each whole or
    /// torn at every sector boundary from either side, or in any way at all if it
    /// has at most three sectors.
    pub fn next(point: &CutPoint, exhaust: &mut ExhaustiveChoices) -> PowerCut {
        let mut kept = Vec::new();
        for (record, of) in point.records.iter().enumerate() {
            if of.forced {
                kept.push(SurvivingPart::whole(record, of));
                continue;
            }
            if exhaust.below(2) == 0 {
                continue;
            }
            let grows = of.grows_to.is_none() || exhaust.below(2) == 0;
            let sectors = match of.sectors() {
                0 => Vec::new(),
                count @ 1..=3 => bits(exhaust.below(1 << count), count),
                count => match exhaust.below(2 * count) {
                    split if split < count => vec![0..split + 1],
                    split => vec![split - count..count],
                },
            };
            kept.push(SurvivingPart {
                record,
                sectors,
                grows,
            });
        }
        PowerCut { kept }
    }

    /// The bytes of every file after this cut.
    pub fn apply(&self, point: &CutPoint) -> Vec<SparseBytes> {
        let mut files = point.durable.clone();
        let mut seen: Option<Vec<SparseBytes>> = None;
        for kept in &self.kept {
            let Some(record) = point.records.get(kept.record) else {
                continue;
            };
            if kept.record < point.completed {
                record.apply_part(&mut files[record.file], kept);
                continue;
            }
            // A request still in flight lands on the bytes that the device holds by then.
            let seen = seen.get_or_insert_with(|| point.volatile.clone());
            let landed = record.landed(&seen[record.file]);
            landed.apply(&mut seen[record.file]);
            landed.apply_part(&mut files[record.file], kept);
        }
        files
    }
}

/// Completed records keep their order; those in flight may land in any order.
fn order_of(point: &CutPoint, rng: &mut Rng) -> Vec<usize> {
    let mut order: Vec<usize> = (0..point.records.len()).collect();
    in_any_order(&mut order[point.completed..], rng);
    order
}

pub(crate) fn in_any_order(records: &mut [usize], rng: &mut Rng) {
    for at in (1..records.len()).rev() {
        records.swap(at, rng.below(at as u64 + 1) as usize);
    }
}

fn torn(record: usize, of: &Record, rng: &mut Rng) -> SurvivingPart {
    let count = of.sectors();
    let grows = rng.chance(2, 3);
    let split = rng.below(count + 1);
    let sectors = match rng.below(4) {
        0 => vec![0..split],
        1 => vec![split..count],
        _ if count <= 64 => bits(rng.next_u64(), count),
        _ => {
            let end = rng.between(split, count);
            vec![0..split / 2, split..end]
        }
    };
    SurvivingPart {
        record,
        sectors,
        grows,
    }
}

/// The sectors whose bits are set.
fn bits(mask: u64, count: u64) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    for sector in (0..count).filter(|sector| mask >> sector & 1 == 1) {
        match ranges.last_mut() {
            Some(last) if last.end == sector => last.end += 1,
            _ => ranges.push(sector..sector + 1),
        }
    }
    ranges
}

impl Record {
    /// Applies some sectors, with or without the length that they need.
    pub(crate) fn apply_torn(&self, pages: &mut SparseBytes, rng: &mut Rng) {
        self.apply_part(pages, &torn(0, self, rng));
    }

    /// Applies what survives to a file.
    fn apply_part(&self, pages: &mut SparseBytes, kept: &SurvivingPart) {
        if let Some(len_bytes) = self.truncates_to {
            pages.set_len(len_bytes);
        }
        if let (Some(end), true) = (self.grows_to, kept.grows) {
            pages.set_len(pages.len_bytes().max(end));
        }
        for range in &kept.sectors {
            let start = self.start_bytes() + range.start * SECTOR_BYTES;
            let end = self.start_bytes() + range.end.min(self.sectors()) * SECTOR_BYTES;
            // What lies beyond a length that was lost is lost with it.
            let end = end.min(pages.len_bytes());
            if start < end {
                self.copy_to(pages, start, end - start);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Payload;

    fn point(records: Vec<Record>) -> CutPoint {
        let mut durable = SparseBytes::new();
        durable.set_len(2048);
        let mut volatile = durable.clone();
        for record in &records {
            record.apply(&mut volatile);
        }
        let completed = records.len();
        CutPoint {
            durable: vec![durable],
            volatile: vec![volatile],
            records,
            completed,
        }
    }

    fn write(offset: u64, byte: u8, len: usize) -> Record {
        let record = Record::new(0, offset, Payload::Bytes(vec![byte; len].into()), true);
        record.landed(&SparseBytes::new())
    }

    #[test]
    fn exhaustive_cuts_see_every_tear() {
        let point = point(vec![write(0, 1, 1024), write(2048, 2, 512)]);
        let mut exhaust = ExhaustiveChoices::new();
        let mut seen = std::collections::BTreeSet::new();
        while exhaust.advance() {
            let files = PowerCut::next(&point, &mut exhaust).apply(&point);
            let bytes = files[0].bytes(0, 2560);
            seen.insert((bytes[0], bytes[512], bytes[2048], files[0].len_bytes()));
        }
        let mut expected = std::collections::BTreeSet::new();
        for (a, b) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            expected.extend([(a, b, 0, 2048), (a, b, 0, 2560), (a, b, 2, 2560)]);
        }
        assert_eq!(seen, expected);
    }

    #[test]
    fn random_cuts_see_every_subset_too() {
        let point = point(vec![
            write(0, 1, 512),
            write(512, 1, 512),
            write(1024, 1, 512),
        ]);
        let mut rng = Rng::new(5);
        let mut seen = std::collections::BTreeSet::new();
        for _ in 0..500 {
            let files = PowerCut::random(&point, &mut rng).apply(&point);
            let bytes = files[0].bytes(0, 1536);
            seen.insert((bytes[0], bytes[512], bytes[1024]));
        }
        assert_eq!(seen.len(), 8);
    }
}
