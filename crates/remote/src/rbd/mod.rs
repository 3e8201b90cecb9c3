//! Images of Ceph clusters, by the system's librbd.
//!
//! Requests go to librbd, whose own threads call back when they have ended; whatever blocks (to
//! connect, to open, to change the length, to ask which objects are there) runs on threads of
//! [`crate::blocking`]. So no lane waits, and nothing of tokio is used.
//!
//! - `library.rs`: the library's functions, found at run time;
//! - `handle.rs`: connections and images, and what of them blocks;
//! - `completion.rs`: requests;
//! - `at_exit.rs`: the end of the program;
//! - `storage.rs`: the storage;
//! - `known_runs.rs`: which parts of an image have data, as it was told last.

mod at_exit;
mod completion;
mod handle;
mod known_runs;
mod library;
mod options;
mod storage;

pub use options::{Encryption, EncryptionFormat, RbdOptions};
pub use storage::{RbdStorage, create_image, remove_image};
