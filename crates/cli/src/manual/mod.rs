//! Completions and manuals, made from what the parsers and the helps say: the tables of
//! options tell how an option is written, the helps what it means. Nothing about an option
//! is written a second time; a test demands that both speak of the same ones.
//!
//! `read` takes a help apart, `tools` lists the tools; `describe` makes a `clap` description of
//! each, from which `clap_mangen` writes the options' part of a manual, and `pages` has the rest
//! (examples, exit codes). `complete` says what may follow on a command line (`names`: of what an
//! image holds), and `scripts` are what asks it in each shell.

mod complete;
mod describe;
mod names;
pub mod pages;
mod program;
mod read;
mod scripts;
mod tools;

pub use program::{complete, completions, man};
pub use tools::subcommand_names;
