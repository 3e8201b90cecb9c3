//! What requests a [`super::DebugStorage`] lets through, and how others are cut
//! to fit. Pure arithmetic.

use std::ops::Range;

/// Limits in bytes; 0 means none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Requests are aligned to this; a power of two.
    pub align_bytes: u64,
    /// The most that one read or write carries.
    pub max_transfer_bytes: u64,
    /// Zeroes are written by multiples of this.
    pub opt_write_zero_bytes: u64,
    /// The most zeroes that one request writes.
    pub max_write_zero_bytes: u64,
    /// Space is given back by multiples of this.
    pub opt_discard_bytes: u64,
    /// The most that one request gives back.
    pub max_discard_bytes: u64,
}

/// A part of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Made of whole units.
    Whole(Range<u64>),
    /// Smaller than a unit, or not aligned to it.
    Part(Range<u64>),
}

impl Limits {
    /// The first limit that cannot be kept beside the others, with its value, where
    /// requests of the storage below are aligned to `inner_align_bytes`.
    pub fn contradiction(&self, inner_align_bytes: u64) -> Option<(&'static str, u64)> {
        let too_large = |bytes: u64| bytes >= i32::MAX as u64;
        let own = self.align_bytes;
        if own != 0 && (too_large(own) || !own.is_power_of_two()) {
            return Some(("align", own));
        }
        let align = own.max(inner_align_bytes).max(1);
        let checks = [
            ("max-transfer", self.max_transfer_bytes, align),
            ("opt-write-zero", self.opt_write_zero_bytes, align),
            (
                "max-write-zero",
                self.max_write_zero_bytes,
                self.opt_write_zero_bytes.max(align),
            ),
            ("opt-discard", self.opt_discard_bytes, align),
            (
                "max-discard",
                self.max_discard_bytes,
                self.opt_discard_bytes.max(align),
            ),
        ];
        checks
            .into_iter()
            .find(|&(_, bytes, unit)| {
                bytes != 0 && (too_large(bytes) || !bytes.is_multiple_of(unit))
            })
            .map(|(name, bytes, _)| (name, bytes))
    }

    /// Whether one read or write may carry so much.
    pub(super) fn fits_transfer(&self, len_bytes: u64) -> bool {
        self.max_transfer_bytes == 0 || len_bytes <= self.max_transfer_bytes
    }

    /// An aligned range in pieces that one read or write may carry.
    pub(super) fn transfers(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        chunks(range, self.max_transfer_bytes)
    }

    /// A range to be zeroed.
    pub(super) fn zeroes(&self, range: Range<u64>) -> Vec<Piece> {
        let unit = self.opt_write_zero_bytes.max(self.align_bytes);
        pieces(range, unit, self.max_write_zero_bytes)
    }

    /// A range to be given back.
    pub(super) fn discards(&self, range: Range<u64>) -> Vec<Piece> {
        let unit = self.opt_discard_bytes.max(self.align_bytes);
        pieces(range, unit, self.max_discard_bytes)
    }
}

/// A range in pieces of at most `max` bytes (any number where that is 0).
fn chunks(range: Range<u64>, max: u64) -> impl Iterator<Item = Range<u64>> {
    let max = if max == 0 { u64::MAX } else { max };
    let mut at = range.start;
    std::iter::from_fn(move || {
        if at >= range.end {
            return None;
        }
        let piece = at..range.end.min(at.saturating_add(max));
        at = piece.end;
        Some(piece)
    })
}

/// A range as whole units of at most `max` bytes, with what is left before and after.
fn pieces(range: Range<u64>, unit: u64, max: u64) -> Vec<Piece> {
    let unit = unit.max(1);
    let start = range.start.next_multiple_of(unit).min(range.end);
    let end = (range.end - range.end % unit).max(start);
    let mut all = Vec::new();
    if range.start < start {
        all.push(Piece::Part(range.start..start));
    }
    all.extend(chunks(start..end, max).map(|piece| match end - start {
        len if len < unit => Piece::Part(piece),
        _ => Piece::Whole(piece),
    }));
    if end < range.end {
        all.push(Piece::Part(end..range.end));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictions_are_named_in_order() {
        let limits = |align, transfer, opt, max| Limits {
            align_bytes: align,
            max_transfer_bytes: transfer,
            opt_write_zero_bytes: opt,
            max_write_zero_bytes: max,
            ..Limits::default()
        };
        assert_eq!(limits(0, 7, 0, 0).contradiction(1), None);
        assert_eq!(limits(3, 7, 0, 0).contradiction(1), Some(("align", 3)));
        assert_eq!(
            limits(512, 7, 0, 0).contradiction(1),
            Some(("max-transfer", 7))
        );
        assert_eq!(
            limits(0, 0, 64, 96).contradiction(1),
            Some(("max-write-zero", 96))
        );
        assert_eq!(
            limits(1 << 31, 0, 0, 0).contradiction(1),
            Some(("align", 1 << 31))
        );
    }

    #[test]
    fn ranges_are_cut_into_whole_units_and_rests() {
        use Piece::{Part, Whole};
        assert_eq!(pieces(0..100, 1, 0), [Whole(0..100)]);
        assert_eq!(pieces(5..8, 16, 0), [Part(5..8)]);
        assert_eq!(
            pieces(10..70, 16, 32),
            [Part(10..16), Whole(16..48), Whole(48..64), Part(64..70)]
        );
        assert_eq!(pieces(16..32, 16, 0), [Whole(16..32)]);
        assert_eq!(pieces(4..4, 16, 0), []);
    }
}
