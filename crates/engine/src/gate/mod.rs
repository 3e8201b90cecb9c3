//! The one gate through which an image may ask for other files.
//!
//! Whoever embeds the engine hands a gate to `Qcow2::open`: [`DenyAll`], [`Folder`], or one of
//! its own.
//!
//! | file | what it does |
//! | --- | --- |
//! | `policy` | the interface, and the gate that refuses everything |
//! | `folder` | the gate that opens what lies in one folder |
//!
//! Invariant (rule 12): no other code opens a file that an image names.

mod folder;
mod policy;

pub use folder::Folder;
pub use policy::{DenyAll, FileRequest, Gate};
