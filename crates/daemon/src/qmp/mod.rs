//! QMP: what a monitor and its client say to each other, as JSON. No I/O is done here,
//! and no command is known.
//!
//! [`Messages`] cuts what a client sends into values, [`Request`] takes one apart, and
//! [`Arguments`] gives a command what it wants to know. [`greeting`], [`answer`] and
//! [`event`] are what goes back; [`text()`] writes it as QEMU does.
//!
//! Invariants:
//! - Bytes from a client are never trusted: whatever they are, they lead to values or to
//!   errors, with bounded memory, and the next message is understood again.
//! - Every request has one answer, with the `id` that came with it.

mod arguments;
mod request;
mod stream;
mod text;
mod value;

pub use arguments::Arguments;
pub use request::Request;
pub use stream::Messages;
pub use text::{
    Class, Failure, Outcome, Written, answer, event, greeting, line, text, version, without_hints,
};
