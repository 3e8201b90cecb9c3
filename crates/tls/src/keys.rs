//! Pre-shared keys: a file of lines `user:hexkey`.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use vellum_io::{Error, Result};
use vellum_storage::secret;
use zeroize::Zeroizing;

use crate::error::error;

/// A key, wiped when it is dropped.
pub(crate) type Key = Zeroizing<Vec<u8>>;

/// Keys by the names of their users.
#[derive(Default)]
pub(crate) struct Keys(HashMap<String, Key>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Keys {
    /// Reads a file of keys.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = secret::read_file(path).map_err(|cause| {
            let reason = Error::from_io("read", &cause);
            error(format!(
                "Unable to access credentials {}: {}",
                path.display(),
                reason.message()
            ))
        })?;
        let parsed = std::str::from_utf8(&bytes).ok().and_then(Self::parse);
        parsed.ok_or_else(|| {
            error(format!(
                "malformed line in the keys of {}: expected USER:HEXKEY",
                path.display()
            ))
        })
    }

    fn parse(text: &str) -> Option<Self> {
        let mut keys = HashMap::new();
        for line in text.lines().map(str::trim) {
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let (user, digits) = line.rsplit_once(':')?;
            // Of several lines for a user the first counts, as for GnuTLS.
            let key = decode(digits)?;
            keys.entry(user.to_owned()).or_insert(key);
        }
        Some(Keys(keys))
    }

    /// The key of a user.
    pub(crate) fn of(&self, user: &str) -> Option<&Key> {
        self.0.get(user)
    }
}

fn decode(digits: &str) -> Option<Key> {
    let is_hex = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    if digits.is_empty() || !digits.len().is_multiple_of(2) || !is_hex {
        return None;
    }
    // As long as it will be: what grows leaves copies behind.
    let mut key = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    for at in (0..digits.len()).step_by(2) {
        key.push(u8::from_str_radix(&digits[at..at + 2], 16).ok()?);
    }
    Some(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_users_and_keys() {
        let keys = Keys::parse("# comment\nqemu:00ff\n\na:b:10\nqemu:01\n").unwrap();
        let key = |user| keys.of(user).map(|key| key.to_vec());
        assert_eq!(key("qemu"), Some(vec![0, 255]));
        assert_eq!(key("a:b"), Some(vec![16]));
        assert_eq!(key("nobody"), None);
        for bad in ["qemu", "qemu:", "qemu:0", "qemu:xx", "qemu:+1"] {
            assert!(Keys::parse(bad).is_none(), "{bad}");
        }
        assert!(!format!("{keys:?}").contains("255"));
    }
}
