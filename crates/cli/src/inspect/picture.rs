//! The map of an image: what is at which part of the guest's disk and of the file, in a fixed
//! number of cells, which [`draw`] puts together to as many as an output has room for. No I/O.

use vellum::qcow2::survey::HostCell;
use vellum::{Extent, ExtentKind};

/// Cells that are gathered, whatever is drawn of them.
pub const CELLS: usize = 4096;

/// A part of the disk: guest bytes by what they are. What is missing to its length is
/// held by no layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GuestCell {
    /// Data of the image itself.
    pub data_bytes: u64,
    /// Compressed data of the image itself.
    pub compressed_bytes: u64,
    /// Zeroes that the image itself tells of.
    pub zero_bytes: u64,
    /// Data from the images below.
    pub below_bytes: u64,
}

/// The disk, as it is walked over.
#[derive(Debug)]
pub struct Picture {
    pub cells: Vec<GuestCell>,
    pub cell_bytes: u64,
}

impl Picture {
    /// At most `count` cells of whole sectors for a disk.
    pub fn new(count: usize, size_bytes: u64) -> Picture {
        let cell_bytes = size_bytes
            .div_ceil(count.max(1) as u64)
            .next_multiple_of(512)
            .max(512);
        Picture {
            cells: vec![GuestCell::default(); size_bytes.div_ceil(cell_bytes) as usize],
            cell_bytes,
        }
    }

    /// Adds an extent.
    pub fn add(&mut self, start_bytes: u64, extent: &Extent) {
        let mut at = start_bytes;
        let end = start_bytes.saturating_add(extent.len_bytes);
        while at < end {
            let index = at / self.cell_bytes;
            let Some(cell) = self.cells.get_mut(index as usize) else {
                return;
            };
            let next = end.min((index + 1) * self.cell_bytes);
            if let Some(bytes) = cell.of(extent) {
                *bytes += next - at;
            }
            at = next;
        }
    }
}

impl GuestCell {
    fn of(&mut self, extent: &Extent) -> Option<&mut u64> {
        match (extent.depth, extent.kind) {
            (_, ExtentKind::Absent | ExtentKind::AbsentZero) => None,
            (0, ExtentKind::Data) => Some(&mut self.data_bytes),
            (0, ExtentKind::Compressed) => Some(&mut self.compressed_bytes),
            (0, ExtentKind::Zero | ExtentKind::ZeroData) => Some(&mut self.zero_bytes),
            (_, ExtentKind::Data | ExtentKind::Compressed) => Some(&mut self.below_bytes),
            (_, ExtentKind::Zero | ExtentKind::ZeroData) => None,
        }
    }
}

/// What a cell shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Empty,
    Data,
    Compressed,
    Zero,
    Below,
    Shared,
    Snapshot,
    Metadata,
}

impl Kind {
    /// The name in legends.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Empty => "empty",
            Kind::Data => "data",
            Kind::Compressed => "compressed",
            Kind::Zero => "zeroes",
            Kind::Below => "from below",
            Kind::Shared => "shared with snapshots",
            Kind::Snapshot => "snapshots only",
            Kind::Metadata => "metadata",
        }
    }
}

/// What can be drawn as a cell: amounts by kind.
pub trait Cell {
    /// Bytes of each kind.
    fn amounts(&self) -> Vec<(Kind, u64)>;
}

impl Cell for GuestCell {
    fn amounts(&self) -> Vec<(Kind, u64)> {
        vec![
            (Kind::Data, self.data_bytes),
            (Kind::Compressed, self.compressed_bytes),
            (Kind::Below, self.below_bytes),
            (Kind::Zero, self.zero_bytes),
        ]
    }
}

impl Cell for HostCell {
    fn amounts(&self) -> Vec<(Kind, u64)> {
        vec![
            (Kind::Metadata, self.metadata_bytes),
            (Kind::Data, self.data_bytes),
            (Kind::Shared, self.shared_bytes),
            (Kind::Snapshot, self.snapshot_bytes),
            (Kind::Compressed, self.compressed_bytes),
        ]
    }
}

/// A cell as it is drawn: the kind that fills most of it, and how much of it is filled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Drawn {
    pub kind: Kind,
    /// From 0 to 1.
    pub filled: f64,
    /// Where it begins, in bytes.
    pub start_bytes: u64,
    pub len_bytes: u64,
}

/// Draws cells of `cell_bytes` each, of something that is `total_bytes` long, as `count`
/// cells at most.
pub fn draw<C: Cell>(cells: &[C], cell_bytes: u64, total_bytes: u64, count: usize) -> Vec<Drawn> {
    let count = count.min(cells.len());
    let drawn = |number: usize| {
        let (first, end) = (
            number * cells.len() / count,
            (number + 1) * cells.len() / count,
        );
        let mut amounts: Vec<(Kind, u64)> = Vec::new();
        for cell in &cells[first..end] {
            for (kind, bytes) in cell.amounts() {
                match amounts.iter_mut().find(|(other, _)| *other == kind) {
                    Some((_, sum)) => *sum += bytes,
                    None => amounts.push((kind, bytes)),
                }
            }
        }
        let start_bytes = first as u64 * cell_bytes;
        let len_bytes = (end as u64 * cell_bytes).min(total_bytes) - start_bytes;
        let used: u64 = amounts.iter().map(|(_, bytes)| bytes).sum();
        // Of equals, the first counts.
        let most = amounts.iter().rev().max_by_key(|(_, bytes)| *bytes);
        Drawn {
            kind: match most {
                Some((kind, bytes)) if *bytes > 0 => *kind,
                _ => Kind::Empty,
            },
            filled: (used as f64 / len_bytes.max(1) as f64).min(1.0),
            start_bytes,
            len_bytes,
        }
    };
    (0..count).map(drawn).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extent(len_bytes: u64, depth: u32, data: bool) -> Extent {
        let kind = if data {
            ExtentKind::Data
        } else {
            ExtentKind::Zero
        };
        Extent {
            depth,
            ..Extent::new(len_bytes, kind)
        }
    }

    #[test]
    fn extents_fall_into_cells_and_cells_are_drawn() {
        let mut picture = Picture::new(4, 4096);
        picture.add(512, &extent(1024, 0, true));
        picture.add(2048, &extent(1024, 1, true));
        picture.add(3072, &extent(9999, 0, false));
        let drawn = draw(&picture.cells, picture.cell_bytes, 4096, 100);
        let seen: Vec<_> = drawn.iter().map(|cell| (cell.kind, cell.filled)).collect();
        let expected = [
            (Kind::Data, 0.5),
            (Kind::Data, 0.5),
            (Kind::Below, 1.0),
            (Kind::Zero, 1.0),
        ];
        assert_eq!(seen, expected);
        let halves = draw(&picture.cells, picture.cell_bytes, 4096, 2);
        assert_eq!(halves[1].kind, Kind::Below, "of equals the first");
        assert_eq!(halves[1].start_bytes, 2048);
        assert!(draw::<GuestCell>(&[], 512, 0, 10).is_empty());
        assert!(Picture::new(4, 0).cells.is_empty());
    }
}
