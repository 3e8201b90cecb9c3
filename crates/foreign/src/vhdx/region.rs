//! The region table: where the BAT and the metadata lie.

use vellum::{Error, ErrorKind, Result};

use super::guid::Guid;
use super::{invalid, le};

/// Where the two copies of the table lie, in bytes.
pub(super) const OFFSETS_BYTES: [u64; 2] = [192 << 10, 256 << 10];
/// What a table takes, and what its checksum is over.
pub(super) const LEN_BYTES: usize = 64 << 10;
const MAX_ENTRIES: u32 = 2047;

/// A region of the file, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    pub offset_bytes: u64,
    pub len_bytes: u32,
}

/// The regions that are known, and the space of all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Regions {
    pub bat: Region,
    pub metadata: Region,
    pub taken: Taken,
}

/// The space in the file that is no payload's, sorted; its pieces do not overlap.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Taken(Vec<Piece>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    start: u64,
    end: u64,
    /// As the how manieth it was found.
    number: usize,
}

impl Taken {
    /// What overlaps a range, if anything does, as start and end: of several the last one that was found,
    /// as QEMU has it.
    pub(super) fn overlap(&self, offset_bytes: u64, len_bytes: u64) -> Option<(u64, u64)> {
        let end = offset_bytes.saturating_add(len_bytes);
        let first = self.0.partition_point(|piece| piece.end <= offset_bytes);
        let pieces = self.0.iter().skip(first);
        let pieces = pieces.take_while(|piece| piece.start < end);
        let last = pieces.max_by_key(|piece| piece.number)?;
        Some((last.start, last.end))
    }

    /// Where the last piece ends.
    pub(super) fn end_bytes(&self) -> u64 {
        self.0.last().map_or(0, |piece| piece.end)
    }

    fn add(&mut self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let end = offset_bytes
            .checked_add(len_bytes)
            .filter(|end| *end <= i64::MAX as u64)
            .ok_or_else(|| invalid("a VHDX region ends beyond any file"))?;
        if len_bytes == 0 {
            return Ok(());
        }
        if let Some((other, other_end)) = self.overlap(offset_bytes, len_bytes) {
            return Err(invalid(overlap_message(
                offset_bytes,
                end,
                other,
                other_end,
            )));
        }
        let at = self.0.partition_point(|piece| piece.start < offset_bytes);
        let piece = Piece {
            start: offset_bytes,
            end,
            number: self.0.len(),
        };
        self.0.insert(at, piece);
        Ok(())
    }
}

/// QEMU's words for two things in one place.
pub(super) fn overlap_message(start: u64, end: u64, other: u64, other_end: u64) -> String {
    format!("VHDX region {start}-{end} overlaps with region {other}-{other_end}")
}

impl Regions {
    /// Reads a table; `None` if it is none or was torn, so that the other copy has to do.
    pub(super) fn decode(bytes: &[u8], log: Region) -> Result<Option<Regions>> {
        let Some(bytes) = bytes.get(..LEN_BYTES) else {
            return Ok(None);
        };
        if !bytes.starts_with(b"regi") || !le::checksum_is_right(bytes) {
            return Ok(None);
        }
        let count = le::le32(bytes, 8).unwrap_or(0);
        if count > MAX_ENTRIES {
            return Err(invalid("the VHDX region table has too many entries"));
        }
        let mut taken = Taken::default();
        taken.add(log.offset_bytes, log.len_bytes.into())?;
        let (mut bat, mut metadata) = (None, None);
        let entries = bytes.get(16..).unwrap_or_default().chunks_exact(32);
        for entry in entries.take(count as usize) {
            let Some((id, region, is_required)) = decode_entry(entry) else {
                break;
            };
            taken.add(region.offset_bytes, region.len_bytes.into())?;
            let known = match id {
                Guid::BAT_REGION => &mut bat,
                Guid::METADATA_REGION => &mut metadata,
                _ if is_required => {
                    let message = format!("the VHDX image needs a region of an unknown kind, {id}");
                    return Err(Error::new(ErrorKind::Unsupported, "open", message));
                }
                _ => continue,
            };
            if known.replace(region).is_some() {
                return Err(invalid("the VHDX region table names a region twice"));
            }
        }
        match (bat, metadata) {
            (Some(bat), Some(metadata)) => Ok(Some(Regions {
                bat,
                metadata,
                taken,
            })),
            _ => Err(invalid("the VHDX region table names no BAT or no metadata")),
        }
    }
}

fn decode_entry(bytes: &[u8]) -> Option<(Guid, Region, bool)> {
    let region = Region {
        offset_bytes: le::le64(bytes, 16)?,
        len_bytes: le::le32(bytes, 24)?,
    };
    Some((Guid::at(bytes, 0)?, region, le::le32(bytes, 28)? & 1 != 0))
}

/// A table of the two regions that an image has to have.
pub(super) fn encode(bat: Region, metadata: Region) -> Vec<u8> {
    let mut bytes = vec![0; LEN_BYTES];
    le::put(&mut bytes, 0, b"regi");
    le::put(&mut bytes, 8, &2u32.to_le_bytes());
    for (at, id, region) in [
        (16, Guid::BAT_REGION, bat),
        (48, Guid::METADATA_REGION, metadata),
    ] {
        le::put(&mut bytes, at, &id.0);
        le::put(&mut bytes, at + 16, &region.offset_bytes.to_le_bytes());
        le::put(&mut bytes, at + 24, &region.len_bytes.to_le_bytes());
        le::put(&mut bytes, at + 28, &1u32.to_le_bytes());
    }
    le::put_checksum(&mut bytes);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn region(at_mib: u64) -> Region {
        Region {
            offset_bytes: at_mib * MIB,
            len_bytes: 1 << 20,
        }
    }

    #[test]
    fn a_table_goes_there_and_back() {
        let bytes = encode(region(2), region(3));
        let regions = Regions::decode(&bytes, region(1)).unwrap().unwrap();
        assert_eq!((regions.bat, regions.metadata), (region(2), region(3)));
        assert_eq!(regions.taken.overlap(0, MIB), None);
        assert_eq!(regions.taken.overlap(0, MIB + 1), Some((MIB, 2 * MIB)));
        assert_eq!(regions.taken.overlap(4 * MIB, u64::MAX), None);
        let all = regions.taken.overlap(0, u64::MAX);
        assert_eq!(all, Some((3 * MIB, 4 * MIB)));
        assert_eq!(
            regions.taken.overlap(4 * MIB - 1, 1),
            Some((3 * MIB, 4 * MIB))
        );
    }

    #[test]
    fn regions_that_overlap_are_refused() {
        let bytes = encode(region(2), region(1));
        let error = Regions::decode(&bytes, region(1)).unwrap_err();
        assert_eq!(
            error.message(),
            "VHDX region 1048576-2097152 overlaps with region 1048576-2097152"
        );
    }

    #[test]
    fn a_torn_table_gives_none() {
        let mut bytes = encode(region(2), region(3));
        bytes[60000] = 1;
        assert_eq!(Regions::decode(&bytes, region(1)).unwrap(), None);
        assert_eq!(Regions::decode(&[], region(1)).unwrap(), None);
    }

    proptest! {
        #[test]
        fn any_entries_give_a_value_or_an_error(
            count in 0u32..3000,
            entries in proptest::collection::vec(any::<u8>(), 0..400),
        ) {
            let mut bytes = encode(region(2), region(3));
            le::put(&mut bytes, 8, &count.to_le_bytes());
            le::put(&mut bytes, 80, &entries);
            le::put_checksum(&mut bytes);
            let _ = Regions::decode(&bytes, region(1));
        }
    }
}
