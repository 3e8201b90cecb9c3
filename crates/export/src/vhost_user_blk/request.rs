//! Requests of the virtio block protocol: from memory to what is to be done. Nothing is done here.
//!
//! The bytes that say what is wanted are copied before they are looked at: the guest may
//! change them meanwhile.

use smallvec::SmallVec;
use vellum_io::Result;
use vellum_io::shared_memory::SharedBuffer;

use super::chain::Chain;
use super::config::{Geometry, MAX_RANGE_SECTORS, MAX_RANGES, SECTOR_BYTES};
use super::memory::{Pieces, total_len};
use super::message::broken;

/// Bytes of what says what is wanted.
const HEADER_BYTES: usize = 16;
/// Bytes of a range to discard or zero.
const RANGE_BYTES: usize = 16;
/// Bytes of the answer to the question for the serial number.
pub(super) const ID_BYTES: usize = 20;
/// Most bytes that a request moves; more than a guest that keeps to the configuration asks for.
pub(super) const MAX_DATA_BYTES: usize = 32 << 20;

const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;
const FLAG_UNMAP: u32 = 1;

/// How a request ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    Ok,
    IoError,
    Unsupported,
}

impl Status {
    fn byte(self) -> u8 {
        match self {
            Status::Ok => 0,
            Status::IoError => 1,
            Status::Unsupported => 2,
        }
    }
}

/// Where a request says how it ended: one byte.
#[derive(Debug)]
pub(super) struct StatusPlace(SharedBuffer);

impl StatusPlace {
    pub(super) fn write(&self, status: Status) {
        self.0.copy_from(0, &[status.byte()]);
    }
}

/// A range of the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct DiskRange {
    pub(super) offset_bytes: u64,
    pub(super) len_bytes: u64,
}

/// What is to be done.
#[derive(Debug)]
pub(super) enum Work {
    Read {
        offset_bytes: u64,
        into: Pieces,
    },
    Write {
        offset_bytes: u64,
        from: Pieces,
    },
    Flush,
    GetId {
        into: Pieces,
    },
    Discard(SmallVec<[DiskRange; 1]>),
    /// Ranges, and whether their space may be given back.
    WriteZeroes(SmallVec<[(DiskRange, bool); 1]>),
}

/// A request, whose memory is sound.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) status: StatusPlace,
    /// What is to be done, or why nothing is.
    pub(super) work: Result<Work, Status>,
}

/// Takes the memory of a request apart.
///
/// # Errors
/// If there is no room for an answer, so that nobody could be told anything.
pub(super) fn parse(chain: Chain, disk: &Geometry) -> Result<Request> {
    let Chain {
        mut readable,
        mut writable,
        ..
    } = chain;
    let Some(status) = split_last_byte(&mut writable) else {
        return Err(broken("a request without room for its status"));
    };
    let work = match take(&mut readable, HEADER_BYTES) {
        Some(header) => understand(&header, readable, writable, disk),
        None => Err(Status::IoError),
    };
    Ok(Request {
        status: StatusPlace(status),
        work,
    })
}

/// Takes the last byte off.
fn split_last_byte(pieces: &mut Pieces) -> Option<SharedBuffer> {
    let mut last = pieces.pop()?;
    let rest = last.split_to(last.len().checked_sub(1)?);
    if !rest.is_empty() {
        pieces.push(rest);
    }
    Some(last)
}

/// Copies the first `len` bytes and takes them off.
fn take(pieces: &mut Pieces, len: usize) -> Option<SmallVec<[u8; 32]>> {
    if total_len(pieces) < len {
        return None;
    }
    let mut bytes = SmallVec::from_elem(0, len);
    let mut filled = 0;
    let mut emptied = 0;
    for piece in pieces.iter_mut() {
        let part = piece.split_to(piece.len().min(len - filled));
        part.copy_to(0, &mut bytes[filled..filled + part.len()]);
        filled += part.len();
        if !piece.is_empty() {
            break;
        }
        emptied += 1;
    }
    pieces.drain(..emptied);
    Some(bytes)
}

fn understand(
    header: &[u8],
    readable: Pieces,
    writable: Pieces,
    disk: &Geometry,
) -> Result<Work, Status> {
    let (kind, sector) = (u32_at(header, 0), u64_at(header, 8));
    match kind {
        TYPE_IN => Ok(Work::Read {
            offset_bytes: check_data(sector, &writable, disk)?,
            into: writable,
        }),
        TYPE_OUT | TYPE_DISCARD | TYPE_WRITE_ZEROES if disk.read_only => Err(Status::IoError),
        TYPE_OUT => Ok(Work::Write {
            offset_bytes: check_data(sector, &readable, disk)?,
            from: readable,
        }),
        TYPE_FLUSH => Ok(Work::Flush),
        TYPE_GET_ID => Ok(Work::GetId { into: writable }),
        TYPE_DISCARD => {
            let ranges = take_ranges(readable, disk)?.into_iter();
            let checked = ranges.map(|(range, flags)| match flags {
                0 => Ok(range),
                _ => Err(Status::Unsupported),
            });
            checked.collect::<Result<_, _>>().map(Work::Discard)
        }
        TYPE_WRITE_ZEROES => {
            let ranges = take_ranges(readable, disk)?.into_iter();
            let checked = ranges.map(|(range, flags)| match flags & !FLAG_UNMAP {
                0 => Ok((range, flags & FLAG_UNMAP != 0)),
                _ => Err(Status::Unsupported),
            });
            checked.collect::<Result<_, _>>().map(Work::WriteZeroes)
        }
        _ => Err(Status::Unsupported),
    }
}

/// The offset of a read or write, in bytes.
fn check_data(sector: u64, data: &[SharedBuffer], disk: &Geometry) -> Result<u64, Status> {
    let len = total_len(data);
    if len > MAX_DATA_BYTES {
        return Err(Status::IoError);
    }
    check_range(sector, len as u64, disk).map(|range| range.offset_bytes)
}

/// A range of the disk that is made of whole blocks.
fn check_range(sector: u64, len_bytes: u64, disk: &Geometry) -> Result<DiskRange, Status> {
    let offset_bytes = sector.checked_mul(SECTOR_BYTES).ok_or(Status::IoError)?;
    let end = offset_bytes.checked_add(len_bytes).ok_or(Status::IoError)?;
    let block_bytes = u64::from(disk.logical_block_bytes);
    let is_aligned =
        offset_bytes.is_multiple_of(block_bytes) && len_bytes.is_multiple_of(block_bytes);
    // The last block may be cut off by the end of the disk: nobody is told of it.
    if end > disk.size_bytes / SECTOR_BYTES * SECTOR_BYTES || !is_aligned {
        return Err(Status::IoError);
    }
    Ok(DiskRange {
        offset_bytes,
        len_bytes,
    })
}

/// The ranges to discard or zero, with their flags.
fn take_ranges(
    mut readable: Pieces,
    disk: &Geometry,
) -> Result<SmallVec<[(DiskRange, u32); 1]>, Status> {
    let len = total_len(&readable);
    let count = len / RANGE_BYTES;
    if len == 0 || !len.is_multiple_of(RANGE_BYTES) || count > MAX_RANGES as usize {
        return Err(Status::IoError);
    }
    let bytes = take(&mut readable, len).ok_or(Status::IoError)?;
    let ranges = bytes.chunks_exact(RANGE_BYTES).map(|bytes| {
        let (sector, sectors, flags) = (u64_at(bytes, 0), u32_at(bytes, 8), u32_at(bytes, 12));
        if sectors > MAX_RANGE_SECTORS {
            return Err(Status::IoError);
        }
        let range = check_range(sector, u64::from(sectors) * SECTOR_BYTES, disk)?;
        Ok((range, flags))
    });
    ranges.collect()
}

/// A number that is known to be there.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::super::memory::tests::memory_of;
    use super::*;

    const DISK: Geometry = Geometry {
        size_bytes: (1 << 20) + 100,
        logical_block_bytes: 4096,
        discard_alignment_bytes: 4096,
        queues: 1,
        read_only: false,
        write_back: true,
    };

    /// A request whose readable bytes lie in pieces of `piece` bytes.
    fn request(readable: &[u8], piece: usize, writable: u32, disk: &Geometry) -> Result<Request> {
        let memory = memory_of(&[(0, 1 << 20)]);
        let mut chain = Chain::default();
        for (number, bytes) in readable.chunks(piece).enumerate() {
            let address = (number * 2 * piece) as u64;
            memory.find(address, bytes.len() as u32, &mut chain.readable)?;
            if let Some(last) = chain.readable.last() {
                last.copy_from(0, bytes);
            }
        }
        memory.find(1 << 19, writable, &mut chain.writable)?;
        parse(chain, disk)
    }

    fn header(kind: u32, sector: u64) -> Vec<u8> {
        [&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat()
    }

    fn range(sector: u64, sectors: u32, flags: u32) -> Vec<u8> {
        [
            &sector.to_le_bytes()[..],
            &sectors.to_le_bytes(),
            &flags.to_le_bytes(),
        ]
        .concat()
    }

    fn work(readable: &[u8], writable: u32) -> Result<Work, Status> {
        request(readable, 7, writable, &DISK)
            .expect("room for the status")
            .work
    }

    #[test]
    fn headers_and_data_may_lie_in_any_pieces() {
        for piece in [1, 7, 16, 5000] {
            let bytes = [header(1, 8), vec![9; 4096]].concat();
            let Ok(Work::Write { offset_bytes, from }) =
                request(&bytes, piece, 1, &DISK).expect("a request").work
            else {
                panic!("a write")
            };
            let mut data = Vec::new();
            for part in &from {
                let mut bytes = vec![0; part.len()];
                part.copy_to(0, &mut bytes);
                data.extend(bytes);
            }
            assert_eq!((offset_bytes, data), (4096, vec![9; 4096]));
        }
    }

    #[test]
    fn what_lies_beyond_the_end_or_amid_a_block_is_refused() {
        for (sector, writable) in [
            (256 * 8, 4097),
            (255 * 8, 8193),
            (1, 4097),
            (0, 513),
            (u64::MAX, 4097),
            (u64::MAX / 512, 4097),
        ] {
            let refused = work(&header(0, sector), writable);
            assert_eq!(refused.expect_err("refused"), Status::IoError, "{sector}");
        }
        assert!(matches!(
            work(&header(0, 255 * 8), 4097),
            Ok(Work::Read { .. })
        ));
    }

    #[test]
    fn ranges_come_in_any_number_up_to_the_limit_and_are_all_checked() {
        let discard = |ranges: &[Vec<u8>]| work(&[header(11, 0), ranges.concat()].concat(), 1);
        let two = [range(0, 8, 0), range(16, 8, 0)];
        assert!(matches!(discard(&two), Ok(Work::Discard(ranges)) if ranges.len() == 2));
        let many = vec![range(0, 8, 0); MAX_RANGES as usize + 1];
        for refused in [&many[..], &[], &[range(0, 8, 0), range(1 << 20, 8, 0)]] {
            assert_eq!(discard(refused).expect_err("refused"), Status::IoError);
        }
        assert_eq!(
            discard(&[range(0, 8, 1)]).expect_err("refused"),
            Status::Unsupported
        );
        assert_eq!(
            discard(&[range(0, MAX_RANGE_SECTORS + 8, 0)]).expect_err("refused"),
            Status::IoError
        );
        let zeroes = work(&[header(13, 0), range(0, 8, 1), range(8, 8, 0)].concat(), 1);
        let Ok(Work::WriteZeroes(ranges)) = zeroes else {
            panic!("zeroes")
        };
        assert_eq!((ranges[0].1, ranges[1].1), (true, false));
        let flags = work(&[header(13, 0), range(0, 8, 2)].concat(), 1);
        assert_eq!(flags.expect_err("refused"), Status::Unsupported);
    }

    #[test]
    fn requests_without_a_header_or_a_status_are_refused() {
        assert_eq!(work(&[0; 15], 1).expect_err("refused"), Status::IoError);
        assert_eq!(
            work(&header(77, 0), 1).expect_err("refused"),
            Status::Unsupported
        );
        assert!(request(&header(0, 0), 16, 0, &DISK).is_err());
    }

    #[test]
    fn a_disk_that_is_only_read_is_not_changed() {
        let disk = Geometry {
            read_only: true,
            ..DISK
        };
        for kind in [1, 11, 13] {
            let bytes = [header(kind, 0), range(0, 8, 0)].concat();
            let refused = request(&bytes, 16, 1, &disk).expect("a request").work;
            assert_eq!(refused.expect_err("refused"), Status::IoError);
        }
        assert!(matches!(
            request(&header(4, 0), 16, 1, &disk)
                .expect("a request")
                .work,
            Ok(Work::Flush)
        ));
    }
}
