//! Numbers, which are big-endian here.

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

pub(super) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

pub(super) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

/// The 16 bytes of an identity.
pub(super) fn id(bytes: &[u8], at: usize) -> Option<[u8; 16]> {
    array(bytes, at)
}
