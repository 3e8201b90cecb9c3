//! Character devices: where a monitor finds its clients (`--chardev`, `chardev-add`).
//!
//! `settings.rs` says what is asked for, `socket.rs` and `files.rs` open it, `port.rs` is the way
//! to whoever is there, `ring.rs` the one that is only memory.
//!
//! A device has one user at most, a monitor, which asks it for one client after the other
//! ([`Chardev::connect`]).

mod device;
mod files;
mod list;
mod port;
mod ring;
mod settings;
mod socket;

pub(crate) use device::Chardev;
pub(crate) use list::{Chardevs, Wanted};
pub use port::Port;
pub use settings::backend_names;
