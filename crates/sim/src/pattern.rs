//! What a guest sector can hold: values small enough to keep in sets, and the
//! 512 bytes that stand for each.
//!
//! Every word of a written sector names the write, the sector and its own place,
//! so bytes that end up in another sector, or come from another write, show.

use crate::sparse_bytes::SECTOR_BYTES;

/// A write's number; see [`Value::Written`].
pub type WriteId = u32;

/// Length of a sector as an array.
pub const SECTOR_LEN: usize = SECTOR_BYTES as usize;

const TAG: u64 = 0xa5 << 56;
const ID_BITS: u32 = 24;
const SECTOR_BITS: u32 = 26;

/// The content of one guest sector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Value {
    /// All bytes are zero.
    Zero,
    /// The whole sector is from one write.
    Written(WriteId),
    /// Bytes of several writes: an index into [`crate::model::Model`]'s table.
    Mixed(u32),
}

/// The word at `index` of `sector` as write `id` writes it.
fn word(id: WriteId, sector: u64, index: usize) -> u64 {
    debug_assert!(id < 1 << ID_BITS && sector < 1 << SECTOR_BITS);
    TAG | u64::from(id) << 32 | sector << 6 | index as u64
}

/// Fills `out` with the bytes that write `id` writes at `offset_bytes`.
pub fn fill(id: WriteId, offset_bytes: u64, out: &mut [u8]) {
    let mut at = offset_bytes;
    let mut rest = out;
    while !rest.is_empty() {
        let inside = (at % 8) as usize;
        let take = rest.len().min(8 - inside);
        let (now, later) = rest.split_at_mut(take);
        let index = (at % SECTOR_BYTES / 8) as usize;
        let bytes = word(id, at / SECTOR_BYTES, index).to_be_bytes();
        now.copy_from_slice(&bytes[inside..inside + take]);
        at += take as u64;
        rest = later;
    }
}

/// Whether `bytes` are what write `id` writes at `offset_bytes`.
pub fn matches(id: WriteId, offset_bytes: u64, bytes: &[u8]) -> bool {
    let mut expected = [0; SECTOR_LEN];
    let expected = &mut expected[..bytes.len()];
    fill(id, offset_bytes, expected);
    expected == bytes
}

/// Whether `bytes` look like guest data rather than metadata.
pub fn is_guest_data(bytes: &[u8]) -> bool {
    bytes.chunks_exact(8).any(|word| word[0] == 0xa5)
}

/// Says what a sector seems to hold, for messages.
pub fn describe(bytes: &[u8]) -> String {
    if bytes.iter().all(|&byte| byte == 0) {
        return "zeroes".to_owned();
    }
    let Some(head) = bytes.first_chunk::<8>() else {
        return format!("the bytes {bytes:02x?}");
    };
    let first = u64::from_be_bytes(*head);
    if first >> 56 != TAG >> 56 {
        return format!("bytes that no write wrote, from {first:#018x}");
    }
    let id = (first >> 32) as u32 & ((1 << ID_BITS) - 1);
    let sector = first >> 6 & ((1 << SECTOR_BITS) - 1);
    let whole = matches(id, sector * SECTOR_BYTES, bytes);
    let part = if whole { "" } else { "partly " };
    format!("{part}write {id} of sector {sector}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_of_a_write_is_the_same_bytes() {
        let mut whole = vec![0; 2048];
        fill(9, 512, &mut whole);
        for (at, len) in [(0, 1), (7, 9), (500, 100), (1000, 1000)] {
            let mut part = vec![0; len];
            fill(9, 512 + at as u64, &mut part);
            assert_eq!(part, whole[at..at + len]);
        }
    }

    #[test]
    fn values_differ_by_write_and_place() {
        let mut bytes = [0; 512];
        fill(3, 1024, &mut bytes);
        assert!(matches(3, 1024, &bytes));
        assert!(!matches(3, 1536, &bytes));
        assert!(!matches(4, 1024, &bytes));
        assert_eq!(describe(&bytes), "write 3 of sector 2");
        assert!(is_guest_data(&bytes));
        bytes[100] ^= 1;
        assert_eq!(describe(&bytes), "partly write 3 of sector 2");
    }
}
