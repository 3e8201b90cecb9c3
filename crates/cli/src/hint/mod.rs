//! Hints: what to do next after an error, for a person at a terminal. All tools give hints; hints
//! use no tool (`main` registers the list of subcommands).
//!
//! The errors themselves are QEMU's, and scripts compare them. A hint is a line of its own
//! on standard error that begins with `hint: `.
//!
//! Invariants:
//! - No hint is given to a pipe, or under the name of one of QEMU's programs.
//! - Looking for a hint changes nothing; if it fails, there is no message.

mod advice;
mod locks;
mod words;

pub(crate) use advice::after;
pub use advice::{
    about, about_option, about_raw, about_seal, about_space, about_subcommand, about_wait,
    about_word, give, know_options, later, set_subcommands,
};
pub use vellum_options::similar::closest;
pub use words::OBJECTS;
