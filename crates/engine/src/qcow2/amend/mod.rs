//! Changing the options of an image after it was made: `qemu-img amend`.
//!
//! Whoever amends an image has it for himself: an amended image is closed first, and
//! its parts are then worked on in steps. Each step that needs the engine (to
//! allocate clusters, or to resize) opens the image anew for itself, because the
//! version and the width of refcounts are fixed for as long as an image is open.
//!
//! | file | what it does |
//! | --- | --- |
//! | `request`, `options` | the steps in their order; what is to change |
//! | `work` | the image between two steps |
//! | `check` | what is refused before anything changes |
//! | `upgrade`, `downgrade`, `zeroes` | version 2 to 3 and back; zero clusters, which version 2 does not have |
//! | `width` | another width of refcounts |
//! | `encryption`, `keys` | key slots |
//! | `progress` | how far it is |
//!
//! Invariants:
//! - Each step makes what it needs, durably, and ends with one switch of the header
//!   (see `rewrite`). A crash leaves the image as it was before the step or after it;
//!   what was made for nothing is leaked.
//! - What can be refused is refused before anything changes, in QEMU's order.

mod check;
mod downgrade;
pub(crate) mod encryption;
mod keys;
mod options;
mod progress;
mod request;
mod upgrade;
mod width;
mod work;
mod zeroes;

pub use options::{AmendOptions, ProgressSink};
