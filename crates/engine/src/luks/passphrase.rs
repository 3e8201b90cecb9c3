//! [`Passphrase`]: what a user knows, wiped from memory when it is not needed any more.

use std::fmt;
use std::sync::Arc;

use zeroize::Zeroizing;

/// A passphrase. Copies share the bytes, which are wiped with the last of them.
#[derive(Clone, PartialEq, Eq)]
pub struct Passphrase(Arc<Zeroizing<Vec<u8>>>);

impl Passphrase {
    /// A passphrase of these bytes.
    pub fn new(bytes: Vec<u8>) -> Self {
        Passphrase(Arc::new(Zeroizing::new(bytes)))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }
}

impl From<&str> for Passphrase {
    fn from(text: &str) -> Self {
        Passphrase::new(text.as_bytes().to_vec())
    }
}

impl fmt::Debug for Passphrase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Passphrase")
    }
}
