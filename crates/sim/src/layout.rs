//! A second, tiny reader of qcow2 metadata, independent of the engine's and of
//! `vellum-format`, so that one mistake cannot hide in both.
//!
//! It believes what it reads: it is for images that the simulator made itself.

use crate::sparse_bytes::SparseBytes;

/// Bit 63 of an L1 or L2 entry: the refcount is exactly one.
pub const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry.
pub const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard L2 entry.
pub const ZERO: u64 = 1;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// Where the incompatible features stand in the header.
pub(crate) const FEATURES_OFFSET: u64 = 72;
/// Where the autoclear features stand in the header.
pub(crate) const AUTOCLEAR_OFFSET: u64 = 88;
/// The autoclear feature of checksums.
pub(crate) const CHECKSUMS: u64 = 1 << 45;

/// The parts of an image's metadata that say where everything lies.
#[derive(Debug, Clone)]
pub struct Layout {
    /// Format version, 2 or 3.
    pub version: u32,
    /// Logarithm of the cluster size.
    pub cluster_bits: u32,
    /// Logarithm of the refcount width.
    pub refcount_order: u32,
    /// L2 entries are 16 bytes long.
    pub extended_l2: bool,
    /// Guest data lies in another file.
    pub external_data: bool,
    /// Refcounts may be wrong until the image is repaired.
    pub dirty: bool,
    /// The image must not be written.
    pub corrupt: bool,
    /// A backing file is named.
    pub has_backing: bool,
    /// Virtual size.
    pub size_bytes: u64,
    /// Where the active L1 table begins.
    pub l1_offset: u64,
    /// How many entries it has.
    pub l1_entries: u64,
    /// Where the refcount table begins.
    pub table_offset: u64,
    /// How many clusters it takes.
    pub table_clusters: u64,
    /// The LUKS header: (offset, length).
    pub luks_header: Option<(u64, u64)>,
    /// The snapshots' L1 tables: (offset, entries).
    pub snapshots: Vec<(u64, u64)>,
    /// The snapshot table: (offset, length).
    pub snapshot_table: (u64, u64),
    /// What the bitmaps take: (what it is, offset, length).
    pub bitmaps: Vec<(&'static str, u64, u64)>,
    /// The active L1 entries that are not zero, by index.
    pub l1: Vec<(u64, u64)>,
    /// The refcount blocks, by index.
    pub blocks: Vec<(u64, u64)>,
}

/// An L2 entry and where it stands.
#[derive(Debug, Clone, Copy)]
pub struct Mapped {
    /// The guest cluster.
    pub guest: u64,
    /// Where the entry lies in the file.
    pub entry_offset: u64,
    /// The entry's first word.
    pub entry: u64,
}

impl Mapped {
    /// Whether the whole cluster reads as zeroes, whatever lies at its place.
    pub fn is_zero(&self, layout: &Layout) -> bool {
        let plain = !layout.extended_l2 && self.entry & COMPRESSED == 0;
        plain && layout.version >= 3 && self.entry & ZERO != 0
    }

    /// The host offset, unless the cluster is compressed or has none.
    pub fn host(&self) -> Option<u64> {
        let offset = self.entry & OFFSET;
        (self.entry & COMPRESSED == 0 && offset != 0).then_some(offset)
    }

    /// The host bytes of a compressed cluster: (offset, length).
    pub fn compressed(&self, cluster_bits: u32) -> Option<(u64, u64)> {
        if self.entry & COMPRESSED == 0 {
            return None;
        }
        let bits = 62 - (cluster_bits - 8);
        let offset = self.entry & ((1 << bits) - 1);
        let sectors = (self.entry & !COPIED & !COMPRESSED) >> bits;
        Some((offset, (sectors + 1) * 512 - offset % 512))
    }
}

/// Looks for the LUKS header among the header extensions, which begin at `at`.
fn luks_header(pages: &SparseBytes, mut at: u64) -> Option<(u64, u64)> {
    loop {
        let (kind, len) = (pages.be64(at) >> 32, pages.be64(at) & 0xffff_ffff);
        match kind {
            0 => return None,
            0x0537_be77 => return Some((pages.be64(at + 8), pages.be64(at + 16))),
            _ => at += 8 + len.next_multiple_of(8),
        }
    }
}

impl Layout {
    /// Reads the metadata that everything else hangs on.
    pub fn parse(pages: &SparseBytes) -> Result<Layout, String> {
        let word32 = |at| pages.be64(at) >> 32;
        if word32(0) != 0x5146_49fb {
            return Err("no qcow2 magic".to_owned());
        }
        let version = word32(4) as u32;
        let v3 = version >= 3;
        let features = if v3 { pages.be64(FEATURES_OFFSET) } else { 0 };
        let mut layout = Layout {
            version,
            cluster_bits: word32(20) as u32,
            refcount_order: if v3 { word32(96) as u32 } else { 4 },
            extended_l2: features & 1 << 4 != 0,
            external_data: features & 1 << 2 != 0,
            dirty: features & 1 != 0,
            corrupt: features & 2 != 0,
            has_backing: pages.be64(8) != 0,
            size_bytes: pages.be64(24),
            l1_offset: pages.be64(40),
            l1_entries: word32(36),
            table_offset: pages.be64(48),
            table_clusters: word32(56),
            luks_header: luks_header(pages, if v3 { word32(100) } else { 72 }),
            snapshots: Vec::new(),
            snapshot_table: (pages.be64(64), 0),
            bitmaps: Vec::new(),
            l1: Vec::new(),
            blocks: Vec::new(),
        };
        if !(9..=21).contains(&layout.cluster_bits) || layout.refcount_order > 6 {
            return Err("the header is torn".to_owned());
        }
        layout.l1 = layout.read_l1(pages, layout.l1_offset, layout.l1_entries);
        let table_len = layout.table_clusters * layout.cluster_bytes();
        let blocks = pages.words(layout.table_offset, table_len).into_iter();
        layout.blocks = blocks
            .map(|(at, entry)| ((at - layout.table_offset) / 8, entry & !0x1ff))
            .collect();
        layout.read_snapshots(pages, word32(60));
        if v3 && pages.be64(88) & 1 != 0 {
            layout.read_bitmaps(pages, word32(100));
        }
        Ok(layout)
    }

    fn read_snapshots(&mut self, pages: &SparseBytes, count: u64) {
        let mut at = self.snapshot_table.0;
        for _ in 0..count {
            let entry = pages.bytes(at, 40);
            let be = |range: std::ops::Range<usize>| {
                entry[range]
                    .iter()
                    .fold(0, |number, byte| number << 8 | u64::from(*byte))
            };
            self.snapshots.push((be(0..8), be(8..12)));
            at += (40 + be(36..40) + be(12..14) + be(14..16)).next_multiple_of(8);
        }
        self.snapshot_table.1 = at - self.snapshot_table.0;
    }

    /// Reads the bitmap directory and tables; `at`: where the extensions begin.
    fn read_bitmaps(&mut self, pages: &SparseBytes, mut at: u64) {
        const BITMAPS: u64 = 0x2385_2875;
        let word32 = |at: u64| pages.be64(at) >> 32;
        while word32(at) != BITMAPS {
            if word32(at) == 0 || at >= self.cluster_bytes() {
                return;
            }
            at += 8 + word32(at + 4).next_multiple_of(8);
        }
        let (count, size, start) = (word32(at + 8), pages.be64(at + 16), pages.be64(at + 24));
        self.bitmaps.push(("the bitmap directory", start, size));
        let mut entry = start;
        for _ in 0..count {
            let (table, entries) = (pages.be64(entry), word32(entry + 8));
            self.bitmaps.push(("a bitmap table", table, entries * 8));
            let clusters = pages.words(table, entries * 8).into_iter();
            let stored = clusters
                .map(|(_, cluster)| cluster & OFFSET)
                .filter(|at| *at != 0);
            let size = self.cluster_bytes();
            self.bitmaps
                .extend(stored.map(|at| ("bits of a bitmap", at, size)));
            let names = (word32(entry + 16) & 0xffff) + word32(entry + 20);
            entry += (24 + names).next_multiple_of(8);
        }
    }

    /// The L1 entries that are not zero, by index.
    pub fn read_l1(&self, pages: &SparseBytes, offset: u64, entries: u64) -> Vec<(u64, u64)> {
        let words = pages.words(offset, entries * 8).into_iter();
        words
            .map(|(at, entry)| ((at - offset) / 8, entry))
            .collect()
    }

    /// The cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// The length of an L2 entry in bytes.
    pub fn entry_bytes(&self) -> u64 {
        if self.extended_l2 { 16 } else { 8 }
    }

    /// How many guest clusters one L2 table maps.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_bytes() / self.entry_bytes()
    }

    /// How many clusters one refcount block counts.
    pub fn block_entries(&self) -> u64 {
        (self.cluster_bytes() * 8) >> self.refcount_order
    }

    /// The active L2 tables: (L1 index, host offset).
    pub fn l2_tables(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.l1
            .iter()
            .map(|(index, entry)| (*index, entry & OFFSET))
    }

    /// Whether an offset lies in the refcount table or one of its blocks.
    pub fn is_refcount_metadata(&self, at: u64) -> bool {
        let cluster = at / self.cluster_bytes() * self.cluster_bytes();
        let table =
            self.table_offset..self.table_offset + self.table_clusters * self.cluster_bytes();
        table.contains(&at) || self.blocks.iter().any(|(_, block)| *block == cluster)
    }

    /// The entries of an L2 table that are not zero.
    pub fn mappings(&self, pages: &SparseBytes, l1_index: u64, l1_entry: u64) -> Vec<Mapped> {
        let table = l1_entry & OFFSET;
        let first = l1_index * self.l2_entries();
        let words = pages.words(table, self.cluster_bytes()).into_iter();
        let entries = words.filter(|(at, _)| (at - table).is_multiple_of(self.entry_bytes()));
        entries
            .map(|(at, entry)| {
                let guest = first + (at - table) / self.entry_bytes();
                Mapped {
                    guest,
                    entry_offset: at,
                    entry,
                }
            })
            .collect()
    }

    /// A host cluster's refcount.
    pub fn refcount(&self, pages: &SparseBytes, cluster: u64) -> u64 {
        let index = cluster / self.block_entries();
        let Ok(found) = self
            .blocks
            .binary_search_by_key(&index, |(index, _)| *index)
        else {
            return 0;
        };
        let (bit, width) = self.refcount_bits(cluster);
        let byte = self.blocks[found].1 + bit / 8;
        let mut raw = [0; 8];
        if width < 8 {
            pages.read(byte, &mut raw[..1]);
            return u64::from(raw[0]) >> (bit % 8) & ((1 << width) - 1);
        }
        let len = width as usize / 8;
        pages.read(byte, &mut raw[8 - len..]);
        u64::from_be_bytes(raw)
    }

    /// Sets a host cluster's refcount; its block must exist.
    pub fn set_refcount(&self, pages: &mut SparseBytes, cluster: u64, value: u64) {
        let index = cluster / self.block_entries();
        let Some((_, block)) = self.blocks.iter().find(|(found, _)| *found == index) else {
            return;
        };
        let (bit, width) = self.refcount_bits(cluster);
        let byte = block + bit / 8;
        if width < 8 {
            let mut old = [0];
            pages.read(byte, &mut old);
            let mask = ((1u64 << width) - 1) << (bit % 8);
            let new = u64::from(old[0]) & !mask | value << (bit % 8) & mask;
            pages.write(byte, &[new as u8]);
        } else {
            pages.write(byte, &value.to_be_bytes()[8 - width as usize / 8..]);
        }
    }

    /// Where in its block, in bits, a refcount lies, and how wide it is.
    fn refcount_bits(&self, cluster: u64) -> (u64, u64) {
        let width = 1 << self.refcount_order;
        (cluster % self.block_entries() * width, width)
    }

    /// Takes `count` clusters in a row at the end of the file, and gives them the
    /// refcount 1; makes the refcount blocks for them. The run must be shorter than
    /// what one block counts.
    pub fn allocate(&mut self, pages: &mut SparseBytes, count: u64) -> u64 {
        let size = self.cluster_bytes();
        let mut first = pages.len_bytes().div_ceil(size);
        let mut cluster = first;
        while cluster < first + count {
            let index = cluster / self.block_entries();
            if !self.blocks.iter().any(|(found, _)| *found == index) {
                // The block takes this very cluster; what was wanted comes after it.
                pages.set_len((cluster + 1) * size);
                pages.put_be64(self.table_offset + index * 8, cluster * size);
                self.blocks.push((index, cluster * size));
                self.blocks.sort_unstable();
                self.set_refcount(pages, cluster, 1);
                first = cluster + 1;
            }
            cluster += 1;
        }
        pages.set_len((first + count) * size);
        (first..first + count).for_each(|cluster| self.set_refcount(pages, cluster, 1));
        first * size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty(order: u32) -> (SparseBytes, Layout) {
        let mut pages = SparseBytes::new();
        pages.set_len(4 * 512);
        pages.put_be64(0, 0x5146_49fb_0000_0003);
        pages.put_be64(16, 9);
        pages.put_be64(24, 32_768);
        pages.put_be64(32, 1);
        pages.put_be64(40, 512);
        pages.put_be64(48, 1024);
        pages.put_be64(56, 1 << 32);
        pages.put_be64(96, u64::from(order) << 32 | 104);
        pages.put_be64(1024, 1536);
        let layout = Layout::parse(&pages).unwrap();
        (pages, layout)
    }

    #[test]
    fn refcounts_of_every_width_keep_apart() {
        for order in 0..=6 {
            let (mut pages, layout) = empty(order);
            let most = u64::MAX >> (64 - (1 << order));
            for cluster in 0..layout.block_entries() {
                layout.set_refcount(&mut pages, cluster, (cluster % 7) & most);
            }
            for cluster in 0..layout.block_entries() {
                assert_eq!(
                    layout.refcount(&pages, cluster),
                    (cluster % 7) & most,
                    "order {order}"
                );
            }
        }
    }

    #[test]
    fn allocation_makes_the_blocks_it_needs() {
        let (mut pages, mut layout) = empty(6);
        let first = layout.allocate(&mut pages, 63);
        let layout = Layout::parse(&pages).unwrap();
        for cluster in first / 512..first / 512 + 63 {
            assert_eq!(layout.refcount(&pages, cluster), 1);
        }
        assert_eq!(layout.blocks.len(), 2);
    }

    #[test]
    fn compressed_descriptors_give_their_bytes() {
        let entry = COMPRESSED | 1 << 54 | 0x1234;
        let mapped = Mapped {
            guest: 0,
            entry_offset: 0,
            entry,
        };
        assert_eq!(mapped.compressed(16), Some((0x1234, 1024 - 0x34)));
        assert_eq!(mapped.host(), None);
    }
}
