//! Apple's images, made here: nothing on this side of the tests makes them. QEMU has to read the same of
//! what it knows.

use std::io::Write;
use std::sync::Arc;

use crate::common::{Counted, Model, Place, compare_with_qemu, open_file, read_side_by_side, run};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, ErrorKind};
use vellum_foreign::dmg;

/// Codes of chunks.
const ZERO: u32 = 0;
const RAW: u32 = 1;
const IGNORE: u32 = 2;
const ADC: u32 = 0x8000_0004;
const ZLIB: u32 = 0x8000_0005;
const BZIP2: u32 = 0x8000_0006;
const LZFSE: u32 = 0x8000_0007;
const XZ: u32 = 0x8000_0008;
const COMMENT: u32 = 0x7fff_fffe;
const END: u32 = 0xffff_ffff;

/// What lists the tables.
#[derive(Debug, Clone, Copy, PartialEq)]
enum List {
    Property,
    Fork,
}

fn stored(code: u32, bytes: &[u8]) -> Vec<u8> {
    match code {
        RAW => bytes.to_vec(),
        ZLIB => {
            let level = flate2::Compression::default();
            let mut encoder = flate2::write::ZlibEncoder::new(Vec::new(), level);
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        BZIP2 => {
            let level = bzip2::Compression::default();
            let mut encoder = bzip2::write::BzEncoder::new(Vec::new(), level);
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        LZFSE => {
            let mut compressed = Vec::new();
            lzfse_rust::encode_bytes(bytes, &mut compressed).unwrap();
            compressed
        }
        XZ => {
            let options = lzma_rust2::XzOptions::with_preset(1);
            let mut encoder = lzma_rust2::XzWriter::new(Vec::new(), options).unwrap();
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        }
        _ => Vec::new(),
    }
}

/// A row of a table.
fn row(code: u32, fields: [usize; 4]) -> Vec<u8> {
    let mut row = code.to_be_bytes().to_vec();
    row.extend([0; 4]);
    row.extend(
        fields
            .iter()
            .flat_map(|&field| (field as u64).to_be_bytes()),
    );
    row
}

/// An image of chunks of these kinds, in two partitions, and what it reads as.
fn image(seed: u64, kinds: &[u32], list: List) -> (Vec<u8>, Vec<u8>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut content = Vec::new();
    let mut data = vec![0x77; 103];
    let mut tables = Vec::new();
    for _ in 0..2 {
        let mut table = vec![0; 204];
        table[..4].copy_from_slice(b"mish");
        table[8..16].copy_from_slice(&((content.len() / 512) as u64).to_be_bytes());
        // Of the data behind the first hundred bytes, which the trailer tells.
        table[24..32].copy_from_slice(&3u64.to_be_bytes());
        let mut sector = 0;
        for _ in 0..8 {
            let code = kinds[random.usize(..kinds.len())];
            let sectors = [512, 600, random.usize(1..200)][random.usize(..3)];
            let mut chunk = vec![0; sectors * 512];
            if !matches!(code, ZERO | IGNORE) {
                for piece in chunk.chunks_mut(1500) {
                    let len = random.usize(..=piece.len());
                    random.fill(&mut piece[..len]);
                }
            }
            let stored = stored(code, &chunk);
            let offset = data.len() - 103;
            table.extend(row(code, [sector, sectors, offset, stored.len()]));
            table.extend(row(COMMENT, [sector, 0, 0, 0]));
            data.extend(stored);
            sector += sectors;
            content.extend(chunk);
        }
        table.extend(row(END, [sector, 0, 0, 0]));
        tables.push(table);
    }
    let start = data.len();
    data.extend(match list {
        List::Property => property_list(&tables),
        List::Fork => resource_fork(&tables),
    });
    let mut trailer = vec![0; 512];
    trailer[..4].copy_from_slice(b"koly");
    let mut put = |at: usize, value: usize| {
        trailer[at..at + 8].copy_from_slice(&(value as u64).to_be_bytes());
    };
    put(0x18, 100);
    let list_at = if list == List::Fork { 0x28 } else { 0xd8 };
    put(list_at, start);
    put(list_at + 8, data.len() - start);
    put(0x1ec, content.len() / 512);
    data.extend(trailer);
    (data, content)
}

fn property_list(tables: &[Vec<u8>]) -> Vec<u8> {
    let mut list = String::from(
        "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n\
         <!DOCTYPE plist PUBLIC \"-//Apple Computer//DTD PLIST 1.0//EN\" \
         \"http://www.apple.com/DTDs/PropertyList-1.0.dtd\">\n\
         <plist version=\"1.0\">\n<dict>\n<key>resource-fork</key>\n<dict>\n<key>blkx</key>\n<array>\n",
    );
    for table in tables {
        list.push_str("<dict><key>Name</key><string>a &amp; b</string><key>Data</key>\n\t<data>\n");
        for line in STANDARD.encode(table).as_bytes().chunks(52) {
            list.push_str(&format!("\t{}\n", str::from_utf8(line).unwrap()));
        }
        list.push_str("\t</data>\n</dict>\n");
    }
    list.push_str("</array>\n<key>plst</key><data>AAAA</data></dict>\n</dict>\n</plist>\n");
    list.into_bytes()
}

fn resource_fork(tables: &[Vec<u8>]) -> Vec<u8> {
    let resources = tables.iter().flat_map(|table| {
        let len = (table.len() as u32).to_be_bytes();
        len.into_iter().chain(table.iter().copied())
    });
    let resources: Vec<u8> = resources.collect();
    let mut fork = vec![0; 256];
    fork[..4].copy_from_slice(&256u32.to_be_bytes());
    fork[8..12].copy_from_slice(&(resources.len() as u32).to_be_bytes());
    fork.extend(resources);
    // The map of resources, which nobody needs.
    fork.extend([0x33; 50]);
    fork
}

/// Compares all, and some reads anywhere.
fn compare(seed: u64, device: &dyn BlockDevice, content: Vec<u8>) {
    let mut model = Model::new(seed, 0);
    model.bytes = content;
    run(async {
        model.compare(device).await;
        let mut random = fastrand::Rng::with_seed(seed);
        for _ in 0..20 {
            let len = random.usize(1..300_000).min(model.bytes.len());
            let at = random.usize(..=model.bytes.len() - len);
            let read = device.read(at as u64, Buffer::for_read(len)).await.unwrap();
            assert!(read[..] == model.bytes[at..at + len], "seed {seed}: {at}");
        }
    });
}

#[test]
fn what_qemu_knows_it_reads_in_the_same_way() {
    let kinds = [ZERO, RAW, IGNORE, ZLIB, ZLIB];
    for (seed, list) in [(1, List::Property), (2, List::Fork)] {
        let place = Place::default();
        let (bytes, content) = image(seed, &kinds, list);
        std::fs::write(place.path("a.dmg"), bytes).unwrap();
        compare_with_qemu(&place, "dmg", "a.dmg", &content);
        let device = run(dmg::open(open_file(&place.path("a.dmg")))).unwrap();
        compare(seed, &*device, content);
    }
}

#[test]
fn all_kinds_of_chunks_are_read() {
    for (seed, list) in [(3, List::Property), (4, List::Fork)] {
        let kinds = [ZERO, RAW, ZLIB, BZIP2, LZFSE, XZ];
        let (bytes, content) = image(seed, &kinds, list);
        let file = Arc::new(MemStorage::with_bytes(bytes));
        let device = run(dmg::open(file)).unwrap();
        compare(seed, &*device, content);
    }
}

#[test]
fn a_chunk_is_inflated_once_for_all_who_read_it() {
    let (bytes, content) = image(8, &[ZLIB], List::Fork);
    run(async {
        let mut counts = Vec::new();
        for is_alone in [true, false] {
            let file = Counted::new(bytes.clone());
            let device = dmg::open(file.clone()).await.unwrap();
            let before = file.reads();
            match is_alone {
                true => drop(device.read(0, Buffer::for_read(512)).await.unwrap()),
                false => read_side_by_side(&*device, &content, &[0]).await,
            }
            counts.push(file.reads() - before);
        }
        assert_eq!(counts[0], counts[1]);
    });
}

#[test]
fn chunks_of_unknown_kinds_are_errors_when_they_are_read() {
    let (bytes, content) = image(5, &[ADC], List::Fork);
    let file = Arc::new(MemStorage::with_bytes(bytes));
    let device = run(dmg::open(file)).unwrap();
    assert_eq!(device.size_bytes(), content.len() as u64);
    let error = run(device.read(0, Buffer::for_read(512))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("80000004"));
}

#[test]
fn damaged_images_give_errors() {
    let (bytes, content) = image(6, &[RAW, ZLIB, BZIP2, LZFSE, XZ], List::Property);
    let mut random = fastrand::Rng::with_seed(6);
    for _ in 0..12 {
        let mut bytes = bytes.clone();
        for _ in 0..random.usize(1..20) {
            let at = random.usize(..bytes.len());
            bytes[at] ^= 1 << random.u8(..8);
        }
        bytes.truncate(bytes.len() - random.usize(..2) * random.usize(..500));
        run(async {
            let file = Arc::new(MemStorage::with_bytes(bytes));
            let Ok(device) = dmg::open(file).await else {
                return;
            };
            for at in (0..content.len() as u64).step_by(1 << 20) {
                let len = device.size_bytes().saturating_sub(at).min(1 << 20);
                let _ = device.read(at, Buffer::for_read(len as usize)).await;
            }
        });
    }
}
