//! Files that nodes stand on instead of those of the host: a simulation's, or an
//! embedder's. No option leads here; whoever makes the nodes hands them in.

use std::fmt;
use std::sync::Arc;

use vellum::{Result, Storage};

/// Opens the files that `file` nodes and images name; a simulation or an embedder implements it.
/// A name leads to the same file as long as nodes stand on it.
pub trait Files: fmt::Debug + Send + Sync {
    /// Opens a file.
    ///
    /// # Errors
    /// If there is none of the name, or it cannot be opened so.
    fn open(&self, name: &str, writable: bool) -> Result<Arc<dyn Storage>>;
}
