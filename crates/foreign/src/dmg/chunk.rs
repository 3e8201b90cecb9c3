//! The tables of chunks (`mish` blocks).

use vellum::{Error, ErrorKind, Result};

use crate::fields::{be32, be64};

const MAGIC: u32 = u32::from_be_bytes(*b"mish");
const ROWS_AT: usize = 204;
const ROW_BYTES: usize = 40;
/// A chunk has at most so many bytes, compressed or not, zeroes aside.
pub(super) const MOST_BYTES: u64 = 64 << 20;
const MOST_SECTORS: u64 = MOST_BYTES / 512;

const COMMENT: u32 = 0x7fff_fffe;
const END: u32 = 0xffff_ffff;

/// What a chunk's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Zeroes, or nothing of interest.
    Zero,
    /// As they are.
    Raw,
    /// Compressed with zlib.
    Zlib,
    /// Compressed with bzip2.
    Bzip2,
    /// Compressed with LZFSE.
    Lzfse,
    /// Compressed with LZMA, in xz's container.
    Xz,
    /// Of a kind that is not known.
    Unknown(u32),
}

impl Kind {
    fn new(code: u32) -> Kind {
        match code {
            0 | 2 => Kind::Zero,
            1 => Kind::Raw,
            0x8000_0005 => Kind::Zlib,
            0x8000_0006 => Kind::Bzip2,
            0x8000_0007 => Kind::Lzfse,
            0x8000_0008 => Kind::Xz,
            other => Kind::Unknown(other),
        }
    }
}

/// A part of the disk, in one piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// What it is.
    pub kind: Kind,
    /// Where on the disk it begins, in bytes.
    pub start_bytes: u64,
    /// How long it is on the disk, in bytes.
    pub len_bytes: u64,
    /// Where in the file its bytes are.
    pub offset_bytes: u64,
    /// How many there are.
    pub stored_bytes: u64,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidImage, "open", message)
}

/// Adds the chunks of a table to others; what is no table has none. The data of chunks begins at
/// `data_bytes` of the file.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] for chunks that are too large, in QEMU's words, or lead nowhere.
pub(super) fn read_table(table: &[u8], data_bytes: u64, chunks: &mut Vec<Chunk>) -> Result<()> {
    if be32(table, 0) != Some(MAGIC) || table.len() < ROWS_AT + ROW_BYTES {
        return Ok(());
    }
    let field = |at| be64(table, at).unwrap_or(0);
    let (first_sector, data_offset) = (field(8), field(0x18));
    let rows = table.get(ROWS_AT..).unwrap_or_default();
    for row in rows.chunks_exact(ROW_BYTES) {
        let code = be32(row, 0).unwrap_or(END);
        if code == COMMENT || code == END {
            continue;
        }
        let field = |at| be64(row, at).unwrap_or(0);
        let (sector, sectors) = (field(8), field(0x10));
        let (offset, stored_bytes) = (field(0x18), field(0x20));
        let kind = Kind::new(code);
        let number = chunks.len();
        if kind != Kind::Zero && sectors > MOST_SECTORS {
            return Err(invalid(format!(
                "sector count {sectors} for chunk {number} is larger than max ({MOST_SECTORS})"
            )));
        }
        if stored_bytes > MOST_BYTES {
            return Err(invalid(format!(
                "length {stored_bytes} for chunk {number} is larger than max ({MOST_BYTES})"
            )));
        }
        let astray = || invalid(format!("chunk {number} leads nowhere"));
        let bytes = |sectors: u64| sectors.checked_mul(512);
        let start_bytes = sector.checked_add(first_sector).and_then(bytes);
        let start_bytes = start_bytes.ok_or_else(astray)?;
        let len_bytes = bytes(sectors).ok_or_else(astray)?;
        let end_bytes = start_bytes.checked_add(len_bytes);
        let offset = offset.checked_add(data_offset);
        let offset = offset.and_then(|offset| offset.checked_add(data_bytes));
        let offset_bytes = match kind {
            // What is nowhere in the file may be said to be anywhere.
            Kind::Zero | Kind::Unknown(_) => Some(0),
            _ => offset.filter(|&offset| offset <= i64::MAX as u64 - MOST_BYTES),
        };
        let offset_bytes = offset_bytes
            .filter(|_| end_bytes.is_some())
            .ok_or_else(astray)?;
        if len_bytes > 0 {
            chunks.push(Chunk {
                kind,
                start_bytes,
                len_bytes,
                offset_bytes,
                stored_bytes,
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn table(rows: &[[u64; 5]]) -> Vec<u8> {
        let mut table = vec![0; ROWS_AT];
        table[..4].copy_from_slice(b"mish");
        table[8..16].copy_from_slice(&100u64.to_be_bytes());
        table[24..32].copy_from_slice(&7u64.to_be_bytes());
        for [code, rest @ ..] in rows {
            table.extend((*code as u32).to_be_bytes());
            table.extend([0; 4]);
            table.extend(rest.iter().flat_map(|field| field.to_be_bytes()));
        }
        table
    }

    #[test]
    fn rows_are_chunks() {
        let mut chunks = Vec::new();
        let rows = [
            [0x8000_0005, 0, 8, 10, 20],
            [COMMENT.into(), 1, 1, 1, 1],
            [2, 8, 1 << 40, 0, 0],
            [END.into(), 1, 1, 1, 1],
        ];
        read_table(&table(&rows), 1000, &mut chunks).unwrap();
        let first = Chunk {
            kind: Kind::Zlib,
            start_bytes: 100 * 512,
            len_bytes: 8 * 512,
            offset_bytes: 1017,
            stored_bytes: 20,
        };
        assert_eq!(chunks[0], first);
        assert_eq!((chunks[1].kind, chunks.len()), (Kind::Zero, 2));
        read_table(b"koly", 0, &mut chunks).unwrap();
        assert_eq!(chunks.len(), 2);
    }

    #[test]
    fn what_qemu_refuses_is_refused_in_its_words() {
        let refused = |row| {
            let error = read_table(&table(&[row]), 0, &mut Vec::new()).unwrap_err();
            error.message().to_owned()
        };
        assert_eq!(
            refused([1, 0, 131_073, 0, 0]),
            "sector count 131073 for chunk 0 is larger than max (131072)"
        );
        assert_eq!(
            refused([1, 0, 1, 0, 67_108_865]),
            "length 67108865 for chunk 0 is larger than max (67108864)"
        );
        assert_eq!(
            refused([1, u64::MAX / 512, 1, 0, 0]),
            "chunk 0 leads nowhere"
        );
        assert_eq!(refused([1, 0, 1, u64::MAX, 0]), "chunk 0 leads nowhere");
    }

    proptest! {
        #[test]
        fn any_bytes_give_chunks_or_an_error(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..400),
            data: u64,
        ) {
            if bytes.len() > 4 {
                bytes[..4].copy_from_slice(b"mish");
            }
            let _ = read_table(&bytes, data, &mut Vec::new());
        }
    }
}
