//! VHDX, the format of Hyper-V: dynamic, fixed and differencing images.
//!
//! ```text
//!   0      64K     128K    192K     256K        1M
//!   | id   | header | header | regions | regions | ... | log | BAT | metadata | blocks ...
//! ```
//!
//! Crash safety: the block allocation table is changed by way of the log. A change is
//! written to the log and made durable, and only then where it belongs; a block's bytes are durable
//! before that (the device sees to it). So after a power cut at any moment the log, replayed, gives a
//! table all of whose entries lead to what was written. Headers change in turns, so one is always
//! whole; the log's identity stands in them from the first change of the table to the close.
//! Whoever opens an image of which that was not taken back replays the log first, or, where
//! nothing may be written, refuses as QEMU does.
//!
//! The parent of a differencing image is opened by whoever opens the image: [`parent()`] reads its names.
//! Blocks of which only some sectors are here are copied whole when they are written to, so the
//! bitmaps never change.

mod bat;
mod check;
mod create;
mod errors;
mod guid;
mod header;
mod image;
mod layout;
mod le;
mod log;
mod metadata;
mod parent;
mod region;
mod replay;
mod space;
#[cfg(test)]
mod tests;
mod writer;

pub use check::check;
pub use create::{CreateOptions, Subformat, create};
pub(crate) use errors::invalid;
pub use guid::Guid;
pub use layout::{OpenOptions, VhdxLayout, open, parent};
pub use parent::ParentLocator;
