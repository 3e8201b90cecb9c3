//! Reading big-endian fields from bytes that nobody vouches for.

/// The rest of a message. Every read checks that the bytes are there.
#[derive(Debug, Clone, Copy)]
pub struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    /// A cursor at the start of `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Cursor { rest: bytes }
    }

    /// Whether all bytes were read.
    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// The next `len_bytes` bytes.
    pub fn take(&mut self, len_bytes: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(len_bytes)?;
        self.rest = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (taken, rest) = self.rest.split_first_chunk()?;
        self.rest = rest;
        Some(*taken)
    }

    /// A 16-bit number.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// A 32-bit number.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// A 64-bit number.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A string behind its 32-bit length, at most `max_bytes` long and in UTF-8.
    pub fn string(&mut self, max_bytes: usize) -> Option<&'a str> {
        let len = usize::try_from(self.u32()?).ok()?;
        if len > max_bytes {
            return None;
        }
        std::str::from_utf8(self.take(len)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_read_beyond_the_end() {
        let mut cursor = Cursor::new(&[0, 0, 0, 2, b'a', b'b', 7]);
        assert_eq!(cursor.string(4096), Some("ab"));
        assert_eq!(cursor.u16(), None);
        assert_eq!(cursor.take(1), Some(&[7][..]));
        assert!(cursor.is_empty());
        assert_eq!(Cursor::new(&[0xff; 4]).string(4096), None);
        assert_eq!(Cursor::new(&[0, 0, 0, 3, 1, 2]).string(4096), None);
        assert_eq!(Cursor::new(&[0, 0, 0, 1, 0xff]).string(4096), None);
    }
}
