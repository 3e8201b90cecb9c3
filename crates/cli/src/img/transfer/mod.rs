//! `send` and `receive`: a disk, or what has changed of one, as a stream that another machine
//! applies.
//!
//! `send` makes the stream (`vellum_jobs::transfer`); `source` knows a source again, so that nobody
//! goes on with another one. `receive` applies it, `state` is what it notes beside the target, and
//! `target` how the target is made, found and given its name.
//!
//! A receiver may be killed at any moment:
//! - While a disk is half received it has another name ([`state::partial`]), whether it was made for
//!   that or is an image that changes are applied to. The note beside it is written before it gets
//!   that name, and knows it by device and inode.
//! - The note says no more than what was durable in the disk before.
//! - Once everything is durable the note says so; then the disk gets its name; then the note says
//!   which stream it holds. Whoever finds the note goes on from any of these places.

mod header;
pub mod receive;
pub mod send;
mod source;
mod state;
mod target;

pub(crate) use header::{header_text, id_text, parse_header, parse_id, widen};
