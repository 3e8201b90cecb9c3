//! [`Servers`]: the servers of other programs that nodes stand on.

use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use vellum_nbd::client::NbdStorage;

/// The servers; clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Servers(pub(crate) Arc<Mutex<Vec<Server>>>);

#[derive(Debug, Clone)]
pub(crate) struct Server {
    pub(crate) storage: Weak<NbdStorage>,
    /// The node that is being opened on it.
    pub(crate) opening: Option<String>,
}
