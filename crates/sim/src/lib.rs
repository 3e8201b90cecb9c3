//! A power-cut simulator for the qcow2 engine.
//!
//! A seed makes a scenario: an image with some options, a guest that does requests,
//! and a disk that completes them in a seeded order. At many moments of the scenario
//! the power fails: any subset of what was not flushed survives, torn at sectors of
//! 512 bytes. Then the machine starts again, and these invariants are checked:
//!
//! 1. Every flushed byte is there; every unflushed sector reads as it did before or
//!    after the writes that were not flushed, never as a third thing.
//! 2. No host cluster serves two guest clusters, or two purposes ([`audit`]).
//! 3. The engine's check and the simulator's own audit find leaks at worst.
//! 4. What a snapshot refers to has not changed.
//! 5. The image can be opened, read, written, closed, and cut again.
//! 6. An enabled bitmap is there, and calls everything dirty that has changed since the
//!    scenario began.
//! 7. While the guest runs, every read sees what the requests before it and beside
//!    it allow, no request fails, none waits for ever, and nothing panics.
//!
//! All is deterministic: a failure is a [`scenario::Scenario`], and [`replay`] repeats
//! it. [`disk_bugs`] make the disk break its word, to show that the simulator notices.
#![forbid(unsafe_code)]

pub mod audit;
mod bitmap;
pub mod cut;
pub mod daemon;
pub mod disk;
pub mod disk_bugs;
pub mod disk_room;
pub mod engine;
pub mod exhaustive;
pub mod explore;
pub mod failure;
pub mod faults;
pub mod foreign;
pub mod generate;
mod guest;
pub mod image_engine;
mod kill;
pub mod layout;
pub mod machine;
pub mod model;
pub mod pattern;
mod prepare;
pub mod record;
mod reply;
pub mod rng;
pub mod runtime;
pub mod scenario;
pub mod schedule;
pub mod shrink;
pub mod space;
pub mod sparse_bytes;
pub mod storage;
pub mod verify;

pub use engine::engine;
pub use explore::{Explorer, Found, Totals, replay};
pub use failure::{Failure, FailureKind};
pub use storage::SimStorage;

/// The README's example, so that it compiles as long as it stands there. It is tested here
/// because the package of `vellum` does not hold that file in the same place.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
