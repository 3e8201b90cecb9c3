//! [`Inflated`]: the block that was inflated last.

use parking_lot::Mutex;

use crate::inflations::Content;

/// What blocks that are being inflated may take in memory, in bytes. One may always be.
const INFLATED_BYTES: u64 = 64 << 20;

/// Blocks of this size that are inflated at a time.
pub(super) fn most_inflations(block_bytes: u64) -> usize {
    (INFLATED_BYTES / block_bytes.max(1)) as usize
}

/// The block that was inflated last: requests smaller than a block come in order more often than not.
#[derive(Debug, Default)]
pub(super) struct Inflated(Mutex<Last>);

#[derive(Debug, Default)]
struct Last {
    /// How often a block was forgotten.
    generation: u64,
    block: Option<(u64, Content)>,
}

impl Inflated {
    /// The content of a block, or else what [`Inflated::put`] has to be told with it.
    pub(super) fn get(&self, offset_bytes: u64) -> std::result::Result<Content, u64> {
        let last = self.0.lock();
        match &last.block {
            Some((at, content)) if *at == offset_bytes => Ok(content.clone()),
            _ => Err(last.generation),
        }
    }

    /// Keeps a block that was inflated since `generation`, unless some block has got another place since.
    pub(super) fn put(&self, generation: u64, offset_bytes: u64, content: &Content) {
        let mut last = self.0.lock();
        if last.generation == generation {
            last.block = Some((offset_bytes, content.clone()));
        }
    }

    /// Forgets whatever there is: all blocks were given up.
    pub(super) fn forget_all(&self) {
        let mut last = self.0.lock();
        last.generation += 1;
        last.block = None;
    }

    /// Forgets a block, whose place has changed.
    pub(super) fn forget(&self, offset_bytes: u64) {
        let mut last = self.0.lock();
        last.generation += 1;
        if last
            .block
            .as_ref()
            .is_some_and(|(at, _)| *at == offset_bytes)
        {
            last.block = None;
        }
    }
}
