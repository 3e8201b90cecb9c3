//! Owned, aligned memory for requests.
//!
//! A [`Buffer`] owns its range of one block of memory. It can be split into disjoint
//! pieces that travel to different requests and be joined again without a copy.
//!
//! Invariant: no two live buffers cover the same byte, so `&mut [u8]` of one
//! never aliases another.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use smallvec::SmallVec;

pub use crate::block::ALIGNMENT_BYTES;
use crate::block::Block;
use crate::pool;

/// The pieces of a vectored request, in order.
pub type Buffers = SmallVec<[Buffer; 1]>;

/// An owned range of aligned memory.
pub struct Buffer {
    block: Option<Arc<Block>>,
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a buffer owns its bytes like a `Box<[u8]>`.
unsafe impl Send for Buffer {}
// SAFETY: `&Buffer` gives only `&[u8]`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// A buffer of `len_bytes` zero bytes, aligned to [`ALIGNMENT_BYTES`].
    pub fn zeroed(len_bytes: usize) -> Self {
        let (mut buffer, is_fresh) = Self::allocate(len_bytes);
        if !is_fresh {
            buffer.fill(0);
        }
        buffer
    }

    /// A buffer for reading into: `len_bytes` bytes of unspecified content, which
    /// may be that of an earlier request of this thread. Whoever does not fill
    /// all of it must not pass it on.
    pub fn for_read(len_bytes: usize) -> Self {
        let (mut buffer, _) = Self::allocate(len_bytes);
        if cfg!(debug_assertions) {
            // So that tests see who takes the content for zeroes.
            buffer.fill(0xa7);
        }
        buffer
    }

    /// A buffer, and whether its memory is fresh, and so zero.
    fn allocate(len_bytes: usize) -> (Self, bool) {
        if len_bytes == 0 {
            let start = NonNull::dangling();
            return (
                Buffer {
                    block: None,
                    start,
                    len_bytes,
                },
                true,
            );
        }
        let block_bytes = pool::block_bytes(len_bytes);
        let kept = pool::take(block_bytes);
        let is_fresh = kept.is_none();
        let block = kept.unwrap_or_else(|| new_block(block_bytes));
        let buffer = Buffer {
            start: block.start(),
            block: Some(block),
            len_bytes,
        };
        (buffer, is_fresh)
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::for_read(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len_bytes
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len_bytes == 0
    }

    /// Splits off and returns the first `at_bytes` bytes; `self` keeps the rest.
    ///
    /// # Panics
    /// If `at_bytes` is beyond the end.
    #[must_use]
    pub fn split_to(&mut self, at_bytes: usize) -> Buffer {
        assert!(
            at_bytes <= self.len_bytes,
            "split at {at_bytes} of {}",
            self.len_bytes
        );
        let head = Buffer {
            block: self.block.clone(),
            start: self.start,
            len_bytes: at_bytes,
        };
        // SAFETY: `at_bytes` is within this buffer's range.
        self.start = unsafe { self.start.add(at_bytes) };
        self.len_bytes -= at_bytes;
        head
    }

    /// Drops all bytes from `len_bytes` on.
    pub fn truncate(&mut self, len_bytes: usize) {
        self.len_bytes = self.len_bytes.min(len_bytes);
    }

    /// Joins two buffers that lie side by side in one block, as
    /// [`Buffer::split_to`] leaves them; gives both back if they do not.
    ///
    /// # Errors
    /// Both buffers as they were, if they do not lie side by side.
    pub fn join(self, next: Buffer) -> std::result::Result<Buffer, (Buffer, Buffer)> {
        if self.is_empty() {
            return Ok(next);
        }
        if next.is_empty() {
            return Ok(self);
        }
        let adjacent = match (&self.block, &next.block) {
            (Some(a), Some(b)) => {
                Arc::ptr_eq(a, b)
                    && self.start.as_ptr().wrapping_add(self.len_bytes) == next.start.as_ptr()
            }
            _ => false,
        };
        if !adjacent {
            return Err((self, next));
        }
        let mut joined = self;
        joined.len_bytes += next.len_bytes;
        Ok(joined)
    }

    /// Joins the pieces of a split buffer in order, copying only if they do not
    /// lie side by side.
    pub fn join_all(pieces: impl IntoIterator<Item = Buffer>) -> Buffer {
        let mut joined = Buffer::zeroed(0);
        for piece in pieces {
            joined = match joined.join(piece) {
                Ok(whole) => whole,
                Err((a, b)) => {
                    let mut copy = Buffer::for_read(a.len() + b.len());
                    copy[..a.len()].copy_from_slice(&a);
                    copy[a.len()..].copy_from_slice(&b);
                    copy
                }
            };
        }
        joined
    }

    /// Whether all bytes are zero.
    pub fn is_zero(&self) -> bool {
        is_zero(self)
    }

    /// Lends the bytes to a request that may fail and drop them: once nothing of the returned
    /// buffer is left, [`Loan::take_back`] returns the bytes as they are then.
    pub fn lend(mut self) -> (Buffer, Loan) {
        let (start, len_bytes) = (self.start, self.len_bytes);
        let block = self
            .block
            .take()
            .map(|block| Arc::new(Block::lent_from(block)));
        let loan = Loan {
            block: block.clone(),
            start,
            len_bytes,
        };
        let lent = Buffer {
            block,
            start,
            len_bytes,
        };
        (lent, loan)
    }
}

/// What [`Buffer::lend`] keeps of a buffer.
///
/// Invariant: its block is shared with pieces of the lent buffer alone, so that the last one of
/// them is gone where nothing else refers to the block.
pub struct Loan {
    block: Option<Arc<Block>>,
    start: NonNull<u8>,
    len_bytes: usize,
}

// SAFETY: a loan gives no access to bytes; the buffer that it becomes is `Send`.
unsafe impl Send for Loan {}
// SAFETY: as above; `&Loan` offers nothing.
unsafe impl Sync for Loan {}

impl Loan {
    /// The buffer that was lent, which the request has returned: it joins the pieces again that it
    /// was split from.
    pub fn end(self, returned: Buffer) -> Buffer {
        let is_whole = returned.start == self.start && returned.len_bytes == self.len_bytes;
        // This loan and what was returned; nobody else can make more of these.
        let is_last = |lent| Arc::strong_count(lent) == 2;
        if !is_whole || !self.block.as_ref().is_none_or(is_last) {
            return returned;
        }
        drop(returned);
        self.take_back().expect("no other piece is left")
    }

    /// The buffer that was lent; `None` while any piece of it is still in use.
    pub fn take_back(mut self) -> Option<Buffer> {
        let block = match &mut self.block {
            None => None,
            Some(lent) => Some(Arc::get_mut(lent)?.take_lender()?),
        };
        Some(Buffer {
            block,
            start: self.start,
            len_bytes: self.len_bytes,
        })
    }
}

impl fmt::Debug for Loan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Loan({} bytes)", self.len_bytes)
    }
}

/// A block of zeroes; others that come with it are kept for later.
fn new_block(block_bytes: usize) -> Arc<Block> {
    let mut blocks = Block::zeroed(block_bytes).map(Arc::new);
    let first = blocks.next().expect("at least one block");
    blocks.for_each(pool::give);
    first
}

/// Whether all bytes of `bytes` are zero; stops early at the first that is not.
pub fn is_zero(bytes: &[u8]) -> bool {
    let mut chunks = bytes.chunks_exact(256);
    chunks
        .by_ref()
        .all(|chunk| chunk.iter().fold(0, |all, byte| all | byte) == 0)
        && chunks.remainder().iter().all(|&byte| byte == 0)
}

/// Total length in bytes of a vectored request.
pub fn total_len(buffers: &[Buffer]) -> u64 {
    buffers.iter().map(|b| b.len() as u64).sum()
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is initialised, owned by `self` and kept alive by
        // `block`; for an empty buffer any dangling aligned pointer will do.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len_bytes) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the ranges of live buffers are disjoint, so the
        // exclusive borrow of `self` is exclusive for the bytes too.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len_bytes) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(mut block) = self.block.take() else {
            return;
        };
        // The last buffer of the block: the memory is free. (Two that are dropped
        // at the same moment both see the other; then the block just goes.)
        let Some(last) = Arc::get_mut(&mut block) else {
            return;
        };
        match last.take_lender() {
            None => pool::give(block),
            Some(mut lender) => {
                if Arc::get_mut(&mut lender).is_some() {
                    pool::give(lender);
                }
            }
        }
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buffer({} bytes)", self.len_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_and_joins_without_a_copy() {
        let mut whole = Buffer::zeroed(8192);
        let address = whole.as_ptr();
        let mut head = whole.split_to(512);
        head.fill(1);
        whole.fill(2);
        let joined = Buffer::join_all([head, whole]);
        assert_eq!(joined.as_ptr(), address);
        assert_eq!(joined.len(), 8192);
        assert_eq!((joined[511], joined[512]), (1, 2));
    }

    #[test]
    fn a_lent_buffer_comes_back_once_no_piece_of_it_is_in_use() {
        let mut whole = Buffer::zeroed(8192);
        whole.fill(3);
        let rest = whole.split_to(4096);
        let address = whole.as_ptr();
        let (mut lent, loan) = whole.lend();
        let piece = lent.split_to(512);
        drop(lent);
        assert!(loan.take_back().is_none(), "a piece is in use");
        drop(piece);
        let (lent, loan) = rest.lend();
        drop(lent);
        let back = loan.take_back().expect("nothing is in use");
        assert_eq!((back.len(), back[0]), (4096, 3));
        assert_eq!(back.as_ptr().wrapping_add(4096), address);
        let (lent, loan) = Buffer::zeroed(0).lend();
        drop(lent);
        assert!(loan.take_back().is_some_and(|empty| empty.is_empty()));
    }

    #[test]
    fn the_memory_of_a_loan_is_used_again_after_its_last_piece() {
        let whole = Buffer::zeroed(4096);
        let address = whole.as_ptr();
        let (lent, loan) = whole.lend();
        drop(loan);
        assert_ne!(Buffer::zeroed(4096).as_ptr(), address);
        drop(lent);
        assert_eq!(Buffer::zeroed(4096).as_ptr(), address);
    }

    #[test]
    fn joins_strangers_with_a_copy() {
        let joined = Buffer::join_all([Buffer::copy_of(b"ab"), Buffer::copy_of(b"c")]);
        assert_eq!(&joined[..], b"abc");
    }

    #[test]
    fn zero_detection_sees_every_position() {
        for len in [0, 1, 255, 256, 257, 1000] {
            let mut buffer = Buffer::zeroed(len);
            assert!(buffer.is_zero());
            for at in 0..len {
                buffer[at] = 1;
                assert!(!buffer.is_zero(), "{at} of {len}");
                buffer[at] = 0;
            }
        }
    }

    #[test]
    fn allocations_are_aligned() {
        assert_eq!(Buffer::for_read(512).as_ptr() as usize % ALIGNMENT_BYTES, 0);
    }
}
