//! The check of streams: header and heads of records.

use vellum_format::stream::{HEAD_BYTES, Header, MAX_DATA_BYTES, Reader, Record, Writer};

/// The bytes as a header (also with the checksum that it should have), and behind it as heads, as
/// they are and with the checksums that they should have.
///
/// - `decode(encode(decode(x))) == decode(x)`, and a bit that changes in a header is noticed.
/// - What a record says lies inside the disk and behind the record before, and is what a writer
///   says in the same words.
/// - A head that is refused changes nothing.
pub fn check(data: &[u8]) {
    let _ = Header::decode(data);
    let Some(header) = header(data) else {
        return;
    };
    let len_bytes = header.encode().expect("what decodes is sound").len();
    let mut reader = Reader::new(&header).expect("what decodes is sound");
    let mut writer = Writer::new(&header).expect("what decodes is sound");
    let rest = data.get(len_bytes..).unwrap_or_default();
    for raw in rest.as_chunks::<HEAD_BYTES>().0 {
        let position_bytes = reader.position_bytes();
        if reader.head(raw).is_ok() {
            // The fuzzer has met a checksum.
            return;
        }
        assert_eq!(reader.position_bytes(), position_bytes);
        let Some(record) = record(raw) else {
            continue;
        };
        let Ok(head) = writer.head(&record) else {
            continue;
        };
        assert_eq!(reader.head(&head), Ok(record));
        let end_bytes = reader.position_bytes();
        assert!((position_bytes..=header.size_bytes).contains(&end_bytes));
        assert!(record.payload_bytes() <= MAX_DATA_BYTES as usize);
        assert!(reader.head(&head).is_err(), "a record counts once");
    }
}

/// The bytes' first part as a header, with magic, length and checksum put right.
fn header(data: &[u8]) -> Option<Header> {
    let mut raw = data.get(..128)?.to_vec();
    raw[..8].copy_from_slice(b"VLLMSEND");
    raw[8..12].copy_from_slice(&1_u32.to_be_bytes());
    raw[12..16].copy_from_slice(&128_u32.to_be_bytes());
    let crc = super::crc32c(&raw[..124]);
    raw[124..].copy_from_slice(&crc.to_be_bytes());
    let header = Header::decode(&raw).ok()?;
    assert_eq!(header.encode().as_deref(), Ok(&raw[..]));
    let bit = usize::from(data[0]) % (128 * 8);
    raw[bit / 8] ^= 1 << (bit % 8);
    assert!(Header::decode(&raw).is_err());
    Some(header)
}

/// What the bytes of a head would say.
fn record(raw: &[u8; HEAD_BYTES]) -> Option<Record> {
    let word = |at: usize| raw[at..].first_chunk().map(|raw| u64::from_be_bytes(*raw));
    let half = |at: usize| raw[at..].first_chunk().map(|raw| u32::from_be_bytes(*raw));
    let offset_bytes = word(16)?;
    Some(match raw[8] % 4 {
        0 => Record::Data {
            offset_bytes,
            len_bytes: half(28)?,
            payload_bytes: half(12)?,
            hash: *raw[32..].first_chunk()?,
        },
        1 => Record::Zeroes {
            offset_bytes,
            len_bytes: word(24)?,
        },
        2 => Record::Checkpoint { offset_bytes },
        _ => Record::End { records: word(24)? },
    })
}
