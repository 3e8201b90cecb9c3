//! Overlap checks: no write may hit metadata that it is not meant for.
//!
//! Where metadata lies is kept in a sparse bitmap of host clusters, one bit for each
//! kind of table, so that a check costs one look into a small map whatever the range
//! and however many tables there are. Guest data goes to the file through [`GuardedData`],
//! which checks every request; tables are checked as they are written, each against
//! everything but its own kind.
//!
//! Invariants:
//! - A bit is set before anything in memory leads to the table, and cleared only when
//!   the refcount of its cluster falls to zero.
//! - The allocator asks for every kind, whatever the options say: it never hands out
//!   metadata that is counted as free.

mod survey;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use vellum_format::features::Autoclear;
use vellum_format::geometry::Geometry;
use vellum_format::header::Header;
use vellum_format::types::HostOffset;
use vellum_io::shared_memory::{SharedBuffer, total_len};
use vellum_io::{Buffers, Io, Result};
use vellum_storage::{Storage, WriteFlags, ZeroFlags, delegate};

use super::errors::corrupt;
use crate::qcow2::table_cache::cache::WriteBack;

/// The longest LUKS header that is made: 4 KiB, and eight key slots of 4000 stripes of 64 bytes,
/// each of whole 4 KiB. What an image claims beyond that is not believed: each cluster of it
/// would cost memory, and none could be used for data.
const MOST_LUKS_HEADER_BYTES: u64 = 0x1f_9000;

/// A kind of metadata, in the order in which QEMU looks for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Metadata {
    /// The header's cluster, and the header of the encryption, which QEMU does not check.
    MainHeader,
    /// The L1 table of the disk.
    ActiveL1,
    /// The refcount table.
    RefcountTable,
    /// The snapshot table.
    SnapshotTable,
    /// The L1 tables of snapshots.
    InactiveL1,
    /// The directory of persistent bitmaps.
    BitmapDirectory,
    /// L2 tables that the disk uses.
    ActiveL2,
    /// Refcount blocks.
    RefcountBlock,
    /// L2 tables that snapshots use.
    InactiveL2,
}

impl Metadata {
    /// All kinds, in order.
    pub const ALL: [Metadata; 9] = [
        Metadata::MainHeader,
        Metadata::ActiveL1,
        Metadata::RefcountTable,
        Metadata::SnapshotTable,
        Metadata::InactiveL1,
        Metadata::BitmapDirectory,
        Metadata::ActiveL2,
        Metadata::RefcountBlock,
        Metadata::InactiveL2,
    ];

    /// What follows `overlap-check.` in the option that switches its check.
    pub const fn option(self) -> &'static str {
        match self {
            Metadata::MainHeader => "main-header",
            Metadata::ActiveL1 => "active-l1",
            Metadata::ActiveL2 => "active-l2",
            Metadata::RefcountTable => "refcount-table",
            Metadata::RefcountBlock => "refcount-block",
            Metadata::SnapshotTable => "snapshot-table",
            Metadata::InactiveL1 => "inactive-l1",
            Metadata::InactiveL2 => "inactive-l2",
            Metadata::BitmapDirectory => "bitmap-directory",
        }
    }

    /// Its name in messages.
    const fn name(self) -> &'static str {
        match self {
            Metadata::MainHeader => "qcow2_header",
            Metadata::ActiveL1 => "active L1 table",
            Metadata::ActiveL2 => "active L2 table",
            Metadata::RefcountTable => "refcount table",
            Metadata::RefcountBlock => "refcount block",
            Metadata::SnapshotTable => "snapshot table",
            Metadata::InactiveL1 => "inactive L1 table",
            Metadata::InactiveL2 => "inactive L2 table",
            Metadata::BitmapDirectory => "bitmap directory",
        }
    }

    /// The bitmap that it has, of those of [`Group`].
    const fn layer(self) -> usize {
        match self {
            Metadata::ActiveL2 => 1,
            Metadata::RefcountBlock => 2,
            Metadata::InactiveL2 => 3,
            _ => AREAS,
        }
    }
}

/// Which kinds of metadata writes are checked against (`overlap-check`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OverlapChecks(u16);

impl OverlapChecks {
    /// `none`.
    pub const NONE: OverlapChecks = OverlapChecks(0);
    /// `constant`: what never moves, or seldom.
    pub const CONSTANT: OverlapChecks = OverlapChecks::NONE
        .with(Metadata::MainHeader, true)
        .with(Metadata::ActiveL1, true)
        .with(Metadata::RefcountTable, true)
        .with(Metadata::SnapshotTable, true)
        .with(Metadata::BitmapDirectory, true);
    /// `cached`, the default: what QEMU has in memory.
    pub const CACHED: OverlapChecks = OverlapChecks::CONSTANT
        .with(Metadata::ActiveL2, true)
        .with(Metadata::RefcountBlock, true)
        .with(Metadata::InactiveL1, true);
    /// `all`.
    pub const ALL: OverlapChecks = OverlapChecks::CACHED.with(Metadata::InactiveL2, true);

    /// The same with the check for one kind switched on or off.
    #[must_use]
    pub const fn with(self, kind: Metadata, on: bool) -> Self {
        let bit = 1 << kind as u16;
        OverlapChecks(if on { self.0 | bit } else { self.0 & !bit })
    }

    /// Whether writes are checked against this kind.
    pub const fn contains(self, kind: Metadata) -> bool {
        self.0 & 1 << kind as u16 != 0
    }
}

impl Default for OverlapChecks {
    fn default() -> Self {
        OverlapChecks::CACHED
    }
}

/// The layer of everything that there is one of, or a few.
const AREAS: usize = 0;
const LAYERS: usize = 4;
/// Clusters of a group: one bit each.
const GROUP_BITS: u32 = 6;
/// Groups that lie side by side and share a lock.
const REGION_BITS: u32 = 8;
const SHARDS: usize = 16;

/// What 64 clusters that lie side by side hold, a bitmap for each layer.
type Group = [u64; LAYERS];
type Shard = BTreeMap<u64, Group>;

/// Where the metadata of an image lies.
#[derive(Debug)]
pub(crate) struct OverlapMap {
    checks: OverlapChecks,
    cluster_bits: u32,
    /// The groups in which there is any, by number.
    shards: [RwLock<Shard>; SHARDS],
    /// What the layer [`AREAS`] shows, as runs of clusters.
    areas: RwLock<Vec<(Metadata, Range<u64>)>>,
    /// Everything is in the map that is always checked for.
    complete: AtomicBool,
}

impl OverlapMap {
    /// A map of the parts of an image that its header knows, which are there from the
    /// beginning; see `Image::map_metadata` for the others.
    pub(crate) fn new(checks: OverlapChecks, header: &Header) -> Arc<Self> {
        let map = OverlapMap {
            checks,
            cluster_bits: header.geometry().cluster_bits,
            shards: Default::default(),
            areas: RwLock::default(),
            complete: AtomicBool::new(false),
        };
        map.add_header(header);
        let table_bytes = u64::from(header.refcount_table_clusters) << map.cluster_bits;
        let table = map.clusters(header.refcount_table_offset, table_bytes);
        map.add(Metadata::RefcountTable, table);
        Arc::new(map)
    }

    /// Adds what the header of an open image knows.
    pub(crate) fn add_header(&self, header: &Header) {
        self.add(Metadata::MainHeader, 0..1);
        let l1 = self.clusters(header.l1_table_offset, u64::from(header.l1_entries) * 8);
        self.add(Metadata::ActiveL1, l1);
        if let Some(luks) = header.encryption_header() {
            let len_bytes = luks.length_bytes.min(MOST_LUKS_HEADER_BYTES);
            self.add(Metadata::MainHeader, self.clusters(luks.offset, len_bytes));
        }
        self.note_directory(header);
    }

    /// Notes where the bitmap directory lies, if there is one.
    pub(crate) fn note_directory(&self, header: &Header) {
        let directory = match header.bitmaps() {
            Some(bitmaps) if header.autoclear.contains(Autoclear::BITMAPS) => {
                self.clusters(bitmaps.directory_offset, bitmaps.directory_size_bytes)
            }
            _ => 0..0,
        };
        self.move_area(Metadata::BitmapDirectory, directory);
    }

    pub(crate) fn clear(&self) {
        let mut areas = self.areas.write();
        areas.clear();
        drop(areas);
        self.shards.iter().for_each(|shard| write(shard).clear());
    }

    /// The clusters of a range of bytes.
    pub(crate) fn clusters(&self, start: HostOffset, len_bytes: u64) -> Range<u64> {
        let first = start.bytes() >> self.cluster_bits;
        match start.bytes().saturating_add(len_bytes).checked_sub(1) {
            Some(last) if len_bytes > 0 => first..(last >> self.cluster_bits) + 1,
            _ => first..first,
        }
    }

    fn shard(&self, group: u64) -> &RwLock<Shard> {
        &self.shards[(group >> REGION_BITS) as usize % SHARDS]
    }

    fn areas(&self) -> RwLockReadGuard<'_, Vec<(Metadata, Range<u64>)>> {
        self.areas.read()
    }

    /// Notes that clusters hold metadata.
    pub(crate) fn add(&self, kind: Metadata, clusters: Range<u64>) {
        if clusters.is_empty() {
            return;
        }
        if kind.layer() == AREAS {
            let mut areas = self.areas.write();
            areas.push((kind, clusters.clone()));
        }
        for (group, bits) in groups(clusters) {
            write(self.shard(group)).entry(group).or_default()[kind.layer()] |= bits;
        }
    }

    /// Notes that the only structure of its kind lies elsewhere now.
    pub(crate) fn move_area(&self, kind: Metadata, clusters: Range<u64>) {
        let mut areas = self.areas.write();
        areas.retain(|(other, _)| *other != kind);
        drop(areas);
        self.add(kind, clusters);
    }

    /// Notes that nothing lies in a cluster any more.
    pub(crate) fn forget(&self, cluster: u64) {
        for (group, bits) in groups(cluster..cluster + 1) {
            let shard = self.shard(group);
            let is_used = |shard: &Shard| shard.get(&group).is_some_and(|g| any(g) & bits != 0);
            // Nearly always there is nothing to change.
            if !is_used(&read(shard)) {
                continue;
            }
            let mut shard = write(shard);
            if let Some(layers) = shard.get_mut(&group) {
                layers.iter_mut().for_each(|layer| *layer &= !bits);
                if any(layers) == 0 {
                    shard.remove(&group);
                }
            }
        }
    }

    /// The layers that show anything in some clusters.
    fn layers_in(&self, clusters: &Range<u64>) -> [bool; LAYERS] {
        let mut hit = [0; LAYERS];
        let (mut group, last) = (
            clusters.start >> GROUP_BITS,
            (clusters.end - 1) >> GROUP_BITS,
        );
        while group <= last {
            let region_end = ((group >> REGION_BITS) + 1) << REGION_BITS;
            let shard = read(self.shard(group));
            for (&number, layers) in shard.range(group..region_end.min(last + 1)) {
                let bits = bits_in(number, clusters);
                for (hit, layer) in hit.iter_mut().zip(layers) {
                    *hit |= layer & bits;
                }
            }
            group = region_end;
        }
        hit.map(|bits| bits != 0)
    }

    /// The first of `kinds` that lies in some clusters.
    pub(crate) fn find(
        &self,
        clusters: &Range<u64>,
        kinds: impl Fn(Metadata) -> bool,
    ) -> Option<Metadata> {
        if clusters.is_empty() {
            return None;
        }
        let layers = self.layers_in(clusters);
        if !layers.contains(&true) {
            return None;
        }
        let found = |kind: Metadata| {
            layers[kind.layer()] && (kind.layer() != AREAS || self.is_in_area(kind, clusters))
        };
        Metadata::ALL
            .into_iter()
            .find(|&kind| kinds(kind) && found(kind))
    }

    fn is_in_area(&self, kind: Metadata, clusters: &Range<u64>) -> bool {
        self.areas().iter().any(|(other, area)| {
            *other == kind && area.start < clusters.end && clusters.start < area.end
        })
    }

    /// Refuses a write to bytes that hold metadata of a kind that is checked for, and
    /// that is not `own`.
    pub(crate) fn check(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        own: Option<Metadata>,
    ) -> Result<()> {
        let clusters = self.clusters(HostOffset(offset_bytes), len_bytes);
        let kinds = |kind| self.checks.contains(kind) && Some(kind) != own;
        match self.find(&clusters, kinds) {
            None => Ok(()),
            Some(kind) => Err(refusal(kind).at(offset_bytes)),
        }
    }

    /// As [`OverlapMap::check`], for tables of one kind that are going to be written.
    pub(crate) fn check_tables<'a>(
        &self,
        tables: impl IntoIterator<Item = &'a WriteBack>,
        own: Metadata,
    ) -> Result<()> {
        tables
            .into_iter()
            .try_for_each(|table| self.check(table.key, table.bytes.len() as u64, Some(own)))
    }
}

/// The error of a write that would have hit metadata.
pub(crate) fn refusal(kind: Metadata) -> vellum_io::Error {
    let name = kind.name();
    corrupt(
        "write",
        format!("Preventing invalid write on metadata (overlaps with {name})"),
    )
}

/// What QEMU says where the header's cluster would have been allocated for `what`.
pub(crate) fn refused_for(what: &str, error: vellum_io::Error) -> vellum_io::Error {
    match error.message() == refusal(Metadata::MainHeader).message() {
        true => corrupt(
            "allocate",
            format!("Preventing invalid allocation of {what} at offset 0"),
        ),
        false => error,
    }
}

fn read(shard: &RwLock<Shard>) -> RwLockReadGuard<'_, Shard> {
    shard.read()
}

fn write(shard: &RwLock<Shard>) -> RwLockWriteGuard<'_, Shard> {
    shard.write()
}

fn any(layers: &Group) -> u64 {
    layers.iter().fold(0, |bits, layer| bits | layer)
}

/// The bits of those clusters that lie in a group.
fn bits_in(group: u64, clusters: &Range<u64>) -> u64 {
    let first = group << GROUP_BITS;
    let start = clusters.start.saturating_sub(first).min(64);
    let end = clusters.end.saturating_sub(first).min(64);
    let below = |count: u64| {
        1u64.checked_shl(count as u32)
            .map_or(u64::MAX, |bit| bit - 1)
    };
    below(end) & !below(start)
}

/// The groups of some clusters, each with their bits.
fn groups(clusters: Range<u64>) -> impl Iterator<Item = (u64, u64)> {
    let last = clusters.end.saturating_sub(1) >> GROUP_BITS;
    (clusters.start >> GROUP_BITS..=last).map(move |group| (group, bits_in(group, &clusters)))
}

/// The image file as guest data sees it: every write is checked.
#[derive(Debug)]
pub(crate) struct GuardedData {
    file: Arc<dyn Storage>,
    map: Arc<OverlapMap>,
}

impl GuardedData {
    /// What guest data is written through. An external data file holds no metadata.
    pub(crate) fn around(
        data: Arc<dyn Storage>,
        geometry: &Geometry,
        map: &Arc<OverlapMap>,
    ) -> Arc<dyn Storage> {
        match geometry.external_data {
            true => data,
            false => Arc::new(GuardedData {
                file: data,
                map: map.clone(),
            }),
        }
    }

    /// Starts a request that changes a range, if it may.
    fn guard<T>(&self, offset_bytes: u64, len_bytes: u64, start: impl FnOnce() -> Io<T>) -> Io<T>
    where
        T: Send + 'static,
    {
        match self.map.check(offset_bytes, len_bytes, None) {
            Ok(()) => start(),
            Err(error) => Io::ready(Err(error)),
        }
    }
}

impl Storage for GuardedData {
    delegate!(
        file: capabilities, name, len_bytes, modified_at, read, read_into, allocate, flush, truncate, block_status,
        allocated_bytes, free_bytes, disk, may_clone_from, close, event_listener, transparent_storage,
    );

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let len_bytes = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        self.guard(offset_bytes, len_bytes, || {
            self.file.write(offset_bytes, buffers, flags)
        })
    }

    fn write_from(
        &self,
        offset_bytes: u64,
        from: &[SharedBuffer],
        flags: WriteFlags,
    ) -> Option<Io<()>> {
        let len_bytes = total_len(from) as u64;
        // What is refused is refused by the write of a copy.
        self.map.check(offset_bytes, len_bytes, None).ok()?;
        self.file.write_from(offset_bytes, from, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        self.guard(offset_bytes, len_bytes, || {
            self.file.write_zeroes(offset_bytes, len_bytes, flags)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        self.guard(offset_bytes, len_bytes, || {
            self.file.discard(offset_bytes, len_bytes)
        })
    }

    fn copy_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.guard(to_bytes, len_bytes, || {
            self.file
                .copy_range(source, from_bytes, to_bytes, len_bytes)
        })
    }

    fn clone_range(
        &self,
        source: &dyn Storage,
        from_bytes: u64,
        to_bytes: u64,
        len_bytes: u64,
    ) -> Io<()> {
        self.guard(to_bytes, len_bytes, || {
            self.file
                .clone_range(source, from_bytes, to_bytes, len_bytes)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(checks: OverlapChecks) -> OverlapMap {
        OverlapMap {
            checks,
            cluster_bits: 16,
            shards: Default::default(),
            areas: RwLock::default(),
            complete: AtomicBool::new(true),
        }
    }

    fn every(_: Metadata) -> bool {
        true
    }

    #[test]
    fn the_templates_hold_what_qemus_do() {
        let count = |checks: OverlapChecks| {
            let kinds = Metadata::ALL.into_iter();
            kinds.filter(|&kind| checks.contains(kind)).count()
        };
        let templates = [
            OverlapChecks::NONE,
            OverlapChecks::CONSTANT,
            OverlapChecks::CACHED,
            OverlapChecks::ALL,
        ];
        assert_eq!(templates.map(count), [0, 5, 8, 9]);
        assert!(!OverlapChecks::CACHED.contains(Metadata::InactiveL2));
    }

    #[test]
    fn a_range_is_refused_if_any_of_its_clusters_holds_metadata() {
        let map = map(OverlapChecks::CACHED);
        // The last cluster of one region, and one far away.
        let (near, far) = ((1 << (GROUP_BITS + REGION_BITS)) - 1, 1 << 30);
        map.add(Metadata::ActiveL2, near..near + 1);
        map.add(Metadata::RefcountBlock, far..far + 1);
        assert_eq!(map.find(&(0..near), every), None);
        assert_eq!(map.find(&(0..near + 1), every), Some(Metadata::ActiveL2));
        assert_eq!(map.find(&(near + 1..far), every), None);
        assert_eq!(
            map.find(&(near + 1..far + 1), every),
            Some(Metadata::RefcountBlock)
        );
        map.forget(near);
        assert_eq!(map.find(&(0..far), every), None);
    }

    #[test]
    fn kinds_are_told_apart_and_may_be_switched_off() {
        let map = map(OverlapChecks::CACHED.with(Metadata::ActiveL1, false));
        map.add(Metadata::ActiveL1, 3..5);
        map.add(Metadata::SnapshotTable, 4..6);
        map.add(Metadata::ActiveL2, 9..10);
        let why = |at: u64, own| {
            map.check(at << 16, 1, own)
                .err()
                .map(|e| e.message().to_owned())
        };
        assert_eq!(why(3, None), None);
        assert!(why(4, None).unwrap().contains("snapshot table"));
        assert!(why(9, None).unwrap().contains("active L2 table"));
        assert_eq!(why(9, Some(Metadata::ActiveL2)), None);
        assert_eq!(why(6, None), None);
        assert_eq!(map.find(&(3..4), every), Some(Metadata::ActiveL1));
    }

    #[test]
    fn a_table_that_moves_leaves_its_old_place() {
        let map = map(OverlapChecks::ALL);
        map.add(Metadata::ActiveL1, 3..4);
        map.add(Metadata::RefcountTable, 3..4);
        map.move_area(Metadata::ActiveL1, 70..200);
        assert_eq!(map.find(&(3..4), every), Some(Metadata::RefcountTable));
        assert_eq!(map.find(&(150..151), every), Some(Metadata::ActiveL1));
        assert_eq!(map.find(&(200..400), every), None);
    }

    #[test]
    fn bits_of_a_range_end_where_it_ends() {
        assert_eq!(bits_in(0, &(0..64)), u64::MAX);
        assert_eq!(bits_in(1, &(65..66)), 2);
        assert_eq!(bits_in(2, &(0..1000)), u64::MAX);
        assert_eq!(bits_in(1, &(0..65)), 1);
        assert_eq!(groups(63..65).collect::<Vec<_>>(), [(0, 1 << 63), (1, 1)]);
    }
}
