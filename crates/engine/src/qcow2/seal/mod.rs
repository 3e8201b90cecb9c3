//! Sealed images: a hash tree over what the guest sees of an image, kept in the image behind
//! everything that it uses, and vouched for by a feature bit that every other writer clears.
//!
//! | file | what it does |
//! | --- | --- |
//! | `area` | finds the seal that the header leads to |
//! | `tree`, `node_cache` | nodes of a tree, checked as they are loaded, some of them in memory |
//! | `state`, `seen` | what an open image needs to verify what it reads |
//! | `content` | what the image itself holds of a range, and the hashes of its leaves |
//! | `reads` | reads and block status that agree with the seal, or fail |
//! | `build`, `mapping` | makes a seal |
//! | `verify` | compares everything with the seal, and names what differs |
//! | `manifest` | makes and compares a tree in a file of its own, over any device |
//! | `unseal` | gives a seal up |
//!
//! Checksums (`qcow2/checksums`) share no code with this: they are sums of the file's blocks that change with
//! each write, each believed by itself, where a seal is a tree over the guest's bytes that never changes.
//!
//! Invariants:
//! - No byte of a seal is believed whose hash was not compared with what leads to it.
//! - A sealed image is not changed: whoever opens it for writing is refused, or gives up the
//!   seal durably first.
//! - While reads are verified, no reader gets bytes or block status that differ from the seal:
//!   the mapping that was used is compared, not another look at it. Who reads around
//!   [`Qcow2::read`](crate::BlockDevice::read) asks
//!   [`Qcow2::verifies_reads`](crate::qcow2::Qcow2::verifies_reads) first.

pub(crate) mod area;
mod build;
mod content;
mod manifest;
mod mapping;
mod node_cache;
mod reads;
mod seen;
pub(crate) mod state;
mod tree;
pub(crate) mod unseal;
mod verify;

pub use area::{SealInfo, SealProgress, VerifyReads};
pub use build::{SealOptions, Signer};
pub use manifest::{make_manifest, verify_manifest};
pub use unseal::unseal;
pub use verify::{Difference, DifferenceKind, DifferenceSink, VerifyOptions, VerifyReport};
