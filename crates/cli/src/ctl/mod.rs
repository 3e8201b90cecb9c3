//! `vellum ctl`: shows and changes what a running daemon serves, over its HTTP interface.
//!
//! `arguments` makes an `action` of a command line, and `run` carries it out: `client` asks, over TLS as `secured` says,
//! `tables` and `show` print the answer, `top` looks again and again, and `wait` waits for a job. `names` are what
//! completions know of the daemon.
//!
//! Invariant: what `--output=json` prints is what the daemon has answered, and nothing else.

mod action;
mod address;
mod arguments;
#[cfg(feature = "http")]
mod client;
#[cfg(feature = "http")]
mod names;
mod run;
#[cfg(feature = "http")]
mod secured;
#[cfg(feature = "http")]
mod show;
#[cfg(feature = "http")]
mod tables;
#[cfg(feature = "http")]
mod top;
#[cfg(feature = "http")]
mod wait;

pub use arguments::{COMMANDS, JOB_ACTIONS, SPEC};
#[cfg(feature = "http")]
pub use names::{Named, names};
pub use run::main;
