//! Where everything in a new image lies; pure arithmetic.

use std::ops::Range;

use vellum_format::{Geometry, HostOffset, limits};

/// A new image, in the order of its file: header, refcount table, refcount blocks,
/// L1 table, encryption header, L2 tables and data, the last two only if everything is
/// mapped.
///
/// Without preallocation that is where QEMU puts things. With it QEMU mixes tables
/// and data; here the tables stay together, to be written and read in one go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) geometry: Geometry,
    pub(super) guest_size_bytes: u64,
    pub(super) refcount_table_clusters: u64,
    pub(super) refcount_blocks: u64,
    pub(super) l1_entries: u64,
    /// What the encryption header fills.
    pub(super) encryption_clusters: u64,
    /// Clusters that the refcount table has entries for, at least.
    place_clusters: u64,
    pub(super) l2_tables: u64,
    /// Clusters of guest data in the image file itself.
    data_clusters: u64,
    /// Whether every guest cluster has an L2 entry.
    maps_everything: bool,
}

impl Layout {
    /// `None` if the image would break a limit of the format.
    pub(super) fn new(
        geometry: Geometry,
        guest_size_bytes: u64,
        maps_everything: bool,
        encryption_header_bytes: u64,
    ) -> Option<Self> {
        if guest_size_bytes > geometry.max_size_bytes() {
            return None;
        }
        let l1_entries = geometry.l1_entries_for(guest_size_bytes);
        let in_image = maps_everything && !geometry.external_data;
        let mut layout = Layout {
            geometry,
            guest_size_bytes,
            refcount_table_clusters: 1,
            refcount_blocks: 1,
            l1_entries,
            encryption_clusters: geometry.clusters_for(encryption_header_bytes),
            place_clusters: 0,
            l2_tables: if maps_everything { l1_entries } else { 0 },
            data_clusters: if in_image {
                geometry.clusters_for(guest_size_bytes)
            } else {
                0
            },
            maps_everything,
        };
        layout.count_refcount_structures();
        layout.is_within_limits().then_some(layout)
    }

    /// The layout of an image that holds so many L2 tables and clusters of data, and maps
    /// nothing else. `None` if that breaks a limit.
    pub(super) fn holding(self, l2_tables: u64, data_clusters: u64) -> Option<Self> {
        let mut layout = Layout {
            l2_tables,
            data_clusters,
            ..self
        };
        layout.count_refcount_structures();
        layout.is_within_limits().then_some(layout)
    }

    /// The same layout on a storage of fixed length. Its refcount table has entries for all
    /// clusters of the storage, as far as the format's limit allows, so it never moves: a full
    /// storage has no room for the old and the new table at once.
    pub(super) fn in_place_of(self, storage_bytes: u64) -> Self {
        let per_block = self.geometry.refcount_block_entries();
        let most = limits::MAX_REFCOUNT_TABLE_SIZE_BYTES / 8 * per_block;
        let mut layout = Layout {
            place_clusters: (storage_bytes >> self.geometry.cluster_bits).min(most),
            ..self
        };
        layout.count_refcount_structures();
        layout
    }

    /// Bytes of the file when every guest cluster is mapped. Saturates beyond the limits of the
    /// format.
    pub(super) fn full_size_bytes(&self) -> u64 {
        let mut full = Layout {
            l2_tables: self.l1_entries,
            data_clusters: match self.geometry.external_data {
                true => 0,
                false => self.geometry.clusters_for(self.guest_size_bytes),
            },
            ..*self
        };
        full.count_refcount_structures();
        full.total_clusters()
            .saturating_mul(self.geometry.cluster_size_bytes())
    }

    fn is_within_limits(&self) -> bool {
        let table_size = self.refcount_table_clusters << self.geometry.cluster_bits;
        let end = self
            .total_clusters()
            .checked_mul(self.geometry.cluster_size_bytes());
        table_size <= limits::MAX_REFCOUNT_TABLE_SIZE_BYTES
            && end.is_some_and(|end| end <= limits::HOST_OFFSET_END)
    }

    /// Refcount structures count themselves too: adds them until all are counted.
    fn count_refcount_structures(&mut self) {
        loop {
            let per_block = self.geometry.refcount_block_entries();
            let blocks = self.total_clusters().div_ceil(per_block);
            let entries = blocks.max(self.place_clusters.div_ceil(per_block));
            let table_clusters = self.geometry.clusters_for(entries * 8);
            if (blocks, table_clusters) == (self.refcount_blocks, self.refcount_table_clusters) {
                return;
            }
            self.refcount_blocks = blocks;
            self.refcount_table_clusters = table_clusters;
        }
    }

    fn l1_clusters(&self) -> u64 {
        self.geometry.clusters_for(self.l1_entries * 8)
    }

    fn offset(&self, cluster: u64) -> HostOffset {
        HostOffset(cluster << self.geometry.cluster_bits)
    }

    pub(super) fn refcount_table_offset(&self) -> HostOffset {
        self.offset(1)
    }

    pub(super) fn refcount_blocks_offset(&self) -> HostOffset {
        self.offset(1 + self.refcount_table_clusters)
    }

    fn l1_cluster(&self) -> u64 {
        1 + self.refcount_table_clusters + self.refcount_blocks
    }

    /// Offset 0 if there is no L1 table, as QEMU has it.
    pub(super) fn l1_table_offset(&self) -> HostOffset {
        match self.l1_entries {
            0 => HostOffset::ZERO,
            _ => self.offset(self.l1_cluster()),
        }
    }

    fn encryption_cluster(&self) -> u64 {
        self.l1_cluster() + self.l1_clusters()
    }

    pub(super) fn encryption_header_offset(&self) -> HostOffset {
        self.offset(self.encryption_cluster())
    }

    fn l2_cluster(&self) -> u64 {
        self.encryption_cluster() + self.encryption_clusters
    }

    pub(super) fn l2_tables_offset(&self) -> HostOffset {
        self.offset(self.l2_cluster())
    }

    fn data_cluster(&self) -> u64 {
        self.l2_cluster() + self.l2_tables
    }

    /// Host cluster of guest cluster `index`; in an external data file that is the
    /// same place.
    pub(super) fn data_offset(&self, index: u64) -> Option<HostOffset> {
        if !self.maps_everything || index >= self.geometry.clusters_for(self.guest_size_bytes) {
            return None;
        }
        let first = if self.geometry.external_data {
            0
        } else {
            self.data_cluster()
        };
        Some(self.offset(first + index))
    }

    /// Where cluster `index` of the data lies in the file.
    pub(super) fn stored_offset(&self, index: u64) -> HostOffset {
        self.offset(self.data_cluster() + index)
    }

    /// Whether nothing follows the L1 table.
    pub(super) fn is_bare(&self) -> bool {
        self.encryption_clusters + self.l2_tables + self.data_clusters == 0
    }

    /// Every cluster of the file, all of them in use.
    pub(super) fn total_clusters(&self) -> u64 {
        self.data_cluster() + self.data_clusters
    }

    /// The bytes of guest data in the image file.
    pub(super) fn data_range(&self) -> Range<u64> {
        self.offset(self.data_cluster()).0..self.offset(self.total_clusters()).0
    }

    /// The end of the file. As in QEMU's images the L1 table is not padded if
    /// nothing follows it.
    pub(super) fn file_size_bytes(&self) -> u64 {
        if !self.is_bare() || self.l1_entries == 0 {
            return self.offset(self.total_clusters()).0;
        }
        self.l1_table_offset().0 + self.l1_entries * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(cluster_bits: u32, order: u32, size: u64, everything: bool) -> Option<Layout> {
        let geometry = Geometry::new(3, cluster_bits, false, order, false).expect("valid");
        Layout::new(geometry, size, everything, 0)
    }

    #[test]
    fn files_have_the_length_of_qemus() {
        let size = |bits, size, everything| {
            layout(bits, 4, size, everything)
                .expect("within the limits")
                .file_size_bytes()
        };
        assert_eq!(size(16, 64 << 20, false), 196_616);
        assert_eq!(size(9, 64 << 20, false), 17_920);
        assert_eq!(size(21, 1 << 40, false), 6_291_472);
        assert_eq!(size(16, 0, false), 196_608);
        assert_eq!(size(16, 64 << 20, true), 67_436_544);
        assert_eq!(size(16, 1 << 40, true), 1_099_679_662_080);
    }

    #[test]
    fn refcount_structures_count_every_cluster() {
        for order in 0..=6 {
            for size in [0, 512, 1 << 20, 64 << 20, (1 << 30) + 512] {
                let layout = layout(9, order, size, true).expect("within the limits");
                let counted = layout.refcount_blocks * layout.geometry.refcount_block_entries();
                assert!(
                    counted >= layout.total_clusters(),
                    "order {order}, size {size}"
                );
                let named = layout.refcount_table_clusters * 64;
                assert!(
                    named >= layout.refcount_blocks,
                    "order {order}, size {size}"
                );
            }
        }
    }

    /// Clusters of an image made on a storage of `place_clusters`, when all of the disk is
    /// written: what was laid out at creation, the L2 tables, the data, and the refcount blocks
    /// for all of that, each of which lies in the range that it counts.
    fn when_full(layout: &Layout, place_clusters: u64) -> u64 {
        let geometry = &layout.geometry;
        let written = layout.total_clusters()
            + layout.l1_entries
            + geometry.clusters_for(layout.guest_size_bytes);
        let more_blocks = |total: u64| {
            let blocks = total.div_ceil(geometry.refcount_block_entries());
            blocks.saturating_sub(layout.refcount_blocks)
        };
        let mut total = written;
        while total < written + more_blocks(total) {
            total = written + more_blocks(total);
        }
        let named = layout.refcount_table_clusters * geometry.table_entries_per_cluster();
        let blocks = total.max(place_clusters);
        let blocks = blocks.div_ceil(geometry.refcount_block_entries());
        assert!(named >= blocks, "the table would move: {layout:?}");
        total
    }

    /// Sizes around the points at which one more table or block is needed.
    fn sizes(geometry: &Geometry) -> Vec<u64> {
        let cluster = geometry.cluster_size_bytes();
        let per_l2_table = cluster / geometry.l2_entry_size_bytes() * cluster;
        let units = [
            512,
            cluster,
            per_l2_table,
            geometry.bytes_per_refcount_block(),
            geometry.table_entries_per_cluster() * geometry.bytes_per_refcount_block(),
        ];
        let mut sizes = vec![0];
        for unit in units {
            for count in [1, 2, 3, 7, 64, 1000] {
                let size: u64 = unit.saturating_mul(count);
                sizes.extend([
                    size.saturating_sub(512),
                    size,
                    size.saturating_add(512),
                    size.saturating_add(3 * cluster),
                ]);
            }
        }
        sizes.retain(|size| *size <= 1 << 44);
        sizes
    }

    #[test]
    fn a_place_of_the_size_of_all_that_is_preallocated_is_never_too_small() {
        let mut checked = 0;
        for (bits, order) in (9..=21).flat_map(|bits| (0..=6).map(move |order| (bits, order))) {
            for extended in [false, bits >= 14] {
                let geometry = Geometry::new(3, bits, extended, order, false).expect("valid");
                for (size, header_bytes) in sizes(&geometry)
                    .into_iter()
                    .flat_map(|size| [(size, 0), (size, 2_068_480)])
                {
                    let Some(full) = Layout::new(geometry, size, true, header_bytes) else {
                        continue;
                    };
                    let place = full.total_clusters();
                    let layout = Layout::new(geometry, size, false, header_bytes)
                        .expect("smaller than the full one")
                        .in_place_of(place << bits);
                    let used = when_full(&layout, place);
                    assert!(used <= place, "{used} of {place} clusters: {layout:?}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 10_000, "{checked}");
    }

    #[test]
    fn the_table_in_a_large_place_stays_within_the_limit() {
        let layout = layout(9, 6, 1 << 20, false).expect("within the limits");
        let layout = layout.in_place_of(1 << 50);
        let table_bytes = layout.refcount_table_clusters << 9;
        assert_eq!(table_bytes, limits::MAX_REFCOUNT_TABLE_SIZE_BYTES);
        assert!(layout.is_within_limits());
        let default = super::tests::layout(16, 4, 1 << 30, false).expect("within the limits");
        assert_eq!(
            default.in_place_of(1 << 40),
            Layout {
                place_clusters: 1 << 24,
                ..default
            }
        );
    }

    #[test]
    fn what_breaks_a_limit_is_refused() {
        assert!(layout(9, 4, 128 << 30, false).is_some());
        assert!(layout(9, 4, (128 << 30) + 512, false).is_none());
        assert!(layout(9, 6, 120 << 30, true).is_none(), "refcount table");
        assert!(layout(21, 4, 1 << 60, true).is_none(), "host offsets");
    }
}
