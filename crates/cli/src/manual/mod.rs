//! Completions and manuals, made from the specifications that the parsers and the helps are made from
//! ([`crate::spec`]).
//!
//! `tools` lists the tools; `describe` makes a `clap` description of each, from which `clap_mangen` writes the
//! options' part of a manual page, and `program` adds the rest. `complete` says what may follow on a command line
//! (`names`: of what an image holds), and `scripts` are what asks it in each shell.

mod complete;
mod describe;
mod names;
mod program;
mod scripts;
mod tools;

pub use program::{complete, completions, man};
pub use tools::{OTHERS, subcommand_names};
