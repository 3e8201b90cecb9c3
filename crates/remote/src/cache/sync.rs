//! Makes blocks durable in the background, so that reads of them need no comparison.
//!
//! Invariants:
//! - A block counts as durable in this process once its bytes were whole and a sync that began after that has
//!   succeeded. After one that has failed none does: the kernel reports a loss once, and a later sync would succeed
//!   for the same bytes.
//! - The groups of blocks whose sync has failed are thrown out, so that no other process relies on them, and what is
//!   wanted of them is written again.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use vellum_io::Error;
use vellum_io::lane::sleep;
use vellum_io::spawn_to_completion;

use super::evict;
use super::fill::Cache;
use super::layout::{GROUP_BLOCKS, entries_of};

/// So often a group is tried that is being filled, and the pause between.
const TRIES: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

impl Cache {
    /// Has a task make durable what was stored or found, unless one does so.
    pub(super) fn sync_soon(self: &Arc<Self>) {
        {
            let mut state = self.state.lock();
            if state.is_syncing || state.unsynced.is_empty() {
                return;
            }
            state.is_syncing = true;
        }
        let (cache, task) = (self.clone(), self.task());
        spawn_to_completion(async move {
            cache.sync().await;
            drop(task);
        });
    }

    async fn sync(&self) {
        loop {
            let blocks = {
                let mut state = self.state.lock();
                if state.unsynced.is_empty() || self.has_lost.load(Ordering::Acquire) {
                    state.unsynced.clear();
                    state.is_syncing = false;
                    return;
                }
                std::mem::take(&mut state.unsynced)
            };
            match self.place.data.flush().await {
                Ok(()) => {
                    for (block, generation) in blocks {
                        self.table.set_durable(block, generation);
                    }
                }
                Err(error) => self.lose(blocks, &error).await,
            }
        }
    }

    /// Any of these blocks may be lost.
    async fn lose(&self, blocks: Vec<(u64, u64)>, error: &Error) {
        self.has_lost.store(true, Ordering::Release);
        self.say(&format!(
            "the disk of the cache may have lost what was written there ({error}): what it holds is compared with hashes \
             at each read, and fetched again if it is wrong"
        ));
        let groups: BTreeSet<u64> = blocks
            .iter()
            .map(|(block, _)| block / GROUP_BLOCKS)
            .collect();
        for group in groups {
            self.throw_out(group).await;
        }
    }

    /// Throws a group out, once nothing of it is being filled.
    async fn throw_out(&self, group: u64) {
        let entries = entries_of(&self.identity().group_blocks(group));
        let shared = self.table.shared();
        for _ in 0..TRIES {
            match self.place.try_claim_alone(&entries) {
                Ok(true) => {
                    shared.set_generation(group, shared.generation(group) | 1);
                    // If that fails, the group stays half gone, and the next reader of it repairs it.
                    let _ = evict::finish(&self.place, shared, group).await;
                    return self.place.release_alone(&entries);
                }
                Ok(false) => sleep(PAUSE).await,
                Err(_) => return,
            }
        }
    }
}
