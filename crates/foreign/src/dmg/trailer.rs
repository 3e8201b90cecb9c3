//! The trailer of a UDIF image.

use vellum::{Error, ErrorKind, Result};

use crate::fields::be64;

/// What the trailer takes.
const TRAILER_BYTES: u64 = 512;
const MAGIC: &[u8] = b"koly";

/// A part of the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Where it begins, in bytes.
    pub start_bytes: u64,
    /// Its length in bytes.
    pub len_bytes: u64,
}

/// What the trailer says, checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Trailer {
    /// The virtual size in bytes.
    pub size_bytes: u64,
    /// Where the data of chunks begins, in bytes.
    pub data_bytes: u64,
    /// The resource fork with the list of tables.
    pub resource_fork: Option<Part>,
    /// The property list with it, which counts where there is no fork.
    pub property_list: Option<Part>,
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// Where in a file of a length the trailer is looked for, and how many bytes have to be read for it: it may be
/// before up to 511 bytes of nothing.
pub(super) fn search_range(len_bytes: u64) -> Result<(u64, usize)> {
    if len_bytes < TRAILER_BYTES {
        return Err(invalid("dmg file must be at least 512 bytes long"));
    }
    let start = len_bytes.saturating_sub(2 * TRAILER_BYTES - 1);
    Ok((start, (len_bytes - start) as usize))
}

impl Trailer {
    /// Looks for the trailer in the end of a file, which begins at `start_bytes`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidImage`] where there is none, or where it leads behind itself.
    pub fn find(bytes: &[u8], start_bytes: u64) -> Result<Trailer> {
        let missing = || invalid("Could not locate UDIF trailer in dmg file");
        // It is the very end, nearly always; what stands before may have the same four letters.
        let usual = bytes.len().checked_sub(TRAILER_BYTES as usize);
        let usual = usual.filter(|&at| bytes.get(at..at + 4) == Some(MAGIC));
        let mut places = bytes.windows(MAGIC.len());
        let at = usual.or_else(|| places.position(|here| here == MAGIC));
        let at = at.ok_or_else(missing)?;
        let end_bytes = start_bytes.saturating_add(at as u64);
        // A trailer that is cut off goes on with zeroes, as what is behind a file does.
        let field = |from: usize| be64(bytes, at + from).unwrap_or(0);
        let astray = || invalid("the UDIF trailer leads out of the file");
        let part = |from: usize| {
            let part = Part {
                start_bytes: field(from),
                len_bytes: field(from + 8),
            };
            let room = end_bytes.checked_sub(part.start_bytes);
            match room.is_some_and(|room| room > 0 && part.len_bytes <= room) {
                true => Ok((part.len_bytes > 0).then_some(part)),
                false => Err(astray()),
            }
        };
        let data_bytes = field(0x18);
        if data_bytes > end_bytes {
            return Err(astray());
        }
        let size_bytes = field(0x1ec).checked_mul(512);
        Ok(Trailer {
            size_bytes: size_bytes
                .filter(|&size_bytes| i64::try_from(size_bytes).is_ok())
                .ok_or_else(|| invalid("the disk is too large"))?,
            data_bytes,
            resource_fork: part(0x28)?,
            property_list: part(0xd8)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_trailer_is_found_before_some_more_bytes() {
        let mut bytes = vec![0; 700];
        bytes[100..104].copy_from_slice(MAGIC);
        bytes[100 + 0xd8..][..8].copy_from_slice(&50u64.to_be_bytes());
        bytes[100 + 0xe0..][..8].copy_from_slice(&7u64.to_be_bytes());
        bytes[100 + 0x1ec..][..8].copy_from_slice(&9u64.to_be_bytes());
        let trailer = Trailer::find(&bytes, 1000).unwrap();
        let list = Part {
            start_bytes: 50,
            len_bytes: 7,
        };
        assert_eq!(trailer.property_list, Some(list));
        assert_eq!(trailer.resource_fork, None);
        assert_eq!(trailer.size_bytes, 9 * 512);
        bytes[100 + 0xd8..][..8].copy_from_slice(&1100u64.to_be_bytes());
        assert!(Trailer::find(&bytes, 1000).is_err());
        let error = Trailer::find(&bytes[101..], 0).unwrap_err();
        let message = "Could not locate UDIF trailer in dmg file";
        assert_eq!(error.message(), message);
        assert!(search_range(511).is_err());
        assert_eq!(search_range(5000).unwrap(), (3977, 1023));
    }

    proptest! {
        #[test]
        fn any_bytes_give_a_trailer_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 4..600),
            at in 0usize..600,
            start: u64,
        ) {
            let at = at.min(bytes.len() - 4);
            bytes[at..at + 4].copy_from_slice(MAGIC);
            let _ = Trailer::find(&bytes, start);
        }
    }
}
