//! What Rock Ridge adds to records: fields one after the other, which may go on elsewhere.
//!
//! ```text
//! 0 two letters   2 bytes of the field   3 version   4 content
//!
//! SP be ef skipped           CE block, offset, bytes   NM flags, part of the name
//! PX mode, links, user,      PN device, high and low   SL flags, parts of a link: flags,
//!    group (each twice)      CL block of a directory      bytes, text
//! TF flags, times            RE moved from elsewhere   ZF how, size of what is compressed
//! ```
//!
//! Invariant: [`AREAS_MAX`] areas are read for a record at most, each no longer than a sector, so
//! areas that lead to each other end.

use super::record::{long_time, short_time};
use super::{Iso, SECTOR_BYTES};
use crate::bytes::{has, le32, part, u8_at};
use crate::error::{Error, Result};
use crate::file_system::Time;

/// So many areas beside the one in the record, as in Linux.
const AREAS_MAX: usize = 32;
const NAME_BYTES_MAX: usize = 255;
const TARGET_BYTES_MAX: usize = 4095;

const CONTINUES: u8 = 1;
const CURRENT: u8 = 2;
const PARENT: u8 = 4;
const ROOT: u8 = 8;

/// Who may do what, and whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Posix {
    pub(super) mode: u32,
    pub(super) links: u32,
    pub(super) user: u32,
    pub(super) group: u32,
}

/// What is added to a record.
#[derive(Debug, Default)]
pub(super) struct SystemUse {
    pub(super) name: Option<Vec<u8>>,
    pub(super) posix: Option<Posix>,
    /// As the kernel writes it in 32 bits.
    pub(super) device: u32,
    /// Where a symbolic link leads.
    pub(super) target: Option<Vec<u8>>,
    pub(super) accessed: Option<Time>,
    pub(super) modified: Option<Time>,
    pub(super) changed: Option<Time>,
    /// Where the directory is that this stands for.
    pub(super) child: Option<u32>,
    /// It is shown elsewhere, where such a field leads to it.
    pub(super) is_moved: bool,
    /// How long it is without compression.
    pub(super) compressed_from_bytes: Option<u32>,
    /// What keeps its content from being read.
    pub(super) unreadable: Option<&'static str>,
    /// A part of it makes no sense.
    pub(super) is_damaged: bool,
}

/// In the root directory: how many bytes are another's before the fields of other records.
/// `None` without Rock Ridge.
pub(super) fn mark(area: &[u8]) -> Option<usize> {
    // Some have 14 bytes of CD-ROM XA first.
    let at = [0, 14].into_iter().find(|at| has(area, *at, b"SP"))?;
    has(area, at + 4, &[0xbe, 0xef]).then(|| usize::from(u8_at(area, at + 6)))
}

/// Reads all fields of a record.
///
/// # Errors
/// If the disk cannot be read. What makes no sense is noted.
pub(super) fn read(iso: &Iso, area: &[u8], skipped: usize) -> Result<SystemUse> {
    let mut added = SystemUse::default();
    let mut parser = Parser::default();
    let mut next = parser.take_area(&mut added, part(area, skipped..area.len()));
    for _ in 0..AREAS_MAX {
        let Some(area) = next.take() else {
            break;
        };
        match area.read(iso) {
            Ok(bytes) => next = parser.take_area(&mut added, &bytes),
            Err(Error::Io(error)) => return Err(Error::Io(error)),
            Err(_) => added.is_damaged = true,
        }
    }
    added.is_damaged |= next.is_some();
    parser.finish(&mut added);
    Ok(added)
}

/// Where fields go on.
#[derive(Debug, Clone, Copy)]
struct Area {
    block: u32,
    offset: u32,
    len: u32,
}

impl Area {
    fn read(self, iso: &Iso) -> Result<Vec<u8>> {
        let at = u64::from(self.block) * u64::from(iso.volume.block_bytes);
        let end = u64::from(self.offset) + u64::from(self.len);
        if end > SECTOR_BYTES {
            return Err(Error::damaged("the continuation of a record", at));
        }
        iso.source
            .bytes(at + u64::from(self.offset), self.len as usize)
    }
}

/// What is not complete after one field.
#[derive(Default)]
struct Parser {
    name: Vec<u8>,
    target: Option<Vec<u8>>,
    /// What follows belongs to the same part of the target.
    is_in_part: bool,
}

impl Parser {
    /// Takes the fields in an area; where they go on.
    fn take_area(&mut self, added: &mut SystemUse, area: &[u8]) -> Option<Area> {
        let mut next = None;
        let mut rest = area;
        while rest.len() > 3 {
            let len = usize::from(u8_at(rest, 2));
            // Zeroes fill what is left; others may have left something else there.
            if len < 4 || len > rest.len() {
                break;
            }
            let (field, later) = rest.split_at(len);
            rest = later;
            match &field[..2] {
                b"CE" => {
                    next = Some(Area {
                        block: le32(field, 4),
                        offset: le32(field, 12),
                        len: le32(field, 20),
                    });
                }
                b"ST" => break,
                _ => self.take(added, field),
            }
        }
        next
    }

    fn take(&mut self, added: &mut SystemUse, field: &[u8]) {
        match &field[..2] {
            b"NM" => self.take_name(field),
            b"SL" => self.take_target(added, field),
            b"PX" if field.len() >= 36 => {
                added.posix = Some(Posix {
                    mode: le32(field, 4),
                    links: le32(field, 12),
                    user: le32(field, 20),
                    group: le32(field, 28),
                });
            }
            b"PN" if field.len() >= 20 => added.device = device(le32(field, 4), le32(field, 12)),
            b"PX" | b"PN" => added.is_damaged = true,
            b"TF" => take_times(added, field),
            b"CL" => added.child = Some(le32(field, 4)),
            b"RE" => added.is_moved = true,
            b"ZF" => {
                added.compressed_from_bytes = Some(le32(field, 8));
                added.unreadable = Some("files that are compressed with zisofs");
            }
            b"SF" => added.unreadable = Some("sparse files of Rock Ridge"),
            _ => {}
        }
    }

    fn take_name(&mut self, field: &[u8]) {
        // Flags of `.` and `..` are for records that are not shown.
        if u8_at(field, 4) & (CURRENT | PARENT) != 0 {
            return;
        }
        let text = part(field, 5..field.len());
        if self.name.len() + text.len() <= NAME_BYTES_MAX {
            self.name.extend(text);
        }
    }

    fn take_target(&mut self, added: &mut SystemUse, field: &[u8]) {
        let target = self.target.get_or_insert_default();
        let mut rest = part(field, 5..field.len());
        while rest.len() >= 2 {
            let (flags, len) = (rest[0], usize::from(rest[1]));
            let Some(text) = rest.get(2..2 + len) else {
                added.is_damaged = true;
                return;
            };
            rest = &rest[2 + len..];
            if !self.is_in_part && !target.is_empty() && !target.ends_with(b"/") {
                target.push(b'/');
            }
            match flags & !CONTINUES {
                0 => target.extend(text),
                CURRENT => target.push(b'.'),
                PARENT => target.extend(b".."),
                ROOT => *target = b"/".to_vec(),
                _ => added.is_damaged = true,
            }
            self.is_in_part = flags & CONTINUES != 0;
            if target.len() > TARGET_BYTES_MAX {
                target.clear();
                added.is_damaged = true;
                return;
            }
        }
    }

    fn finish(self, added: &mut SystemUse) {
        added.name = Some(self.name).filter(|name| !name.is_empty());
        added.target = self.target;
    }
}

/// Times in the order of their flags: created, modified, accessed, changed.
fn take_times(added: &mut SystemUse, field: &[u8]) {
    const LONG: u8 = 0x80;
    let flags = u8_at(field, 4);
    let len = if flags & LONG != 0 { 17 } else { 7 };
    let mut at = 5;
    for flag in [1, 2, 4, 8] {
        if flags & flag == 0 {
            continue;
        }
        let bytes = part(field, at..at + len);
        at += len;
        if bytes.len() < len {
            added.is_damaged = true;
            return;
        }
        let time = match flags & LONG != 0 {
            true => long_time(bytes),
            false => short_time(bytes),
        };
        match flag {
            2 => added.modified = Some(time),
            4 => added.accessed = Some(time),
            // Of the two the second counts; some have the first alone.
            _ => added.changed = Some(time),
        }
    }
}

/// A number of a device in 32 bits from the two numbers that stand there.
fn device(high: u32, low: u32) -> u32 {
    let (major, minor) = match high == 0 && low > 0xff {
        true => (low >> 8, low & 0xff),
        false => (high, low),
    };
    (minor & 0xff) | (major & 0xfff) << 8 | (minor & 0xf_ff00) << 12
}
