//! [`SourceVersion`]: what tells the bytes of a source from those that it had or will have.

use std::time::SystemTime;

use crate::file::times::COARSE_MARGIN;

mod look;

/// The version of a source's bytes.
///
/// `Unknown` compares unequal to everything, itself included: a source whose version is unknown has to be taken for
/// changed. That is why there is no `Eq` and no `Hash`.
#[derive(Debug, Clone)]
pub enum SourceVersion {
    /// Two sources of one name with this version have the same bytes.
    Known(String),
    /// Nothing rules out that the bytes change, or have changed, unnoticed.
    Unknown,
}

impl PartialEq for SourceVersion {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (SourceVersion::Known(one), SourceVersion::Known(other)) => one == other,
            _ => false,
        }
    }
}

impl From<Option<String>> for SourceVersion {
    fn from(version: Option<String>) -> Self {
        version.map_or(SourceVersion::Unknown, SourceVersion::Known)
    }
}

impl SourceVersion {
    /// The version in words, if it is known.
    pub fn known(self) -> Option<String> {
        match self {
            SourceVersion::Known(version) => Some(version),
            SourceVersion::Unknown => None,
        }
    }
}

/// Whether a time of last change that a server gives in whole seconds tells the version: a change from `now` on, by the
/// server's clock, has another one.
pub fn tells_version(modified: SystemTime, now: SystemTime) -> bool {
    now.duration_since(modified)
        .is_ok_and(|age| age >= COARSE_MARGIN)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    const NOW_SECONDS: u64 = 1_800_000_000;

    fn now() -> SystemTime {
        UNIX_EPOCH + Duration::from_secs(NOW_SECONDS)
    }

    #[test]
    fn an_unknown_version_equals_nothing() {
        let known = |text: &str| SourceVersion::Known(text.to_owned());
        assert_eq!(known("1"), known("1"));
        assert_ne!(known("1"), known("2"));
        assert_ne!(known("1"), SourceVersion::Unknown);
        assert_ne!(SourceVersion::Unknown, SourceVersion::Unknown);
    }

    #[test]
    fn a_servers_time_counts_some_seconds_later() {
        let tells = |age| tells_version(now() - Duration::from_secs(age), now());
        assert!(!tells(0) && !tells(2) && tells(5));
        assert!(!tells_version(now() + Duration::from_secs(60), now()));
    }
}
