//! Nodes on files that forget what was not flushed, and a guest of them: for the tests of this crate, and, with the feature
//! `testing`, of those that change graphs.

mod image;
mod volatile;
mod world;

pub use image::make_image;
pub use volatile::Volatile;
pub use world::{SIZE_BYTES, World, open};
