//! What all jobs have in common: the states that one goes through, what may be asked of it
//! in each, and the control that it is led by.

mod control;
mod status;

pub use control::{JobCommand, JobControl};
pub use status::{Status, Verb};
