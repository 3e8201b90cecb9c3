//! One change of a disk's size after the other, whoever makes them.
//!
//! A file that grows as it is written is made "at least so long": its size is looked at, and set. Between the two
//! nobody else may set it, or what they have written behind the end is cut off.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use async_lock::{Mutex, MutexGuardArc};
use vellum::{BlockDevice, DiskIdentity};

type Turns = HashMap<Option<DiskIdentity>, Weak<Mutex<()>>>;

/// The turns of the disks of a program; clones share them.
#[derive(Debug, Clone, Default)]
pub struct SizeTurns(Arc<parking_lot::Mutex<Turns>>);

impl PartialEq for SizeTurns {
    /// Whether both are the same turns.
    fn eq(&self, other: &SizeTurns) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SizeTurns {}

impl SizeTurns {
    /// Waits until nobody else changes the size of `device`, and holds that up until the turn is dropped.
    pub async fn take(&self, device: &dyn BlockDevice) -> MutexGuardArc<()> {
        let turn = self.of_disk(device.identity());
        turn.lock_arc().await
    }

    fn of_disk(&self, disk: Option<DiskIdentity>) -> Arc<Mutex<()>> {
        let mut turns = self.0.lock();
        if let Some(turn) = turns.get(&disk).and_then(Weak::upgrade) {
            return turn;
        }
        turns.retain(|_, turn| turn.strong_count() > 0);
        let turn = Arc::new(Mutex::new(()));
        turns.insert(disk, Arc::downgrade(&turn));
        turn
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
    use vellum::{Raw, RawOptions};
    use vellum_io::lane::block_on;
    use vellum_storage::MemStorage;

    use super::*;

    fn disk() -> Arc<Raw> {
        let file = Arc::new(MemStorage::with_bytes(vec![0; 512]));
        Raw::open(file, RawOptions::default()).expect("a device")
    }

    #[test]
    fn turns_of_a_disk_follow_each_other_and_other_disks_do_not_wait() {
        block_on(async {
            let (turns, one, other) = (SizeTurns::default(), disk(), disk());
            let held = turns.take(&*one).await;
            assert!(turns.clone().take(&*one).now_or_never().is_none());
            assert!(turns.take(&*other).now_or_never().is_some());
            drop(held);
            assert!(turns.take(&*one).now_or_never().is_some());
            assert!(turns.of_disk(None).try_lock().is_some());
            assert_eq!(turns.0.lock().len(), 1, "what nobody holds is forgotten");
        });
    }
}
