//! Places of fixed length, and what images take in them.

use vellum::luks;

use crate::disk_room::BLOCK_BYTES;
use crate::engine::luks_options;
use crate::scenario::ImageOptions;

/// Bytes of an entry of the L1 and of the refcount table.
const TABLE_ENTRY_BYTES: u64 = 8;

/// Where the image's file lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Place {
    /// Somewhere with enough room. The rules of space are not checked.
    #[default]
    Unchecked,
    /// In a file that grows as it wants.
    Growable,
    /// On a device of this length.
    Fixed {
        /// The length in bytes.
        len_bytes: u64,
    },
    /// In a file that may have this many blocks of 4 KiB allocated at first.
    Quota {
        /// The number of blocks.
        blocks: u64,
    },
}

/// The sizes that decide how many clusters of metadata an image needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) cluster_bytes: u64,
    /// Guest clusters that one L2 table maps.
    pub(crate) l2_entries: u64,
    /// Host clusters that one refcount block counts.
    block_entries: u64,
    guest_clusters: u64,
    luks_clusters: u64,
}

impl Sizes {
    pub(crate) fn of(options: &ImageOptions) -> Sizes {
        let cluster_bytes = 1 << options.cluster_bits;
        let luks_bytes = match options.encrypted {
            true => luks::header_size_bytes(&luks_options()).unwrap_or(0),
            false => 0,
        };
        Sizes {
            cluster_bytes,
            l2_entries: cluster_bytes / if options.extended_l2 { 16 } else { 8 },
            block_entries: (cluster_bytes * 8) >> options.refcount_order,
            guest_clusters: options.size_bytes.div_ceil(cluster_bytes),
            luks_clusters: luks_bytes.div_ceil(cluster_bytes),
        }
    }

    fn l1_clusters(&self) -> u64 {
        let tables = self.guest_clusters.div_ceil(self.l2_entries);
        (tables * TABLE_ENTRY_BYTES).div_ceil(self.cluster_bytes)
    }

    /// Refcount blocks, and clusters of the refcount table, that count `clusters` clusters.
    fn refcount_clusters(&self, clusters: u64) -> (u64, u64) {
        let blocks = clusters.div_ceil(self.block_entries);
        let table = (blocks * TABLE_ENTRY_BYTES).div_ceil(self.cluster_bytes);
        (blocks, table.max(1))
    }

    /// All host clusters that an image needs at most which has so many clusters of data and L2
    /// tables, and whose refcounts reach to `counted` host clusters.
    pub(crate) fn needed_clusters(&self, data: u64, l2_tables: u64, counted: u64) -> u64 {
        let (blocks, table) = self.refcount_clusters(counted);
        // While the table moves there are two of them.
        let tables = if table > 1 { 2 * table } else { 1 };
        1 + self.l1_clusters() + self.luks_clusters + l2_tables + data + blocks + tables
    }
}

/// The size of the fully allocated image, as `measure` reports it.
///
/// Like QEMU's, `measure` leaves out the refcount blocks that count a LUKS header. Without them no engine
/// could keep the contract with small clusters, so they are counted here.
pub fn full_bytes(options: &ImageOptions) -> u64 {
    let sizes = Sizes::of(options);
    let l2_tables = sizes.guest_clusters.div_ceil(sizes.l2_entries);
    let l1_clusters = (l2_tables * TABLE_ENTRY_BYTES).div_ceil(sizes.cluster_bytes);
    let others = 1 + l2_tables + l1_clusters + sizes.guest_clusters + sizes.luks_clusters;
    let mut counts = (0, 0);
    loop {
        let next = sizes.refcount_clusters(others + counts.0 + counts.1);
        if next == counts {
            break;
        }
        counts = next;
    }
    (others + counts.0 + counts.1) * sizes.cluster_bytes
}

/// How many blocks a file has whose clusters lie apart from each other.
pub(crate) fn blocks_of(clusters: u64, cluster_bytes: u64) -> u64 {
    clusters * cluster_bytes.max(BLOCK_BYTES) / BLOCK_BYTES
}

#[cfg(test)]
mod tests {
    use vellum_images::measure::{MeasureSource, measure, settings};
    use vellum_io::lane::block_on;

    use super::*;

    #[test]
    fn the_full_size_is_that_of_measure() {
        for bits in [9, 10, 12, 14, 16, 21] {
            for (order, extended) in [(0, false), (4, true), (4, false), (6, false)] {
                for size_bytes in [512, 65_536, 1_000_448, 7 << 20, 40 << 20] {
                    let extended_l2 = extended && bits >= 14;
                    let image = ImageOptions {
                        refcount_order: order,
                        extended_l2,
                        ..ImageOptions::plain(size_bytes, bits)
                    };
                    let given = format!(
                        "cluster_size={},refcount_bits={},extended_l2={}",
                        1 << bits,
                        1 << order,
                        if extended_l2 { "on" } else { "off" }
                    );
                    let settings = settings("qcow2", Some(&given)).unwrap();
                    let measured = measure(MeasureSource::Size(size_bytes), "qcow2", &settings);
                    let measured = block_on(measured).unwrap();
                    assert_eq!(full_bytes(&image), measured.full_bytes, "{image:?}");
                }
            }
        }
    }
}
