//! What all jobs have in common: the states that one goes through, what may be asked of it
//! in each, and its controls.

mod control;
mod status;

pub use control::{JobCommand, JobControl};
pub use status::{Status, Verb};
