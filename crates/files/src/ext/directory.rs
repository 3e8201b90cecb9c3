//! Directories: entries one after the other in each block. The trees that help to find names
//! look like entries without a file, and are passed over.
//!
//! ```text
//! 0 inode (0: none)   4 bytes of the entry   6 bytes of the name   7 kind   8 name
//! ```
//!
//! A name that comes next is told by the place of its entry, in bytes from the start of the
//! directory. An entry is never longer than what is left of its block.

use super::inode::Inode;
use super::{Ext, checksums, id, inline};
use crate::bytes::{le16, le32, part, u8_at};
use crate::error::{Error, Result};
use crate::file_system::{Entry, Id, Kind, is_sound_name};
use crate::lookup::{Key, Named};

const HEAD_BYTES: usize = 8;
/// Of longer directories the rest is not looked at: they would keep a reader busy for hours.
const DIRECTORY_BYTES_MAX: u64 = 1 << 30;
/// In an inode, the first bytes are the number of the directory above.
const PARENT_BYTES: usize = 4;
const ROOT_BYTES: usize = 60;

/// Takes an entry; `false`: it wants no more.
type Take<'a> = &'a mut dyn FnMut(&Entry<'_>) -> bool;

/// Whether a list is to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Walk {
    On,
    Ended,
}

/// Finds a name.
pub(super) fn lookup(ext: &Ext, directory: Id, name: &[u8]) -> Result<Option<Id>> {
    if !is_sound_name(name) {
        return Ok(None);
    }
    let inode = ext.of_id(directory)?;
    ext.lookups
        .find(directory, &[Key::Exact(name)], &|from, take| {
            walk(ext, &inode, from, Damage::Skip, &mut |entry| {
                take(&Named::new(entry, &[Key::Exact(entry.name)]))
            })
        })
}

/// Gives names to `take`.
pub(super) fn list(ext: &Ext, directory: &Inode, from: u64, take: Take<'_>) -> Result<()> {
    walk(ext, directory, from, Damage::Stop, take)
}

/// What is done about blocks that are damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    Stop,
    /// The others are looked at first.
    Skip,
}

fn walk(ext: &Ext, directory: &Inode, from: u64, damage: Damage, take: Take<'_>) -> Result<()> {
    if directory.kind() != Some(Kind::Directory) {
        return Err(Error::NotADirectory);
    }
    let has_types = ext.superblock.has_file_types();
    if directory.is_inline() {
        let (root, rest) = inline::parts(directory)?;
        let first = part(root, PARENT_BYTES..ROOT_BYTES);
        if entries(first, PARENT_BYTES as u64, from, has_types, take)? == Walk::On {
            entries(rest, ROOT_BYTES as u64, from, has_types, take)?;
        }
        return Ok(());
    }
    let block_bytes = ext.superblock.block_bytes as u64;
    let mut block = vec![0; block_bytes as usize];
    let mut start = from / block_bytes * block_bytes;
    let mut first_error = None;
    while start < directory.size_bytes.min(DIRECTORY_BYTES_MAX) {
        let read = ext.read_content(directory, start, &mut block);
        let walked = read.and_then(|len| {
            let block = &block[..len];
            checksums::check_directory(directory, start == 0, block)?;
            entries(block, start, from, has_types, take)
        });
        match walked {
            Ok(Walk::On) => {}
            Ok(Walk::Ended) => return Ok(()),
            Err(error) if damage == Damage::Stop => return Err(error),
            Err(error) => first_error = first_error.or(Some(error)),
        }
        start += block_bytes;
    }
    first_error.map_or(Ok(()), Err)
}

/// Gives the names in one block, or in a part of an inode, that are at `from` or behind it.
fn entries(block: &[u8], start: u64, from: u64, has_types: bool, take: Take<'_>) -> Result<Walk> {
    let mut at = 0;
    while at + HEAD_BYTES <= block.len() {
        let place = start + at as u64;
        let entry_bytes = match usize::from(le16(block, at + 4)) {
            // The whole of a block of 64 KiB has no room in the number.
            0 | 0xffff if block.len() == 0x1_0000 => 0x1_0000,
            len => len,
        };
        let name_bytes = match has_types {
            true => usize::from(u8_at(block, at + 6)),
            false => usize::from(le16(block, at + 6)),
        };
        let inode = le32(block, at);
        let is_sound = entry_bytes >= HEAD_BYTES
            && entry_bytes.is_multiple_of(4)
            && entry_bytes <= block.len() - at
            && (inode == 0 || name_bytes <= entry_bytes - HEAD_BYTES);
        if !is_sound {
            return Err(Error::damaged("an entry of a directory", place));
        }
        let name = part(block, at + HEAD_BYTES..at + HEAD_BYTES + name_bytes);
        at += entry_bytes;
        let Some(id) = id(inode).filter(|_| place >= from && is_sound_name(name)) else {
            continue;
        };
        let entry = Entry {
            name,
            id,
            kind: has_types
                .then(|| kind(u8_at(block, at - entry_bytes + 7)))
                .flatten(),
            next: start + at as u64,
        };
        if !take(&entry) {
            return Ok(Walk::Ended);
        }
    }
    Ok(Walk::On)
}

fn kind(code: u8) -> Option<Kind> {
    Some(match code {
        1 => Kind::File,
        2 => Kind::Directory,
        3 => Kind::CharacterDevice,
        4 => Kind::BlockDevice,
        5 => Kind::Fifo,
        6 => Kind::Socket,
        7 => Kind::Link,
        _ => return None,
    })
}
