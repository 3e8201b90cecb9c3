//! Big-endian reads that cannot panic: a read that is not wholly inside the
//! slice is `None`.

/// The `N` bytes at `at`.
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk::<N>().copied()
}

pub(crate) fn be16(bytes: &[u8], at: usize) -> Option<u16> {
    array(bytes, at).map(u16::from_be_bytes)
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> Option<u32> {
    array(bytes, at).map(u32::from_be_bytes)
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> Option<u64> {
    array(bytes, at).map(u64::from_be_bytes)
}

/// `bytes` up to its first NUL: what a C program sees of the string.
pub(crate) fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes.split(|&byte| byte == 0).next().unwrap_or(bytes)
}

/// `length` rounded up to the 8 bytes to which qcow2 pads variable parts.
pub(crate) const fn padded(length: usize) -> usize {
    length.saturating_add(7) & !7
}

/// Writes `value` at `at`; false if that is not wholly inside `bytes`.
#[must_use]
pub(crate) fn put_be64(bytes: &mut [u8], at: Option<usize>, value: u64) -> bool {
    let place = at
        .and_then(|at| bytes.get_mut(at..))
        .and_then(|rest| rest.first_chunk_mut::<8>());
    match place {
        Some(place) => {
            *place = value.to_be_bytes();
            true
        }
        None => false,
    }
}
