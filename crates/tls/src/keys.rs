//! Pre-shared keys: a file of lines `user:hexkey`.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;

use vellum_storage::{Error, Result};

use crate::error;

/// Keys by the names of their users.
#[derive(Clone, Default)]
pub(crate) struct Keys(HashMap<String, Vec<u8>>);

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} keys", self.0.len())
    }
}

impl Keys {
    /// Reads a file of keys.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|cause| {
            let reason = Error::from_io("read", &cause);
            error(format!(
                "Unable to access credentials {}: {}",
                path.display(),
                reason.message()
            ))
        })?;
        Self::parse(&text).ok_or_else(|| {
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
            keys.insert(user.to_owned(), decode(digits)?);
        }
        Some(Keys(keys))
    }

    /// The key of a user.
    pub(crate) fn of(&self, user: &str) -> Option<&[u8]> {
        self.0.get(user).map(Vec::as_slice)
    }
}

fn decode(digits: &str) -> Option<Vec<u8>> {
    if digits.is_empty() || !digits.len().is_multiple_of(2) || !digits.is_ascii() {
        return None;
    }
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_users_and_keys() {
        let keys = Keys::parse("# comment\nqemu:00ff\n\na:b:10\n").unwrap();
        assert_eq!(keys.of("qemu"), Some(&[0, 255][..]));
        assert_eq!(keys.of("a:b"), Some(&[16][..]));
        assert_eq!(keys.of("nobody"), None);
        for bad in ["qemu", "qemu:", "qemu:0", "qemu:xx"] {
            assert!(Keys::parse(bad).is_none(), "{bad}");
        }
        assert!(!format!("{keys:?}").contains("255"));
    }
}
