//! What the tests of finished programs share with each other and with `xtask`: temporary folders in which
//! programs run, processes that end with the test, and clients of QMP and NBD.
//!
//! Only tests and `xtask` use it. It uses no crate of the workspace, so that a client here and the server
//! under test never share a mistake.
//!
//! Everything but what returns a `Result` panics if it fails, at the caller's line where that helps.

mod folder;
pub mod nbd;
pub mod qmp;
mod running;
mod wait;
mod words;

pub use folder::{Folder, Said};
pub use qmp::Qmp;
pub use running::{Running, signal};
pub use wait::{PATIENCE, until, within};
pub use words::Words;
