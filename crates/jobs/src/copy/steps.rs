//! How far a copy is, told in steps that do not depend on which of the pieces in flight
//! is over first: a piece counts once all before it are over, and one that ends a step
//! is told of.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;

use crate::piece::Piece;

/// A step is an extent of the source, or so much of a longer one.
const STEP_BYTES: u64 = 2 << 20;

/// A piece that counts for the progress.
#[derive(Debug, Clone, Copy)]
struct Part {
    len_bytes: u64,
    ends_step: bool,
    is_over: bool,
}

/// Pieces that have been started and do not count yet.
#[derive(Debug, Default)]
pub(super) struct ProgressSteps {
    parts: RefCell<VecDeque<Part>>,
    /// Ticket of the first of them.
    first: Cell<u64>,
    done_bytes: Cell<u64>,
}

impl ProgressSteps {
    /// The next ticket's piece, of which so many bytes count.
    pub(super) fn begin(&self, piece: &Piece, len_bytes: u64) {
        let end_bytes = piece.offset_bytes + piece.len_bytes;
        self.parts.borrow_mut().push_back(Part {
            len_bytes,
            ends_step: piece.ends_extent || end_bytes.is_multiple_of(STEP_BYTES),
            is_over: false,
        });
    }

    /// A piece is over. Returns the bytes done after each step that this ends.
    pub(super) fn end(&self, ticket: u64) -> Vec<u64> {
        let mut parts = self.parts.borrow_mut();
        if let Some(part) = parts.get_mut((ticket - self.first.get()) as usize) {
            part.is_over = true;
        }
        let mut told = Vec::new();
        while parts.front().is_some_and(|part| part.is_over)
            && let Some(part) = parts.pop_front()
        {
            self.first.set(self.first.get() + 1);
            self.done_bytes.set(self.done_bytes.get() + part.len_bytes);
            if part.ends_step && part.len_bytes > 0 {
                told.push(self.done_bytes.get());
            }
        }
        told
    }

    /// The bytes done when `inside_bytes` of a piece are, if all before it are over.
    pub(super) fn inside(&self, ticket: u64, inside_bytes: u64) -> Option<u64> {
        (ticket == self.first.get()).then(|| self.done_bytes.get() + inside_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::piece::Content;

    fn piece(offset_bytes: u64, ends_extent: bool) -> Piece {
        Piece {
            offset_bytes,
            len_bytes: 1 << 19,
            content: Content::Data,
            source: 0,
            source_offset_bytes: offset_bytes,
            ends_extent,
        }
    }

    #[test]
    fn steps_are_told_in_order_whatever_ends_first() {
        let steps = ProgressSteps::default();
        // Half an extent, its end, one that ends nothing, and the end of two megabytes.
        for (at, ends) in [
            (0, false),
            (1 << 19, true),
            (1 << 20, false),
            (3 << 19, false),
        ] {
            steps.begin(&piece(at, ends), 1 << 19);
        }
        steps.begin(&piece(2 << 20, true), 0);
        assert_eq!(steps.end(1), []);
        assert_eq!(steps.end(3), []);
        assert_eq!(steps.inside(2, 1), None);
        assert_eq!(steps.end(0), [1 << 20]);
        assert_eq!(steps.inside(2, 1), Some((1 << 20) + 1));
        assert_eq!(steps.end(2), [2 << 20]);
        assert_eq!(steps.end(4), [], "it holds nothing that counts");
    }

    #[test]
    fn no_step_is_left_out_where_the_first_piece_ends_last() {
        let steps = ProgressSteps::default();
        for at in 0..4 {
            steps.begin(&piece(at << 19, true), 1 << 19);
        }
        for ticket in [3, 1, 2] {
            assert_eq!(steps.end(ticket), []);
        }
        assert_eq!(steps.end(0), [1 << 19, 2 << 19, 3 << 19, 4 << 19]);
    }
}
