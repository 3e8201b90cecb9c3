//! What lies where in the file, in equal parts.

/// A part of the file: bytes by what they are for. What is missing to its length is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HostCell {
    /// Header, tables, refcounts, bitmaps.
    pub metadata_bytes: u64,
    /// Guest data that the disk alone uses.
    pub data_bytes: u64,
    /// Guest data that disk and snapshots share.
    pub shared_bytes: u64,
    /// Guest data that only snapshots use.
    pub snapshot_bytes: u64,
    /// Compressed data, whoever uses it.
    pub compressed_bytes: u64,
}

/// What a host cluster is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Content {
    Metadata,
    Data,
    Shared,
    Snapshot,
    Compressed,
}

/// The parts of a file.
#[derive(Debug, Default)]
pub(super) struct Cells {
    pub(super) cells: Vec<HostCell>,
    pub(super) cell_bytes: u64,
}

impl Cells {
    /// At most `count` parts of a file, each of whole clusters.
    pub(super) fn new(count: usize, file_bytes: u64, cluster_bytes: u64) -> Cells {
        if count == 0 || file_bytes == 0 {
            return Cells::default();
        }
        let cell_bytes = file_bytes
            .div_ceil(count as u64)
            .next_multiple_of(cluster_bytes);
        let cells = file_bytes.div_ceil(cell_bytes) as usize;
        Cells {
            cells: vec![HostCell::default(); cells],
            cell_bytes,
        }
    }

    /// Notes what `len_bytes` at `offset_bytes` are for; beyond the file it does nothing.
    pub(super) fn add(&mut self, content: Content, offset_bytes: u64, len_bytes: u64) {
        if self.cell_bytes == 0 {
            return;
        }
        let end = offset_bytes.saturating_add(len_bytes);
        let mut at = offset_bytes;
        while at < end {
            let index = at / self.cell_bytes;
            let Some(cell) = self.cells.get_mut(index as usize) else {
                return;
            };
            let next = end.min((index + 1) * self.cell_bytes);
            *cell.of(content) += next - at;
            at = next;
        }
    }
}

impl HostCell {
    fn of(&mut self, content: Content) -> &mut u64 {
        match content {
            Content::Metadata => &mut self.metadata_bytes,
            Content::Data => &mut self.data_bytes,
            Content::Shared => &mut self.shared_bytes,
            Content::Snapshot => &mut self.snapshot_bytes,
            Content::Compressed => &mut self.compressed_bytes,
        }
    }

    /// All bytes that are used.
    pub fn used_bytes(&self) -> u64 {
        self.metadata_bytes
            + self.data_bytes
            + self.shared_bytes
            + self.snapshot_bytes
            + self.compressed_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_whole_clusters_and_take_what_lies_in_them() {
        let mut cells = Cells::new(3, 10 << 16, 1 << 16);
        assert_eq!(cells.cell_bytes, 4 << 16);
        assert_eq!(cells.cells.len(), 3);
        cells.add(Content::Data, 3 << 16, 2 << 16);
        cells.add(Content::Metadata, 9 << 16, 100 << 16);
        assert_eq!(cells.cells[0].data_bytes, 1 << 16);
        assert_eq!(cells.cells[1].data_bytes, 1 << 16);
        assert_eq!(cells.cells[2].used_bytes(), 3 << 16);
        Cells::new(0, 1, 1).add(Content::Data, 0, 1);
    }
}
