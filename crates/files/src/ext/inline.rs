//! Content that lies in inodes: 60 bytes where blocks would stand, the rest as the attribute
//! `system.data`.
//!
//! Attributes begin with 00 00 02 ea. Entries follow: length of the name, kind of the name,
//! where the value begins (from the first entry on), an inode, length of the value, a hash, the
//! name, padding to four bytes.

use super::inode::Inode;
use crate::bytes::{le16, le32, part, u8_at};
use crate::error::{Error, Result};

const MARK: u32 = 0xea02_0000;
const ENTRY_BYTES: usize = 16;
/// The kind of names that begin with `system.`.
const SYSTEM: u8 = 7;

/// The two parts of the content.
pub(super) fn parts(inode: &Inode) -> Result<(&[u8], &[u8])> {
    let rest = attribute(inode.tail());
    let damaged = Error::damaged("the attributes of inode", inode.number.into());
    Ok((inode.root(), rest.ok_or(damaged)?))
}

/// Reads what there is of the content; what there should be besides, and is not, is zero.
pub(super) fn read(inode: &Inode, offset_bytes: u64, bytes: &mut [u8]) -> Result<()> {
    let (first, rest) = parts(inode)?;
    let all = [first, rest].concat();
    let at = usize::try_from(offset_bytes).unwrap_or(usize::MAX);
    let found = part(&all, at..at.saturating_add(bytes.len()));
    // Nothing is kept in an inode that is longer than that.
    if found.len() < bytes.len() {
        return Err(Error::damaged("the size of inode", inode.number.into()));
    }
    bytes.copy_from_slice(found);
    Ok(())
}

/// The value of the attribute; empty without it, `None` if what is there is none.
fn attribute(tail: &[u8]) -> Option<&[u8]> {
    if le32(tail, 0) != MARK {
        return Some(&[]);
    }
    let entries = part(tail, 4..tail.len());
    let mut at = 0;
    while le32(entries, at) != 0 {
        let name_len = usize::from(u8_at(entries, at));
        let name = part(entries, at + ENTRY_BYTES..at + ENTRY_BYTES + name_len);
        if u8_at(entries, at + 1) == SYSTEM && name == b"data" {
            let (start, len) = (
                usize::from(le16(entries, at + 2)),
                le32(entries, at + 8) as usize,
            );
            return match len {
                0 => Some(&[]),
                _ => entries.get(start..start.checked_add(len)?),
            };
        }
        at += (ENTRY_BYTES + name_len).next_multiple_of(4);
    }
    Some(&[])
}
