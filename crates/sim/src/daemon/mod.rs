//! A simulator of the daemon: its graph of nodes, the jobs that change it, the monitor's
//! commands, and clients of its exports.
//!
//! A seed makes a scenario: disks with clients each, several lanes whose turns the seed
//! decides, commands at moments that have nothing to do with the clients', and a disk
//! below that completes requests in a seeded order, and fails some in a part of the
//! scenarios. At many moments of it the process dies, or the power fails. What must hold:
//!
//! 1. Every disk, opened by the name of the image that its clients used last, holds what
//!    an acknowledged flush, or a write with FUA, says, whatever happened to the graph.
//! 2. The base of a snapshot, and a backup that is complete and closed, hold what the disk
//!    showed at one moment while the command ran.
//! 3. A bitmap that tells the next backup what to copy calls dirty all that differs from the
//!    last one, or is inconsistent.
//! 4. Every image passes the simulator's audit and the engine's check: leaks at worst.
//! 5. While the daemon runs, every read sees what the requests before it and beside it
//!    allow, no request fails (unless the disk failed one), no job and no client waits for
//!    ever, and nothing panics.
//!
//! Equal seeds give equal scenarios.

mod bitmaps;
mod changes;
mod clients;
mod clones;
mod events;
mod exports;
mod files;
mod filters;
mod fleece;
mod greedy;
mod guest_disk;
mod images;
mod jobs;
mod lanes;
mod mirror;
mod monitor;
mod network;
mod play;
mod refusals;
mod remote;
mod scenario;
mod series;
mod sessions;
mod setup;
mod under_way;
mod verify;

pub use play::{Played, seed};
pub use scenario::{Kind, Settings};
pub use under_way::IDLE;
