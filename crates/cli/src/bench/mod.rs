//! `vellum bench`: what the choices of a qcow2 image cost on this machine.
//!
//! The classical tables (reads by cache size and by slice size, writes by cluster
//! size with and without subclusters, growth), and sustained writes with and
//! without a write log, measured in process through the library, beside a raw file in
//! the same run. `plan` says what is measured, `run` does it, `result` holds it, and
//! `tables`, `json` and `html` show it.
//!
//! Invariants:
//! - An image that the user names is opened for reading only.
//! - What is written lies in one new folder, which is gone when the program ends,
//!   also after a signal; a page never replaces an image.

mod arguments;
mod failure;
mod html;
mod images;
mod json;
mod load;
mod plan;
mod program;
mod progress;
mod reading;
mod result;
mod run;
mod scratch;
mod survey;
mod tables;
mod timeline;

pub use arguments::SPEC;
pub use program::main;
