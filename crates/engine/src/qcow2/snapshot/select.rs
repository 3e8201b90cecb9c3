//! Which snapshot is meant: by identifier, by name, or by either.

use std::fmt;

use vellum_format::snapshot::SnapshotEntry;
use vellum_io::{Error, ErrorKind, Result};

const ENOENT: i32 = 2;

/// Names one of an image's snapshots. Where several fit, the first one in the
/// image's table is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SnapshotSelector {
    /// The one with this identifier.
    Id(String),
    /// The first one with this name.
    Name(String),
    /// The one with this identifier, if it has this name.
    IdAndName {
        /// Its identifier.
        id: String,
        /// Its name.
        name: String,
    },
    /// The one with this identifier, or else the first one with this name.
    IdOrName(String),
}

impl SnapshotSelector {
    /// The place of the snapshot that is meant.
    pub(crate) fn find(&self, entries: &[SnapshotEntry]) -> Option<usize> {
        let position = |test: &dyn Fn(&SnapshotEntry) -> bool| entries.iter().position(test);
        let has_id = |entry: &SnapshotEntry, id: &str| entry.id_text() == id;
        let has_name = |entry: &SnapshotEntry, name: &str| entry.name_text() == name;
        match self {
            SnapshotSelector::Id(id) => position(&|entry| has_id(entry, id)),
            SnapshotSelector::Name(name) => position(&|entry| has_name(entry, name)),
            SnapshotSelector::IdAndName { id, name } => {
                position(&|entry| has_id(entry, id) && has_name(entry, name))
            }
            SnapshotSelector::IdOrName(text) => {
                position(&|entry| has_id(entry, text)).or_else(|| position(&|e| has_name(e, text)))
            }
        }
    }
}

impl fmt::Display for SnapshotSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SnapshotSelector::Id(text)
            | SnapshotSelector::Name(text)
            | SnapshotSelector::IdOrName(text) => f.write_str(text),
            SnapshotSelector::IdAndName { id, name } => write!(f, "{id} ({name})"),
        }
    }
}

/// The entry of a snapshot.
pub(crate) fn find<'a>(
    entries: &'a [SnapshotEntry],
    selector: &SnapshotSelector,
) -> Result<(usize, &'a SnapshotEntry)> {
    let found = selector.find(entries).map(|index| (index, &entries[index]));
    found.ok_or_else(|| {
        Error::new(ErrorKind::NotFound, "snapshot", "Can't find snapshot").with_errno(ENOENT)
    })
}

/// The identifier of the next snapshot: one more than the largest number that is one.
pub(super) fn next_id(entries: &[SnapshotEntry]) -> String {
    let numbers = entries.iter().map(|entry| leading_number(&entry.id_text()));
    let last = numbers.max().unwrap_or(0);
    last.saturating_add(1).to_string()
}

/// The number that a text begins with; 0 if there is none.
fn leading_number(text: &str) -> u64 {
    let text = text.trim_start();
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    text[..end].parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(all: &[(&str, &str)]) -> Vec<SnapshotEntry> {
        let entry = |&(id, name): &(&str, &str)| SnapshotEntry {
            id: id.into(),
            name: name.into(),
            ..SnapshotEntry::default()
        };
        all.iter().map(entry).collect()
    }

    #[test]
    fn identifiers_come_before_names() {
        let entries = entries(&[("1", "2"), ("2", "a"), ("3", "a")]);
        let text = || "2".to_owned();
        let find = |selector: SnapshotSelector| selector.find(&entries);
        assert_eq!(find(SnapshotSelector::IdOrName(text())), Some(1));
        assert_eq!(find(SnapshotSelector::Id("a".into())), None);
        assert_eq!(find(SnapshotSelector::Name("a".into())), Some(1));
        let both = |id: &str, name: &str| SnapshotSelector::IdAndName {
            id: id.into(),
            name: name.into(),
        };
        assert_eq!(find(both("3", "a")), Some(2));
        assert_eq!(find(both("3", "2")), None);
    }

    #[test]
    fn new_identifiers_are_numbers_that_nobody_has() {
        assert_eq!(next_id(&[]), "1");
        assert_eq!(
            next_id(&entries(&[("7", ""), ("x9", ""), ("12b", "")])),
            "13"
        );
    }
}
