//! Differencing images, which QEMU does not have: built by hand as the specification says, and compared with
//! a model.

use std::sync::Arc;

use vellum::io::lane;
use vellum::storage::MemStorage;
use vellum::{
    BlockDevice, Buffer, ErrorKind, ExtentKind, Raw, RawOptions, RequestFlags, Storage, ZeroRequest,
};

use super::bat::{BITMAP_BLOCK_BYTES, Entry, Shape};
use super::guid::Guid;
use super::header::{self, Header};
use super::image::Image;
use super::log::Log;
use super::parent::tests::encode;
use super::replay::OnLog;
use super::{CreateOptions, OpenOptions, check, create, le, open, parent};
use crate::cuts::{Recorded, assert_flushed_is_kept};
use crate::device::ForeignImage;
use crate::facts::Fix;

const MIB: usize = 1 << 20;
const SIZE_BYTES: usize = 6 * MIB + 4096;

/// What a block of the child is to be.
#[derive(Clone, Copy)]
enum Block {
    Parents,
    Whole,
    /// Those sectors are here whose number's bit this mask has, 8 at a time.
    Partial(u8),
    Zero,
    Unmapped,
}

const BLOCKS: [Block; 7] = [
    Block::Parents,
    Block::Whole,
    Block::Partial(0b0001_0110),
    Block::Zero,
    Block::Partial(0b1111_0000),
    Block::Unmapped,
    Block::Partial(0b0000_0001),
];

async fn new_image() -> Vec<u8> {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(SIZE_BYTES as u64)
        .block_size_bytes(MIB as u64)
        .block_state_zero(false);
    create(&(file.clone() as Arc<dyn Storage>), &options)
        .await
        .unwrap();
    file.snapshot()
}

/// A differencing image over a parent with this identity, and what it reads as over these bytes.
async fn differencing(linkage: Guid, below: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let mut bytes = new_image().await;
    let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes.clone()));
    let image = Image::read(file, OnLog::Refuse).await.unwrap();
    let metadata = image.regions.metadata.offset_bytes as usize;
    let linkage = format!("{{{linkage}}}");
    let locator = encode(&[
        ("parent_linkage", &linkage),
        ("relative_path", r".\parent.vhdx"),
    ]);
    // The flag of the file parameters, and a sixth item.
    bytes[metadata + (64 << 10) + 4] = 2;
    bytes[metadata + 10] = 6;
    let entry = metadata + 32 + 5 * 32;
    le::put(&mut bytes, entry, &Guid::PARENT_LOCATOR.0);
    le::put(&mut bytes, entry + 16, &(65u32 << 10).to_le_bytes());
    le::put(
        &mut bytes,
        entry + 20,
        &(locator.len() as u32).to_le_bytes(),
    );
    le::put(&mut bytes, entry + 24, &4u32.to_le_bytes());
    le::put(&mut bytes, metadata + (65 << 10), &locator);

    let mut parameters = image.parameters;
    parameters.has_parent = true;
    let shape = Shape::new(&parameters);
    let bat = image.regions.bat.offset_bytes as usize;
    let put_entry = |bytes: &mut [u8], index: usize, entry: u64| {
        le::put(bytes, bat + index * 8, &entry.to_le_bytes());
    };
    let bitmaps = bytes.len();
    bytes.resize(bitmaps + BITMAP_BLOCK_BYTES as usize, 0);
    put_entry(&mut bytes, shape.bitmap(0), bitmaps as u64 | 6);
    let mut model = below.to_vec();
    for (index, block) in BLOCKS.into_iter().enumerate() {
        let guest = index * MIB..SIZE_BYTES.min((index + 1) * MIB);
        let host = bytes.len();
        let entry = match block {
            Block::Parents => 0,
            Block::Zero => 2,
            Block::Unmapped => 3,
            Block::Whole => Entry::fully_present(host as u64).0,
            Block::Partial(_) => host as u64 | 7,
        };
        put_entry(&mut bytes, shape.payload(index as u64), entry);
        match block {
            Block::Parents => continue,
            Block::Zero | Block::Unmapped => model[guest].fill(0),
            Block::Whole | Block::Partial(_) => {
                bytes.resize(host + MIB, 0xd0 + index as u8);
                let mask = match block {
                    Block::Partial(mask) => mask,
                    _ => 0xff,
                };
                bytes[bitmaps + index * 256..][..256].fill(mask);
                for (sector, content) in model[guest].chunks_mut(512).enumerate() {
                    if mask >> (sector % 8) & 1 == 1 {
                        content.fill(0xd0 + index as u8);
                    }
                }
            }
        }
    }
    (bytes, model)
}

fn raw(bytes: &[u8]) -> Arc<dyn BlockDevice> {
    let file = Arc::new(MemStorage::with_bytes(bytes.to_vec()));
    Raw::open(file, RawOptions::default()).unwrap()
}

fn random_bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

async fn read_all(device: &dyn BlockDevice) -> Vec<u8> {
    let buffer = Buffer::for_read(device.size_bytes() as usize);
    device.read(0, buffer).await.unwrap().to_vec()
}

#[test]
fn a_differencing_image_shows_its_parent_where_it_has_nothing() {
    lane::block_on(async {
        let below = random_bytes(1, SIZE_BYTES);
        let (bytes, model) = differencing(Guid::BAT_REGION, &below).await;
        let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
        let options = OpenOptions::default().read_only(true);
        let named = parent(file.clone(), options).await.unwrap().unwrap();
        assert_eq!(named.paths().collect::<Vec<_>>(), [r".\parent.vhdx"]);
        let alone = open(file.clone(), None, options).await.unwrap();
        let facts = ForeignImage::of(&*alone).unwrap().facts();
        assert_eq!(facts.backing, named.backing_name());
        let read = alone.read(0, Buffer::for_read(MIB)).await.unwrap();
        assert!(read.is_zero());

        let device = open(file.clone(), Some(raw(&below)), options)
            .await
            .unwrap();
        assert!(read_all(&*device).await == model);
        let at = |offset: usize| device.block_status(offset as u64, MIB as u64, 0);
        let extent = at(2 * MIB + 512).await.unwrap();
        assert_eq!((extent.kind, extent.len_bytes), (ExtentKind::Data, 1024));
        let extent = at(2 * MIB + 1536 + 100).await.unwrap();
        assert_eq!((extent.kind, extent.len_bytes), (ExtentKind::Absent, 412));
        let extent = at(3 * MIB).await.unwrap();
        assert_eq!(extent.kind, ExtentKind::Zero);
        let found = check(&file, Fix::default()).await.unwrap();
        assert_eq!(found.messages, Vec::<String>::new());
    });
}

#[test]
fn writes_to_a_differencing_image_are_those_of_the_model() {
    for seed in 0..8 {
        lane::block_on(async {
            let below = random_bytes(1, SIZE_BYTES);
            let (bytes, mut model) = differencing(Guid::BAT_REGION, &below).await;
            let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
            let mut random = fastrand::Rng::with_seed(seed);
            for _ in 0..2 {
                let device = open(file.clone(), Some(raw(&below)), OpenOptions::default());
                let device = device.await.unwrap();
                assert!(read_all(&*device).await == model, "seed {seed}");
                for _ in 0..4 {
                    let len = random.usize(1..40_000);
                    let at = random.usize(0..SIZE_BYTES - len);
                    let block = random.usize(0..6) * MIB;
                    if random.u8(0..4) == 0 {
                        model[block..block + MIB].fill(0);
                        let request = ZeroRequest::default();
                        let zeroed = device.write_zeroes(block as u64, MIB as u64, request);
                        zeroed.await.unwrap();
                    } else {
                        model[at..at + len].fill(seed as u8 + 1);
                        let buffer = Buffer::copy_of(&model[at..at + len]);
                        let written = device.write(at as u64, buffer, RequestFlags::default());
                        written.await.unwrap();
                    }
                }
                assert!(read_all(&*device).await == model, "seed {seed}");
                device.close().await.unwrap();
            }
            let found = check(&file, Fix::default()).await.unwrap();
            assert_eq!(found.messages, Vec::<String>::new(), "seed {seed}");
        });
    }
}

/// Also where a block of the image holds only some sectors.
#[test]
fn a_power_cut_loses_nothing_that_was_flushed_to_a_differencing_image() {
    lane::block_on(async {
        let below = random_bytes(1, SIZE_BYTES);
        let image = differencing(Guid::BAT_REGION, &below).await;
        let open_child = async |file| {
            let device = open(file, Some(raw(&below)), OpenOptions::default());
            device.await.unwrap() as Arc<dyn BlockDevice>
        };
        assert_flushed_is_kept(image, "differencing", open_child).await;
    });
}

#[test]
fn a_parent_that_was_written_to_is_not_the_parent_any_more() {
    lane::block_on(async {
        let below: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(new_image().await));
        let options = OpenOptions::default();
        let parent = open(below.clone(), None, options).await.unwrap();
        let linkage = parent.layout().data_write_guid().await;
        let (bytes, model) = differencing(linkage, &vec![0; SIZE_BYTES]).await;
        let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
        let child = open(file.clone(), Some(parent.clone()), options)
            .await
            .unwrap();
        assert!(read_all(&*child).await == model);
        drop(child);

        let buffer = Buffer::copy_of(&[1; 512]);
        parent
            .write(0, buffer, RequestFlags::default())
            .await
            .unwrap();
        let error = open(file, Some(parent), options).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidImage);
    });
}

/// Pages that are changed together: an entry of them takes 85 of the log's 256 sectors.
const PAGES: usize = 84;

/// What the table's first pages are full of.
async fn fill_of(file: &dyn Storage, at_bytes: u64) -> u8 {
    let bytes = crate::fields::read_at(file, at_bytes, PAGES * 4096).await;
    let bytes = bytes.unwrap();
    assert!(
        bytes.iter().all(|byte| *byte == bytes[0]),
        "pages of two changes"
    );
    bytes[0]
}

#[test]
fn changes_through_the_log_are_made_whole_or_not_at_all() {
    lane::block_on(async {
        let recorded = Recorded::new(new_image().await);
        let file: Arc<dyn Storage> = recorded.clone();
        let mut image = Image::read(file.clone(), OnLog::Replay).await.unwrap();
        let place = image.regions.bat.offset_bytes;
        image.writer.begin(false).await.unwrap();
        let (mut logs, mut moments) = (Vec::new(), Vec::new());
        for round in 1u8..8 {
            let pages = (0..PAGES as u64).map(|page| (place + page * 4096, vec![round; 4096]));
            let pages: Vec<_> = pages.collect();
            image.writer.write(&pages, 0).await.unwrap();
            file.flush().await.unwrap();
            moments.push(recorded.moment());
            logs.push(image.writer.header().log);
        }
        image.writer.end().await.unwrap();
        // It goes on at its beginning under a new identity.
        assert_eq!(logs[0], logs[2]);
        assert_ne!(logs[2], logs[3]);
        assert_eq!(logs[3], logs[5]);

        let random = &mut fastrand::Rng::with_seed(5);
        for moment in (0..=recorded.moment()).step_by(5) {
            let done = moments.iter().filter(|at| **at <= moment).count() as u8;
            for _ in 0..2 {
                let bytes = recorded.cut(moment, random);
                let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes.clone()));
                let header = read_header(&bytes);
                let log = &bytes[header.log_offset_bytes as usize..][..1 << 20];
                // The specification takes an image that has a log without entries for damaged.
                let is_sound = header.log.is_nil() || Log::new(log, header.log).active().is_some();
                assert!(is_sound, "cut at {moment}");
                Image::read(file.clone(), OnLog::Replay).await.unwrap();
                let fill = fill_of(&*file, place).await;
                assert!(
                    fill == done || fill == done + 1,
                    "cut at {moment}: {fill} of {done}"
                );
            }
        }
    });
}

fn read_header(bytes: &[u8]) -> Header {
    let [first, second] = header::OFFSETS_BYTES.map(|at| Header::decode(&bytes[at as usize..]));
    header::newer(first, second).unwrap().1
}

#[test]
fn any_bytes_give_an_image_or_an_error() {
    for seed in 0..60 {
        lane::block_on(async {
            let mut random = fastrand::Rng::with_seed(seed);
            let mut bytes = new_image().await;
            let metadata = [1 << 20, 2 << 20, 3 << 20, 3 << 20, (3 << 20) + (64 << 10)];
            for _ in 0..random.usize(1..8) {
                let at = metadata[random.usize(0..metadata.len())] + random.usize(0..200);
                bytes[at] = random.u8(..);
            }
            for (at, len) in [
                (64 << 10, 4096),
                (128 << 10, 4096),
                (192 << 10, 65536),
                (256 << 10, 65536),
            ] {
                if random.u8(0..4) == 0 {
                    bytes[at + random.usize(8..90)] = random.u8(..);
                    le::put_checksum(&mut bytes[at..at + len]);
                }
            }
            let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
            let _ = check(&file, Fix::default()).await;
            let Ok(device) = open(file, None, OpenOptions::default()).await else {
                return;
            };
            let end = device.size_bytes();
            for at in [0, end / 2, end.saturating_sub(600)] {
                let len = 600.min(end - at) as usize;
                let _ = device.read(at, Buffer::for_read(len)).await;
            }
        });
    }
}
