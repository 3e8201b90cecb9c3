//! How the objects of a repository are named, and what users call a disk in it.
//!
//! | key | what |
//! | --- | --- |
//! | `vellum-repository` | that this is one |
//! | `tags/TAG/NUMBER` | a manifest, or a tombstone |
//! | `segments/PUSH/NUMBER` | chunks |
//! | `maps/PUSH/NUMBER` | pieces of maps |
//! | `indexes/PUSH/NUMBER` | lists of what the push's segments hold |
//! | `sessions/PUSH` | that a push runs |
//! | `damaged/PUSH/NUMBER` | that the segment is damaged |
//! | `locks/gc` | that objects are removed |
//! | `garbage/ID` | what is to be removed when the pushes have ended that may use it |

use std::fmt;

use serde::{Deserialize, Serialize};
use vellum_io::{Error, ErrorKind, Result};

use crate::codec::PushId;

pub(crate) const MARKER: &str = "vellum-repository";
pub(crate) const TAGS: &str = "tags/";
pub(crate) const SEGMENTS: &str = "segments/";
pub(crate) const MAPS: &str = "maps/";
pub(crate) const INDEXES: &str = "indexes/";
pub(crate) const DAMAGED: &str = "damaged/";
pub(crate) const SESSIONS: &str = "sessions/";
pub(crate) const GARBAGE: &str = "garbage/";
pub(crate) const LOCKS: &str = "locks/";
pub(crate) const LOCK: &str = "locks/gc";

/// The highest number of a disk: of ten digits, so that lists are in order.
pub(crate) const MOST_NUMBER: u64 = 9_999_999_999;
/// Characters of a tag at most.
const LONGEST_TAG: usize = 128;

/// The name of a tag: up to 128 letters, digits, `.`, `_` and `-`, the first of which is no `.` or `-`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TagName(String);

impl TagName {
    /// The tag of a name.
    ///
    /// # Errors
    /// If it can be no tag's.
    pub fn parse(text: &str) -> Result<TagName> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        let right = (1..=LONGEST_TAG).contains(&text.len())
            && text.chars().all(is_part)
            && !text.starts_with(['.', '-']);
        if right {
            return Ok(TagName(text.to_owned()));
        }
        let message = format!(
            "'{text}' cannot be a tag: up to {LONGEST_TAG} letters, digits, '.', '_' and '-', and no \
             '.' or '-' in front"
        );
        Err(Error::new(ErrorKind::InvalidArgument, "open", message))
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for TagName {
    fn default() -> Self {
        TagName("latest".to_owned())
    }
}

impl fmt::Display for TagName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for TagName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for TagName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        TagName::parse(&text).map_err(serde::de::Error::custom)
    }
}

/// A disk in a repository: `TAG` or `TAG@NUMBER`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DiskName {
    /// Its tag.
    pub tag: TagName,
    /// Which of them; `None`: the newest.
    pub number: Option<u64>,
}

impl DiskName {
    /// The disk of a name.
    ///
    /// # Errors
    /// If it can be none.
    pub fn parse(text: &str) -> Result<DiskName> {
        let (tag, number) = match text.split_once('@') {
            Some((tag, number)) => (tag, Some(number)),
            None => (text, None),
        };
        let tag = TagName::parse(tag)?;
        let number = match number.map(|text| (text, text.parse())) {
            None => None,
            Some((_, Ok(number))) if (1..=MOST_NUMBER).contains(&number) => Some(number),
            Some((text, _)) => {
                let message = format!("'{text}' cannot be the number of a disk (1, 2 ...)");
                return Err(Error::new(ErrorKind::InvalidArgument, "open", message));
            }
        };
        Ok(DiskName { tag, number })
    }
}

impl fmt::Display for DiskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            Some(number) => write!(f, "{}@{number}", self.tag),
            None => write!(f, "{}", self.tag),
        }
    }
}

/// What tells a repository from others in the names of things outside of it: 16 letters and digits.
pub fn name_hash(name: &str) -> String {
    let hash = blake3::hash(name.as_bytes()).to_hex();
    hash[..16].to_owned()
}

/// Where what is under a number of a tag is.
pub(crate) fn entry(tag: &TagName, number: u64) -> String {
    format!("{TAGS}{tag}/{number:010}")
}

/// Where all of a tag is.
pub(crate) fn tag(tag: &TagName) -> String {
    format!("{TAGS}{tag}/")
}

/// The tag and number of a key; `None` if it is another one's.
pub(crate) fn parse_entry(key: &str) -> Option<(TagName, u64)> {
    let (tag, number) = key.strip_prefix(TAGS)?.split_once('/')?;
    let tag = TagName::parse(tag).ok()?;
    let number = number
        .parse()
        .ok()
        .filter(|&number| number <= MOST_NUMBER)?;
    (entry(&tag, number) == key).then_some((tag, number))
}

/// Where an object of a push is: `folder` is one of [`SEGMENTS`], [`MAPS`], [`INDEXES`],
/// [`DAMAGED`].
pub(crate) fn part(folder: &str, push: PushId, number: u32) -> String {
    format!("{folder}{push}/{number:08}")
}

/// Where all of those are.
pub(crate) fn parts(folder: &str, push: PushId) -> String {
    format!("{folder}{push}/")
}

/// The push and number of such a key.
pub(crate) fn parse_part(folder: &str, key: &str) -> Option<(PushId, u32)> {
    let (push, number) = key.strip_prefix(folder)?.split_once('/')?;
    let (push, number) = (PushId::parse(push)?, number.parse().ok()?);
    (part(folder, push, number) == key).then_some((push, number))
}

/// Where a push says that it runs.
pub(crate) fn session(push: PushId) -> String {
    format!("{SESSIONS}{push}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_can_be_named_in_any_store() {
        for right in ["a", "vm-1.disk_2", "0", &"x".repeat(128)] {
            assert_eq!(TagName::parse(right).unwrap().as_str(), right);
        }
        for wrong in [
            "",
            ".",
            "..",
            "-x",
            "a/b",
            "a b",
            "ä",
            "a@1",
            &"x".repeat(129),
        ] {
            assert!(TagName::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn disks_are_named_by_tag_and_number() {
        let disk = DiskName::parse("vm@12").unwrap();
        assert_eq!((disk.tag.as_str(), disk.number), ("vm", Some(12)));
        assert_eq!(disk.to_string(), "vm@12");
        assert_eq!(DiskName::parse("vm").unwrap().number, None);
        for wrong in ["vm@", "vm@0", "vm@x", "vm@1@2", "@1"] {
            assert!(DiskName::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn keys_are_told_in_one_way() {
        let vm = TagName::parse("vm").unwrap();
        assert_eq!(parse_entry(&entry(&vm, 3)), Some((vm.clone(), 3)));
        assert_eq!(parse_entry(&entry(&vm, 1 << 60)), None);
        let push = PushId([7; 16]);
        let key = part(SEGMENTS, push, 12);
        assert_eq!(parse_part(SEGMENTS, &key), Some((push, 12)));
        for wrong in [
            "tags/vm/3",
            "tags/vm/+000000003",
            "tags/vm",
            "segments/x/00000001",
        ] {
            assert_eq!(parse_entry(wrong), None);
            assert_eq!(parse_part(SEGMENTS, wrong), None);
        }
    }
}
