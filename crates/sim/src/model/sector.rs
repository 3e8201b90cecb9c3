//! What one guest sector may hold, and how bytes are cut at sectors.

use std::ops::Range;

use crate::failure::{Failure, FailureKind};
use crate::pattern::Value;
use crate::sparse_bytes::SECTOR_BYTES;

/// The model's clock: it advances with every beginning and end of a request.
pub type LogicalTime = u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Candidate {
    pub(super) value: Value,
    /// One bit for each running change that is included.
    pub(super) includes: u16,
}

/// A value that is no candidate any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SupersededValue {
    pub(super) candidate: Candidate,
    pub(super) at: LogicalTime,
    /// No power cut brings it back.
    pub(super) gone: bool,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Sector {
    pub(super) candidates: Vec<Candidate>,
    pub(super) retired: Vec<SupersededValue>,
    pub(super) changed_at: LogicalTime,
}

/// A sector that holds what it must not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The guest sector's number.
    pub sector: u64,
    /// What it holds and what it may hold.
    pub message: String,
}

impl From<Mismatch> for Failure {
    fn from(mismatch: Mismatch) -> Self {
        Failure::new(FailureKind::Content, mismatch.message)
    }
}

impl Sector {
    /// Retires the values of `before` that are no candidates any more.
    pub(super) fn retire(&mut self, before: &[Candidate], now: LogicalTime) {
        for &candidate in before {
            if !self
                .candidates
                .iter()
                .any(|kept| kept.value == candidate.value)
            {
                self.retired.push(SupersededValue {
                    candidate,
                    at: now,
                    gone: false,
                });
            }
        }
    }
}

/// The sectors that a byte range touches.
pub(super) fn sectors_of(range: &Range<u64>) -> Range<u64> {
    range.start / SECTOR_BYTES..range.end.div_ceil(SECTOR_BYTES)
}

/// Cuts bytes at sector boundaries: (sector, offset in bytes, bytes).
pub(super) fn pieces(offset_bytes: u64, bytes: &[u8]) -> impl Iterator<Item = (u64, u64, &[u8])> {
    let mut at = offset_bytes;
    let mut rest = bytes;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let take = rest.len().min((SECTOR_BYTES - at % SECTOR_BYTES) as usize);
        let (part, later) = rest.split_at(take);
        let piece = (at / SECTOR_BYTES, at, part);
        at += take as u64;
        rest = later;
        Some(piece)
    })
}
