//! What slices of L2 tables take in a cache. Pure.

use vellum_format::Geometry;

use super::report::CacheNeed;
use crate::qcow2::mapping::packed::L2Codec;

/// The smallest entry of an L2 cache.
const MIN_ENTRY_BYTES: usize = 512;
/// What Vellum loads at once.
const SLICE_BYTES: usize = 4096;

/// Adds up what caches need, table by table.
pub(super) struct CacheTally {
    codec: L2Codec,
    need: CacheNeed,
}

impl CacheTally {
    pub(super) fn new(geometry: Geometry, disk_bytes: u64) -> CacheTally {
        let cluster = geometry.cluster_size_bytes();
        let sizes = (MIN_ENTRY_BYTES.trailing_zeros()..=cluster.trailing_zeros())
            .map(|bits| (1 << bits, 0))
            .collect();
        CacheTally {
            codec: L2Codec::new(geometry),
            need: CacheNeed {
                whole_disk_bytes: geometry
                    .clusters_for(disk_bytes)
                    .saturating_mul(geometry.l2_entry_size_bytes()),
                by_entry_size: sizes,
                packed_bytes: 0,
            },
        }
    }

    /// Takes an L2 table of the disk into account.
    pub(super) fn add(&mut self, table: &[u8]) {
        let is_used = |slice: &[u8]| slice.iter().any(|byte| *byte != 0);
        let mut used: Vec<bool> = table.chunks(MIN_ENTRY_BYTES).map(is_used).collect();
        for (size, bytes) in &mut self.need.by_entry_size {
            let count = used.iter().filter(|used| **used).count() as u64;
            *bytes += count * *size;
            used = used.chunks(2).map(|pair| pair.contains(&true)).collect();
        }
        for slice in table.chunks(SLICE_BYTES).filter(|slice| is_used(slice)) {
            self.need.packed_bytes += self.codec.cost_bytes(slice);
        }
    }

    pub(super) fn finish(self) -> CacheNeed {
        self.need
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn larger_entries_take_more_for_scattered_data() {
        let geometry = Geometry::new(3, 16, false, 4, false).unwrap();
        let mut tally = CacheTally::new(geometry, 1 << 40);
        let mut table = vec![0; 1 << 16];
        table[0] = 0x80;
        table[40_000] = 0x80;
        tally.add(&table);
        let need = tally.finish();
        assert_eq!(need.whole_disk_bytes, 128 << 20);
        assert_eq!(need.by_entry_size.first(), Some(&(512, 1024)));
        assert_eq!(need.by_entry_size.get(3), Some(&(4096, 8192)));
        assert_eq!(need.by_entry_size.last(), Some(&(65536, 65536)));
        assert!(need.packed_bytes < 1024, "{}", need.packed_bytes);
    }
}
