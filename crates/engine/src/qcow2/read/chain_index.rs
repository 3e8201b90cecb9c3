//! Regions of the merged mapping in memory, within a budget of bytes.
//!
//! Invariants:
//! - All regions, with what it takes to find them, stay within the budget.
//! - While there is room every region that was resolved is kept. After that only those
//!   are that are asked for again soon (a scan of a chain that is larger than the budget
//!   does not throw out what random reads need), and those that were not used since the
//!   clock's hand came by make room.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};

use crate::qcow2::cache_budget::CacheShare;

/// Where a run's bytes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Nowhere: they are zeroes.
    Zero,
    /// At this offset of the layer's data.
    Data {
        /// Which layer, counted from the top of those below.
        layer: u16,
        /// Bytes from the beginning of its data file.
        host: u64,
    },
    /// In this layer, in a form that it has to read itself.
    Layer(u16),
    /// In what stands below all layers.
    Rest,
}

/// The end of a run, and where its bytes lie. Runs follow each other without gaps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ChainRun {
    /// Guest offset of the first byte behind the run.
    pub(crate) end: u64,
    /// Where its first byte lies.
    pub(crate) place: Place,
}

/// Memory of a run beside its share of a region's bookkeeping.
const RUN_BYTES: usize = size_of::<ChainRun>();
/// What a region costs beside its runs: its places in map and clock, and its box.
const REGION_BYTES: usize = 160;
const SHARDS: usize = 8;
/// Regions remembered in each shard that were wanted and not kept.
const WANTED: usize = 512;

/// A part of the merged mapping.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Region {
    start: u64,
    runs: Box<[ChainRun]>,
}

impl Region {
    /// A region that begins at `start`; the runs are merged where they are one.
    pub(crate) fn new(start: u64, runs: Vec<ChainRun>) -> Self {
        let mut merged: Vec<ChainRun> = Vec::with_capacity(runs.len());
        let mut at = start;
        let mut last_start = start;
        for run in runs {
            match merged.last_mut() {
                Some(last) if continues(last.place, at - last_start, run.place) => {
                    last.end = run.end;
                }
                _ => {
                    merged.push(run);
                    last_start = at;
                }
            }
            at = run.end;
        }
        Region {
            start,
            runs: merged.into_boxed_slice(),
        }
    }

    /// Where the byte at `offset` lies, and the end of its run.
    pub(crate) fn find(&self, offset: u64) -> Option<ChainRun> {
        let index = self.runs.partition_point(|run| run.end <= offset);
        let run = self.runs.get(index)?;
        let start = match index {
            0 => self.start,
            _ => self.runs[index - 1].end,
        };
        let place = match run.place {
            Place::Data { layer, host } => Place::Data {
                layer,
                host: host + (offset - start),
            },
            other => other,
        };
        Some(ChainRun {
            end: run.end,
            place,
        })
    }

    fn size_bytes(&self) -> usize {
        REGION_BYTES + self.runs.len() * RUN_BYTES
    }
}

/// Whether `next`, which begins `len_bytes` after `place`, goes on where that lies.
fn continues(place: Place, len_bytes: u64, next: Place) -> bool {
    match (place, next) {
        (Place::Data { layer: a, host }, Place::Data { layer: b, host: c }) => {
            a == b && host + len_bytes == c
        }
        (place, next) => place == next,
    }
}

#[derive(Debug)]
struct CachedRegion {
    region: Arc<Region>,
    used: bool,
}

#[derive(Debug, Default)]
struct Shard {
    regions: HashMap<u64, CachedRegion>,
    clock: VecDeque<u64>,
    bytes: usize,
    wanted: Vec<u64>,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct ChainIndex {
    shard_budget_bytes: usize,
    share: Arc<CacheShare>,
    shards: [Mutex<Shard>; SHARDS],
}

impl ChainIndex {
    pub(crate) fn new(budget_bytes: usize, share: &Arc<CacheShare>) -> Self {
        ChainIndex {
            shard_budget_bytes: budget_bytes / SHARDS,
            share: share.clone(),
            shards: Default::default(),
        }
    }

    fn shard(&self, number: u64) -> MutexGuard<'_, Shard> {
        self.shards[number as usize % SHARDS].lock()
    }

    /// The region with this number, if it is in memory.
    pub(crate) fn get(&self, number: u64) -> Option<Arc<Region>> {
        let mut shard = self.shard(number);
        let kept = shard.regions.get_mut(&number)?;
        kept.used = true;
        Some(kept.region.clone())
    }

    /// Whether a region that is not in memory is worth resolving as a whole.
    pub(crate) fn admits(&self, number: u64) -> bool {
        let mut shard = self.shard(number);
        if shard.bytes < self.shard_budget_bytes / 4 * 3 {
            return true;
        }
        if self.shard_budget_bytes == 0 {
            return false;
        }
        shard.wanted.resize(WANTED, u64::MAX);
        let place = (number / SHARDS as u64) as usize % WANTED;
        std::mem::replace(&mut shard.wanted[place], number) == number
    }

    /// Keeps a region, and drops others for it; one that is larger than the budget is
    /// not kept.
    pub(crate) fn insert(&self, number: u64, region: Arc<Region>) {
        let size_bytes = region.size_bytes();
        if size_bytes > self.shard_budget_bytes {
            return;
        }
        self.share.make_room(size_bytes);
        let mut shard = self.shard(number);
        if shard.regions.contains_key(&number) {
            return;
        }
        let before = shard.bytes;
        while shard.bytes + size_bytes > self.shard_budget_bytes && shard.turn() {}
        shard.bytes += size_bytes;
        shard.clock.push_back(number);
        let used = false;
        shard.regions.insert(number, CachedRegion { region, used });
        self.share.account(before, shard.bytes);
    }

    /// Drops the regions that were not used since the last call.
    pub(crate) fn drop_unused(&self) {
        for number in 0..SHARDS as u64 {
            let mut shard = self.shard(number);
            let before = shard.bytes;
            for _ in 0..shard.clock.len() {
                shard.turn();
            }
            self.share.account(before, shard.bytes);
        }
    }

    /// Drops regions until so many bytes are free.
    pub(crate) fn evict(&self, wanted_bytes: usize) {
        let mut freed_bytes = 0;
        for number in 0..SHARDS as u64 {
            let mut shard = self.shard(number);
            let before = shard.bytes;
            while freed_bytes + before - shard.bytes < wanted_bytes && shard.turn() {}
            freed_bytes += before - shard.bytes;
            self.share.account(before, shard.bytes);
        }
    }

    /// Bytes that the regions take.
    pub(crate) fn used_bytes(&self) -> usize {
        (0..SHARDS as u64).map(|n| self.shard(n).bytes).sum()
    }
}

impl Drop for ChainIndex {
    fn drop(&mut self) {
        self.share.account(self.used_bytes(), 0);
    }
}

impl Shard {
    /// Looks at one region: drops it, or lets it stay for another round. `false` if there
    /// are none.
    fn turn(&mut self) -> bool {
        let Some(number) = self.clock.pop_front() else {
            return false;
        };
        let Some(kept) = self.regions.get_mut(&number) else {
            return true;
        };
        if std::mem::take(&mut kept.used) {
            self.clock.push_back(number);
        } else if let Some(kept) = self.regions.remove(&number) {
            self.bytes -= kept.region.size_bytes();
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(layer: u16, host: u64) -> Place {
        Place::Data { layer, host }
    }

    fn run(end: u64, place: Place) -> ChainRun {
        ChainRun { end, place }
    }

    #[test]
    fn runs_are_merged_and_found() {
        let region = Region::new(
            1000,
            vec![
                run(1100, data(0, 5000)),
                run(1200, data(0, 5100)),
                run(1300, data(1, 5200)),
                run(1400, Place::Zero),
                run(1500, Place::Zero),
                run(1600, Place::Rest),
            ],
        );
        assert_eq!(region.runs.len(), 4);
        assert_eq!(region.find(1000), Some(run(1200, data(0, 5000))));
        assert_eq!(region.find(1150), Some(run(1200, data(0, 5150))));
        assert_eq!(region.find(1200), Some(run(1300, data(1, 5200))));
        assert_eq!(region.find(1450), Some(run(1500, Place::Zero)));
        assert_eq!(region.find(1599), Some(run(1600, Place::Rest)));
        assert_eq!(region.find(1600), None);
    }

    fn region(runs: usize) -> Arc<Region> {
        let runs = (0..runs as u64).map(|n| run(n + 1, data(n as u16, n << 20)));
        Arc::new(Region::new(0, runs.collect()))
    }

    #[test]
    fn memory_stays_within_the_budget() {
        let index = ChainIndex::new(64 << 10, &Arc::default());
        for number in 0..10_000 {
            index.insert(number, region(number as usize % 100 + 1));
            assert!(index.used_bytes() <= 64 << 10);
        }
        assert!(index.used_bytes() > 32 << 10);
        index.insert(20_000, region(10_000));
        assert!(index.get(20_000).is_none(), "larger than the budget");
    }

    #[test]
    fn what_is_used_stays_and_a_full_index_admits_only_what_comes_again() {
        let index = ChainIndex::new(64 << 10, &Arc::default());
        assert!(index.admits(0));
        for number in 0..2000 {
            index.insert(number, region(10));
            assert!(index.get(0).is_some(), "{number}");
        }
        assert!(index.get(8).is_none());
        assert!(!index.admits(4000));
        assert!(index.admits(4000));
        assert!(!ChainIndex::new(0, &Arc::default()).admits(1));
    }
}
