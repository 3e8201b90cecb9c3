//! Shapes and nodes of hash trees, and how one is made.

use super::hash::node_hash;
use super::{HASHES_PER_NODE, Hash, NODE_BYTES, fault};
use crate::bytes;
use crate::error::Result;
use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

const INDEX_FANOUT_BITS: u32 = 6;
const ENTRY_BYTES: usize = 64;

/// The node at the top of a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Root {
    /// Where it lies, counted from the superblock on.
    pub offset_bytes: u64,
    /// Its hash.
    pub hash: Hash,
}

impl Root {
    /// Where a node inside an area of `length_bytes` lies; `None`: there is nothing.
    pub(super) fn decode(block: &[u8], at: usize, length_bytes: u64) -> Result<Option<Root>> {
        let offset_bytes = bytes::be64(block, at).unwrap_or_default();
        let hash = bytes::array(block, at + 8).unwrap_or_default();
        if offset_bytes == 0 {
            return Ok(None);
        }
        let end = offset_bytes.checked_add(NODE_BYTES as u64);
        let inside = end.is_some_and(|end| end <= length_bytes);
        if !inside || !offset_bytes.is_multiple_of(NODE_BYTES as u64) {
            return Err(fault("node", offset_bytes, "no place of a node"));
        }
        Ok(Some(Root { offset_bytes, hash }))
    }
}

/// How many levels a tree has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Its leaves.
    pub leaves: u64,
    /// Levels of index nodes above the hash nodes.
    pub depth: u32,
}

impl Shape {
    /// The shape of a tree with so many leaves.
    pub fn new(leaves: u64) -> Shape {
        let mut nodes = leaves.div_ceil(HASHES_PER_NODE);
        let mut depth = 0;
        while nodes > 1 {
            nodes = nodes.div_ceil(1 << INDEX_FANOUT_BITS);
            depth += 1;
        }
        Shape { leaves, depth }
    }

    /// The leaves under node `number` of a level; 0 is that of the hash nodes.
    pub fn leaves_under(&self, level: u32, number: u64) -> Range<u64> {
        let shift = INDEX_FANOUT_BITS * level + HASHES_PER_NODE.trailing_zeros();
        let edge = |number: u64| {
            let widened = u128::from(number) << shift;
            u64::try_from(widened).unwrap_or(u64::MAX).min(self.leaves)
        };
        edge(number)..edge(number.saturating_add(1))
    }

    /// Which node of a level leads to hash node `number`, and which of its entries leads there.
    pub fn step(&self, level: u32, number: u64) -> (u64, usize) {
        let below = number >> (INDEX_FANOUT_BITS * level.saturating_sub(1)).min(63);
        let fanout = 1_u64 << INDEX_FANOUT_BITS;
        (below / fanout, (below % fanout) as usize)
    }
}

/// What an index node says of a node below it.
pub type IndexEntry = Root;

/// A node whose hash was compared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node(Vec<u8>);

impl Node {
    /// The node in `block`, if it has this hash; `level` is 0 for hash nodes.
    pub fn checked(block: &[u8], level: u32, hash: &Hash) -> Option<Node> {
        let is_whole = block.len() == NODE_BYTES;
        (is_whole && node_hash(level, block) == *hash).then(|| Node(block.to_vec()))
    }

    /// A hash of a hash node; of others, and beyond the last one, nothing to rely on.
    pub fn hash(&self, index: usize) -> Hash {
        bytes::array(&self.0, index % HASHES_PER_NODE as usize * 32).unwrap_or_default()
    }

    /// An entry of an index node in an area of `length_bytes`; `None`: nothing is below.
    ///
    /// # Errors
    /// For an entry that leads out of the area.
    pub fn entry(&self, index: usize, length_bytes: u64) -> Result<Option<IndexEntry>> {
        let at = index % (NODE_BYTES / ENTRY_BYTES) * ENTRY_BYTES;
        Root::decode(&self.0, at, length_bytes)
    }
}

/// A level of a tree that is being made.
#[derive(Debug, Clone)]
struct Level {
    /// Number of the node that is being filled.
    number: u64,
    /// It, once something was put there.
    block: Option<Vec<u8>>,
    /// The node that was finished last.
    last: Option<Root>,
}

/// Makes a tree from its hash nodes, which come in ascending order. Equal neighbours are stored
/// once, so what repeats takes next to nothing.
#[derive(Debug, Clone)]
pub struct TreeBuilder {
    levels: Vec<Level>,
    next_bytes: u64,
    finished: Vec<u8>,
}

impl TreeBuilder {
    /// A tree of this shape, whose first node lies at `offset_bytes` from the superblock.
    pub fn new(shape: Shape, offset_bytes: u64) -> TreeBuilder {
        let level = Level {
            number: 0,
            block: None,
            last: None,
        };
        TreeBuilder {
            levels: vec![level; shape.depth as usize + 1],
            next_bytes: offset_bytes,
            finished: Vec::new(),
        }
    }

    /// Adds hash node `number`, larger than those before; nodes left out hold nothing.
    pub fn push(&mut self, number: u64, hashes: &[Hash]) {
        let mut block = Vec::with_capacity(NODE_BYTES);
        for hash in hashes.iter().take(HASHES_PER_NODE as usize) {
            block.extend_from_slice(hash);
        }
        block.resize(NODE_BYTES, 0);
        let root = self.store(0, &block);
        self.lead_to(1, number, root);
    }

    /// Bytes of nodes that were finished since the last call, to be written one behind the other.
    pub fn take_finished(&mut self) -> Vec<u8> {
        core::mem::take(&mut self.finished)
    }

    /// Bytes that wait for [`TreeBuilder::take_finished`].
    pub fn finished_bytes(&self) -> usize {
        self.finished.len()
    }

    /// Ends the tree: its root, and the offset behind its last node.
    pub fn finish(&mut self) -> (Option<Root>, u64) {
        for level in 1..self.levels.len() {
            self.close(level);
        }
        let root = self.levels.last().and_then(|level| level.last);
        (root, self.next_bytes)
    }

    fn store(&mut self, level: usize, block: &[u8]) -> Root {
        let hash = node_hash(level as u32, block);
        if let Some(last) = self.levels[level].last.filter(|last| last.hash == hash) {
            return last;
        }
        let root = Root {
            offset_bytes: self.next_bytes,
            hash,
        };
        self.finished.extend_from_slice(block);
        self.next_bytes += NODE_BYTES as u64;
        self.levels[level].last = Some(root);
        root
    }

    /// Notes in a level where node `below` of the level under it lies.
    fn lead_to(&mut self, level: usize, below: u64, root: Root) {
        let number = below >> INDEX_FANOUT_BITS;
        match self.levels.get(level) {
            None => return,
            Some(current) if current.block.is_some() && current.number != number => {
                self.close(level);
            }
            Some(_) => {}
        }
        let current = &mut self.levels[level];
        current.number = number;
        let block = current.block.get_or_insert_with(|| vec![0; NODE_BYTES]);
        let at = (below % (1 << INDEX_FANOUT_BITS)) as usize * ENTRY_BYTES;
        block[at..at + 8].copy_from_slice(&root.offset_bytes.to_be_bytes());
        block[at + 8..at + 40].copy_from_slice(&root.hash);
    }

    fn close(&mut self, level: usize) {
        let number = self.levels[level].number;
        if let Some(block) = self.levels[level].block.take() {
            let root = self.store(level, &block);
            self.lead_to(level + 1, number, root);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use proptest::prelude::*;

    /// Walks a tree that was made, and gives its hash nodes' first hashes.
    fn walk(area: &[u8], shape: Shape, root: Option<Root>) -> BTreeMap<u64, Hash> {
        let mut found = BTreeMap::new();
        let mut open: Vec<(u32, u64, Root)> = root
            .map(|root| (shape.depth, 0, root))
            .into_iter()
            .collect();
        while let Some((level, number, root)) = open.pop() {
            let at = root.offset_bytes as usize;
            let node = Node::checked(&area[at..at + NODE_BYTES], level, &root.hash).unwrap();
            if level == 0 {
                found.insert(number, node.hash(0));
                continue;
            }
            for index in 0..64 {
                if let Some(entry) = node.entry(index, area.len() as u64).unwrap() {
                    open.push((level - 1, number * 64 + index as u64, entry));
                }
            }
        }
        found
    }

    #[test]
    fn shapes_cover_their_leaves() {
        assert_eq!(Shape::new(0).depth, 0);
        assert_eq!(Shape::new(128).depth, 0);
        assert_eq!(Shape::new(129).depth, 1);
        assert_eq!(Shape::new(128 * 64).depth, 1);
        assert_eq!(Shape::new(128 * 64 + 1).depth, 2);
        let largest = Shape::new(1 << 51);
        assert_eq!(largest.depth, 8);
        assert_eq!(largest.leaves_under(8, 0), 0..1 << 51);
        assert_eq!(largest.leaves_under(0, 3), 384..512);
        assert_eq!(Shape::new(130).leaves_under(0, 1), 128..130);
        assert_eq!(largest.step(1, 65), (1, 1));
        assert_eq!(largest.step(2, 65), (0, 1));
        assert_eq!(largest.step(8, u64::MAX >> 20), (0, 3));
    }

    #[test]
    fn what_repeats_is_stored_once() {
        let shape = Shape::new(1 << 30);
        let mut builder = TreeBuilder::new(shape, 4096);
        for number in 0..64 * 64 * 2 {
            builder.push(number, &[[3; 32]; 128]);
        }
        let (root, end) = builder.finish();
        assert!(root.is_some());
        // A hash node, an index node over it, one over that, and the nodes up to the root.
        assert!(end <= 4096 * 8, "{end}");
    }

    proptest! {
        #[test]
        fn a_tree_leads_to_what_it_was_made_of(
            leaves in 1_u64..1 << 40,
            picks in proptest::collection::btree_map(any::<u64>(), any::<u8>(), 0..40),
        ) {
            let shape = Shape::new(leaves);
            let nodes = leaves.div_ceil(HASHES_PER_NODE);
            let wanted: BTreeMap<u64, Hash> = picks
                .into_iter()
                .map(|(pick, fill)| (pick % nodes, [fill | 1; 32]))
                .collect();
            let mut builder = TreeBuilder::new(shape, 4096);
            for (number, hash) in &wanted {
                builder.push(*number, &[*hash; 128]);
            }
            let (root, end) = builder.finish();
            let mut area = vec![0; 4096];
            area.extend(builder.take_finished());
            prop_assert_eq!(area.len() as u64, end);
            prop_assert_eq!(walk(&area, shape, root), wanted);
        }
    }
}
