//! [`Recent`]: what was used lately, within a bound; each made once, however many want it.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::Arc;

use async_lock::OnceCell;
use parking_lot::Mutex;
use vellum_io::Result;

/// Values by keys, up to a number of them.
#[derive(Debug)]
pub(crate) struct Recent<K, V> {
    most: usize,
    state: Mutex<State<K, V>>,
}

#[derive(Debug)]
struct State<K, V> {
    values: HashMap<K, (u64, Arc<OnceCell<V>>)>,
    by_use: BTreeMap<u64, K>,
    uses: u64,
}

impl<K: Copy + Eq + Hash, V: Clone> Recent<K, V> {
    pub(crate) fn new(most: usize) -> Self {
        Recent {
            most,
            state: Mutex::new(State {
                values: HashMap::new(),
                by_use: BTreeMap::new(),
                uses: 0,
            }),
        }
    }

    /// The value of a key; made by `make` unless it is there.
    ///
    /// # Errors
    /// That of `make`; the next one who wants it tries again.
    pub(crate) async fn get(&self, key: K, make: impl Future<Output = Result<V>>) -> Result<V> {
        let cell = self.cell(key);
        let made = cell.get_or_try_init(|| make).await;
        made.cloned()
    }

    fn cell(&self, key: K) -> Arc<OnceCell<V>> {
        let mut state = self.state.lock();
        let State {
            values,
            by_use,
            uses,
        } = &mut *state;
        *uses += 1;
        let (used, cell) = values.entry(key).or_default();
        by_use.remove(used);
        *used = *uses;
        by_use.insert(*uses, key);
        let cell = cell.clone();
        if by_use.len() > self.most
            && let Some((_, oldest)) = by_use.pop_first()
        {
            values.remove(&oldest);
        }
        cell
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use vellum_io::lane;

    use super::*;

    #[test]
    fn values_are_made_once_while_they_are_recent() {
        let recent = Recent::<u32, u32>::new(2);
        let made = Cell::new(0);
        let get = |key| {
            let make = async {
                made.set(made.get() + 1);
                Ok(key * 10)
            };
            lane::block_on(recent.get(key, make)).unwrap()
        };
        assert_eq!([1, 2, 1, 3, 1].map(get), [10, 20, 10, 30, 10]);
        assert_eq!(made.get(), 3);
        // The second one has gone for the third.
        get(2);
        assert_eq!(made.get(), 4);
        assert_eq!(recent.state.lock().values.len(), 2);
    }
}
