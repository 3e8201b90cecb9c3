//! Blocks: the memory of buffers, as it comes from the allocator.
//!
//! An allocator keeps its own notes in front of what it hands out. In front of an aligned
//! page these take another page: small blocks are made several at a time, side by side.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ptr::NonNull;
use std::sync::Arc;

/// Alignment in bytes of every allocation: enough for direct I/O.
pub const ALIGNMENT_BYTES: usize = 4096;

/// Blocks that are smaller are made together up to this length.
const SLAB_BYTES: usize = 32 << 10;

/// One block of memory, initialised.
pub(crate) struct Block {
    start: NonNull<u8>,
    len_bytes: usize,
    /// What it is a part of, with nobody else's bytes in it.
    slab: Arc<Slab>,
    /// The block whose memory this one lends out; it is not used otherwise meanwhile.
    lender: Option<Arc<Block>>,
}

/// A piece of the allocator's memory, which goes back to it with the last block.
struct Slab {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a slab is plain memory; access goes through `Buffer`s, whose ranges are disjoint.
unsafe impl Send for Slab {}
// SAFETY: as above; `Slab` itself offers no access through `&self`.
unsafe impl Sync for Slab {}
// SAFETY: as for `Slab`.
unsafe impl Send for Block {}
// SAFETY: as for `Slab`.
unsafe impl Sync for Block {}

impl Block {
    /// Blocks of zeroes of `len_bytes` each, at least one.
    ///
    /// # Panics
    /// If `len_bytes` is zero, or more than there can be.
    pub(crate) fn zeroed(len_bytes: usize) -> impl Iterator<Item = Block> {
        assert!(len_bytes > 0, "a block has bytes");
        let padded_bytes = len_bytes.next_multiple_of(ALIGNMENT_BYTES);
        let count = (SLAB_BYTES / padded_bytes).max(1);
        let slab = Arc::new(Slab::zeroed(padded_bytes * count));
        (0..count).map(move |number| Block {
            // SAFETY: the slab has `count` times so many bytes.
            start: unsafe { slab.start.add(number * padded_bytes) },
            len_bytes,
            slab: slab.clone(),
            lender: None,
        })
    }

    /// A block over the same memory, which keeps `lender` alive.
    pub(crate) fn lent_from(lender: Arc<Block>) -> Block {
        Block {
            start: lender.start,
            len_bytes: lender.len_bytes,
            slab: lender.slab.clone(),
            lender: Some(lender),
        }
    }

    /// The block whose memory this one lends out, if it does; it lends nothing afterwards.
    pub(crate) fn take_lender(&mut self) -> Option<Arc<Block>> {
        self.lender.take()
    }

    /// Its first byte, aligned to [`ALIGNMENT_BYTES`].
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Length in bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.len_bytes
    }
}

impl Slab {
    fn zeroed(len_bytes: usize) -> Self {
        let layout = Layout::from_size_align(len_bytes, ALIGNMENT_BYTES)
            .unwrap_or_else(|_| panic!("buffer of {len_bytes} bytes"));
        // SAFETY: the layout has a non-zero size, as the only caller sees to.
        let raw = unsafe { alloc_zeroed(layout) };
        let Some(start) = NonNull::new(raw) else {
            handle_alloc_error(layout)
        };
        Slab { start, layout }
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: `start` came from the allocator with this very layout.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_blocks_lie_side_by_side_and_large_ones_alone() {
        let blocks: Vec<Block> = Block::zeroed(4096).collect();
        let starts: Vec<usize> = blocks.iter().map(|b| b.start().as_ptr() as usize).collect();
        assert_eq!(starts.len(), 8);
        assert!(starts.windows(2).all(|pair| pair[1] - pair[0] == 4096));
        assert!(starts[0].is_multiple_of(ALIGNMENT_BYTES));
        assert_eq!(Block::zeroed(32 << 10).count(), 1);
        let odd: Vec<Block> = Block::zeroed((1 << 20) + 1).collect();
        assert_eq!((odd.len(), odd[0].len_bytes()), (1, (1 << 20) + 1));
    }
}
