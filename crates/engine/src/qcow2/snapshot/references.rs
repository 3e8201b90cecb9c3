//! What an L2 table refers to, and how many more or fewer references clusters get.

use std::ops::Range;

use vellum_format::geometry::Geometry;
use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::refcount;
use vellum_storage::{Error, ErrorKind, Result};

use super::super::fault::{bad_format, corrupt};

const EINVAL: i32 = 22;

/// Calls `visit` with every run of host clusters that the L2 table refers to, once
/// for each reference.
pub(super) fn for_each_reference(
    table: &[u8],
    geometry: &Geometry,
    mut visit: impl FnMut(Range<u64>),
) -> Result<()> {
    let mut run = 0..0;
    for index in 0..geometry.l2_entries() as usize {
        let Some(clusters) = referred(table, index, geometry)? else {
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

    /// The change of one cluster; `None` if it does not know it.
    pub(super) fn of(&self, cluster: u64) -> Option<i32> {
        let index = cluster.checked_sub(self.clusters.start)?;
        self.changes.get(index as usize).copied()
    }

    /// Applies the changes to a refcount block whose first cluster is `first`.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] where a count would fall below zero,
    /// [`ErrorKind::InvalidArgument`] where it would not fit its width. The block is
    /// of no use then.
    pub(super) fn apply(&self, block: &mut [u8], first: u64, geometry: &Geometry) -> Result<()> {
        let order = geometry.refcount_order;
        let start = (first - self.clusters.start) as usize;
        let end = (start + geometry.refcount_block_entries() as usize).min(self.changes.len());
        for (index, &change) in self.changes[start..end].iter().enumerate() {
            if change == 0 {
                continue;
            }
            let old = refcount::get(block, order, index);
            let cluster = first + index as u64;
            let Some(new) = old.checked_add_signed(change.into()) else {
                return Err(match change > 0 {
                    true => too_high(cluster, geometry),
                    false => too_low(cluster),
                });
            };
            if !refcount::set(block, order, index, new) {
                return Err(too_high(cluster, geometry));
            }
        }
        Ok(())
    }

    /// Refuses changes in clusters from `first` on that no refcount block counts.
    pub(super) fn refuse(&self, first: u64, geometry: &Geometry) -> Result<()> {
        let start = (first - self.clusters.start) as usize;
        let end = (start + geometry.refcount_block_entries() as usize).min(self.changes.len());
        let changes = self.changes[start..end].iter();
        match changes.enumerate().find(|(_, change)| **change != 0) {
            Some((index, _)) => Err(too_low(first + index as u64)),
            None => Ok(()),
        }
    }
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
        assert_eq!((deltas.of(512), deltas.of(513)), (Some(1), Some(0)));
        assert_eq!((deltas.of(511), deltas.of(1024)), (None, None));
        let mut block = vec![1; 512];
        deltas.apply(&mut block, 512, &geometry()).unwrap();
        assert_eq!(block[..4], [2, 1, 0, 1]);
        block[2] = 0;
        let low = deltas.apply(&mut block, 512, &geometry()).unwrap_err();
        assert_eq!(low.kind(), ErrorKind::Corrupt);
        block[..3].copy_from_slice(&[255, 1, 1]);
        let high = deltas.apply(&mut block, 512, &geometry()).unwrap_err();
        assert_eq!(high.errno(), EINVAL);
        assert!(deltas.refuse(512, &geometry()).is_err());
    }
}
