//! What the files of a cache hold: the header and the entries of an index. Pure; no I/O.
//!
//! An index begins with a header of one page, which says which version of which file the blocks are
//! of. Behind it there are 16 bytes for each block: the beginning of its BLAKE3 hash, or zeroes while
//! the block is not there. Then, from a multiple of 4096 on, the table that processes share
//! ([`super::table`]): a generation and a time for each group of blocks.
//!
//! Nothing more is needed after a crash: a block whose bytes have another
//! hash counts as not there, whatever of the writes was lost.

use std::ops::Range;

use vellum_io::{Error, ErrorKind, Result};

/// Length of a block: the last one of a file may be shorter.
pub(super) const BLOCK_BYTES: u64 = 64 << 10;
/// Blocks that are thrown out together.
pub(super) const GROUP_BLOCKS: u64 = 64;
/// Length of the header.
pub(super) const HEADER_BYTES: u64 = 4096;
/// Length of an entry.
pub(super) const ENTRY_BYTES: u64 = 16;
/// Bytes of a group's generation and time in the table.
pub(super) const GROUP_BYTES: u64 = 16;
/// Memory is mapped in these.
const PAGE_BYTES: u64 = 4096;
/// The byte of an index that whoever uses it shares.
pub(super) const USERS: Range<u64> = 0..1;

const MAGIC: &[u8; 8] = b"VELLUMRC";
const FORMAT: u32 = 1;
const SUM_BYTES: usize = 16;
/// Longest text that a header holds.
const MOST_TEXT_BYTES: usize = 1900;

/// Files longer than this are not cached: what is known of each group takes 64 MiB of memory then, and as many
/// on disk, and a server may claim any length.
const MOST_FILE_BYTES: u64 = 16 << 40;

/// An entry of an index.
pub(super) type Entry = [u8; ENTRY_BYTES as usize];
/// That of a block that is not there.
pub(super) const ABSENT: Entry = [0; ENTRY_BYTES as usize];

/// The entry of a block with these bytes.
pub(super) fn entry_of(block: &[u8]) -> Entry {
    let mut entry = ABSENT;
    let hash = blake3::hash(block);
    entry.copy_from_slice(&hash.as_bytes()[..ENTRY_BYTES as usize]);
    // One in 2^128 would count as not there.
    entry
}

/// Where the entries of some blocks are.
pub(super) fn entries_of(blocks: &Range<u64>) -> Range<u64> {
    HEADER_BYTES + blocks.start * ENTRY_BYTES..HEADER_BYTES + blocks.end * ENTRY_BYTES
}

/// Which version of which file a cache holds blocks of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Identity {
    /// Where it is.
    pub(super) source: String,
    /// What tells its versions apart.
    pub(super) version: String,
    pub(super) len_bytes: u64,
}

impl Identity {
    /// What the names of its files begin with.
    pub(super) fn stem(&self) -> String {
        let mut hash = blake3::Hasher::new();
        for text in [&self.source, &self.version] {
            hash.update(&(text.len() as u64).to_le_bytes());
            hash.update(text.as_bytes());
        }
        hash.update(&self.len_bytes.to_le_bytes());
        hash.finalize().to_hex()[..32].to_owned()
    }

    pub(super) fn blocks(&self) -> u64 {
        self.len_bytes.div_ceil(BLOCK_BYTES)
    }

    pub(super) fn groups(&self) -> u64 {
        self.blocks().div_ceil(GROUP_BLOCKS)
    }

    /// Where the table is in the index.
    pub(super) fn table(&self) -> Range<u64> {
        let start = entries_of(&(0..self.blocks()))
            .end
            .next_multiple_of(PAGE_BYTES);
        start..start + self.groups().max(1) * GROUP_BYTES
    }

    /// Sees that the file is not too long for a cache of `limit_bytes`, before anything is made for it.
    ///
    /// # Errors
    /// [`ErrorKind::NoSpace`].
    pub(super) fn check_len(&self, limit_bytes: Option<u64>) -> Result<()> {
        let len_bytes = self.len_bytes;
        let refuse = |why: String| Err(Error::new(ErrorKind::NoSpace, "open", why));
        if len_bytes > MOST_FILE_BYTES {
            return refuse(format!(
                "a file of {len_bytes} bytes is too long for a cache ({MOST_FILE_BYTES} at most)"
            ));
        }
        let table = self.table();
        let table_bytes = table.end - table.start;
        match limit_bytes {
            Some(limit) if table_bytes > limit => refuse(format!(
                "a file of {len_bytes} bytes needs a table of {table_bytes} bytes, and the limit of the cache \
                 is {limit}"
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn group_blocks(&self, group: u64) -> Range<u64> {
        let start = group * GROUP_BLOCKS;
        start..(start + GROUP_BLOCKS).min(self.blocks())
    }

    /// The header of its index.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut page = Vec::with_capacity(HEADER_BYTES as usize);
        page.extend_from_slice(MAGIC);
        page.extend_from_slice(&FORMAT.to_le_bytes());
        page.extend_from_slice(&(BLOCK_BYTES as u32).to_le_bytes());
        page.extend_from_slice(&self.len_bytes.to_le_bytes());
        for text in [&self.source, &self.version] {
            let text = shortened(text);
            page.extend_from_slice(&(text.len() as u16).to_le_bytes());
            page.extend_from_slice(text.as_bytes());
        }
        page.resize(HEADER_BYTES as usize - SUM_BYTES, 0);
        let sum = entry_of(&page);
        page.extend_from_slice(&sum);
        page
    }

    /// What a header says.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] if it is none, or of another format.
    pub(super) fn decode(page: &[u8]) -> Result<Identity> {
        let wrong = |why: &str| Error::new(ErrorKind::InvalidImage, "open", why);
        let none = || wrong("it is no index of a cache");
        let body_bytes = HEADER_BYTES as usize - SUM_BYTES;
        let (body, sum) = page.split_at_checked(body_bytes).ok_or_else(none)?;
        if !body.starts_with(MAGIC) {
            return Err(none());
        }
        if entry_of(body) != sum {
            return Err(wrong("the header of the cache's index is damaged"));
        }
        let mut rest = &body[MAGIC.len()..];
        let mut take = |len: usize| -> Result<&[u8]> {
            let (part, behind) = rest.split_at_checked(len).ok_or_else(none)?;
            rest = behind;
            Ok(part)
        };
        let number = |bytes: &[u8]| {
            bytes
                .iter()
                .rev()
                .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
        };
        if number(take(4)?) != u64::from(FORMAT) || number(take(4)?) != BLOCK_BYTES {
            return Err(wrong(
                "the cache was made by another version of this program",
            ));
        }
        let len_bytes = number(take(8)?);
        if len_bytes > i64::MAX as u64 {
            return Err(none());
        }
        let mut text = || -> Result<String> {
            let len = number(take(2)?) as usize;
            let text = str::from_utf8(take(len)?).map_err(|_| none())?;
            Ok(text.to_owned())
        };
        Ok(Identity {
            source: text()?,
            version: text()?,
            len_bytes,
        })
    }

    /// Whether a header was made for this one: long texts are told apart by the file's name.
    pub(super) fn is_told_by(&self, header: &Identity) -> bool {
        header.len_bytes == self.len_bytes
            && header.source == shortened(&self.source)
            && header.version == shortened(&self.version)
    }
}

fn shortened(text: &str) -> &str {
    let mut end = text.len().min(MOST_TEXT_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> Identity {
        Identity {
            source: "https://host/golden.qcow2".to_owned(),
            version: "300000 \"abc\"".to_owned(),
            len_bytes: 300_000,
        }
    }

    #[test]
    fn headers_come_back_and_damage_is_seen() {
        let page = identity().encode();
        assert_eq!(page.len() as u64, HEADER_BYTES);
        assert_eq!(Identity::decode(&page).unwrap(), identity());
        for at in [0, 9, 20, 30, 4000, 4095] {
            let mut damaged = page.clone();
            damaged[at] ^= 1;
            assert!(Identity::decode(&damaged).is_err(), "{at}");
        }
        assert!(Identity::decode(&[]).is_err());
        assert!(Identity::decode(&page[..4000]).is_err());
    }

    #[test]
    fn long_names_are_cut_and_still_told_apart() {
        let mut long = identity();
        long.source = "ä".repeat(5000);
        let header = Identity::decode(&long.encode()).unwrap();
        assert!(long.is_told_by(&header));
        assert!(!identity().is_told_by(&header));
        let mut other = long.clone();
        other.source.push('x');
        assert_ne!(long.stem(), other.stem());
    }

    #[test]
    fn files_that_are_too_long_for_a_cache_are_refused() {
        let check = |len_bytes, limit| {
            let identity = Identity {
                len_bytes,
                ..identity()
            };
            identity.check_len(limit).map_err(|error| error.kind())
        };
        assert_eq!(check(MOST_FILE_BYTES, None), Ok(()));
        // 16 bytes for each 4 MiB.
        assert_eq!(check(MOST_FILE_BYTES, Some(64 << 20)), Ok(()));
        assert_eq!(check(1 << 20, Some(1 << 20)), Ok(()));
        for (len_bytes, limit) in [
            (MOST_FILE_BYTES + 1, None),
            (1 << 46, Some(1 << 40)),
            (MOST_FILE_BYTES, Some((64 << 20) - 1)),
        ] {
            assert_eq!(check(len_bytes, limit), Err(ErrorKind::NoSpace));
        }
    }

    #[test]
    fn blocks_and_groups_end_with_the_file() {
        let identity = identity();
        assert_eq!((identity.blocks(), identity.groups()), (5, 1));
        assert_eq!(identity.group_blocks(0), 0..5);
        assert_eq!(entries_of(&(1..3)), 4112..4144);
        assert_eq!(identity.table(), 8192..8208);
    }
}
