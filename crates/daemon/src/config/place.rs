//! Where something stands in the file, and what is wrong there.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A place in the file, counted from 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The line.
    pub line: usize,
    /// The character of the line.
    pub column: usize,
}

/// What is wrong, and where.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// The file.
    pub path: PathBuf,
    /// Where in it; `None` for what does not stand there any more, and for all of it.
    pub place: Option<Place>,
    /// What a person should read.
    pub text: String,
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = self.path.display();
        match self.place {
            Some(Place { line, column }) => write!(f, "{path}:{line}:{column}: {}", self.text),
            None => write!(f, "{path}: {}", self.text),
        }
    }
}

/// The text of a file.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source<'a> {
    pub(super) path: &'a Path,
    pub(super) text: &'a str,
}

impl Source<'_> {
    /// The place of a byte.
    pub(super) fn place(&self, at: usize) -> Place {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line_start = before.rfind('\n').map_or(0, |end| end + 1);
        Place {
            line: 1 + before.matches('\n').count(),
            column: 1 + before[line_start..].chars().count(),
        }
    }

    /// What is wrong at a place.
    pub(super) fn mistake(&self, at: Place, text: impl Into<String>) -> Mistake {
        Mistake {
            path: self.path.to_owned(),
            place: Some(at),
            text: text.into(),
        }
    }

    /// What is wrong with what stands at some bytes.
    pub(super) fn wrong(&self, span: &Range<usize>, text: impl Into<String>) -> Mistake {
        self.mistake(self.place(span.start), text)
    }

    /// A path as the file means it: a relative one begins at its folder.
    pub(super) fn resolve(&self, path: &str) -> String {
        let folder = self.path.parent();
        match folder.filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) if !path.starts_with('/') => folder.join(path).display().to_string(),
            _ => path.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_counted_from_one() {
        let source = Source {
            path: Path::new("/etc/d.toml"),
            text: "a = 1\nä = 2\n",
        };
        for (at, line, column) in [(0, 1, 1), (4, 1, 5), (6, 2, 1), (8, 2, 2), (99, 3, 1)] {
            assert_eq!(source.place(at), Place { line, column }, "{at}");
        }
        assert_eq!(
            source.wrong(&(6..7), "no").to_string(),
            "/etc/d.toml:2:1: no"
        );
        assert_eq!(source.resolve("a/b"), "/etc/a/b");
        assert_eq!(source.resolve("/a"), "/a");
    }
}
