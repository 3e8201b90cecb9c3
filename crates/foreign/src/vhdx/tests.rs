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
use super::header::Header;
use super::image::Image;
use super::parent::tests::encode;
use super::{CreateOptions, OpenOptions, check, create, le, open, parent};
use crate::facts::{Facts, Fix};

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
    let image = Image::read(file, true).await.unwrap();
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
        let facts = alone.format_device().unwrap().downcast_ref::<Facts>();
        assert_eq!(facts.unwrap().backing, named.backing_name());
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

#[test]
fn the_log_goes_on_at_its_beginning_under_a_new_identity() {
    lane::block_on(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(new_image().await));
        let mut image = Image::read(file.clone(), false).await.unwrap();
        image.writer.begin().await.unwrap();
        let mut logs = Vec::new();
        // An entry of 84 pages takes 85 of the 256 sectors.
        for round in 0u8..10 {
            let place = image.regions.bat.offset_bytes;
            let pages = (0..84).map(|page| (place + page * 4096, vec![round; 4096]));
            image.writer.write(pages.collect(), 0).await.unwrap();
            let header: &Header = image.writer.header();
            logs.push(header.log);
        }
        assert_eq!(logs[0], logs[2]);
        assert_ne!(logs[2], logs[3]);
        assert_eq!(logs[3], logs[5]);
        let read = crate::transfer::read(&*file, image.regions.bat.offset_bytes, 84 * 4096);
        assert!(read.await.unwrap().iter().all(|byte| *byte == 9));
        // What is replayed is the last entry, whole.
        overwrite(&*file, image.regions.bat.offset_bytes).await;
        let image = Image::read(file.clone(), false).await.unwrap();
        assert!(image.was_replayed);
        let read = crate::transfer::read(&*file, image.regions.bat.offset_bytes, 84 * 4096);
        assert!(read.await.unwrap().iter().all(|byte| *byte == 9));
    });
}

async fn overwrite(file: &dyn Storage, at_bytes: u64) {
    crate::transfer::write(file, at_bytes, &[0; 84 * 4096])
        .await
        .unwrap();
}
