//! Names: short ones of eight and three letters, and long ones.

use crate::bytes::{le16, u8_at};

/// Bits of an entry that tell what is written in small letters.
const SMALL_BASE: u8 = 0x08;
const SMALL_EXTENSION: u8 = 0x10;
/// Parts of a long name, and letters in each.
pub(super) const PARTS_MAX: usize = 20;
const LETTERS: [usize; 13] = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];

/// The letters from 80 on, as they are on a PC.
const CODE_PAGE_437: &str = "ÇüéâäàåçêëèïîìÄÅÉæÆôöòûùÿÖÜ¢£¥₧ƒáíóúñÑªº¿⌐¬½¼¡«»░▒▓│┤╡╢╖╕╣║╗╝╜╛┐\
                             └┴┬├─┼╞╟╚╔╩╦╠═╬╧╨╤╥╙╘╒╓╫╪┘┌█▄▌▐▀αßΓπΣσµτΦΘΩδ∞φε∩≡±≥≤⌠⌡÷≈°∙·√ⁿ²■\u{a0}";

fn letter(byte: u8) -> char {
    match byte.checked_sub(0x80) {
        None => char::from(byte),
        Some(index) => CODE_PAGE_437.chars().nth(index.into()).unwrap_or('?'),
    }
}

/// A short name as people write it.
pub(super) fn short(name: &[u8; 11], case: u8) -> String {
    let (base, extension) = name.split_at(8);
    let mut base: Vec<u8> = base.to_vec();
    // A first letter that is the mark of an empty entry is written as another one.
    if base[0] == 0x05 {
        base[0] = 0xe5;
    }
    let part = |bytes: &[u8], small: u8| {
        let text: String = bytes.iter().map(|byte| letter(*byte)).collect();
        let text = text.trim_end_matches(' ').to_owned();
        match case & small != 0 {
            true => text.to_lowercase(),
            false => text,
        }
    };
    let (base, extension) = (part(&base, SMALL_BASE), part(extension, SMALL_EXTENSION));
    match extension.is_empty() {
        true => base,
        false => format!("{base}.{extension}"),
    }
}

/// A long name that is read part by part.
#[derive(Debug, Default)]
pub(super) struct LongName {
    /// From the last part to the first.
    parts: Vec<[u16; 13]>,
    /// The part that is to come; 0 when there is none.
    next: u8,
    checksum: u8,
}

impl LongName {
    /// Takes a part.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        let (order, checksum) = (u8_at(bytes, 0), u8_at(bytes, 0x0d));
        let number = order & 0x3f;
        if order & 0x40 != 0 {
            *self = LongName {
                parts: Vec::new(),
                next: number,
                checksum,
            };
        }
        let is_next = number != 0 && number == self.next && checksum == self.checksum;
        if !is_next || self.parts.len() == PARTS_MAX {
            *self = LongName::default();
            return;
        }
        self.parts.push(LETTERS.map(|at| le16(bytes, at)));
        self.next -= 1;
    }

    /// The name, if all of it was there and belongs to that short one.
    pub(super) fn finish(self, short: &[u8; 11]) -> Option<String> {
        let sum = short
            .iter()
            .fold(0_u8, |sum, byte| sum.rotate_right(1).wrapping_add(*byte));
        if self.parts.is_empty() || self.next != 0 || sum != self.checksum {
            return None;
        }
        let units = self.parts.iter().rev().flatten().copied();
        let units: Vec<u16> = units.take_while(|unit| *unit != 0).collect();
        Some(String::from_utf16_lossy(&units))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_names_are_written_as_people_do() {
        assert_eq!(CODE_PAGE_437.chars().count(), 128);
        assert_eq!(short(b"README  TXT", 0), "README.TXT");
        assert_eq!(
            short(b"README  TXT", SMALL_BASE | SMALL_EXTENSION),
            "readme.txt"
        );
        assert_eq!(short(b"NAME       ", 0), "NAME");
        assert_eq!(short(b"\x05\x81      A  ", 0), "σü.A");
    }

    #[test]
    fn a_long_name_belongs_to_its_short_one() {
        let mut part = [0; 32];
        (part[0], part[0x0d]) = (0x41, 0);
        for (at, unit) in LETTERS.iter().zip("long name".encode_utf16()) {
            part[*at..*at + 2].copy_from_slice(&unit.to_le_bytes());
        }
        let short = b"LONGNA~1   ";
        let add = |sum: u8, byte: &u8| sum.rotate_right(1).wrapping_add(*byte);
        part[0x0d] = short.iter().fold(0, add);
        let read = |part: &[u8], short: &[u8; 11]| {
            let mut name = LongName::default();
            name.add(part);
            name.finish(short)
        };
        assert_eq!(read(&part, short).as_deref(), Some("long name"));
        assert_eq!(read(&part, b"LONGNA~2   "), None);
        part[0] = 0x42;
        assert_eq!(read(&part, short), None);
        part[0] = 0x01;
        assert_eq!(read(&part, short), None);
    }
}
