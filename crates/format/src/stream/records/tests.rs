use alloc::vec::Vec;

use crate::stream::MAX_HEADER_BYTES;

use alloc::vec;

use super::*;

const SIZE: u64 = 8 << 20;

fn header() -> Header {
    Header {
        id: StreamId([7; 16]),
        size_bytes: SIZE,
        incremental: true,
        granularity_bytes: 65536,
        base: Some(StreamId([8; 16])),
        start_bytes: 0,
        source: [9; 32],
        bitmap: b"monday".to_vec(),
    }
}

fn data(offset_bytes: u64, len_bytes: u32, payload: &[u8]) -> Record {
    Record::Data {
        offset_bytes,
        len_bytes,
        payload_bytes: payload.len() as u32,
        hash: payload_hash(payload),
    }
}

fn records() -> Vec<Record> {
    vec![
        data(0, 512, &[1; 512]),
        data(4096, 1 << 20, &[2; 100]),
        Record::Zeroes {
            offset_bytes: 2 << 20,
            len_bytes: 5 << 20,
        },
        Record::Checkpoint {
            offset_bytes: 7 << 20,
        },
        Record::End { records: 4 },
    ]
}

fn heads() -> Vec<[u8; HEAD_BYTES]> {
    let mut writer = Writer::new(&header()).unwrap();
    let records = records().into_iter();
    records
        .map(|record| writer.head(&record).unwrap())
        .collect()
}

/// Reads heads up to the first that is refused.
fn read(heads: &[[u8; HEAD_BYTES]]) -> (Vec<Record>, Option<FormatError>) {
    let mut reader = Reader::new(&header()).unwrap();
    let mut records = Vec::new();
    for head in heads {
        match reader.head(head) {
            Ok(record) => records.push(record),
            Err(error) => return (records, Some(error)),
        }
    }
    (records, None)
}

#[test]
fn what_is_written_comes_back() {
    let (read, error) = read(&heads());
    assert_eq!((read, error), (records(), None));
    let raw = header().encode().unwrap();
    assert_eq!(Header::decode(&raw), Ok(header()));
    let longest = Header {
        bitmap: vec![b'x'; 1023],
        ..header()
    };
    assert_eq!(longest.encode().unwrap().len(), MAX_HEADER_BYTES);
}

#[test]
fn every_changed_bit_of_a_header_is_noticed() {
    let mut raw = header().encode().unwrap();
    for bit in 0..raw.len() * 8 {
        raw[bit / 8] ^= 1 << (bit % 8);
        assert!(Header::decode(&raw).is_err(), "bit {bit}");
        raw[bit / 8] ^= 1 << (bit % 8);
    }
    for end in 0..raw.len() {
        assert!(Header::decode(&raw[..end]).is_err());
    }
}

#[test]
fn every_changed_bit_of_a_head_is_noticed() {
    let good = heads();
    for place in 0..good.len() {
        for bit in 0..HEAD_BYTES * 8 {
            let mut heads = good.clone();
            heads[place][bit / 8] ^= 1 << (bit % 8);
            let (read, error) = read(&heads);
            assert!(error.is_some() && read.len() == place, "{place} {bit}");
        }
    }
}

#[test]
fn records_that_are_lost_doubled_or_of_another_stream_are_noticed() {
    let good = heads();
    for place in 0..good.len() - 1 {
        let mut heads = good.clone();
        heads.remove(place);
        assert_eq!(read(&heads).0.len(), place);
        heads.insert(place, good[place]);
        heads.insert(place, good[place]);
        assert_eq!(read(&heads).0.len(), place + 1);
        heads[place] = good[place + 1];
        assert_eq!(read(&heads).0.len(), place);
    }
    let other = Header {
        id: StreamId([1; 16]),
        ..header()
    };
    let mut reader = Reader::new(&other).unwrap();
    assert!(reader.head(&good[0]).is_err());
}

/// A sum that another header leads to, with checksums that agree.
#[test]
fn a_checkpoint_of_another_past_is_refused() {
    let other = Header {
        granularity_bytes: 4096,
        ..header()
    };
    let mut writer = Writer::new(&other).unwrap();
    let mut reader = Reader::new(&header()).unwrap();
    for record in records() {
        let read = reader.head(&writer.head(&record).unwrap());
        let is_sum = matches!(record, Record::Checkpoint { .. } | Record::End { .. });
        assert_eq!(read.is_err(), is_sum, "{record:?}");
        if is_sum {
            break;
        }
    }
}

#[test]
fn what_lies_outside_or_out_of_order_is_refused() {
    let zeroes = |offset_bytes, len_bytes| Record::Zeroes {
        offset_bytes,
        len_bytes,
    };
    let refused = [
        zeroes(SIZE, 512),
        zeroes(0, SIZE + 512),
        zeroes(u64::MAX - 511, 512),
        zeroes(512, u64::MAX - 511),
        zeroes(0, 0),
        zeroes(1, 512),
        zeroes(0, 511),
        data(0, 0, &[]),
        data(0, 512, &[]),
        data(0, 512, &[1; 513]),
        data(0, MAX_DATA_BYTES + 512, &[1]),
        data(SIZE - 512, 1024, &[1]),
        Record::Checkpoint {
            offset_bytes: SIZE + 512,
        },
        Record::End { records: 1 },
    ];
    for record in refused {
        let mut writer = Writer::new(&header()).unwrap();
        assert!(writer.head(&record).is_err(), "{record:?}");
    }
    let mut writer = Writer::new(&header()).unwrap();
    writer.head(&zeroes(4096, 4096)).unwrap();
    assert!(writer.head(&zeroes(4096, 4096)).is_err());
    assert!(writer.head(&zeroes(0, 4096)).is_err());
    writer.head(&Record::End { records: 1 }).unwrap();
    assert!(writer.head(&zeroes(8192, 4096)).is_err());
}

#[test]
fn headers_that_cannot_be_are_refused() {
    let refused = [
        Header {
            size_bytes: 1,
            ..header()
        },
        Header {
            size_bytes: 1 << 63,
            ..header()
        },
        Header {
            start_bytes: SIZE + 512,
            ..header()
        },
        Header {
            start_bytes: 1,
            ..header()
        },
        Header {
            granularity_bytes: 0,
            ..header()
        },
        Header {
            granularity_bytes: 256,
            ..header()
        },
        Header {
            granularity_bytes: 65537,
            ..header()
        },
        Header {
            id: StreamId([0; 16]),
            ..header()
        },
        Header {
            incremental: false,
            ..header()
        },
        Header {
            bitmap: vec![b'x'; 1024],
            ..header()
        },
    ];
    for header in refused {
        assert!(header.encode().is_err(), "{header:?}");
    }
}
