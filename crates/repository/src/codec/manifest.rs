//! What a tag holds under one number: a manifest, or a note that nothing may come there.
//!
//! Two lines of text: JSON, and its hash.

use serde::{Deserialize, Serialize};
use vellum_io::{Error, ErrorKind, Result};

use super::piece::MOST_PIECE_BYTES;
use super::{CHUNK_BYTES, HexHash, MOST_DISK_BYTES, PIECE_CHUNKS, PushId, damaged, from_hex};
use crate::names::TagName;

/// More bytes than an entry can have.
pub const MOST_ENTRY_BYTES: u64 = 64 << 20;
/// The version of what this module writes; others are refused.
const VERSION: u32 = 1;
const HASH_LINE: &str = "blake3 ";

/// What is under a number of a tag.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Entry {
    /// A disk.
    Manifest(Box<Manifest>),
    /// None: it is not to come here any more.
    Tombstone(Tombstone),
}

/// Why there is no disk under a number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Tombstone {
    /// What it stands for.
    pub kind: TombstoneKind,
    /// For people.
    pub why: String,
}

/// Kinds of tombstones.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TombstoneKind {
    /// A push that was given up would have come here; what is below counts.
    Void,
    /// The tag was removed, with all that is below.
    Removed,
    /// There was a disk, which was removed. So that a request that was under way for long cannot
    /// bring it back without what it leads to.
    Pruned,
}

/// A disk at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Manifest {
    version: u32,
    /// The push that has made it.
    pub push: PushId,
    /// Its tag.
    pub tag: TagName,
    /// Its number there: newer ones have higher numbers.
    pub number: u64,
    /// The length of the disk in bytes.
    pub disk_bytes: u64,
    /// When it was made, in seconds since 1970, by the clock of who has made it.
    pub created_seconds: u64,
    /// The machine that has made it.
    pub host: String,
    /// Whose content the disk was compared with, if only changes were read.
    pub base: Option<PushId>,
    /// The map, a piece for each GiB; `None` reads as zeroes.
    pub pieces: Vec<Option<PieceRef>>,
    /// All segments that the map leads to.
    pub segments: Vec<UsedSegments>,
    /// What the push took.
    pub cost: Cost,
}

/// Where a piece of a map is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct PieceRef {
    /// The push that has made it.
    pub push: PushId,
    /// The number of the object among those of the push.
    pub part: u32,
    /// Its place in there.
    pub offset_bytes: u64,
    /// Its length.
    pub len_bytes: u64,
    /// Its hash.
    pub hash: HexHash,
}

/// Segments of one push.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct UsedSegments {
    /// The push.
    pub push: PushId,
    /// Their numbers, first and last of each run, ascending.
    pub numbers: Vec<(u32, u32)>,
}

/// What a push took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct Cost {
    /// Bytes of the disk that were read.
    pub read_bytes: u64,
    /// Bytes of those that were nowhere in the repository yet.
    pub new_bytes: u64,
    /// Bytes that were sent to the store.
    pub sent_bytes: u64,
}

/// Chunks of a disk.
pub fn chunks_of(disk_bytes: u64) -> u64 {
    disk_bytes.div_ceil(CHUNK_BYTES)
}

/// Pieces of a disk.
pub fn pieces_of(disk_bytes: u64) -> u64 {
    chunks_of(disk_bytes).div_ceil(PIECE_CHUNKS)
}

/// Chunks of a piece of a disk: the last one may have fewer.
pub fn piece_chunks(disk_bytes: u64, piece: u64) -> u64 {
    let before = piece.saturating_mul(PIECE_CHUNKS);
    chunks_of(disk_bytes)
        .saturating_sub(before)
        .min(PIECE_CHUNKS)
}

impl Manifest {
    /// A manifest without a map.
    pub fn new(push: PushId, tag: TagName, number: u64, disk_bytes: u64) -> Self {
        Manifest {
            version: VERSION,
            push,
            tag,
            number,
            disk_bytes,
            created_seconds: 0,
            host: String::new(),
            base: None,
            pieces: Vec::new(),
            segments: Vec::new(),
            cost: Cost::default(),
        }
    }

    /// All pushes that have made something of it.
    pub fn pushes(&self) -> impl Iterator<Item = PushId> + '_ {
        let maps = self.pieces.iter().flatten().map(|piece| piece.push);
        let segments = self.segments.iter().map(|used| used.push);
        maps.chain(segments)
    }

    fn check(&self) -> Result<()> {
        if self.version != VERSION {
            let message = format!(
                "a manifest of version {}, which this program is too old for",
                self.version
            );
            return Err(damaged(message));
        }
        let whole = |piece: &PieceRef| piece.len_bytes <= MOST_PIECE_BYTES;
        let fits = self.disk_bytes <= MOST_DISK_BYTES
            && self.pieces.len() as u64 == pieces_of(self.disk_bytes)
            && self.pieces.iter().flatten().all(whole);
        let ordered = |used: &UsedSegments| {
            let mut next = 0;
            used.numbers.iter().all(|&(first, last)| {
                let fits = next <= first && first <= last && last < u32::MAX;
                next = last.saturating_add(1);
                fits
            })
        };
        match fits && self.segments.iter().all(ordered) {
            true => Ok(()),
            false => Err(damaged("a manifest that contradicts itself")),
        }
    }
}

impl Entry {
    /// Reads what is under the number `number` of the tag `tag`.
    ///
    /// # Errors
    /// If it is not what was written, or from a newer program.
    pub fn decode(bytes: &[u8], tag: &TagName, number: u64) -> Result<Entry> {
        let wrong = || damaged("no manifest");
        let text = std::str::from_utf8(bytes).map_err(|_| wrong())?;
        let (json, rest) = text.split_once('\n').ok_or_else(wrong)?;
        let hash = rest.strip_prefix(HASH_LINE).map(str::trim_end);
        let hash: [u8; 32] = hash.and_then(from_hex).ok_or_else(wrong)?;
        if *blake3::hash(json.as_bytes()).as_bytes() != hash {
            return Err(damaged("a manifest that is not what was written"));
        }
        let entry = serde_json::from_str(json);
        let entry: Entry = entry.map_err(|error| damaged(format!("no manifest: {error}")))?;
        if let Entry::Manifest(manifest) = &entry {
            manifest.check()?;
            if manifest.tag != *tag || manifest.number != number {
                return Err(damaged("a manifest of another tag or number"));
            }
        }
        Ok(entry)
    }

    /// As [`Entry::decode`] reads it.
    ///
    /// # Errors
    /// If it is longer than an entry can be.
    pub fn encode(&self) -> Result<Vec<u8>> {
        let json = serde_json::to_string(self);
        let json = json.map_err(|error| damaged(format!("cannot write a manifest: {error}")))?;
        let hash = blake3::hash(json.as_bytes()).to_hex();
        let bytes = format!("{json}\n{HASH_LINE}{hash}\n").into_bytes();
        match bytes.len() as u64 <= MOST_ENTRY_BYTES {
            true => Ok(bytes),
            false => {
                let message =
                    "the disk lies in too many places of the repository: push it to another one";
                Err(Error::new(ErrorKind::Unsupported, "push", message))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tag() -> TagName {
        TagName::parse("vm-1").unwrap()
    }

    fn manifest() -> Manifest {
        let mut manifest = Manifest::new(PushId([1; 16]), tag(), 7, 3 << 29);
        manifest.pieces = vec![
            None,
            Some(PieceRef {
                push: PushId([2; 16]),
                part: 1,
                offset_bytes: 5,
                len_bytes: 100,
                hash: HexHash([9; 32]),
            }),
        ];
        manifest.segments = vec![UsedSegments {
            push: PushId([2; 16]),
            numbers: vec![(0, 3), (9, 9)],
        }];
        manifest
    }

    #[test]
    fn manifests_come_back_whole_or_not_at_all() {
        let entry = Entry::Manifest(Box::new(manifest()));
        let bytes = entry.encode().unwrap();
        assert_eq!(Entry::decode(&bytes, &tag(), 7).unwrap(), entry);
        assert!(Entry::decode(&bytes, &tag(), 8).is_err());
        for at in 0..bytes.len() - 1 {
            let mut other = bytes.clone();
            other[at] ^= 1;
            assert!(Entry::decode(&other, &tag(), 7).is_err(), "{at}");
            assert!(Entry::decode(&bytes[..at], &tag(), 7).is_err(), "{at}");
        }
    }

    #[test]
    fn contradictions_are_refused() {
        type Change = fn(&mut Manifest);
        let changes: [Change; 6] = [
            |m| m.version = 2,
            |m| m.disk_bytes = 1 << 30,
            |m| m.disk_bytes = u64::MAX,
            |m| m.pieces[1].as_mut().unwrap().len_bytes = 1 << 40,
            |m| m.segments[0].numbers = vec![(3, 2)],
            |m| m.segments[0].numbers = vec![(0, u32::MAX)],
        ];
        for change in changes {
            let mut wrong = manifest();
            change(&mut wrong);
            let bytes = Entry::Manifest(Box::new(wrong)).encode().unwrap();
            assert!(Entry::decode(&bytes, &tag(), 7).is_err());
        }
        let tombstone = Entry::Tombstone(Tombstone {
            kind: TombstoneKind::Void,
            why: "given up".to_owned(),
        });
        let bytes = tombstone.encode().unwrap();
        assert_eq!(Entry::decode(&bytes, &tag(), 1).unwrap(), tombstone);
    }

    #[test]
    fn disks_have_pieces() {
        assert_eq!((pieces_of(0), pieces_of(1), pieces_of(1 << 30)), (0, 1, 1));
        assert_eq!(pieces_of((1 << 30) + 1), 2);
        assert_eq!(piece_chunks((1 << 30) + 1, 0), PIECE_CHUNKS);
        assert_eq!(piece_chunks((1 << 30) + 1, 1), 1);
        assert_eq!(piece_chunks(1, 1), 0);
    }

    proptest! {
        #[test]
        fn any_text_is_an_entry_or_an_error(json in "[{}\\[\\]\":,a-z0-9-]{0,60}") {
            let hash = blake3::hash(json.as_bytes()).to_hex();
            let _ = Entry::decode(format!("{json}\nblake3 {hash}\n").as_bytes(), &tag(), 1);
        }
    }
}
