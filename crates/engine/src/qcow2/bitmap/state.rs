//! What an open image knows of its enabled bitmaps.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, MutexGuard};
use vellum_format::bitmap::BitmapCluster;
use vellum_format::geometry::Geometry;
use vellum_format::types::HostOffset;
use vellum_io::{Error, ErrorKind, Result};

use super::dirty::Dirty;
use crate::qcow2::commit::coalesce::Coalescer;

/// The smallest region whose bits are set on disk at once, unless an option says so.
pub(crate) const DEFAULT_STEP_BYTES: u64 = 1 << 20;
/// After so many steps the next ones are twice as long.
const STEPS_OF_A_LENGTH: u32 = 32;
/// A step is at most this part of the device, and at most so long.
const STEPS_OF_A_DEVICE: u64 = 64;
const MAX_STEP_BYTES: u64 = 1 << 30;
/// Regions of a device that are told apart.
const MAX_REGIONS: u64 = 1 << 20;

/// An enabled bitmap.
#[derive(Debug, Clone)]
pub(super) struct Tracked {
    pub(super) name: Vec<u8>,
    /// Its bits, exact.
    pub(super) dirty: Dirty,
    /// What it called dirty before the last backup: so it does on disk until the close.
    before_backup: Option<Dirty>,
}

impl Tracked {
    pub(super) fn new(name: Vec<u8>, dirty: Dirty) -> Self {
        Tracked {
            name,
            dirty,
            before_backup: None,
        }
    }

    /// Has it call dirty what has changed since a backup began, in memory.
    pub(super) fn end_backup(&mut self, changed: Dirty) {
        self.before_backup = Some(std::mem::replace(&mut self.dirty, changed));
    }

    /// Whether the disk holds more than the exact bits wherever it was written.
    pub(super) fn is_coarse(&self) -> bool {
        self.before_backup.is_some()
    }

    /// What the disk holds at least.
    pub(super) fn on_disk(&self) -> Dirty {
        let mut bits = self.dirty.clone();
        if let Some(before) = &self.before_backup {
            bits.merge(before);
        }
        bits
    }

    /// Sets the bits in a range of bytes of the bitmap that the disk holds at least.
    pub(super) fn copy_on_disk(&self, first_byte: u64, out: &mut [u8]) {
        self.dirty.bits().copy_to(first_byte, out);
        if let Some(before) = &self.before_backup {
            let mut more = vec![0; out.len()];
            before.bits().copy_to(first_byte, &mut more);
            out.iter_mut()
                .zip(more)
                .for_each(|(out, more)| *out |= more);
        }
    }

    /// Changes the device's size; what comes into being is clean.
    pub(super) fn set_size(&mut self, size_bytes: u64) {
        let all = [Some(&mut self.dirty), self.before_backup.as_mut()];
        all.into_iter()
            .flatten()
            .for_each(|bits| bits.set_size(size_bytes));
    }
}

/// Where a bitmap's bits lie on disk.
#[derive(Debug, Clone)]
pub(super) struct Table {
    pub(super) offset: HostOffset,
    pub(super) entries: u32,
    pub(super) clusters: Vec<BitmapCluster>,
    /// Numbers of clusters that hold more than the exact bits.
    pub(super) coarse: BTreeSet<usize>,
}

impl Table {
    /// The host clusters of table and bits: (first, count).
    pub(super) fn host_clusters(&self, geometry: &Geometry) -> Vec<(u64, u64)> {
        let table = (
            self.offset.cluster(geometry).index(),
            geometry.clusters_for(u64::from(self.entries) * 8),
        );
        let bits = self.clusters.iter().filter_map(|cluster| match cluster {
            BitmapCluster::Stored(host) => Some((host.cluster(geometry).index(), 1)),
            _ => None,
        });
        std::iter::once(table).chain(bits).collect()
    }

    /// Leaves it so many entries, if it has more; the host clusters that it has no use for then: (first,
    /// count).
    pub(super) fn shorten(&mut self, entries: u64, geometry: &Geometry) -> Vec<(u64, u64)> {
        if entries >= u64::from(self.entries) {
            return Vec::new();
        }
        let clusters = |entries: u64| geometry.clusters_for(entries * 8);
        let kept = clusters(entries);
        let place = self.offset.cluster(geometry).index() + kept;
        let rest = (place, clusters(u64::from(self.entries)) - kept);
        let bits = self.clusters.split_off(entries as usize);
        self.entries = entries as u32;
        self.coarse.retain(|&number| (number as u64) < entries);
        let bits = bits.into_iter().filter_map(|cluster| match cluster {
            BitmapCluster::Stored(host) => Some((host.cluster(geometry).index(), 1)),
            _ => None,
        });
        bits.chain((rest.1 > 0).then_some(rest)).collect()
    }
}

/// How long the regions are that are covered at once.
#[derive(Debug)]
struct Step {
    bytes: u64,
    taken: u32,
    max_bytes: u64,
}

impl Step {
    fn new(size_bytes: u64, unit_bytes: u64) -> Self {
        let part = (size_bytes / STEPS_OF_A_DEVICE).next_power_of_two();
        Step {
            bytes: unit_bytes,
            taken: 0,
            max_bytes: part.min(MAX_STEP_BYTES).max(unit_bytes),
        }
    }

    fn take(&mut self) -> u64 {
        if self.taken == STEPS_OF_A_LENGTH && self.bytes < self.max_bytes {
            self.bytes *= 2;
            self.taken = 0;
        }
        self.taken += 1;
        self.bytes
    }
}

/// See [`BitmapState`]; behind its lock.
#[derive(Debug)]
pub(super) struct Live {
    pub(super) bitmaps: Vec<Tracked>,
    /// What all enabled bitmaps call dirty on disk, beyond their exact bits.
    pub(super) covered: Dirty,
    /// Ranges that somebody waits for.
    wanted: Vec<Range<u64>>,
    step: Step,
    closed: bool,
}

impl Live {
    fn new() -> Self {
        Live {
            bitmaps: Vec::new(),
            covered: Dirty::new(0, 0),
            wanted: Vec::new(),
            step: Step::new(0, 1),
            closed: false,
        }
    }

    pub(super) fn find(&mut self, name: &[u8]) -> Option<&mut Tracked> {
        self.bitmaps.iter_mut().find(|bitmap| bitmap.name == name)
    }

    /// Takes what is waited for, as regions to be covered. A device shorter than them
    /// ends the last.
    pub(super) fn take_wanted(&mut self) -> Vec<Range<u64>> {
        let size_bytes = self.covered.size_bytes();
        let wanted = std::mem::take(&mut self.wanted);
        let mut regions: Vec<Range<u64>> = Vec::new();
        for range in wanted {
            let inside =
                |region: &Range<u64>| region.start <= range.start && range.end <= region.end;
            if regions.iter().any(inside) || self.covered.is_marked(&range) {
                continue;
            }
            let step = self.step.take();
            let end = range.end.div_ceil(step).saturating_mul(step);
            regions.push(range.start / step * step..end.min(size_bytes));
        }
        regions
    }
}

/// The enabled bitmaps of an open image.
pub(crate) struct BitmapState {
    step_bytes: u64,
    /// Some bitmap is enabled.
    tracking: AtomicBool,
    live: Mutex<Live>,
    /// Those who wait for ranges to be covered.
    pub(super) covers: Coalescer,
    /// Where the bits of the bitmaps in `live` lie, in the same order.
    pub(super) layout: async_lock::Mutex<Vec<Table>>,
}

impl std::fmt::Debug for BitmapState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BitmapState({} enabled)", self.live().bitmaps.len())
    }
}

impl BitmapState {
    pub(crate) fn new(step_bytes: Option<u64>) -> Self {
        let step_bytes = step_bytes.unwrap_or(DEFAULT_STEP_BYTES);
        BitmapState {
            step_bytes: step_bytes.max(512).next_power_of_two(),
            tracking: AtomicBool::new(false),
            live: Mutex::new(Live::new()),
            covers: Coalescer::default(),
            layout: async_lock::Mutex::default(),
        }
    }

    pub(super) fn live(&self) -> MutexGuard<'_, Live> {
        self.live.lock()
    }

    /// Whether any bitmap records writes.
    #[inline]
    pub(crate) fn is_tracking(&self) -> bool {
        self.tracking.load(Ordering::Acquire)
    }

    /// Forgets what is covered, so that every change waits for the layout's owner from
    /// now on; says what the bitmaps hold, which cannot change while he is at work.
    pub(super) fn uncover(&self, size_bytes: u64) -> MutexGuard<'_, Live> {
        let mut live = self.live();
        let unit = self
            .step_bytes
            .max((size_bytes / MAX_REGIONS).next_power_of_two());
        live.covered = Dirty::new(unit.trailing_zeros() as u8, size_bytes);
        live.step = Step::new(size_bytes, unit);
        self.tracking
            .store(!live.bitmaps.is_empty(), Ordering::Release);
        live
    }

    /// Marks a range dirty in all bitmaps. `false`: it must be covered first, and is
    /// noted as wanted.
    ///
    /// # Errors
    /// If the bitmaps have been written for good.
    pub(super) fn mark(&self, range: &Range<u64>) -> Result<bool> {
        let mut live = self.live();
        if live.closed {
            let message = "the image is closed";
            return Err(Error::new(ErrorKind::InvalidArgument, "write", message));
        }
        // What lies beyond the end comes into being with the end, and dirty.
        let size_bytes = live.covered.size_bytes();
        let range = range.start.min(size_bytes)..range.end.min(size_bytes);
        let known = live.covered.is_marked(&range)
            || live
                .bitmaps
                .iter()
                .all(|bitmap| bitmap.dirty.is_marked(&range));
        if known {
            for bitmap in &mut live.bitmaps {
                bitmap.dirty.mark(&range);
            }
        } else {
            live.wanted.push(range);
        }
        Ok(known)
    }

    /// Nothing is marked any more.
    pub(super) fn close(&self) {
        self.live().closed = true;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_grow_with_their_number() {
        let mut step = Step::new(1 << 40, 1 << 20);
        let lengths: Vec<u64> = (0..STEPS_OF_A_LENGTH * 40).map(|_| step.take()).collect();
        assert_eq!(lengths[31], 1 << 20);
        assert_eq!(lengths[32], 2 << 20);
        assert_eq!(lengths.last(), Some(&MAX_STEP_BYTES));
        let mut small = Step::new(4096, 512);
        assert!((0..1000).all(|_| small.take() == 512));
    }

    #[test]
    fn a_range_is_known_once_it_is_covered_or_dirty() {
        let state = BitmapState::new(Some(4096));
        let tracked = |name: &[u8]| Tracked::new(name.to_vec(), Dirty::new(9, 1 << 20));
        state.live().bitmaps.extend([tracked(b"a"), tracked(b"b")]);
        drop(state.uncover(1 << 20));
        assert!(state.is_tracking());
        assert!(!state.mark(&(100..200)).unwrap());
        let regions = state.live().take_wanted();
        assert_eq!(regions, [0..4096]);
        state.live().covered.mark(&regions[0]);
        assert!(state.mark(&(100..200)).unwrap());
        assert!(!state.mark(&(100..5000)).unwrap());
        drop(state.uncover(1 << 20));
        assert!(state.mark(&(0..512)).unwrap(), "dirty in all of them");
        state.live().find(b"b").unwrap().dirty = Dirty::new(9, 1 << 20);
        assert!(!state.mark(&(0..512)).unwrap());
        state.close();
        assert!(state.mark(&(0..512)).is_err());
    }
}
