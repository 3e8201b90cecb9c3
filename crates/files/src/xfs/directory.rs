//! Directories: entries in the inode, or one after the other in blocks. The lists and trees that
//! help to find names lie behind the entries, or begin at 32 GiB, and are passed over.
//!
//! ```text
//! in an inode: 0 entries   1 how many need eight bytes for a number   2 number of the parent
//!              entries: 0 bytes of the name   1 place elsewhere   3 name, kind, number
//! in blocks:   XD2B or XDB3 (the only one, with its list at the end), XD2D or XDD3
//!              entries: 0 number   8 bytes of the name   9 name, kind, padding, own place
//!              room:    0 ffff     2 bytes of it
//! ```
//!
//! A name that comes next is told by the place of its entry, in bytes from the start of the
//! directory, or of the inode's fork.

use super::inode::{Form, Inode};
use super::superblock::is_intact;
use super::{Xfs, blocks};
use crate::bytes::{be16, be32, be64, has, part, u8_at};
use crate::error::{Error, Result};
use crate::file_system::{Entry, Id, Kind, is_sound_name};
use crate::lookup::{Key, Named};

/// Of longer directories the rest is not looked at: they would keep a reader busy for hours.
const DIRECTORY_BYTES_MAX: u64 = 1 << 30;
const HEAD_4_BYTES: usize = 16;
const HEAD_5_BYTES: usize = 64;
const CHECKSUM_AT: usize = 4;
const OWNER_AT: usize = 40;
/// Of the list at the end of an only block: what counts its entries, and one of them.
const TAIL_BYTES: usize = 8;
const LIST_ENTRY_BYTES: usize = 8;

/// Takes an entry; `false`: it wants no more.
type Take<'a> = &'a mut dyn FnMut(&Entry<'_>) -> bool;

/// Whether a list is to go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Walk {
    On,
    Ended,
}

/// What is done about blocks that are damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Damage {
    Stop,
    /// The others are looked at first.
    Skip,
}

/// Finds a name.
pub(super) fn lookup(xfs: &Xfs, directory: Id, name: &[u8]) -> Result<Option<Id>> {
    if !is_sound_name(name) {
        return Ok(None);
    }
    let inode = xfs.of_id(directory)?;
    xfs.lookups
        .find(directory, &[Key::Exact(name)], &|from, take| {
            walk(xfs, &inode, from, Damage::Skip, &mut |entry| {
                take(&Named::new(entry, &[Key::Exact(entry.name)]))
            })
        })
}

/// Gives names to `take`.
pub(super) fn list(xfs: &Xfs, directory: &Inode, from: u64, take: Take<'_>) -> Result<()> {
    walk(xfs, directory, from, Damage::Stop, take)
}

fn walk(xfs: &Xfs, directory: &Inode, from: u64, damage: Damage, take: Take<'_>) -> Result<()> {
    if directory.kind() != Kind::Directory {
        return Err(Error::NotADirectory);
    }
    if directory.form == Form::Local {
        return in_inode(xfs, directory, from, take);
    }
    let own_bytes = xfs.superblock.directory_block_bytes as u64;
    let mut start = from / own_bytes * own_bytes;
    let mut first_error = None;
    while start < directory.size_bytes.min(DIRECTORY_BYTES_MAX) {
        let walked = block_at(xfs, directory, start).and_then(|found| match found {
            Block::Hole(bytes) => {
                start = (start + bytes) / own_bytes * own_bytes;
                Ok(Walk::On)
            }
            Block::Entries(block) => {
                let own_start = start;
                start += own_bytes;
                entries(xfs, &block, own_start, from, take)
            }
        });
        match walked {
            Ok(Walk::On) => {}
            Ok(Walk::Ended) => return Ok(()),
            Err(error) if damage == Damage::Stop => return Err(error),
            Err(error) => {
                start = (start + 1).next_multiple_of(own_bytes);
                first_error = first_error.or(Some(error));
            }
        }
    }
    first_error.map_or(Ok(()), Err)
}

/// What is in one place of a directory.
enum Block {
    /// Nothing, for so many bytes: one block of a directory at least.
    Hole(u64),
    /// Entries, without what is before and behind them.
    Entries(Body),
}

/// The entries of a block.
struct Body {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

fn block_at(xfs: &Xfs, directory: &Inode, start: u64) -> Result<Block> {
    let (block_bytes, own_bytes) = (
        xfs.superblock.block_bytes as u64,
        xfs.superblock.directory_block_bytes,
    );
    let run = blocks::find(xfs, directory, start / block_bytes)?;
    let hole_bytes = run.blocks.saturating_mul(block_bytes);
    if run.is_hole && hole_bytes >= own_bytes as u64 {
        return Ok(Block::Hole(hole_bytes.min(DIRECTORY_BYTES_MAX)));
    }
    let mut bytes = vec![0; own_bytes];
    xfs.read_content(directory, start, &mut bytes)?;
    let damaged = || Error::damaged("a block of the directory with inode", directory.number);
    let (marks, head_bytes) = match xfs.superblock.is_version_5 {
        true => ([b"XDB3", b"XDD3"], HEAD_5_BYTES),
        false => ([b"XD2B", b"XD2D"], HEAD_4_BYTES),
    };
    let is_only_one = has(&bytes, 0, marks[0]);
    if !is_only_one && !has(&bytes, 0, marks[1]) {
        return Err(damaged());
    }
    if xfs.superblock.is_version_5
        && (!is_intact(&bytes, CHECKSUM_AT) || be64(&bytes, OWNER_AT) != directory.number)
    {
        return Err(damaged());
    }
    let mut end = own_bytes;
    if is_only_one {
        let count = be32(&bytes, own_bytes - TAIL_BYTES) as usize;
        let list_bytes = count.saturating_mul(LIST_ENTRY_BYTES);
        end = (own_bytes - TAIL_BYTES)
            .checked_sub(list_bytes)
            .filter(|end| *end >= head_bytes)
            .ok_or_else(damaged)?;
    }
    Ok(Block::Entries(Body {
        bytes,
        start: head_bytes,
        end,
    }))
}

/// Gives the names in one block that are at `from` or behind it.
fn entries(xfs: &Xfs, body: &Body, start: u64, from: u64, take: Take<'_>) -> Result<Walk> {
    const HEAD_BYTES: usize = 9;
    let has_types = xfs.superblock.has_file_types;
    let bytes = part(&body.bytes, 0..body.end);
    let mut at = body.start;
    while at < bytes.len() {
        let place = start + at as u64;
        let damaged = || Error::damaged("an entry of a directory", place);
        if be16(bytes, at) == 0xffff {
            let len = usize::from(be16(bytes, at + 2));
            if len < 8 || len % 8 != 0 || len > bytes.len() - at {
                return Err(damaged());
            }
            at += len;
            continue;
        }
        let name_end = at + HEAD_BYTES + usize::from(u8_at(bytes, at + 8));
        let end = (name_end + usize::from(has_types) + 2).next_multiple_of(8);
        // Each entry ends with its own place.
        if end > bytes.len() || usize::from(be16(bytes, end - 2)) != at {
            return Err(damaged());
        }
        let name = part(bytes, at + HEAD_BYTES..name_end);
        let id = xfs.id(be64(bytes, at));
        let code = if has_types { u8_at(bytes, name_end) } else { 0 };
        at = end;
        let Some(id) = id.filter(|_| place >= from && is_sound_name(name)) else {
            continue;
        };
        let entry = Entry {
            name,
            id,
            kind: kind(code),
            next: start + at as u64,
        };
        if !take(&entry) {
            return Ok(Walk::Ended);
        }
    }
    Ok(Walk::On)
}

fn in_inode(xfs: &Xfs, directory: &Inode, from: u64, take: Take<'_>) -> Result<()> {
    let len = usize::try_from(directory.size_bytes).unwrap_or(usize::MAX);
    let damaged = || Error::damaged("the entries in inode", directory.number);
    let fork = directory.fork().get(..len).ok_or_else(damaged)?;
    let has_types = xfs.superblock.has_file_types;
    let number_bytes = if u8_at(fork, 1) > 0 { 8 } else { 4 };
    // In a wide directory that counts the wide ones alone.
    let count = u8_at(fork, 0).max(u8_at(fork, 1));
    let mut at = 2 + number_bytes;
    for _ in 0..count {
        let place = at as u64;
        let name_end = at + 3 + usize::from(u8_at(fork, at));
        let number_at = name_end + usize::from(has_types);
        if number_at + number_bytes > fork.len() {
            return Err(damaged());
        }
        let name = part(fork, at + 3..name_end);
        let number = match number_bytes {
            8 => be64(fork, number_at),
            _ => be32(fork, number_at).into(),
        };
        at = number_at + number_bytes;
        let code = if has_types { u8_at(fork, name_end) } else { 0 };
        let Some(id) = xfs
            .id(number)
            .filter(|_| place >= from && is_sound_name(name))
        else {
            continue;
        };
        let entry = Entry {
            name,
            id,
            kind: kind(code),
            next: at as u64,
        };
        if !take(&entry) {
            break;
        }
    }
    Ok(())
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
