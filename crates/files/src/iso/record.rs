//! What a directory has of a file.
//!
//! ```text
//! 00 bytes of the record      12 recorded: year from 1900, month, day, hour, minute, second,
//! 01 of extended attributes      zone in quarters of an hour
//! 02 first block              19 flags: 1 hidden, 2 directory, 4 associated, 80 more pieces
//! 0a bytes of the content     1a unit, 1b gap of interleaved files
//!                             20 bytes of the name    21 name, and a byte to make it even
//! ```
//! Numbers are there twice, with their lowest byte first, and then with their highest.

use crate::bytes::{le32, part, u8_at};
use crate::error::{Error, Result};
use crate::file_system::Time;

/// Longest record in bytes.
pub(super) const RECORD_BYTES_MAX: usize = 255;
const HEAD_BYTES: usize = 33;
const SHORT_TIME_BYTES: usize = 7;

const DIRECTORY: u8 = 0x02;
const ASSOCIATED: u8 = 0x04;
const MORE: u8 = 0x80;

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Record {
    /// Where it is on the volume.
    pub(super) place_bytes: u64,
    pub(super) size_bytes: u64,
    bytes: Vec<u8>,
}

impl Record {
    /// Takes what stands at the start of `bytes`.
    pub(super) fn decode(bytes: &[u8], place_bytes: u64) -> Result<Record> {
        let damaged = Error::damaged("a record of a directory", place_bytes);
        let len = usize::from(u8_at(bytes, 0));
        let name_end = HEAD_BYTES + usize::from(u8_at(bytes, 32));
        if len <= HEAD_BYTES || len > bytes.len() || name_end > len || name_end == HEAD_BYTES {
            return Err(damaged);
        }
        Ok(Record {
            place_bytes,
            size_bytes: le32(bytes, 10).into(),
            bytes: part(bytes, 0..len).to_vec(),
        })
    }

    /// How long it is itself.
    pub(super) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Where the content begins, behind extended attributes.
    pub(super) fn first_block(&self) -> u64 {
        u64::from(le32(&self.bytes, 2)) + u64::from(u8_at(&self.bytes, 1))
    }

    pub(super) fn is_directory(&self) -> bool {
        self.flags() & DIRECTORY != 0
    }

    pub(super) fn is_associated(&self) -> bool {
        self.flags() & ASSOCIATED != 0
    }

    /// Whether another piece of the same file follows.
    pub(super) fn has_more(&self) -> bool {
        self.flags() & MORE != 0 && !self.is_directory()
    }

    pub(super) fn is_interleaved(&self) -> bool {
        part(&self.bytes, 26..28) != [0, 0]
    }

    fn flags(&self) -> u8 {
        u8_at(&self.bytes, 25)
    }

    /// As it stands there.
    pub(super) fn name(&self) -> &[u8] {
        part(&self.bytes, HEAD_BYTES..self.name_end())
    }

    fn name_end(&self) -> usize {
        HEAD_BYTES + usize::from(u8_at(&self.bytes, 32))
    }

    /// What follows the name.
    pub(super) fn system_use(&self) -> &[u8] {
        let start = self.name_end().next_multiple_of(2);
        part(&self.bytes, start..self.bytes.len())
    }

    /// When it was recorded.
    pub(super) fn recorded(&self) -> Time {
        short_time(part(&self.bytes, 18..18 + SHORT_TIME_BYTES))
    }
}

/// A time in seven bytes; what is none is the start of 1970.
pub(super) fn short_time(bytes: &[u8]) -> Time {
    let number = |at| i64::from(u8_at(bytes, at));
    time(
        [
            1900 + number(0),
            number(1),
            number(2),
            number(3),
            number(4),
            number(5),
        ],
        u8_at(bytes, 6),
    )
}

/// A time in seventeen bytes: four digits of the year, two of all others, the zone.
pub(super) fn long_time(bytes: &[u8]) -> Time {
    let number = |at: usize, len| {
        let digits = part(bytes, at..at + len).iter();
        digits.fold(0, |sum, digit| {
            sum * 10 + i64::from(digit.saturating_sub(b'0').min(9))
        })
    };
    let numbers = [
        number(0, 4),
        number(4, 2),
        number(6, 2),
        number(8, 2),
        number(10, 2),
        number(12, 2),
    ];
    let mut time = time(numbers, u8_at(bytes, 16));
    time.nanoseconds = number(14, 2) as u32 * 10_000_000;
    time
}

fn time([year, month, day, hour, minute, second]: [i64; 6], zone: u8) -> Time {
    if !(1..=12).contains(&month) {
        return Time::default();
    }
    // Days since 1970 of a year that begins in March.
    let (year, month) = match month > 2 {
        true => (year, month - 3),
        false => (year - 1, month + 9),
    };
    let leap = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = year * 365 + leap + (month * 153 + 2) / 5 + day - 1 - 719_468;
    let zone = i64::from(zone as i8);
    let zone = if (-52..=52).contains(&zone) { zone } else { 0 };
    Time {
        seconds: ((days * 24 + hour) * 60 + minute) * 60 + second - zone * 15 * 60,
        nanoseconds: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_seconds_since_1970() {
        let seconds = |bytes: [u8; 7]| short_time(&bytes).seconds;
        assert_eq!(seconds([70, 1, 1, 0, 0, 0, 0]), 0);
        assert_eq!(seconds([100, 2, 29, 0, 0, 0, 0]), 951_782_400);
        assert_eq!(seconds([126, 11, 24, 13, 34, 56, 4]), 1_795_523_696);
        assert_eq!(seconds([0; 7]), 0);
        let long = long_time(b"2026112412345650\xfc");
        assert_eq!(long.seconds, 1_795_523_696 + 3600);
        assert_eq!(long.nanoseconds, 500_000_000);
    }
}
