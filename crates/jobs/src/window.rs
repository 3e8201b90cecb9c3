//! [`ReorderWindow`]: pieces of a copy that change places, so that a fragmented source is read in
//! the order of its file.
//!
//! Only pieces that the target holds already change places: written over where they lie,
//! they move nothing in it. All others keep the order of their offsets, in which the
//! target allocates its clusters. Pieces do not overlap, so that the result is the same.

use std::collections::VecDeque;

use vellum::BlockDevice;

use crate::piece::{Content, Piece};

/// So many pieces stand in a window. Reading a file in its order takes half of the time of
/// reading it in pieces of a cluster or two, but only where neighbours meet; the pieces of
/// a full window are 2 MiB of memory.
const WINDOW_PIECES: usize = 32 << 10;

/// Where a piece lies in the source: the layer that holds it, and the offset in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SourceLocation {
    layer: u32,
    host_offset_bytes: u64,
}

/// Pieces that wait to be copied.
#[derive(Debug, Default)]
pub(crate) struct ReorderWindow {
    /// Those that keep their places.
    in_order: VecDeque<Piece>,
    /// Those that do not; sorted when the window is closed.
    by_place: VecDeque<(SourceLocation, Piece)>,
}

impl ReorderWindow {
    /// Whether another piece may be put in.
    pub(crate) fn has_room(&self) -> bool {
        self.in_order.len() + self.by_place.len() < WINDOW_PIECES
    }

    /// Puts a piece in: at its place, if it has one.
    pub(crate) fn put(&mut self, piece: Piece, place: Option<SourceLocation>) {
        match place {
            Some(place) => self.by_place.push_back((place, piece)),
            None => self.in_order.push_back(piece),
        }
    }

    /// No piece comes any more before all are taken.
    pub(crate) fn close(&mut self) {
        let by_place = self.by_place.make_contiguous();
        by_place.sort_by_key(|(place, _)| *place);
    }

    /// The next piece to copy.
    pub(crate) fn take(&mut self) -> Option<Piece> {
        let in_order = self.in_order.pop_front();
        in_order.or_else(|| self.by_place.pop_front().map(|(_, piece)| piece))
    }
}

/// Where a piece lies in its source's file, if the target holds all of it already. What
/// cannot be found out makes the copy fail later, in order.
pub(crate) async fn place_of_overwrite(
    source: &dyn BlockDevice,
    target: &dyn BlockDevice,
    piece: &Piece,
) -> Option<SourceLocation> {
    if piece.content != Content::Data {
        return None;
    }
    let extent = source.block_status(piece.source_offset_bytes, piece.len_bytes, u32::MAX);
    let extent = extent.await.ok()?;
    let host = extent.host?;
    let held = target.block_status(piece.offset_bytes, piece.len_bytes, 0);
    let held = held.await.ok()?;
    let as_is = held.kind.is_present() && !held.kind.is_compressed();
    let in_place = as_is && held.len_bytes >= piece.len_bytes;
    in_place.then_some(SourceLocation {
        layer: extent.depth,
        host_offset_bytes: host.offset_bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(offset_bytes: u64) -> Piece {
        Piece {
            offset_bytes,
            len_bytes: 1,
            content: Content::Data,
            source: 0,
            source_offset_bytes: offset_bytes,
            ends_extent: true,
        }
    }

    #[test]
    fn pieces_with_a_place_follow_the_others_in_the_order_of_their_files() {
        let place = |layer, host_offset_bytes| SourceLocation {
            layer,
            host_offset_bytes,
        };
        let mut window = ReorderWindow::default();
        window.put(piece(0), Some(place(1, 10)));
        window.put(piece(1), None);
        window.put(piece(2), Some(place(0, 30)));
        window.put(piece(3), Some(place(0, 20)));
        window.put(piece(4), None);
        window.close();
        let taken = std::iter::from_fn(|| window.take()).map(|piece| piece.offset_bytes);
        assert_eq!(taken.collect::<Vec<_>>(), [1, 4, 3, 2, 0]);
    }

    #[test]
    fn a_window_is_full_at_its_size() {
        let mut window = ReorderWindow::default();
        for at in 0..WINDOW_PIECES as u64 {
            assert!(window.has_room());
            window.put(piece(at), None);
        }
        assert!(!window.has_room());
    }
}
