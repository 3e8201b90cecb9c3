//! Streams of disks: what is sent arrives, and what is damaged, cut off or made up does not.

use std::ops::Range;
use std::sync::Arc;

use vellum::{BlockDevice, Raw, RawOptions};
use vellum_format::stream::{HEAD_BYTES, Header, Record, StreamId, Writer, payload_hash};
use vellum_io::lane;
use vellum_jobs::Speed;
use vellum_jobs::transfer::{Input, ReceiveError, ReceiveOptions, SendOptions, receive, send};
use vellum_storage::MemStorage;

fn device(bytes: &[u8]) -> (Arc<MemStorage>, Arc<dyn BlockDevice>) {
    let storage = Arc::new(MemStorage::with_bytes(bytes.to_vec()));
    let raw = Raw::open(storage.clone(), RawOptions::default()).expect("a raw device");
    (storage, raw)
}

/// Bytes in blocks of 512: zeroes, of one kind, or noise.
fn content(len_bytes: usize, seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = Vec::with_capacity(len_bytes);
    while bytes.len() < len_bytes {
        let len = 512 * random.usize(1..400);
        match random.u8(0..3) {
            0 => bytes.resize(bytes.len() + len, 0),
            1 => bytes.resize(bytes.len() + len, random.u8(..)),
            _ => bytes.extend((0..len).map(|_| random.u8(..))),
        }
    }
    bytes.truncate(len_bytes);
    bytes
}

fn header(size_bytes: usize, incremental: bool) -> Header {
    Header {
        id: StreamId([1; 16]),
        size_bytes: size_bytes as u64,
        incremental,
        granularity_bytes: 512,
        base: None,
        start_bytes: 0,
        source: [2; 32],
        bitmap: Vec::new(),
    }
}

fn sent(bytes: &[u8], header: &Header, ranges: &[Range<u64>], parallel: usize) -> Vec<u8> {
    let (_, source) = device(bytes);
    let options = SendOptions {
        parallel,
        level: 1,
        speed: Speed::new(0),
    };
    let mut stream = Vec::new();
    let write = |bytes: &[u8]| {
        stream.extend_from_slice(bytes);
        Ok::<(), ()>(())
    };
    let ranges = ranges.iter().cloned();
    lane::block_on(send(&source, header, ranges, &options, write, |_| {})).expect("a stream");
    stream
}

struct Bytes<'a>(&'a [u8]);

impl Input for Bytes<'_> {
    type Error = ();

    async fn fill(&mut self, buffer: &mut [u8]) -> Result<usize, ()> {
        let len = buffer.len().min(self.0.len());
        let (now, rest) = self.0.split_at(len);
        buffer[..len].copy_from_slice(now);
        self.0 = rest;
        Ok(len)
    }
}

/// What has become of a target: its bytes, up to where it was told to be durable, and the error.
struct Received {
    target: Vec<u8>,
    durable_bytes: u64,
    error: Option<ReceiveError<(), ()>>,
}

fn received(before: &[u8], stream: &[u8], is_zero: bool, parallel: usize) -> Received {
    let (storage, target) = device(before);
    let options = ReceiveOptions {
        parallel,
        target_is_zero: is_zero,
    };
    let len = u32::from_be_bytes(*stream[12..].first_chunk().unwrap()) as usize;
    let header = Header::decode(&stream[..len]).expect("a header");
    let mut durable_bytes = header.start_bytes;
    let durable = |at| {
        assert!(at >= durable_bytes);
        durable_bytes = at;
        Ok(())
    };
    let mut input = Bytes(&stream[len..]);
    let result = receive(&header, &mut input, &target, &options, durable, |_| {});
    let error = lane::block_on(result).err();
    Received {
        target: storage.snapshot(),
        durable_bytes,
        error,
    }
}

fn whole(bytes: &[u8]) -> Vec<Range<u64>> {
    vec![0..bytes.len() as u64]
}

#[test]
fn a_whole_disk_arrives() {
    for (seed, len_bytes) in [(1, 5 << 20), (2, (3 << 20) + 512), (3, 512), (4, 0)] {
        let bytes = content(len_bytes, seed);
        for parallel in [1, 2, 16] {
            let stream = sent(&bytes, &header(len_bytes, false), &whole(&bytes), parallel);
            for (before, is_zero) in [(0, true), (0xee, false)] {
                let before = vec![before; len_bytes];
                let Received {
                    target,
                    durable_bytes,
                    error,
                } = received(&before, &stream, is_zero, parallel);
                assert!(error.is_none() && target == bytes, "{seed} {error:?}");
                assert_eq!(durable_bytes, len_bytes as u64);
            }
        }
    }
}

#[test]
fn changes_are_applied_and_nothing_else() {
    let (old, new) = (content(4 << 20, 5), content(4 << 20, 6));
    let ranges = [512..4096, 65536..(1 << 20) + 512, (3 << 20)..(4 << 20)];
    let stream = sent(&new, &header(old.len(), true), &ranges, 8);
    let mut expected = old.clone();
    for range in ranges {
        let range = range.start as usize..range.end as usize;
        expected[range.clone()].copy_from_slice(&new[range]);
    }
    let Received { target, error, .. } = received(&old, &stream, false, 8);
    assert!(error.is_none() && target == expected, "{error:?}");
    let nothing = sent(&new, &header(old.len(), true), &[], 8);
    assert!(received(&old, &nothing, false, 8).target == old);
}

/// What holds whatever became of a stream: before the place that is durable the target is what was
/// sent, and behind it each sector is that or what it was before.
#[track_caller]
fn check_prefix(got: &Received, before: &[u8], source: &[u8]) {
    let (at, target) = (got.durable_bytes as usize, &got.target);
    assert!(target[..at] == source[..at], "durable up to {at}");
    for (number, sector) in target.chunks(512).enumerate() {
        let place = number * 512..number * 512 + sector.len();
        assert!(sector == &source[place.clone()] || sector == &before[place]);
    }
}

/// A small stream with all kinds of records.
fn small() -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let mut source = content(40 << 10, 7);
    source[..2048].fill(3);
    source[8192..16384].fill(0);
    let before = content(source.len(), 8);
    let ranges = [0..2048, 4096..16384, 16896..40960];
    let stream = sent(&source, &header(source.len(), true), &ranges, 4);
    let mut expected = before.clone();
    for range in ranges {
        let range = range.start as usize..range.end as usize;
        expected[range.clone()].copy_from_slice(&source[range]);
    }
    (before, expected, stream)
}

#[test]
fn a_stream_that_is_cut_off_anywhere_goes_on_from_there() {
    let (before, source, stream) = small();
    let first = header(source.len(), true);
    let header_bytes = first.encode().unwrap().len();
    let mut places = Vec::new();
    for end in header_bytes..stream.len() {
        let got = received(&before, &stream[..end], false, 4);
        assert!(matches!(got.error, Some(ReceiveError::Cut)), "{end}");
        check_prefix(&got, &before, &source);
        if places.last() != Some(&got.durable_bytes) {
            places.push(got.durable_bytes);
            let rest = Header {
                start_bytes: got.durable_bytes,
                ..first.clone()
            };
            let ranges = [0..2048, 4096..16384, 16896..40960];
            let stream = sent(&source, &rest, &ranges, 4);
            let got = received(&got.target, &stream, false, 4);
            assert!(got.error.is_none() && got.target == source, "{end}");
        }
    }
    assert!(places.len() > 3, "{places:?}");
}

#[test]
fn every_changed_byte_is_noticed_before_it_is_applied() {
    let (before, source, stream) = small();
    let header_bytes = header(0, true).encode().unwrap().len();
    for at in header_bytes..stream.len() {
        for change in [1, 0x80, 0xff] {
            let mut stream = stream.clone();
            stream[at] ^= change;
            let got = received(&before, &stream, false, 4);
            assert!(got.error.is_some(), "byte {at}");
            check_prefix(&got, &before, &source);
        }
    }
}

/// A stream that somebody makes up, with checksums and hashes that agree.
fn made_up(size_bytes: usize, records: &[(Record, Vec<u8>)]) -> Vec<u8> {
    let header = header(size_bytes, true);
    let mut writer = Writer::new(&header).unwrap();
    let mut stream = header.encode().unwrap();
    for (record, payload) in records {
        let head: [u8; HEAD_BYTES] = writer.head(record).unwrap();
        stream.extend_from_slice(&head);
        stream.extend_from_slice(payload);
    }
    stream
}

#[test]
fn frames_that_are_not_what_their_heads_say_are_refused() {
    let pack = |len: usize| vellum_zstd(&vec![1; len]);
    let mut cut = pack(1 << 20);
    cut.pop();
    for payload in [pack(64 << 20), pack(4096), cut, vec![0; 100], vec![0x28; 7]] {
        let record = Record::Data {
            offset_bytes: 0,
            len_bytes: 1 << 20,
            payload_bytes: payload.len() as u32,
            hash: payload_hash(&payload),
        };
        let stream = made_up(1 << 20, &[(record, payload)]);
        let got = received(&vec![0; 1 << 20], &stream, true, 4);
        let is_refused = matches!(
            got.error,
            Some(ReceiveError::DamagedData { offset_bytes: 0 })
        );
        assert!(is_refused && got.durable_bytes == 0, "{:?}", got.error);
        assert!(got.target.iter().all(|byte| *byte == 0));
    }
}

fn vellum_zstd(bytes: &[u8]) -> Vec<u8> {
    zstd::bulk::compress(bytes, 1).unwrap()
}

#[test]
fn a_stream_of_a_larger_disk_writes_nothing_beyond_the_end() {
    let record = Record::Zeroes {
        offset_bytes: 1 << 20,
        len_bytes: 1 << 40,
    };
    let header = header(1 << 41, true);
    let mut writer = Writer::new(&header).unwrap();
    let mut stream = header.encode().unwrap();
    stream.extend_from_slice(&writer.head(&record).unwrap());
    let got = received(&vec![7; 4096], &stream, false, 4);
    assert!(matches!(got.error, Some(ReceiveError::Write(_))));
    assert!(got.target == vec![7; 4096]);
}
