//! [`Ledger`]: which guest clusters need a host cluster, and whether there is room for them.
//!
//! It follows the guest's requests and is never too low: a cluster counts as allocated from the
//! beginning of the first request that may allocate it, until a request that frees all of it has
//! succeeded, with no other change of the cluster beside it. To these it adds all metadata that
//! there may be. So if they fit all the time that a request runs, ENOSPC is a failure of the
//! engine: committing what was freed, and returning what was reserved, would have made room.
//!
//! Where they do not fit, a write of blocks that were written before, and are durable, still needs no room.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use super::{Place, Sizes, blocks_of, full_bytes};
use crate::audit::usage;
use crate::disk::Disk;
use crate::disk_room::BLOCK_BYTES;
use crate::layout::Layout;
use crate::scenario::{Backing, ImageOptions, Op};

/// The number of the image's file on the disk.
const IMAGE: usize = 0;

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Ledger {
    disk: Arc<Disk>,
    sizes: Sizes,
    size_bytes: u64,
    full_bytes: u64,
    /// Discards, and zeroes that may unmap, free clusters.
    discards_free: bool,
    zeroes_free: bool,
    room: Room,
    /// Guest clusters that may have a host cluster.
    allocated: BTreeSet<u64>,
    /// L2 tables that there may be.
    l2_tables: BTreeSet<u64>,
    /// Clusters that were leaked when the image was opened.
    leaked: u64,
    /// So many host clusters the file has had.
    longest: u64,
    running: Vec<Running>,
    /// Guest blocks of 4 KiB that a write has covered as a whole and nothing has freed since, with
    /// the time at which that write ended.
    written: BTreeMap<u64, u64>,
    /// Counts the beginnings of requests.
    now: u64,
    /// When there was too little room last.
    short_at: Option<u64>,
    /// When the last flush began that has succeeded.
    flush_begun: u64,
    /// The most clusters that were needed at any time.
    peak: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Room {
    Unlimited,
    /// Clusters of a device.
    Clusters(u64),
    /// Blocks of a file system.
    Blocks(u64),
}

#[derive(Debug)]
struct Running {
    begun: u64,
    changes: Range<u64>,
    /// What is free if it succeeds.
    frees: BTreeSet<u64>,
    /// It writes durable blocks only.
    in_place: bool,
    /// No other change of its clusters has run beside it.
    alone: bool,
}

/// A request that the ledger knows of; see [`Ledger::begin`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Entry {
    begun: u64,
}

impl Ledger {
    /// The ledger of an image that is closed; `None` where space is not checked.
    pub(crate) fn of(options: &ImageOptions, disk: &Arc<Disk>) -> Option<Ledger> {
        let sizes = Sizes::of(options);
        let room = match options.place {
            Place::Unchecked => return None,
            Place::Growable => Room::Unlimited,
            Place::Fixed { len_bytes } => Room::Clusters(len_bytes / sizes.cluster_bytes),
            Place::Quota { blocks } => Room::Blocks(blocks),
        };
        let pages = disk.contents(IMAGE);
        let layout = Layout::parse(&pages).ok()?;
        let mapped = layout.l1.iter().flat_map(|(index, entry)| {
            let mapped = layout.mappings(&pages, *index, *entry);
            mapped.into_iter().filter(|one| one.host().is_some())
        });
        let can_free = !options.discard_no_unref;
        let is_new = options.version >= 3;
        let mut ledger = Ledger {
            disk: disk.clone(),
            sizes,
            size_bytes: options.size_bytes,
            full_bytes: full_bytes(options),
            discards_free: can_free && (is_new || options.backing == Backing::None),
            zeroes_free: can_free && is_new,
            room,
            allocated: mapped.map(|one| one.guest).collect(),
            l2_tables: layout.l1.iter().map(|(index, _)| *index).collect(),
            leaked: usage(&pages).map_or(0, |usage| usage.leaked),
            longest: 0,
            running: Vec::new(),
            written: BTreeMap::new(),
            now: 1,
            short_at: None,
            flush_begun: 0,
            peak: 0,
        };
        ledger.note();
        Some(ledger)
    }

    /// All clusters that the image needs now.
    fn needed(&self) -> u64 {
        let counted = match self.room {
            Room::Clusters(clusters) => clusters,
            Room::Unlimited | Room::Blocks(_) => self.longest,
        };
        let (data, tables) = (self.allocated.len() as u64, self.l2_tables.len() as u64);
        self.leaked + self.sizes.needed_clusters(data, tables, counted)
    }

    fn fits(&self) -> bool {
        let cluster_bytes = self.sizes.cluster_bytes;
        let holds_all = |bytes| self.leaked == 0 && bytes >= self.full_bytes;
        match self.room {
            Room::Unlimited => true,
            Room::Clusters(clusters) => {
                holds_all(clusters * cluster_bytes) || self.needed() <= clusters
            }
            // Of smaller clusters some may be free in blocks that are allocated.
            Room::Blocks(blocks) => {
                let in_blocks = cluster_bytes >= BLOCK_BYTES;
                in_blocks && holds_all(blocks * BLOCK_BYTES)
                    || blocks_of(self.needed(), cluster_bytes) <= blocks
            }
        }
    }

    /// Notes how it stands: to be called before and after every change.
    fn note(&mut self) {
        let len_bytes = self.disk.len_bytes(IMAGE);
        let clusters = len_bytes.div_ceil(self.sizes.cluster_bytes);
        self.longest = self.longest.max(clusters);
        self.peak = self.peak.max(self.needed());
        if !self.fits() {
            self.short_at = Some(self.now);
        }
    }

    /// Begins a request.
    pub(crate) fn begin(&mut self, op: Op) -> Entry {
        self.note();
        self.now += 1;
        let begun = self.now;
        if let Some((touched, whole)) = self.clusters_of(op) {
            let tables = touched.clone().map(|guest| guest / self.sizes.l2_entries);
            self.l2_tables.extend(tables);
            let frees = match op {
                Op::Discard { .. } if self.discards_free => whole,
                Op::WriteZeroes { unmap: true, .. } if self.zeroes_free => whole,
                _ => touched.start..touched.start,
            };
            let mut frees: BTreeSet<u64> = frees.collect();
            if !matches!(op, Op::Discard { .. }) {
                let kept = touched.clone().filter(|guest| !frees.contains(guest));
                self.allocated.extend(kept);
            }
            let mut alone = true;
            for other in &mut self.running {
                let is_beside =
                    other.changes.start < touched.end && touched.start < other.changes.end;
                alone &= !is_beside;
                other.alone &= !is_beside;
                other.frees.retain(|guest| !touched.contains(guest));
                frees.retain(|guest| !other.changes.contains(guest));
            }
            self.running.push(Running {
                begun,
                changes: touched,
                frees,
                in_place: self.is_in_place(op),
                alone,
            });
            if !matches!(op, Op::Write { .. }) {
                let (offset, len) = op.range();
                let blocks = touched_blocks(offset, len);
                self.written.retain(|block, _| !blocks.contains(block));
            }
        }
        self.note();
        Entry { begun }
    }

    /// Ends a request; whether ENOSPC is right if that is what it got.
    pub(crate) fn end(&mut self, op: Op, entry: Entry, succeeded: bool) -> bool {
        self.note();
        let since = match op {
            // It is also for what found no room before it began.
            Op::Flush => self.flush_begun,
            _ => entry.begun,
        };
        let was_short = self.short_at >= Some(since);
        let is_it = |one: &Running| one.begun == entry.begun;
        let Some(at) = self.running.iter().position(is_it) else {
            return was_short;
        };
        let ended = self.running.swap_remove(at);
        if succeeded {
            self.allocated.retain(|guest| !ended.frees.contains(guest));
            self.note_written(op, &ended);
        }
        self.note();
        was_short && !(ended.in_place && ended.alone)
    }

    /// Notes which blocks a write has covered, with nothing beside it.
    fn note_written(&mut self, op: Op, ended: &Running) {
        let (Op::Write { offset, len, .. }, true) = (op, ended.alone) else {
            return;
        };
        let first = offset.div_ceil(BLOCK_BYTES);
        let covered = first..((offset + len) / BLOCK_BYTES).max(first);
        self.written.extend(covered.map(|block| (block, self.now)));
    }

    /// Whether a request writes only blocks that are durable.
    fn is_in_place(&self, op: Op) -> bool {
        let Op::Write { offset, len, .. } = op else {
            return false;
        };
        touched_blocks(offset, len).all(|block| {
            let written = self.written.get(&block);
            written.is_some_and(|ended| *ended < self.flush_begun)
        })
    }

    /// Notes that a flush has succeeded.
    pub(crate) fn end_flush(&mut self, entry: Entry) {
        self.flush_begun = self.flush_begun.max(entry.begun);
    }

    /// Changes the quota, which there must be.
    pub(crate) fn set_quota(&mut self, blocks: u64) {
        self.note();
        self.room = Room::Blocks(blocks);
        self.note();
    }

    /// The quota now.
    pub(crate) fn quota(&self) -> Option<u64> {
        match self.room {
            Room::Blocks(blocks) => Some(blocks),
            Room::Unlimited | Room::Clusters(_) => None,
        }
    }

    /// Whether there was too little room for what is not durable at some time.
    pub(crate) fn was_short_since_flush(&mut self) -> bool {
        self.note();
        self.short_at >= Some(self.flush_begun)
    }

    /// The most bytes that were needed at any time.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak * self.sizes.cluster_bytes
    }

    /// How it stands, for a message.
    pub(crate) fn describe(&self) -> String {
        format!(
            "{} clusters of data and {} L2 tables, {} clusters in all with {} leaked ones, fit into {:?}",
            self.allocated.len(),
            self.l2_tables.len(),
            self.needed(),
            self.leaked,
            self.room
        )
    }

    /// The guest clusters that a change touches, and those that it covers as a whole.
    fn clusters_of(&self, op: Op) -> Option<(Range<u64>, Range<u64>)> {
        if matches!(op, Op::Read { .. } | Op::Flush) {
            return None;
        }
        let (offset, len) = op.range();
        let (cluster, end) = (self.sizes.cluster_bytes, offset + len);
        let touched = offset / cluster..end.div_ceil(cluster);
        let first = offset.div_ceil(cluster);
        let last = match end >= self.size_bytes {
            true => end.div_ceil(cluster),
            false => end / cluster,
        };
        Some((touched, first..last.max(first)))
    }
}

/// The blocks of 4 KiB that a range touches.
fn touched_blocks(offset: u64, len: u64) -> Range<u64> {
    offset / BLOCK_BYTES..(offset + len).div_ceil(BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Mode;
    use crate::machine::Machine;
    use crate::prepare::prepare;
    use crate::scenario::Scenario;
    use crate::storage::SimFileOptions;

    const CLUSTER: u64 = 4096;

    /// The ledger of a new image of 16 clusters.
    fn ledger(place: Place) -> Ledger {
        let image = ImageOptions {
            place,
            traits: SimFileOptions {
                growable: !matches!(place, Place::Fixed { .. }),
                ..SimFileOptions::default()
            },
            ..ImageOptions::plain(16 * CLUSTER, 12)
        };
        let scenario = Scenario {
            image: image.clone(),
            setup: Vec::new(),
            preparations: Vec::new(),
            cycles: Vec::new(),
        };
        let machine: Machine = prepare(&crate::engine(), &scenario).expect("a new image");
        let plugged = machine.plug(&image, Mode::Instant);
        Ledger::of(&image, &plugged.disk).expect("space is checked")
    }

    fn write(cluster: u64, count: u64) -> Op {
        Op::Write {
            offset: cluster * CLUSTER,
            len: count * CLUSTER,
            fua: false,
        }
    }

    fn discard(cluster: u64, count: u64) -> Op {
        Op::Discard {
            offset: cluster * CLUSTER,
            len: count * CLUSTER,
        }
    }

    /// Header, L1 table, refcount table and block, an L2 table, and `data` clusters.
    fn place(data: u64) -> Place {
        Place::Fixed {
            len_bytes: (5 + data) * CLUSTER,
        }
    }

    #[test]
    fn what_was_freed_is_room_for_what_begins_afterwards() {
        let mut ledger = ledger(place(4));
        let first = ledger.begin(write(0, 4));
        assert!(!ledger.end(write(0, 4), first, true));
        let freed = ledger.begin(discard(0, 2));
        let beside = ledger.begin(write(8, 1));
        assert!(
            ledger.end(write(8, 1), beside, false),
            "nothing is free yet"
        );
        ledger.end(discard(0, 2), freed, true);
        let after = ledger.begin(write(9, 1));
        assert!(!ledger.end(write(9, 1), after, true));
        assert!(ledger.was_short_since_flush());
        ledger.end_flush(after);
        assert!(!ledger.was_short_since_flush());
    }

    #[test]
    fn a_discard_beside_a_write_of_its_cluster_frees_nothing() {
        let mut ledger = ledger(place(4));
        let first = ledger.begin(write(0, 4));
        ledger.end(write(0, 4), first, true);
        let freed = ledger.begin(discard(0, 2));
        let again = ledger.begin(write(0, 1));
        ledger.end(write(0, 1), again, true);
        ledger.end(discard(0, 2), freed, true);
        let one = ledger.begin(write(8, 1));
        assert!(!ledger.end(write(8, 1), one, true));
        let two = ledger.begin(write(9, 1));
        assert!(ledger.end(write(9, 1), two, false));
    }

    #[test]
    fn a_place_of_full_size_is_never_short() {
        let image = ImageOptions::plain(16 * CLUSTER, 12);
        let mut ledger = ledger(Place::Fixed {
            len_bytes: full_bytes(&image),
        });
        let all = ledger.begin(write(0, 16));
        assert!(!ledger.end(write(0, 16), all, false));
    }

    #[test]
    fn durable_blocks_are_written_in_place_whatever_the_quota() {
        let mut ledger = ledger(Place::Quota { blocks: 100 });
        let first = ledger.begin(write(0, 4));
        ledger.set_quota(8);
        assert!(ledger.end(write(0, 4), first, true));
        let again = ledger.begin(write(1, 2));
        assert!(ledger.end(write(1, 2), again, true), "not durable");
        let flush = ledger.begin(Op::Flush);
        ledger.end_flush(flush);
        let in_place = ledger.begin(write(1, 2));
        assert!(!ledger.end(write(1, 2), in_place, true));
        let freed = ledger.begin(discard(2, 1));
        ledger.end(discard(2, 1), freed, false);
        let again = ledger.begin(write(1, 2));
        assert!(ledger.end(write(1, 2), again, true));
        ledger.set_quota(100);
        let late = ledger.begin(write(1, 2));
        assert!(!ledger.end(write(1, 2), late, true));
    }
}
