//! `vellum inspect`: what is in this image, for a person.
//!
//! `gather` collects the facts (`growth` by comparing samples of an overlay with what lies
//! below it), `advice` draws conclusions from them, and `text`, `json` and `html` show both;
//! `picture` makes the map of few cells that these draw.
//!
//! Invariants:
//! - Images are opened for reading only.
//! - Memory does not grow with the image, but for a few bits for each cluster of the file.
//! - Advice follows from what was counted; what is estimated says so.

mod advice;
mod arguments;
mod gather;
mod growth;
mod html;
mod json;
mod picture;
mod program;
mod text;

pub use arguments::SPEC;
pub use program::main;
