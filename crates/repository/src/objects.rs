//! [`Objects`]: the store that a repository is in.

use std::fmt;
use std::ops::Range;
use std::time::Duration;

use vellum_io::Io;

/// An object of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its key.
    pub key: String,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// When it was made, in seconds since 1970 by the store's own clock.
    pub changed_seconds: u64,
}

/// A store of objects: what S3 promises. An object is there whole or not at all; who has been told that
/// it is there finds it, by its key and in lists.
///
/// Keys are relative to where the repository is; they are of `[A-Za-z0-9._/-]`.
///
/// # Errors
/// A request fails with what the store says, after it was tried again where that may help. Whether one
/// that fails had its effect, or will have it later, is not known.
pub trait Objects: Send + Sync + fmt::Debug {
    /// Where it is, for messages.
    fn name(&self) -> &str;

    /// Reads an object of `limit_bytes` bytes at most; [`vellum_io::ErrorKind::NotFound`] if there is none.
    fn get(&self, key: &str, limit_bytes: u64) -> Io<Vec<u8>>;

    /// Reads a range, not empty, which must be inside the object.
    fn get_range(&self, key: &str, range: Range<u64>) -> Io<Vec<u8>>;

    /// Makes an object, in the place of one that is there.
    fn put(&self, key: &str, content: Vec<u8>) -> Io<()>;

    /// Makes an object if there is none of that key; otherwise nothing changes, and `false` is said.
    /// That may also be where this very call has made it, if an answer was lost: who must know looks.
    fn put_new(&self, key: &str, content: Vec<u8>) -> Io<bool>;

    /// All objects whose keys begin with `prefix` (which ends with `/`), ordered by key.
    fn list(&self, prefix: &str) -> Io<Vec<ObjectInfo>>;

    /// Removes what was left of objects that were begun and never came to be, and is older than that;
    /// for stores that keep such.
    fn remove_unfinished(&self, older: Duration) -> Io<()> {
        let _ = older;
        Io::ready(Ok(()))
    }

    /// Removes an object; there may be none.
    fn remove(&self, key: &str) -> Io<()>;
}
