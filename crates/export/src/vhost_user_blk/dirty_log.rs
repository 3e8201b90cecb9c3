//! Pages of a guest's memory that were written, told to a client that moves the guest elsewhere while it runs.
//!
//! The client copies the memory meanwhile, and copies those pages again. What a queue writes is told after it was
//! written: the last look of the client comes when the queue has stopped.

use std::cell::RefCell;
use std::collections::HashMap;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use vellum_io::Result;
use vellum_io::shared_memory::{SharedBuffer, SharedMemory};

use super::message::{LogArea, broken};

/// Bytes of a page, for which there is a bit.
const PAGE_BYTES: u64 = 4096;

/// Addresses of a guest with the lengths of what is written there.
pub(super) type Written = SmallVec<[(u64, u32); 4]>;

/// The client's bits, one for each page from the guest's address 0 on.
#[derive(Debug)]
pub(super) struct DirtyLog(SharedBuffer);

impl DirtyLog {
    /// Maps the bits, which are in `file`.
    ///
    /// # Errors
    /// If there are none, or they cannot be mapped.
    pub(super) fn map(area: LogArea, file: impl AsFd) -> Result<DirtyLog> {
        let mapped = SharedMemory::map(file.as_fd(), area.offset_bytes, area.len_bytes)?;
        let bits = Arc::new(mapped).range(0, area.len_bytes);
        let bits = bits.filter(|bits| !bits.is_empty());
        bits.map(DirtyLog)
            .ok_or_else(|| broken("a log of written memory without bytes"))
    }

    /// Tells that bytes were written. Pages that the client has no bits for are none of its guest's.
    fn mark(&self, address: u64, len_bytes: u64) {
        let Some(last_byte) = len_bytes.checked_sub(1) else {
            return;
        };
        let pages = address / PAGE_BYTES..=address.saturating_add(last_byte) / PAGE_BYTES;
        for page in pages {
            match usize::try_from(page / 8) {
                Ok(at) if at < self.0.len() => {
                    self.0.set_bits(at, 1 << (page % 8), Ordering::SeqCst);
                }
                _ => return,
            }
        }
    }
}

/// What a queue tells.
#[derive(Debug)]
pub(super) struct QueueDirtyLog {
    log: Arc<DirtyLog>,
    /// Where the guest has the used ring.
    used_ring: Option<u64>,
    /// What requests in flight write, by their heads.
    in_flight: RefCell<HashMap<u16, Written>>,
}

impl QueueDirtyLog {
    pub(super) fn new(log: Arc<DirtyLog>, used_ring: Option<u64>) -> QueueDirtyLog {
        QueueDirtyLog {
            log,
            used_ring,
            in_flight: RefCell::default(),
        }
    }

    /// A request begins that may write there.
    pub(super) fn begin(&self, head: u16, written: Written) {
        self.in_flight.borrow_mut().insert(head, written);
    }

    /// It has ended, and `used` bytes of the used ring were written for it: where in the ring, and how many.
    pub(super) fn end(&self, head: u16, used: impl IntoIterator<Item = (usize, usize)>) {
        let written = self.in_flight.borrow_mut().remove(&head);
        for (address, len_bytes) in written.unwrap_or_default() {
            self.log.mark(address, len_bytes.into());
        }
        if let Some(ring) = self.used_ring {
            for (at, len_bytes) in used {
                self.log
                    .mark(ring.saturating_add(at as u64), len_bytes as u64);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log_of(len_bytes: u64) -> DirtyLog {
        let file = tempfile::tempfile().expect("a file");
        file.set_len(len_bytes).expect("a length");
        let offset_bytes = 0;
        let area = LogArea {
            len_bytes,
            offset_bytes,
        };
        DirtyLog::map(area, file).expect("bits")
    }

    #[test]
    fn each_page_that_is_touched_has_its_bit_and_no_other() {
        let log = log_of(4);
        let mut bits = [0; 4];
        for (address, len_bytes) in [(0xfff, 1), (0x2fff, 2), (0x9000, 0), (0xf000, 0x1001)] {
            log.mark(address, len_bytes);
        }
        log.0.copy_to(0, &mut bits);
        assert_eq!(bits, [0b1101, 0b1000_0000, 1, 0]);
    }

    #[test]
    fn what_lies_beyond_the_bits_is_left_out() {
        let log = log_of(1);
        for (address, len_bytes) in [
            (0x7fff, 2),
            (u64::MAX, 1),
            (u64::MAX, u64::MAX),
            (1 << 40, 1),
        ] {
            log.mark(address, len_bytes);
        }
        let mut bits = [0; 1];
        log.0.copy_to(0, &mut bits);
        assert_eq!(bits, [0b1000_0000]);
    }
}
