//! [`Bitmaps`]: which sectors of a block an image holds, for blocks that it holds a part of.
//!
//! A cache of what is on disk: what was not used for long is read again.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;

/// What the bitmaps of one image take of memory, in bytes.
const MAX_BYTES: usize = 16 << 20;

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Bitmaps(Mutex<Kept>);

#[derive(Debug, Default)]
struct Kept {
    /// By block, with the moment of the last use.
    bitmaps: HashMap<u64, (u64, Arc<[u8]>)>,
    moment: u64,
    bytes: usize,
}

impl Bitmaps {
    /// The bitmap of a block, if it is here.
    pub(crate) fn get(&self, block: u64) -> Option<Arc<[u8]>> {
        let mut kept = self.0.lock();
        kept.moment += 1;
        let moment = kept.moment;
        let (used, bitmap) = kept.bitmaps.get_mut(&block)?;
        *used = moment;
        Some(bitmap.clone())
    }

    /// Keeps a bitmap; if there are too many, the half goes that was not used for longest.
    pub(crate) fn put(&self, block: u64, bitmap: &[u8]) {
        let mut kept = self.0.lock();
        kept.moment += 1;
        let moment = kept.moment;
        kept.bytes += bitmap.len();
        if let Some((_, old)) = kept.bitmaps.insert(block, (moment, bitmap.into())) {
            kept.bytes -= old.len();
        }
        if kept.bytes <= MAX_BYTES {
            return;
        }
        let mut uses: Vec<u64> = kept.bitmaps.values().map(|(used, _)| *used).collect();
        let middle = uses.len() / 2;
        let (_, limit, _) = uses.select_nth_unstable(middle);
        let limit = *limit;
        kept.bitmaps.retain(|_, (used, _)| *used >= limit);
        kept.bytes = kept.bitmaps.values().map(|(_, bitmap)| bitmap.len()).sum();
    }

    /// Drops the bitmap of a block that changes.
    pub(crate) fn forget(&self, block: u64) {
        let mut kept = self.0.lock();
        if let Some((_, old)) = kept.bitmaps.remove(&block) {
            kept.bytes -= old.len();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_last_is_kept() {
        let bitmaps = Bitmaps::default();
        let bitmap = vec![1; 64 << 10];
        for block in 0..300 {
            bitmaps.put(block, &bitmap);
            assert!(bitmaps.get(block).is_some());
            assert!(bitmaps.get(0).is_some());
        }
        assert!(bitmaps.get(1).is_none());
        assert!(bitmaps.0.lock().bytes <= MAX_BYTES);
        bitmaps.put(0, &bitmap);
        bitmaps.forget(0);
        assert!(bitmaps.get(0).is_none());
        let kept = bitmaps.0.lock();
        assert_eq!(kept.bytes, kept.bitmaps.len() * bitmap.len());
    }
}
