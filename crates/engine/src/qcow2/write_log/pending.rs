//! [`Pending`]: what was changed since the last flush, as far as it goes to the log.

use std::ops::Range;

use vellum_format::write_log::{BLOCK_BYTES, LogId, RecordHead, RecordKind};
use vellum_io::Buffer;

/// A change of the guest's bytes.
#[derive(Debug)]
pub(super) struct Change {
    pub(super) kind: RecordKind,
    pub(super) guest_offset_bytes: u64,
    pub(super) len_bytes: u64,
    /// The bytes of [`RecordKind::Data`].
    pub(super) payload: Vec<u8>,
    /// The bytes are in the image, and the mapping was not changed for them.
    pub(super) is_in_place: bool,
}

impl Change {
    /// Bytes that were written.
    pub(super) fn data(guest_offset_bytes: u64, bytes: &[u8]) -> Change {
        Change {
            kind: RecordKind::Data,
            guest_offset_bytes,
            len_bytes: bytes.len() as u64,
            payload: bytes.to_vec(),
            is_in_place: false,
        }
    }

    /// As it is, but that its bytes may be in the image without a change of the mapping.
    pub(super) fn in_place(self, is_in_place: bool) -> Change {
        Change {
            is_in_place,
            ..self
        }
    }

    /// A range that was zeroed.
    pub(super) fn zeroes(kind: RecordKind, range: &Range<u64>) -> Change {
        Change {
            kind,
            guest_offset_bytes: range.start,
            len_bytes: range.end - range.start,
            payload: Vec::new(),
            is_in_place: false,
        }
    }
}

/// What the records of a batch say besides the changes.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchHead {
    pub(super) id: LogId,
    /// The newest superblock that is durable.
    pub(super) generation: u64,
    pub(super) batch: u64,
    /// Of the first record.
    pub(super) sequence: u64,
}

/// See the module's head.
#[derive(Debug, Default)]
pub(super) struct Pending {
    changes: Vec<Change>,
    record_bytes: u64,
    /// Something was changed that is not among the changes.
    is_incomplete: bool,
}

impl Pending {
    /// Adds a change, unless all of them would take more than `max_bytes`: then the next flush
    /// goes past the log.
    pub(super) fn note(&mut self, change: Change, max_bytes: u64) {
        if self.is_incomplete {
            return;
        }
        self.record_bytes += RecordHead::record_bytes(change.payload.len()) as u64;
        if self.record_bytes > max_bytes {
            return self.note_other();
        }
        self.changes.push(change);
    }

    /// Something else was changed: the next flush goes past the log.
    pub(super) fn note_other(&mut self) {
        *self = Pending {
            is_incomplete: true,
            ..Pending::default()
        };
    }

    /// Nothing was changed.
    pub(super) fn is_empty(&self) -> bool {
        self.changes.is_empty() && !self.is_incomplete
    }

    /// Everything that was changed can go to the log.
    pub(super) fn is_complete(&self) -> bool {
        !self.is_incomplete
    }

    /// Every change was made in place, and nothing else was changed.
    pub(super) fn is_in_place(&self) -> bool {
        self.is_complete() && self.changes.iter().all(|change| change.is_in_place)
    }

    /// The guest ranges that the changes are of, in bytes.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range<u64>> {
        self.changes
            .iter()
            .map(|change| change.guest_offset_bytes..change.guest_offset_bytes + change.len_bytes)
    }

    /// Length of the batch.
    pub(super) fn batch_bytes(&self) -> u64 {
        self.record_bytes.next_multiple_of(BLOCK_BYTES)
    }

    /// How many records that are.
    pub(super) fn count(&self) -> u64 {
        self.changes.len() as u64
    }

    /// The batch.
    pub(super) fn encode(&self, batch: &BatchHead) -> Buffer {
        let mut bytes = Vec::with_capacity(self.batch_bytes() as usize);
        for (index, change) in self.changes.iter().enumerate() {
            let head = RecordHead {
                id: batch.id,
                sequence: batch.sequence + index as u64,
                batch: batch.batch,
                kind: change.kind,
                ends_batch: index + 1 == self.changes.len(),
                generation: batch.generation,
                guest_offset_bytes: change.guest_offset_bytes,
                len_bytes: change.len_bytes,
            };
            head.encode(&change.payload, &mut bytes);
        }
        let mut buffer = Buffer::zeroed(self.batch_bytes() as usize);
        buffer[..bytes.len()].copy_from_slice(&bytes);
        buffer
    }
}
