//! Payload memory that is used again: aligned allocations are too dear to make
//! one for every request.

use std::cell::{Cell, RefCell};

use vellum_io::Buffer;

const MIN_CLASS: u32 = 12;
const MAX_CLASS: u32 = 22;
const CLASSES: usize = (MAX_CLASS - MIN_CLASS + 1) as usize;
/// Most that a busy connection keeps in bytes.
const MAX_KEPT_BYTES: usize = 16 << 20;
/// Most that an idle connection keeps in bytes.
const MAX_IDLE_BYTES: usize = 2 << 20;

/// Buffers of one connection whose length is a power of two, 4 KiB to 4 MiB;
/// what has another length is allocated and freed as it comes.
#[derive(Debug, Default)]
pub(super) struct Pool {
    free: [RefCell<Vec<Buffer>>; CLASSES],
    kept_bytes: Cell<usize>,
}

fn class_of(len_bytes: usize) -> Option<usize> {
    let class = len_bytes.checked_ilog2()?;
    let fits = len_bytes.is_power_of_two() && (MIN_CLASS..=MAX_CLASS).contains(&class);
    fits.then(|| (class - MIN_CLASS) as usize)
}

impl Pool {
    /// A buffer of exactly `len_bytes` bytes with unspecified content of this
    /// connection: it must be overwritten before it is sent.
    pub(super) fn take(&self, len_bytes: usize) -> Buffer {
        let kept = class_of(len_bytes).and_then(|class| self.free[class].borrow_mut().pop());
        match kept {
            Some(buffer) => {
                self.kept_bytes.set(self.kept_bytes.get() - len_bytes);
                buffer
            }
            None => Buffer::for_read(len_bytes),
        }
    }

    /// Keeps a buffer for later, if it is worth it.
    pub(super) fn give(&self, buffer: Buffer) {
        let kept_bytes = self.kept_bytes.get() + buffer.len();
        if let Some(class) = class_of(buffer.len())
            && kept_bytes <= MAX_KEPT_BYTES
        {
            self.kept_bytes.set(kept_bytes);
            self.free[class].borrow_mut().push(buffer);
        }
    }

    /// Frees most of what is kept; for when nothing is in flight.
    pub(super) fn trim(&self) {
        for class in self.free.iter().rev() {
            while self.kept_bytes.get() > MAX_IDLE_BYTES {
                let Some(buffer) = class.borrow_mut().pop() else {
                    break;
                };
                self.kept_bytes.set(self.kept_bytes.get() - buffer.len());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_comes_back_and_is_bounded() {
        let pool = Pool::default();
        let buffer = pool.take(4096);
        let address = buffer.as_ptr();
        pool.give(buffer);
        assert_eq!(pool.take(4096).as_ptr(), address);
        for _ in 0..20 {
            pool.give(Buffer::for_read(4 << 20));
        }
        assert_eq!(pool.kept_bytes.get(), MAX_KEPT_BYTES);
        pool.trim();
        assert!(pool.kept_bytes.get() <= MAX_IDLE_BYTES);
        pool.give(Buffer::for_read(5000));
        assert_eq!(pool.take(5000).len(), 5000);
    }
}
