//! Directories: entries of 32 bytes. Those of a long name stand before the entry of its file,
//! the last part first.
//!
//! ```text
//! short:  0 name, padded   0b attributes   0c case   16 time, 18 date of change
//!         12 date of use   14 cluster, high   1a cluster, low   1c size
//! long:   0 number of the part, 40: last   1, 0e, 1c: 5, 6, 2 letters in UTF-16   0d checksum
//! ```
//!
//! A name that comes next is told by its place, in entries from the start of the directory.

use super::names::{self, LongName};
use crate::bytes::{le16, le32, part, u8_at};
use crate::file_system::{Entry, Kind, Time, is_sound_name};

pub(super) const SLOT_BYTES: usize = 32;
const LONG: u8 = 0x0f;
const READ_ONLY: u8 = 0x01;
const VOLUME: u8 = 0x08;
const DIRECTORY: u8 = 0x10;

/// The entry of a file.
#[derive(Debug, Clone)]
pub(super) struct Slot {
    pub(super) first_cluster: u32,
    pub(super) size_bytes: u32,
    pub(super) is_read_only: bool,
    pub(super) accessed: Time,
    pub(super) modified: Time,
    name: [u8; 11],
    case: u8,
    attributes: u8,
}

impl Slot {
    /// Takes an entry apart; `None` if it is no file's.
    pub(super) fn decode(bytes: &[u8]) -> Option<Slot> {
        let attributes = u8_at(bytes, 0x0b);
        let is_used = !matches!(u8_at(bytes, 0), 0 | 0xe5);
        if !is_used || attributes & VOLUME != 0 {
            return None;
        }
        let high = u32::from(le16(bytes, 0x14)) << 16;
        Some(Slot {
            first_cluster: high | u32::from(le16(bytes, 0x1a)),
            size_bytes: le32(bytes, 0x1c),
            is_read_only: attributes & READ_ONLY != 0,
            accessed: time(le16(bytes, 0x12), 0),
            modified: time(le16(bytes, 0x18), le16(bytes, 0x16)),
            name: part(bytes, 0..11).try_into().ok()?,
            case: u8_at(bytes, 0x0c),
            attributes,
        })
    }

    pub(super) fn kind(&self) -> Kind {
        match self.attributes & DIRECTORY != 0 {
            true => Kind::Directory,
            false => Kind::File,
        }
    }

    pub(super) fn short_name(&self) -> String {
        names::short(&self.name, self.case)
    }
}

/// A date and a time, taken for UTC: which zone was meant, nobody knows.
fn time(date: u16, time: u16) -> Time {
    let (year, month, day) = (
        1980 + i64::from(date >> 9),
        i64::from(date >> 5 & 15),
        i64::from(date & 31),
    );
    if !(1..=12).contains(&month) || day == 0 {
        return Time::default();
    }
    // Days since 1970, in years that begin in March.
    let (year, month) = match month {
        1 | 2 => (year - 1, month + 9),
        _ => (year, month - 3),
    };
    let days =
        year * 365 + year / 4 - year / 100 + year / 400 + (month * 153 + 2) / 5 + day - 719_469;
    let (hours, minutes, seconds) = (time >> 11, time >> 5 & 63, (time & 31) * 2);
    Time {
        seconds: days * 86400
            + i64::from(hours) * 3600
            + i64::from(minutes) * 60
            + i64::from(seconds),
        nanoseconds: 0,
    }
}

/// Takes a directory piece by piece.
pub(super) struct Reader {
    from: u64,
    long: LongName,
}

impl Reader {
    /// One that gives the names from the entry `from` on.
    pub(super) fn new(from: u64) -> Reader {
        Reader {
            from,
            long: LongName::default(),
        }
    }

    /// Gives the names in a piece that begins `at` bytes into the directory, and at
    /// `place_bytes` on the volume. `false`: no more are wanted, or there are no more.
    pub(super) fn take_piece(
        &mut self,
        at: u64,
        place_bytes: u64,
        bytes: &[u8],
        take: &mut dyn FnMut(&Entry<'_>, &Slot) -> bool,
    ) -> bool {
        for (number, bytes) in bytes.chunks_exact(SLOT_BYTES).enumerate() {
            let index = at / SLOT_BYTES as u64 + number as u64;
            match u8_at(bytes, 0) {
                0 => return false,
                0xe5 => {
                    self.long = LongName::default();
                    continue;
                }
                _ => {}
            }
            if u8_at(bytes, 0x0b) & 0x3f == LONG {
                self.long.add(bytes);
                continue;
            }
            let long = std::mem::take(&mut self.long);
            let Some(slot) = Slot::decode(bytes) else {
                continue;
            };
            let name = long.finish(&slot.name);
            let name = name.unwrap_or_else(|| slot.short_name());
            if index < self.from || !is_sound_name(name.as_bytes()) {
                continue;
            }
            let entry = Entry {
                name: name.as_bytes(),
                id: place_bytes / SLOT_BYTES as u64 + number as u64,
                kind: Some(slot.kind()),
                next: index + 1,
            };
            if !take(&entry, &slot) {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_days_since_1970() {
        let date = |year: u16, month: u16, day: u16| (year - 1980) << 9 | month << 5 | day;
        assert_eq!(time(date(1980, 1, 1), 0).seconds, 315_532_800);
        assert_eq!(time(date(2000, 2, 29), 0).seconds, 951_782_400);
        assert_eq!(
            time(date(2026, 11, 24), 12 << 11 | 34 << 5 | 28).seconds,
            1_795_523_696
        );
        assert_eq!(time(0, 0), Time::default());
    }
}
