//! [`DebugStorage`]: errors, breakpoints and limits on demand (`blkdebug`).
//!
//! Who uses the storage tells its [`Debugger`] of `Event`s; the rules decide
//! which of them arm an error for the requests that follow, go to another state,
//! or hold the one who told. Limits make requests smaller or larger than they
//! came: what is below the alignment is read and written in whole blocks.
//!
//! Invariant: of two writes that share a block of the alignment without
//! overlapping, none undoes the other: whoever reads a block to write it back
//! holds it, and so does every write that is smaller.
//!
//! A flush with no change before it that an earlier one has not covered is passed on,
//! but no rule strikes it: in QEMU such a flush does not come to the node.

mod debugger;
mod limits;
mod rules;
mod storage;

pub use debugger::{Debugger, HasDebugger};
pub use limits::{Limits, Piece};
pub use rules::{Action, Injection, RequestKind, Rule};
pub use storage::DebugStorage;
