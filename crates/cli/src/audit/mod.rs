//! `vellum audit`: is an image that nobody vouches for safe to open?
//!
//! The work is done by [`vellum_images::audit`]; here are the command line, the two forms
//! of the answer, and the exit codes that pipelines look at: 0 safe, 1 the image could
//! not be read (or the command line not be understood), 2 rejected; of several images the
//! highest.
//!
//! Invariant: the image is a local file or block device, or lies in a package that is one, opened for
//! reading, by its path alone: no word of the command line is taken for a protocol.

mod arguments;
mod program;
mod text;

pub use arguments::SPEC;
pub use program::main;
