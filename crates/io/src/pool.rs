//! Memory of dropped buffers, kept for the next ones of the same thread.
//!
//! A 4K request should cost neither an allocation nor 4K of zeroing. The pool is
//! bounded, per thread, and holds initialised memory only: what comes out of it
//! has old content, so nobody may show a byte that no read has filled.

use std::cell::RefCell;
use std::sync::Arc;

use crate::block::{ALIGNMENT_BYTES, Block};

/// Blocks have a power of two of bytes from [`ALIGNMENT_BYTES`] up; so many sizes
/// are kept, which makes the largest 2 MiB.
const CLASSES: usize = 10;

/// What a thread keeps at most.
const MAX_POOLED_BYTES: usize = 4 << 20;

struct Pool {
    free: [Vec<Arc<Block>>; CLASSES],
    pooled_bytes: usize,
}

thread_local! {
    static POOL: RefCell<Pool> =
        const { RefCell::new(Pool { free: [const { Vec::new() }; CLASSES], pooled_bytes: 0 }) };
}

/// The size of the block that a buffer of `len_bytes` gets: a class's, or its own
/// if it is too large for one.
pub(crate) fn block_bytes(len_bytes: usize) -> usize {
    if len_bytes > ALIGNMENT_BYTES << (CLASSES - 1) {
        return len_bytes;
    }
    len_bytes.next_power_of_two().max(ALIGNMENT_BYTES)
}

/// The class of blocks of just this size, if there is one.
fn class_of(block_bytes: usize) -> Option<usize> {
    let units = block_bytes / ALIGNMENT_BYTES;
    let class = units.checked_ilog2()? as usize;
    (block_bytes == ALIGNMENT_BYTES << class && class < CLASSES).then_some(class)
}

/// A kept block of a size that [`block_bytes`] gave.
pub(crate) fn take(block_bytes: usize) -> Option<Arc<Block>> {
    let class = class_of(block_bytes)?;
    // In a thread that ends the pool may be gone already.
    POOL.try_with(|pool| {
        let mut pool = pool.borrow_mut();
        let block = pool.free[class].pop()?;
        pool.pooled_bytes -= block_bytes;
        Some(block)
    })
    .ok()?
}

/// Keeps a block that nobody else refers to, if there is space.
pub(crate) fn give(block: Arc<Block>) {
    let bytes = block.len_bytes();
    let Some(class) = class_of(bytes) else { return };
    let _ = POOL.try_with(|pool| {
        let mut pool = pool.borrow_mut();
        if pool.pooled_bytes + bytes <= MAX_POOLED_BYTES {
            pool.pooled_bytes += bytes;
            pool.free[class].push(block);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Buffer;

    #[test]
    fn sizes_round_up_to_classes() {
        assert_eq!(block_bytes(1), 4096);
        assert_eq!(block_bytes(4097), 8192);
        assert_eq!(block_bytes(2 << 20), 2 << 20);
        assert_eq!(block_bytes((2 << 20) + 1), (2 << 20) + 1);
        assert_eq!((class_of(4096), class_of(2 << 20)), (Some(0), Some(9)));
        assert_eq!(
            (class_of(12_288), class_of(4 << 20), class_of(100)),
            (None, None, None)
        );
    }

    #[test]
    fn memory_comes_back_once_and_zeroed_means_zero() {
        let mut buffer = Buffer::for_read(4096);
        buffer.fill(9);
        let address = buffer.as_ptr();
        let head = buffer.split_to(10);
        drop(buffer);
        let other = Buffer::for_read(4096);
        assert_ne!(other.as_ptr(), address, "half of it is still in use");
        drop(head);
        let again = Buffer::zeroed(4000);
        assert_eq!(again.as_ptr(), address);
        assert!(again.is_zero());
    }

    #[test]
    fn what_is_kept_is_bounded() {
        drop(
            (0..100)
                .map(|_| Buffer::for_read(256 << 10))
                .collect::<Vec<_>>(),
        );
        POOL.with(|pool| {
            let pool = pool.borrow();
            assert_eq!(pool.pooled_bytes, MAX_POOLED_BYTES);
            assert_eq!(pool.free[6].len(), MAX_POOLED_BYTES / (256 << 10));
        });
    }
}
