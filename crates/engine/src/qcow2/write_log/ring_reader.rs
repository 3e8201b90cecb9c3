//! [`RingReader`]: a ring as it is read after a crash, a piece at a time: a log is as long as its
//! superblock says, and that need not be true.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::write_log::{
    BLOCK_BYTES, MAX_RECORD_BYTES, RECORD_HEAD_BYTES, RING_START_BYTES, RecordHead,
};
use vellum_io::{Buffer, Result};
use vellum_storage::Storage;

use crate::qcow2::header::load::read_bytes;

/// What is read of the log at a time.
const READ_BYTES: u64 = 4 << 20;
/// A longer record there is not.
const WHOLE_RECORD_BYTES: u64 = RECORD_HEAD_BYTES as u64 + MAX_RECORD_BYTES;

/// Where a ring lies; its bytes are counted from its start.
#[derive(Debug, Clone)]
pub(super) struct RingPlace {
    batches: Arc<dyn Storage>,
    /// The offset of the ring's first byte in `batches`.
    start_bytes: u64,
    pub(super) len_bytes: u64,
}

impl RingPlace {
    /// The ring of a log of `log_len_bytes`, whose batches are read from the first of `batches` at
    /// offsets that begin at the second.
    pub(super) fn new(batches: (&Arc<dyn Storage>, u64), log_len_bytes: u64) -> RingPlace {
        RingPlace {
            batches: batches.0.clone(),
            start_bytes: batches.1 + RING_START_BYTES,
            len_bytes: log_len_bytes - RING_START_BYTES,
        }
    }

    /// The bytes of a range, which lies in the ring.
    pub(super) async fn read(&self, range: Range<u64>) -> Result<Buffer> {
        let at = self.start_bytes + range.start;
        read_bytes(&self.batches, at, range.end - range.start).await
    }
}

/// Looks for records, and keeps the bytes around the one that it looked at last.
#[derive(Debug)]
pub(super) struct RingReader<'a> {
    place: &'a RingPlace,
    window: Buffer,
    window_start: u64,
}

impl<'a> RingReader<'a> {
    pub(super) fn new(place: &'a RingPlace) -> RingReader<'a> {
        RingReader {
            place,
            window: Buffer::zeroed(0),
            window_start: 0,
        }
    }

    /// The record that begins at a byte of the ring, if one that is whole does.
    pub(super) async fn record(&mut self, at: u64) -> Result<Option<RecordHead>> {
        if at >= self.place.len_bytes {
            return Ok(None);
        }
        let end = self.place.len_bytes.min(at + WHOLE_RECORD_BYTES);
        let window_end = self.window_start + self.window.len() as u64;
        if at < self.window_start || end > window_end {
            let start = at / BLOCK_BYTES * BLOCK_BYTES;
            let end = self.place.len_bytes.min(start + READ_BYTES);
            // Not two at a time.
            self.window = Buffer::zeroed(0);
            self.window = self.place.read(start..end).await?;
            self.window_start = start;
        }
        let index = (at - self.window_start) as usize;
        Ok(self.window.get(index..).and_then(RecordHead::decode))
    }
}
