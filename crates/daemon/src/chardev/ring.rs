//! [`Ring`]: the newest bytes that were written, until they are read.

use std::cell::RefCell;
use std::collections::VecDeque;

/// Bytes kept where nobody says how many.
pub(super) const DEFAULT_SIZE_BYTES: usize = 65536;
/// The largest one: its memory is taken as it fills.
pub(super) const MAX_SIZE_BYTES: usize = 64 << 20;

/// A buffer in memory whose oldest bytes make room for new ones.
#[derive(Debug)]
pub struct Ring {
    size_bytes: usize,
    bytes: RefCell<VecDeque<u8>>,
}

impl Ring {
    pub(super) fn new(size_bytes: usize) -> Self {
        Ring {
            size_bytes,
            bytes: RefCell::default(),
        }
    }

    /// Puts bytes in.
    pub fn write(&self, new: &[u8]) {
        let new = &new[new.len().saturating_sub(self.size_bytes)..];
        let mut bytes = self.bytes.borrow_mut();
        let too_many = (bytes.len() + new.len()).saturating_sub(self.size_bytes);
        bytes.drain(..too_many);
        bytes.extend(new);
    }

    /// Takes out the oldest bytes, at most so many.
    pub fn read(&self, most_bytes: usize) -> Vec<u8> {
        let mut bytes = self.bytes.borrow_mut();
        let count = most_bytes.min(bytes.len());
        bytes.drain(..count).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_bytes_are_kept_and_read_once() {
        let ring = Ring::new(4);
        ring.write(b"ab");
        ring.write(b"cde");
        assert_eq!(ring.read(3), b"bcd");
        ring.write(b"0123456789");
        assert_eq!(ring.read(100), b"6789");
        assert_eq!(ring.read(100), b"");
    }
}
