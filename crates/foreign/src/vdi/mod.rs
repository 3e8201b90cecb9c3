//! VDI, VirtualBox's format: dynamic and static images, without VirtualBox's snapshots.
//!
//! A header of one sector, a map with a 32-bit entry for each block of a MiB, and the blocks. New blocks are put behind
//! the last one.
//!
//! What a power cut leaves: the header's count of blocks is durable before entries that lead to new ones, so no
//! program that opens the image puts two blocks in one place. Blocks that were counted and that
//! no entry leads to are used by the next writer; until then `check` tells that the count is too high.

mod check;
mod create;
mod header;
mod layout;

pub use check::check;
pub use create::{CreateOptions, create};
pub use header::Header;
pub use layout::{VdiLayout, open};
