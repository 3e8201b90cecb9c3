//! The seal of an image: a hash tree over what the guest sees of it, and one over its mapping.
//!
//! ```text
//! header extension ──► area: │ superblock │ nodes of both trees │
//!                                 │   │
//!               content root ◄────┘   └────► mapping root
//!                    │
//!              index nodes: 64 × (where the node below lies, its hash)
//!                    │
//!              hash nodes: 128 hashes of leaves
//! ```
//!
//! | file | what it holds |
//! | --- | --- |
//! | `superblock` | the block that leads to both trees, and the statement that is signed |
//! | `hash` | what each hash is taken of |
//! | `tree` | shapes and nodes of trees, and how one is made |
//!
//! The rules have numbers from I54 on in `docs/FORMAT.md`. Nothing here trusts a byte whose hash
//! was not compared.

mod hash;
mod pointer;
mod superblock;
mod tree;

pub use hash::{LeafHasher, header_hash, mapping_hash, node_hash};
pub use pointer::{
    HASHES_PER_NODE, Hash, LEAF_BYTES, NODE_BYTES, NODE_GUEST_BYTES, NOTHING, SealPointer,
};
pub(crate) use pointer::{fault, unsupported};
pub use superblock::Superblock;
pub use tree::{IndexEntry, Node, Root, Shape, TreeBuilder};
