//! [`Joined`]: work that many ask for and one does.
//!
//! Invariants:
//! - Whoever asks for work that somebody does already gets what that one gets. If that one gives up or
//!   fails, the next one tries.
//! - No lock is held while work is done.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use async_lock::OnceCell;
use parking_lot::Mutex;
use vellum::Result;

/// The work under way, by what tells it apart.
#[derive(Debug)]
pub(crate) struct Joined<K, T> {
    running: Mutex<HashMap<K, Weak<OnceCell<T>>>>,
}

impl<K, T> Default for Joined<K, T> {
    fn default() -> Self {
        Joined {
            running: Mutex::default(),
        }
    }
}

impl<K: Copy + Eq + Hash, T: Clone> Joined<K, T> {
    /// What `work` results in, which is awaited unless somebody does the same already. It has to look first whether
    /// there is still something to do: that one may just have ended.
    pub(crate) async fn join(&self, key: K, work: impl Future<Output = Result<T>>) -> Result<T> {
        let cell = self.cell(key);
        let result = cell.get_or_try_init(|| work).await.cloned();
        drop(cell);
        self.running
            .lock()
            .retain(|_, cell| cell.strong_count() > 0);
        result
    }

    fn cell(&self, key: K) -> Arc<OnceCell<T>> {
        let mut running = self.running.lock();
        if let Some(cell) = running.get(&key).and_then(Weak::upgrade) {
            return cell;
        }
        let cell = Arc::new(OnceCell::new());
        running.insert(key, Arc::downgrade(&cell));
        cell
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.running.lock().is_empty()
    }
}
