//! What an L2 table refers to, and how many more or fewer references clusters get.

use std::ops::Range;

use vellum_format::geometry::Geometry;
use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::{limits, refcount};
use vellum_io::bits::Bits;
use vellum_io::{Error, ErrorKind, Result};

use crate::qcow2::integrity::errors::{bad_format, corrupt};
use crate::qcow2::mapping::runs::{EntryRun, first_run};

const EINVAL: i32 = 22;

/// Calls `visit` with every run of host clusters that the L2 table refers to, once
/// for each reference.
fn for_each_reference(
    table: &[u8],
    geometry: &Geometry,
    mut visit: impl FnMut(Range<u64>),
) -> Result<()> {
    let mut run = 0..0;
    let mut index = 0;
    while index < geometry.l2_entries() as usize {
        let (entries, clusters) = first_reference(table, index, geometry)?;
        index += entries;
        let Some(clusters) = clusters else {
            continue;
        };
        if clusters.start == run.end {
            run.end = clusters.end;
            continue;
        }
        if !run.is_empty() {
            visit(run);
        }
        run = clusters;
    }
    if !run.is_empty() {
        visit(run);
    }
    Ok(())
}

/// What the entries from `index` on refer to, as far as they can be told at once, and
/// how many these are.
fn first_reference(
    table: &[u8],
    index: usize,
    geometry: &Geometry,
) -> Result<(usize, Option<Range<u64>>)> {
    let run = match geometry.extended_l2 {
        false => first_run(&table[index * 8..], geometry, limits::HOST_OFFSET_END),
        true => EntryRun::NONE,
    };
    if run.entries == 0 {
        return referred(table, index, geometry).map(|clusters| (1, clusters));
    }
    let first = run.offset_bytes >> geometry.cluster_bits;
    let clusters = first..first + run.entries as u64;
    Ok((run.entries, (run.offset_bytes > 0).then_some(clusters)))
}

fn referred(table: &[u8], index: usize, geometry: &Geometry) -> Result<Option<Range<u64>>> {
    let entry = L2Entry::read(table, index, geometry).unwrap_or_default();
    if entry == L2Entry::UNALLOCATED {
        return Ok(None);
    }
    let mapping = entry
        .decode(geometry)
        .map_err(|e| bad_format("snapshot", &e))?;
    let cluster_bytes = geometry.cluster_size_bytes();
    Ok(match mapping {
        Mapping::Compressed(descriptor) => {
            let end = descriptor.end().bytes().div_ceil(cluster_bytes);
            Some(descriptor.host_offset.bytes() / cluster_bytes..end)
        }
        mapping => mapping.host().map(|host| {
            let cluster = host.bytes() / cluster_bytes;
            cluster..cluster + 1
        }),
    })
}

/// Gives every entry of an L2 table the COPIED flag that `copied` says of its host
/// cluster (`None`: the flag that it has); whether that changed any.
pub(super) fn set_flags(
    table: &mut [u8],
    geometry: &Geometry,
    mut copied: impl FnMut(u64) -> Option<bool>,
) -> bool {
    let mut changed = false;
    for index in 0..geometry.l2_entries() as usize {
        let entry = L2Entry::read(table, index, geometry).unwrap_or_default();
        let offset = entry.raw_offset();
        if entry.is_compressed() || offset == 0 {
            continue;
        }
        let wanted = copied(offset >> geometry.cluster_bits).unwrap_or(entry.copied());
        if wanted != entry.copied() {
            let written = entry.with_copied(wanted).write(table, index, geometry);
            debug_assert!(written, "the entry was read from there");
            changed = true;
        }
    }
    changed
}

/// Changes of the counts of some clusters that lie side by side.
#[derive(Debug)]
pub(super) struct Deltas {
    clusters: Range<u64>,
    changes: Vec<i32>,
}

impl Deltas {
    /// No changes yet.
    pub(super) fn new(clusters: Range<u64>) -> Self {
        let count = clusters.end - clusters.start;
        Deltas {
            clusters,
            changes: vec![0; count as usize],
        }
    }

    /// Notes a change of those of some clusters that it knows.
    pub(super) fn add(&mut self, clusters: &Range<u64>, change: i32) {
        let start = clusters.start.max(self.clusters.start);
        let end = clusters.end.min(self.clusters.end);
        if start >= end {
            return;
        }
        let first = self.clusters.start;
        for place in &mut self.changes[(start - first) as usize..(end - first) as usize] {
            *place = place.saturating_add(change);
        }
    }

    /// The clusters that it knows.
    pub(super) fn clusters(&self) -> &Range<u64> {
        &self.clusters
    }

    /// Applies the changes to a refcount block whose first cluster is `first`.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where a count would fall below zero,
    /// [`ErrorKind::InvalidArgument`] where it would not fit its width. The block is as
    /// it was then.
    pub(super) fn apply(&self, block: &mut [u8], first: u64, geometry: &Geometry) -> Result<()> {
        let changes = self.of_block(first, geometry);
        if refcount::add(block, geometry.refcount_order, changes) {
            return Ok(());
        }
        let outside = |(index, &change): (usize, &i32)| {
            let cluster = first + index as u64;
            let old = refcount::get(block, geometry.refcount_order, index);
            match old.checked_add_signed(change.into()) {
                None if change < 0 => Some(too_low(cluster)),
                Some(new) if new <= geometry.max_refcount() => None,
                _ => Some(too_high(cluster, geometry)),
            }
        };
        let found = changes.iter().enumerate().find_map(outside);
        Err(found.unwrap_or_else(|| too_low(first)))
    }

    /// The changes of what a block counts whose first cluster is `first`.
    fn of_block(&self, first: u64, geometry: &Geometry) -> &[i32] {
        let start = (first - self.clusters.start) as usize;
        let end = start + geometry.refcount_block_entries() as usize;
        &self.changes[start..end.min(self.changes.len())]
    }

    /// Refuses changes in clusters from `first` on that no refcount block counts.
    pub(super) fn refuse(&self, first: u64, geometry: &Geometry) -> Result<()> {
        let changes = self.of_block(first, geometry).iter();
        match changes.enumerate().find(|(_, change)| **change != 0) {
            Some((index, _)) => Err(too_low(first + index as u64)),
            None => Ok(()),
        }
    }
}

/// Changes of counts, as they are found in L2 tables.
pub(super) struct References {
    geometry: Geometry,
    /// So many clusters are counted.
    counted: u64,
    deltas: Deltas,
    /// A cluster that is referred to and not counted.
    beyond: Option<u64>,
}

impl References {
    /// No references yet, for clusters of a window, where so many are counted at all.
    pub(super) fn new(geometry: Geometry, counted: u64, window: Range<u64>) -> Self {
        References {
            geometry,
            counted,
            deltas: Deltas::new(window),
            beyond: None,
        }
    }

    /// Adds what a table refers to, `by` times.
    pub(super) fn add(&mut self, table: &[u8], by: i32) -> Result<()> {
        for_each_reference(table, &self.geometry, |run| {
            if run.end > self.counted {
                self.beyond = Some(run.end - 1);
            }
            self.deltas.add(&run, by);
        })
    }

    /// The changes, unless something is not counted at all.
    pub(super) fn finish(self) -> Result<Deltas> {
        match self.beyond {
            Some(cluster) => Err(too_low(cluster)),
            None => Ok(self.deltas),
        }
    }
}

/// Clusters from a first one on.
#[derive(Debug)]
pub(super) struct SomeClusters {
    first: u64,
    bits: Bits,
}

impl SomeClusters {
    /// None of the clusters.
    pub(super) fn none_of(clusters: &Range<u64>) -> Self {
        SomeClusters {
            first: clusters.start,
            bits: Bits::none(clusters.end - clusters.start),
        }
    }

    /// Adds those clusters that a block counts once, and whose first is `first`, after
    /// `deltas`.
    pub(super) fn add_own(&mut self, deltas: &Deltas, block: &[u8], first: u64, of: &Geometry) {
        for (index, &change) in deltas.of_block(first, of).iter().enumerate() {
            let count = refcount::get(block, of.refcount_order, index);
            if count.checked_add_signed(change.into()) == Some(1) {
                self.bits.insert(first - self.first + index as u64);
            }
        }
    }

    /// Whether a cluster is among them.
    pub(super) fn contain(&self, cluster: u64) -> bool {
        let bit = cluster.checked_sub(self.first);
        bit.is_some_and(|bit| self.bits.contains(bit))
    }
}

/// Whether a block counts a cluster no more that it counted before.
pub(super) fn frees(old: &[u8], new: &[u8], geometry: &Geometry) -> bool {
    if geometry.refcount_order == 4 {
        let mut pairs = old.chunks_exact(2).zip(new.chunks_exact(2));
        return pairs.any(|(old, new)| new == [0, 0] && old != [0, 0]);
    }
    let count =
        |block: &[u8], index: u64| refcount::get(block, geometry.refcount_order, index as usize);
    (0..geometry.refcount_block_entries()).any(|at| count(new, at) == 0 && count(old, at) > 0)
}

pub(super) fn too_low(cluster: u64) -> Error {
    let message = format!("the refcount of cluster {cluster} is too low");
    corrupt("snapshot", message)
}

fn too_high(cluster: u64, geometry: &Geometry) -> Error {
    let bits = geometry.refcount_bits();
    let message = format!("the refcount of cluster {cluster} does not fit into {bits} bits");
    Error::new(ErrorKind::InvalidArgument, "snapshot", message).with_errno(EINVAL)
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_format::compressed::CompressedDescriptor;
    use vellum_format::types::HostOffset;

    fn geometry() -> Geometry {
        Geometry {
            cluster_bits: 9,
            extended_l2: false,
            refcount_order: 3,
            version: 3,
            external_data: false,
        }
    }

    fn table(mappings: &[Mapping]) -> Vec<u8> {
        let mut table = vec![0; 512];
        for (index, mapping) in mappings.iter().enumerate() {
            let entry = mapping.encode(&geometry());
            assert!(entry.write(&mut table, index, &geometry()));
        }
        table
    }

    fn data(cluster: u64, copied: bool) -> Mapping {
        Mapping::Data {
            host: HostOffset(cluster * 512),
            copied,
        }
    }

    #[test]
    fn references_come_in_runs_and_compressed_clusters_may_touch_two() {
        let packed = CompressedDescriptor::new(HostOffset(20 * 512 + 400), 300, 9).unwrap();
        let zero = Mapping::Zero {
            host: Some(HostOffset(7 * 512)),
            copied: true,
        };
        let table = table(&[
            data(5, true),
            data(6, false),
            zero,
            Mapping::Unallocated,
            Mapping::Compressed(packed),
            Mapping::Compressed(packed),
        ]);
        let mut seen = Vec::new();
        for_each_reference(&table, &geometry(), |run| seen.push(run)).unwrap();
        assert_eq!(seen, [5..8, 20..22, 20..22]);
    }

    #[test]
    fn flags_change_where_they_are_wrong() {
        let mut bytes = table(&[data(5, true), data(6, false), data(9, true)]);
        let wanted = |cluster| (cluster < 8).then_some(cluster == 6);
        assert!(set_flags(&mut bytes, &geometry(), wanted));
        let expected = table(&[data(5, false), data(6, true), data(9, true)]);
        assert_eq!(bytes, expected);
        assert!(!set_flags(&mut bytes, &geometry(), wanted));
    }

    #[test]
    fn counts_stay_within_their_width() {
        let mut deltas = Deltas::new(512..1024);
        deltas.add(&(500..514), 1);
        deltas.add(&(513..515), -1);
        let mut block = vec![1; 512];
        let mut own = SomeClusters::none_of(deltas.clusters());
        own.add_own(&deltas, &block, 512, &geometry());
        let among = [511, 512, 513, 514, 515, 1023, 1024].map(|cluster| own.contain(cluster));
        assert_eq!(among, [false, false, true, false, true, true, false]);
        let old = block.clone();
        deltas.apply(&mut block, 512, &geometry()).unwrap();
        assert_eq!(block[..4], [2, 1, 0, 1]);
        assert!(frees(&old, &block, &geometry()) && !frees(&block, &old, &geometry()));
        let wide = Geometry {
            refcount_order: 4,
            ..geometry()
        };
        assert!(
            !frees(&old, &block, &wide),
            "two counts of 8 bits are one of 16"
        );
        block[2] = 0;
        let low = deltas.apply(&mut block, 512, &geometry()).unwrap_err();
        assert_eq!(low.kind(), ErrorKind::Corrupt);
        block[..3].copy_from_slice(&[255, 1, 1]);
        let high = deltas.apply(&mut block, 512, &geometry()).unwrap_err();
        assert_eq!(high.errno(), EINVAL);
        assert!(deltas.refuse(512, &geometry()).is_err());
    }
}
