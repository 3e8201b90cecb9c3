//! What all jobs have in common: the states that one goes through, what may be asked of it
//! in each, and the reins that it is led by.

mod reins;
mod status;

pub use reins::{Reins, Wish};
pub use status::{Status, Verb};
