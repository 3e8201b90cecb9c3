//! [`Tree`]: a hash tree in a file, read from its root on. A node is checked against the one
//! that leads to it when it is loaded, and so are its neighbours, which come with it.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::seal::{HASHES_PER_NODE, IndexEntry};
use vellum_format::seal::{Hash, NODE_BYTES, NOTHING, Node, Root, Shape};
use vellum_storage::Storage;

use super::node_cache::NodeCache;
use crate::qcow2::header::load::read_bytes;

/// Entries of an index node.
const FANOUT: usize = 64;
/// Nodes behind the one that is needed which come with it where memory is full.
const FEW: usize = 8;

/// A node that cannot be used, and what is under it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BadNode {
    /// The leaves under it.
    pub(super) leaves: Range<u64>,
    /// What is wrong.
    pub(super) why: String,
}

/// A hash tree in a file.
#[derive(Debug)]
pub(super) struct Tree {
    file: Arc<dyn Storage>,
    /// Where the superblock lies.
    start_bytes: u64,
    len_bytes: u64,
    shape: Shape,
    root: Option<Root>,
    cache: NodeCache,
}

impl Tree {
    /// A tree in an area of `len_bytes` at a place of a file.
    pub(super) fn new(
        (file, start_bytes): (Arc<dyn Storage>, u64),
        len_bytes: u64,
        shape: Shape,
        root: Option<Root>,
    ) -> Tree {
        Tree {
            file,
            start_bytes,
            len_bytes,
            shape,
            root,
            cache: NodeCache::default(),
        }
    }

    /// Its leaves.
    pub(super) fn leaves(&self) -> u64 {
        self.shape.leaves
    }

    fn bad(&self, level: u32, number: u64, why: impl Into<String>) -> BadNode {
        BadNode {
            leaves: self.shape.leaves_under(level, number),
            why: why.into(),
        }
    }

    /// Hash node `number`; `None`: the tree has nothing there.
    pub(super) async fn hashes(&self, number: u64) -> Result<Option<Arc<Node>>, BadNode> {
        if let Some(node) = self.cache.get((0, number)) {
            return Ok(Some(node));
        }
        let Some(root) = self.root else {
            return Ok(None);
        };
        let depth = self.shape.depth;
        let mut node = self.node(depth, 0, root).await?;
        for level in (1..=depth).rev() {
            let (above, index) = self.shape.step(level, number);
            let Some(entry) = self.entry(&node, level, above, index)? else {
                return Ok(None);
            };
            let below = number >> (6 * (level - 1));
            node = match level {
                1 => self.load_beside(&node, number, index, entry).await?,
                _ => self.node(level - 1, below, entry).await?,
            };
        }
        Ok(Some(node))
    }

    fn entry(
        &self,
        node: &Node,
        level: u32,
        number: u64,
        index: usize,
    ) -> Result<Option<IndexEntry>, BadNode> {
        node.entry(index, self.len_bytes)
            .map_err(|error| self.bad(level, number, error.to_string()))
    }

    /// The first hash node from `from` on that the tree has, without a look at it.
    pub(super) async fn next_present(&self, from: u64) -> Result<Option<u64>, BadNode> {
        let Some(root) = self.root else {
            return Ok(None);
        };
        let (depth, nodes) = (self.shape.depth, self.leaves().div_ceil(HASHES_PER_NODE));
        let mut at = from;
        'next: while at < nodes {
            let mut place = root;
            for level in (1..=depth).rev() {
                let (number, index) = self.shape.step(level, at);
                let node = self.node(level, number, place).await?;
                match self.entry(&node, level, number, index)? {
                    Some(entry) => place = entry,
                    None => {
                        let shift = 6 * (level - 1);
                        at = ((at >> shift) + 1) << shift;
                        continue 'next;
                    }
                }
            }
            return Ok(Some(at));
        }
        Ok(None)
    }

    /// The node of a level that `place` leads to.
    async fn node(&self, level: u32, number: u64, place: Root) -> Result<Arc<Node>, BadNode> {
        if let Some(node) = self.cache.get((level, number)) {
            return Ok(node);
        }
        let block = self.read(place.offset_bytes, 1).await;
        let block = block.map_err(|why| self.bad(level, number, why))?;
        self.keep(level, number, &block, &place.hash)
            .ok_or_else(|| self.bad(level, number, "a node of the seal is damaged"))
    }

    /// Hash node `number`, which entry `index` of `above` leads to, with those that lie beside it.
    async fn load_beside(
        &self,
        above: &Node,
        number: u64,
        index: usize,
        entry: IndexEntry,
    ) -> Result<Arc<Node>, BadNode> {
        let follows = |other: usize| {
            let there = above.entry(other, self.len_bytes).ok().flatten();
            let wanted = (entry.offset_bytes + (other * NODE_BYTES) as u64)
                .checked_sub((index * NODE_BYTES) as u64);
            there.filter(|there| Some(there.offset_bytes) == wanted)
        };
        let all = self.cache.has_room(FANOUT);
        let first = match all {
            true => (0..index)
                .rev()
                .take_while(|&i| follows(i).is_some())
                .count(),
            false => 0,
        };
        let first = index - first;
        let most = if all {
            FANOUT
        } else {
            (index + FEW).min(FANOUT)
        };
        let end = (index..most).take_while(|&i| follows(i).is_some()).count() + index;
        let start_bytes = entry.offset_bytes - ((index - first) * NODE_BYTES) as u64;
        let read = self.read(start_bytes, end - first).await;
        let blocks = match read {
            Ok(blocks) => blocks,
            // Perhaps it is one of the others that cannot be read.
            Err(_) => return self.node(0, number, entry).await,
        };
        let base = number - index as u64;
        for (other, block) in (first..end).zip(blocks.chunks_exact(NODE_BYTES)) {
            if let Some(there) = follows(other) {
                // One that is damaged is told when it is needed.
                let _ = self.keep(0, base + other as u64, block, &there.hash);
            }
        }
        let at = (index - first) * NODE_BYTES;
        let block = blocks.get(at..at + NODE_BYTES).unwrap_or_default();
        self.keep(0, number, block, &entry.hash)
            .ok_or_else(|| self.bad(0, number, "a node of the seal is damaged"))
    }

    fn keep(&self, level: u32, number: u64, block: &[u8], hash: &Hash) -> Option<Arc<Node>> {
        if let Some(node) = self.cache.get((level, number)) {
            return Some(node);
        }
        let node = Arc::new(Node::checked(block, level, hash)?);
        self.cache.insert((level, number), node.clone());
        Some(node)
    }

    async fn read(&self, offset_bytes: u64, nodes: usize) -> Result<vellum_io::Buffer, String> {
        let at = self.start_bytes.saturating_add(offset_bytes);
        let read = read_bytes(&self.file, at, (nodes * NODE_BYTES) as u64);
        let unread =
            |error: vellum_io::Error| format!("a node of the seal cannot be read: {error}");
        read.await.map_err(unread)
    }
}

/// The hashes of some leaves of a hash node, or of none.
pub(super) fn hash_in(node: Option<&Node>, leaf: u64) -> Hash {
    node.map_or(NOTHING, |node| node.hash((leaf % HASHES_PER_NODE) as usize))
}
