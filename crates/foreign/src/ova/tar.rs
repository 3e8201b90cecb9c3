//! Headers of tar files, as far as packages need them: ustar, pax and GNU's long names. Pure.
//!
//! Called by `package`, which reads the blocks and follows the sizes.

use vellum::{Error, ErrorKind, Result};

use crate::fields::until_nul;

/// Headers are of this size, and what follows them is padded to it.
pub const BLOCK_BYTES: usize = 512;

const NAME: std::ops::Range<usize> = 0..100;
const SIZE: std::ops::Range<usize> = 124..136;
const CHECKSUM: std::ops::Range<usize> = 148..156;
const TYPE: usize = 156;
const MAGIC: std::ops::Range<usize> = 257..263;
const PREFIX: std::ops::Range<usize> = 345..500;

/// What a block of 512 bytes at the place of a header is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Block {
    /// Zeroes: the archive ends here.
    End,
    /// The header of a member.
    Header(Header),
}

/// The header of a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The member's name, unless an extension before it says another one.
    pub name: Vec<u8>,
    /// Bytes behind the header, without the padding.
    pub size_bytes: u64,
    /// What these bytes are.
    pub kind: Kind,
}

/// What the bytes behind a header are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A file.
    File,
    /// The name of the next member (GNU).
    LongName,
    /// Records about the next member (pax).
    Extended,
    /// Nothing that a package needs: folders, links, records about all members.
    Other,
}

/// What pax records say of the next member.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extended {
    /// Its name.
    pub name: Option<Vec<u8>>,
    /// Its size.
    pub size_bytes: Option<u64>,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

fn field(block: &[u8; BLOCK_BYTES], range: std::ops::Range<usize>) -> &[u8] {
    block.get(range).unwrap_or_default()
}

/// Whether a file that begins so may be a package: a tar file, be its first header damaged. The descriptor
/// is to come first, but not all who make packages keep to that.
pub fn may_be_package(block: &[u8; BLOCK_BYTES]) -> bool {
    field(block, MAGIC).starts_with(b"ustar") || matches!(decode(block), Ok(Block::Header(_)))
}

/// Takes a header apart.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] for what is no header, [`ErrorKind::Unsupported`] for members that do not
/// lie in one piece.
pub fn decode(block: &[u8; BLOCK_BYTES]) -> Result<Block> {
    if block.iter().all(|&byte| byte == 0) {
        return Ok(Block::End);
    }
    let sum =
        number(field(block, CHECKSUM)).ok_or_else(|| invalid("this is no header of a tar file"))?;
    if !checksums(block).contains(&sum) {
        return Err(invalid("a header of the tar file has a wrong checksum"));
    }
    let kind = match block.get(TYPE) {
        Some(b'0' | 0 | b'7') => Kind::File,
        Some(b'L') => Kind::LongName,
        Some(b'x') => Kind::Extended,
        Some(b'K' | b'g' | b'1'..=b'6') => Kind::Other,
        other => {
            let letter = char::from(other.copied().unwrap_or_default()).escape_default();
            let message =
                format!("the tar file has a member of type '{letter}', which no package has");
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
    };
    let size_bytes = match block.get(TYPE) {
        // Links and folders, whatever they say.
        Some(b'1'..=b'6') => Some(0),
        _ => number(field(block, SIZE)),
    };
    let size_bytes = size_bytes.ok_or_else(|| invalid("a header of the tar file has no size"))?;
    Ok(Block::Header(Header {
        name: name(block),
        size_bytes,
        kind,
    }))
}

fn name(block: &[u8; BLOCK_BYTES]) -> Vec<u8> {
    let name = until_nul(field(block, NAME));
    // GNU's own headers have other things there.
    let prefix = match field(block, MAGIC) {
        b"ustar\0" => until_nul(field(block, PREFIX)),
        _ => b"",
    };
    match prefix.is_empty() {
        true => name.to_vec(),
        false => [prefix, b"/", name].concat(),
    }
}

/// The sums that a header may have: of bytes, and as some programs count, of signed ones.
fn checksums(block: &[u8; BLOCK_BYTES]) -> [u64; 2] {
    let (mut unsigned, mut signed) = (0_u64, 0_i64);
    for (at, &byte) in block.iter().enumerate() {
        // It counts itself as spaces.
        let byte = if CHECKSUM.contains(&at) { b' ' } else { byte };
        unsigned += u64::from(byte);
        signed += i64::from(byte.cast_signed());
    }
    [unsigned, u64::try_from(signed).unwrap_or(unsigned)]
}

/// A number in octal digits, or GNU's form for large ones.
fn number(field: &[u8]) -> Option<u64> {
    let (first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        // Negative ones have the next bit, too.
        let mut value = u64::from(first & 0x7f);
        for &byte in rest {
            value = value.checked_mul(256)?.checked_add(u64::from(byte))?;
        }
        return Some(value);
    }
    let text = std::str::from_utf8(until_nul(field)).ok()?.trim();
    if text.is_empty() {
        return Some(0);
    }
    text.bytes()
        .all(|digit| digit.is_ascii_digit())
        .then(|| u64::from_str_radix(text, 8).ok())?
}

/// Takes pax records apart.
///
/// # Errors
/// As [`decode`].
pub fn decode_extended(mut bytes: &[u8]) -> Result<Extended> {
    let mut extended = Extended::default();
    let broken = || invalid("the tar file has pax records that are none");
    // Some programs pad them.
    while bytes.first().is_some_and(|&byte| byte != 0) {
        let digits = bytes
            .iter()
            .position(|&byte| byte == b' ')
            .ok_or_else(broken)?;
        let len = bytes.get(..digits).map(std::str::from_utf8);
        let len: usize = len
            .and_then(|text| text.ok()?.parse().ok())
            .ok_or_else(broken)?;
        let record = bytes.get(digits + 1..len).ok_or_else(broken)?;
        let record = record.strip_suffix(b"\n").ok_or_else(broken)?;
        let equals = record
            .iter()
            .position(|&byte| byte == b'=')
            .ok_or_else(broken)?;
        let (key, value) = record.split_at(equals);
        let value = value.get(1..).unwrap_or_default();
        match key {
            b"path" => extended.name = Some(value.to_vec()),
            b"size" => {
                let size = std::str::from_utf8(value)
                    .ok()
                    .and_then(|text| text.parse().ok());
                extended.size_bytes = Some(size.ok_or_else(broken)?);
            }
            key if key.starts_with(b"GNU.sparse.") => {
                let message = "the tar file has a member with holes, which no package has";
                return Err(Error::new(ErrorKind::Unsupported, "open", message));
            }
            _ => {}
        }
        bytes = bytes.get(len..).unwrap_or_default();
    }
    Ok(extended)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A header with its checksum.
    pub(crate) fn header(name: &[u8], size: &[u8], kind: u8) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        block[..name.len()].copy_from_slice(name);
        block[SIZE.start..SIZE.start + size.len()].copy_from_slice(size);
        block[TYPE] = kind;
        block[MAGIC].copy_from_slice(b"ustar\0");
        seal(&mut block);
        block
    }

    fn seal(block: &mut [u8; BLOCK_BYTES]) {
        block[CHECKSUM].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[CHECKSUM].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }

    fn decoded(block: &[u8; BLOCK_BYTES]) -> Header {
        match decode(block).unwrap() {
            Block::Header(header) => header,
            Block::End => panic!("the end"),
        }
    }

    #[test]
    fn sizes_are_octal_or_binary() {
        assert_eq!(
            decoded(&header(b"a", b"0000001750\0", b'0')).size_bytes,
            1000
        );
        assert_eq!(decoded(&header(b"a", b"   17 ", b'0')).size_bytes, 15);
        let mut large = [0; 12];
        large[0] = 0x80;
        large[4..].copy_from_slice(&(9_u64 << 40).to_be_bytes());
        assert_eq!(decoded(&header(b"a", &large, b'0')).size_bytes, 9 << 40);
        for size in [
            &b"9"[..],
            b"-1",
            b"+7",
            b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        ] {
            assert!(decode(&header(b"a", size, b'0')).is_err(), "{size:?}");
        }
    }

    #[test]
    fn names_have_prefixes_in_ustar_only() {
        let mut block = header(b"disk.vmdk", b"0", b'0');
        block[PREFIX.start..PREFIX.start + 6].copy_from_slice(b"folder");
        seal(&mut block);
        assert_eq!(decoded(&block).name, b"folder/disk.vmdk");
        block[MAGIC].copy_from_slice(b"ustar ");
        seal(&mut block);
        assert_eq!(decoded(&block).name, b"disk.vmdk");
        assert_eq!(decode(&[0; BLOCK_BYTES]).unwrap(), Block::End);
        block[0] ^= 1;
        assert!(decode(&block).is_err(), "a wrong checksum");
    }

    #[test]
    fn packages_begin_as_tar_files() {
        let mut block = header(b"m.ovf", b"7", b'0');
        assert!(may_be_package(&block));
        block[0] ^= 1;
        assert!(
            may_be_package(&block),
            "one that is damaged is not taken for a disk"
        );
        block[MAGIC].fill(0);
        assert!(!may_be_package(&block));
        seal(&mut block);
        assert!(may_be_package(&block), "older ones have no magic");
        assert!(!may_be_package(&[0; BLOCK_BYTES]));
        assert!(!may_be_package(&[b'x'; BLOCK_BYTES]));
    }

    #[test]
    fn pax_records_name_and_measure() {
        let extended = decode_extended(b"11 path=abc\n13 size=123 \n").map(|_| ());
        assert!(extended.is_err(), "lengths that do not fit");
        let extended = decode_extended(b"12 path=abc\n12 size=123\n8 uid=0\n\0\0").unwrap();
        assert_eq!(extended.name.as_deref(), Some(&b"abc"[..]));
        assert_eq!(extended.size_bytes, Some(123));
        assert!(decode_extended(b"22 GNU.sparse.major=1\n").is_err());
        assert!(decode_extended(b"0 path=abc\n").is_err());
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_value_or_an_error(
            bytes in proptest::collection::vec(any::<u8>(), BLOCK_BYTES),
            sealed: bool,
        ) {
            let mut block: [u8; BLOCK_BYTES] = bytes.try_into().unwrap();
            if sealed {
                seal(&mut block);
            }
            let _ = (decode(&block), may_be_package(&block), decode_extended(&block));
        }

        #[test]
        fn any_records_give_a_value_or_an_error(text in "([0-9]{1,3} (path|size)=[0-9]{0,4}\n?){0,4}") {
            let _ = decode_extended(text.as_bytes());
        }
    }
}
