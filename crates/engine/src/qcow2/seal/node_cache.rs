//! Nodes of a tree in memory, within a budget: those that were not used since the hand of the
//! clock came by make room.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use parking_lot::Mutex;
use vellum_format::seal::Node;

/// Most nodes in memory: 32 MiB, which lead to 4 GiB of the disk.
const MOST_NODES: usize = 8192;

/// A node by its level and number.
pub(super) type Key = (u32, u64);

#[derive(Debug)]
struct Kept {
    node: Arc<Node>,
    used: bool,
}

/// Nodes in memory.
#[derive(Debug, Default)]
pub(super) struct NodeCache(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    nodes: HashMap<Key, Kept>,
    clock: VecDeque<Key>,
}

impl NodeCache {
    pub(super) fn get(&self, key: Key) -> Option<Arc<Node>> {
        let mut inner = self.0.lock();
        let kept = inner.nodes.get_mut(&key)?;
        kept.used = true;
        Some(kept.node.clone())
    }

    pub(super) fn insert(&self, key: Key, node: Arc<Node>) {
        let mut inner = self.0.lock();
        let used = false;
        if inner.nodes.insert(key, Kept { node, used }).is_none() {
            inner.clock.push_back(key);
        }
        while inner.nodes.len() > MOST_NODES {
            inner.evict();
        }
    }

    /// Whether further nodes push none out.
    pub(super) fn has_room(&self, nodes: usize) -> bool {
        self.0.lock().nodes.len() + nodes <= MOST_NODES
    }
}

impl Inner {
    fn evict(&mut self) {
        let Some(key) = self.clock.pop_front() else {
            return;
        };
        match self.nodes.get_mut(&key) {
            Some(kept) if kept.used => {
                kept.used = false;
                self.clock.push_back(key);
            }
            _ => drop(self.nodes.remove(&key)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum_format::seal::{NODE_BYTES, node_hash};

    #[test]
    fn memory_stays_bounded_and_what_is_used_stays() {
        let block = [0; NODE_BYTES];
        let node = Node::checked(&block, 0, &node_hash(0, &block)).map(Arc::new);
        let node = node.unwrap();
        let cache = NodeCache::default();
        let most = MOST_NODES as u64;
        for number in 0..2 * most {
            cache.insert((0, number), node.clone());
            assert!(cache.get((0, 0)).is_some(), "after {number}");
        }
        assert!(!cache.has_room(1));
        assert_eq!(cache.0.lock().nodes.len(), MOST_NODES);
        assert!(cache.0.lock().clock.len() <= MOST_NODES);
        assert!(cache.get((0, 1)).is_none());
    }
}
