//! `--monitor`: clients that ask for things by QMP and are told what happens.
//!
//! A monitor serves one client at a time, which its character device leads to it. Where one has hung up
//! while a command was carried out for it, that goes on beside the next client (`Left`). What the
//! client says and what is made of it is in `session.rs`; answers and events go through an
//! outbox.
//!
//! Invariant: a client that sends nonsense, does not listen or goes away harms nobody but
//! itself.

mod outbox;
mod serve;
mod session;

pub(crate) use serve::{Description, start, talk};
