//! Numbers in bytes. Who reads beyond the end gets zero, which no structure takes for sound.

use std::ops::Range;

fn take<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = at.checked_add(N).and_then(|end| bytes.get(at..end));
    found.map_or([0; N], |found| found.try_into().unwrap_or([0; N]))
}

pub(crate) fn u8_at(bytes: &[u8], at: usize) -> u8 {
    take::<1>(bytes, at)[0]
}

pub(crate) fn le16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(take(bytes, at))
}

pub(crate) fn le32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(take(bytes, at))
}

pub(crate) fn le64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(take(bytes, at))
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(take(bytes, at))
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(take(bytes, at))
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(take(bytes, at))
}

/// Whether `mark` stands at `at`.
pub(crate) fn has(bytes: &[u8], at: usize, mark: &[u8]) -> bool {
    bytes.get(at..).is_some_and(|rest| rest.starts_with(mark))
}

/// What of `range` there is.
pub(crate) fn part(bytes: &[u8], range: Range<usize>) -> &[u8] {
    let end = range.end.min(bytes.len());
    bytes.get(range.start.min(end)..end).unwrap_or_default()
}

/// Text up to the first NUL, without space around it, and with nothing that a terminal would
/// obey.
pub(crate) fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0);
    let text = String::from_utf8_lossy(&bytes[..end.unwrap_or(bytes.len())]);
    let shown = text.chars().map(|letter| match letter.is_control() {
        true => '?',
        false => letter,
    });
    shown.collect::<String>().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_beyond_the_end() {
        assert_eq!(le32(&[1, 2, 3], 0), 0);
        assert_eq!(le16(&[1, 2, 3], usize::MAX), 0);
        assert_eq!(be16(&[1, 2, 3], 1), 0x203);
        assert_eq!(part(&[1, 2, 3], 2..9), [3]);
        assert_eq!(part(&[1, 2, 3], 5..9), []);
        assert!(!has(&[1], 4, &[]));
        assert_eq!(text(b" a\x1bb \0c"), "a?b");
    }
}
