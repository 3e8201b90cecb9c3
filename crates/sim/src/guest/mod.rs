//! The guest: does the steps of a cycle, tells the model of each, and compares a device with
//! the model.
//!
//! `state` is what its tasks share, and `drive` does the steps. What `requests`,
//! `snapshots`, `bitmaps` and `keys` do runs side by side on an open image; `close` closes
//! it, and `chain` and `damage` change one that is closed. `room` accounts for the space,
//! and `examine` compares.

mod bitmaps;
mod chain;
mod close;
mod damage;
mod drive;
mod examine;
mod keys;
mod requests;
mod room;
mod snapshots;
mod state;

pub(crate) use close::close;
pub(crate) use drive::drive;
pub use examine::Depth;
pub(crate) use examine::examine;
pub(crate) use requests::perform;
pub(crate) use state::Guest;
