//! Who reads a block to write it meets nobody who changes it, and nobody waits for ever.

use super::*;
use crate::sync::{block_on, explore, join, point, thread};

/// Blocks and who is at work on them.
#[derive(Default)]
struct Blocks {
    alone: [AtomicUsize; 3],
    whole: [AtomicUsize; 3],
}

impl Blocks {
    fn change_part(&self, blocks: Range<u64>) {
        for block in blocks.clone() {
            let alone = self.alone[block as usize].fetch_add(1, Ordering::SeqCst);
            let whole = self.whole[block as usize].load(Ordering::SeqCst);
            assert_eq!((alone, whole), (0, 0), "block {block} is in use");
        }
        point();
        for block in blocks {
            self.alone[block as usize].fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn change_whole(&self, blocks: Range<u64>) {
        for block in blocks.clone() {
            self.whole[block as usize].fetch_add(1, Ordering::SeqCst);
            let alone = self.alone[block as usize].load(Ordering::SeqCst);
            assert_eq!(alone, 0, "block {block} is held");
        }
        point();
        for block in blocks {
            self.whole[block as usize].fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[test]
fn parts_and_whole_blocks_never_change_at_once() {
    explore(|| {
        let locks = Arc::new(RangeLocks::default());
        let blocks = Arc::new(Blocks::default());
        let parts = [0..2, 1..3].map(|range| {
            let (locks, blocks) = (locks.clone(), blocks.clone());
            thread::spawn(move || {
                let _held = block_on(locks.lock_exclusive(range.clone()));
                blocks.change_part(range);
            })
        });
        let wholes = [1..2, 0..3].map(|range| {
            let (locks, blocks) = (locks.clone(), blocks.clone());
            thread::spawn(move || {
                let _shared = block_on(locks.lock_shared(range.clone()));
                blocks.change_whole(range);
            })
        });
        join(parts);
        join(wholes);
        assert_eq!(locks.exclusive.load(Ordering::SeqCst), 0);
        assert_eq!(locks.untracked.load(Ordering::SeqCst), 0);
    });
}
