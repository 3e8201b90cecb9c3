//! Differencing images, whose parents QEMU does not know: built by hand as the specification says, and compared
//! with a model. And images of any bytes.

use std::sync::Arc;

use vellum::io::lane;
use vellum::storage::MemStorage;
use vellum::{
    BlockDevice, Buffer, ErrorKind, ExtentKind, Raw, RawOptions, RequestFlags, Storage, ZeroRequest,
};

use super::footer::{Footer, Kind};
use super::geometry::Geometry;
use super::header::{BLOCK_BYTES, Header, put_checksum};
use super::{CreateOptions, OpenOptions, create, open, parent};
use crate::cuts::assert_flushed_is_kept;
use crate::device::ForeignImage;
use crate::fields::put;

const BLOCK: usize = BLOCK_BYTES as usize;
const SIZE_BYTES: usize = 4 * BLOCK + 5120;
const PARENT_ID: [u8; 16] = [9; 16];

/// What a block of the child is to be.
#[derive(Clone, Copy)]
enum Block {
    Parents,
    /// Those sectors are here whose number's bit this byte has, from the highest on, 8 at a time.
    Here(u8),
}

const BLOCKS: [Block; 5] = [
    Block::Parents,
    Block::Here(0xff),
    Block::Here(0b0110_1000),
    Block::Here(0b0000_1111),
    Block::Here(0b1000_0000),
];

/// A differencing image, and what it reads as over these bytes.
fn differencing(below: &[u8]) -> (Vec<u8>, Vec<u8>) {
    let path: Vec<u8> = r".\below.vhd"
        .encode_utf16()
        .flat_map(u16::to_le_bytes)
        .collect();
    let mut header = Header::encode(BLOCKS.len() as u32);
    put(&mut header, 40, &PARENT_ID);
    let name: Vec<u8> = "below.vhd"
        .encode_utf16()
        .flat_map(u16::to_be_bytes)
        .collect();
    put(&mut header, 64, &name);
    put(&mut header, 576, b"W2ru");
    put(&mut header, 580, &512u32.to_be_bytes());
    put(&mut header, 584, &(path.len() as u32).to_be_bytes());
    put(&mut header, 592, &2048u64.to_be_bytes());
    put_checksum(&mut header);
    let size_bytes = SIZE_BYTES as u64;
    let footer = Footer::new(
        Kind::Differencing,
        b"win ",
        size_bytes,
        Geometry::LARGEST,
        &[1; 16],
    );
    let mut bytes = footer.bytes().to_vec();
    bytes.extend(header);
    bytes.extend([0xff; 512]);
    bytes.extend(path);
    bytes.resize(2560, 0);
    let mut model = below.to_vec();
    for (index, block) in BLOCKS.into_iter().enumerate() {
        let Block::Here(mask) = block else {
            continue;
        };
        let place = bytes.len();
        put(
            &mut bytes,
            1536 + index * 4,
            &(place as u32 / 512).to_be_bytes(),
        );
        bytes.extend([mask; 512]);
        bytes.resize(place + 512 + BLOCK, 0xd0 + index as u8);
        let guest = index * BLOCK..SIZE_BYTES.min((index + 1) * BLOCK);
        for (sector, content) in model[guest].chunks_mut(512).enumerate() {
            if mask & 0x80 >> (sector % 8) != 0 {
                content.fill(0xd0 + index as u8);
            }
        }
    }
    bytes.extend(footer.bytes());
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
        let (bytes, model) = differencing(&below);
        let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
        let options = OpenOptions::default().read_only(true);
        let named = parent(file.clone(), options).await.unwrap().unwrap();
        let paths: Vec<_> = named.paths().collect();
        assert_eq!(paths, [r".\below.vhd", "below.vhd"]);
        let alone = open(file.clone(), None, options).await.unwrap();
        let facts = ForeignImage::of(&*alone).unwrap().facts();
        assert_eq!(facts.backing.as_ref().unwrap().name, "./below.vhd");

        let device = open(file, Some(raw(&below)), options).await.unwrap();
        assert!(read_all(&*device).await == model);
        let at = |offset: usize| device.block_status(offset as u64, BLOCK as u64, 0);
        let extent = at(2 * BLOCK + 600).await.unwrap();
        assert_eq!(
            (extent.kind, extent.len_bytes),
            (ExtentKind::Data, 1024 - 88)
        );
        let extent = at(2 * BLOCK + 5 * 512).await.unwrap();
        assert_eq!(
            (extent.kind, extent.len_bytes),
            (ExtentKind::Absent, 4 * 512)
        );
    });
}

#[test]
fn writes_to_a_differencing_image_are_those_of_the_model() {
    for seed in 0..6 {
        lane::block_on(async {
            let below = random_bytes(1, SIZE_BYTES);
            let (bytes, mut model) = differencing(&below);
            let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
            let mut random = fastrand::Rng::with_seed(seed);
            for _ in 0..2 {
                let device = open(file.clone(), Some(raw(&below)), OpenOptions::default());
                let device = device.await.unwrap();
                assert!(read_all(&*device).await == model, "seed {seed}");
                for _ in 0..3 {
                    let len = random.usize(1..40_000);
                    let at = random.usize(0..SIZE_BYTES - len);
                    if random.u8(0..4) == 0 {
                        model[at..at + len].fill(0);
                        let request = ZeroRequest::default();
                        let zeroed = device.write_zeroes(at as u64, len as u64, request);
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
        });
    }
}

/// Also where a block of the image holds only some sectors.
#[test]
fn a_power_cut_loses_nothing_that_was_flushed_to_a_differencing_image() {
    lane::block_on(async {
        let below = random_bytes(1, SIZE_BYTES);
        let image = differencing(&below);
        let open_child = async |file| {
            let device = open(file, Some(raw(&below)), OpenOptions::default());
            device.await.unwrap() as Arc<dyn BlockDevice>
        };
        assert_flushed_is_kept(image, "differencing", open_child).await;
    });
}

/// Of a child that has no blocks yet: whoever made it may have put the ways to its parent anywhere behind the table,
/// and told how much space they take in sectors or in bytes.
#[test]
fn new_blocks_spare_the_ways_to_the_parent() {
    lane::block_on(async {
        let below = vec![1; SIZE_BYTES];
        for space in [0_u32, 1, 512, u32::MAX] {
            let (mut bytes, _) = differencing(&below);
            let footer = bytes[..512].to_vec();
            bytes.truncate(2560);
            bytes[1536..2048].fill(0xff);
            put(&mut bytes, 580, &space.to_be_bytes());
            put_checksum(&mut bytes[512..1536]);
            bytes.extend(footer);
            let memory = Arc::new(MemStorage::with_bytes(bytes));
            let file: Arc<dyn Storage> = memory.clone();
            let before = parent(file.clone(), OpenOptions::default()).await.unwrap();
            let device = open(file.clone(), Some(raw(&below)), OpenOptions::default());
            let device = device.await.unwrap();
            let buffer = Buffer::copy_of(&[7; 512]);
            let written = device.write(512, buffer, RequestFlags::default());
            written.await.unwrap();
            device.close().await.unwrap();
            let after = parent(file, OpenOptions::default()).await.unwrap();
            assert_eq!(before, after, "space {space}");
            let place = u32::from_be_bytes(memory.snapshot()[1536..1540].try_into().unwrap());
            assert_eq!(place, 5, "right behind, space {space}");
        }
    });
}

#[test]
fn another_image_is_not_the_parent() {
    lane::block_on(async {
        let (bytes, _) = differencing(&vec![0; SIZE_BYTES]);
        let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
        let mut below = vec![0; SIZE_BYTES];
        for (id, is_parent) in [(PARENT_ID, true), ([8; 16], false)] {
            let size_bytes = SIZE_BYTES as u64;
            let footer = Footer::new(Kind::Fixed, b"win ", size_bytes, Geometry::LARGEST, &id);
            below.truncate(SIZE_BYTES);
            below.extend(footer.bytes());
            let opened = open(file.clone(), Some(raw(&below)), OpenOptions::default()).await;
            assert_eq!(opened.is_ok(), is_parent);
            if let Err(error) = opened {
                assert_eq!(error.kind(), ErrorKind::InvalidImage);
            }
        }
    });
}

#[test]
fn bits_that_a_dynamic_image_lacks_come_with_the_first_flush_of_a_change() {
    lane::block_on(async {
        let (mut bytes, _) = differencing(&vec![0; SIZE_BYTES]);
        let size_bytes = SIZE_BYTES as u64;
        let footer = Footer::new(
            Kind::Dynamic,
            b"win ",
            size_bytes,
            Geometry::LARGEST,
            &[1; 16],
        );
        put(&mut bytes, 0, footer.bytes());
        let memory = Arc::new(MemStorage::with_bytes(bytes.clone()));
        let file: Arc<dyn Storage> = memory.clone();
        let device = open(file.clone(), None, OpenOptions::default())
            .await
            .unwrap();
        // The third block, all of whose bytes are the image's: bitmaps tell nothing here.
        let read = device.read(2 * BLOCK as u64, Buffer::for_read(BLOCK)).await;
        assert!(read.unwrap().iter().all(|byte| *byte == 0xd2));
        device.flush().await.unwrap();
        assert!(
            memory.snapshot() == bytes,
            "what is only read is not written"
        );
        let buffer = Buffer::copy_of(&[7; 100]);
        let written = device.write(3 * BLOCK as u64 + 77, buffer, RequestFlags::default());
        written.await.unwrap();
        device.close().await.unwrap();
        let place = 2560 + 2 * (BLOCK + 512);
        put(&mut bytes, place - 512 - BLOCK, &[0xff; 512]);
        put(&mut bytes, place, &[0xff; 512]);
        put(&mut bytes, place + 512 + 77, &[7; 100]);
        assert!(memory.snapshot() == bytes);
    });
}

#[test]
fn any_bytes_give_an_image_or_an_error() {
    for seed in 0..400 {
        lane::block_on(async {
            let mut random = fastrand::Rng::with_seed(seed);
            let made = Arc::new(MemStorage::new());
            let options = CreateOptions::default().size_bytes(random.u64(0..20 << 20));
            create(&(made.clone() as Arc<dyn Storage>), &options)
                .await
                .unwrap();
            let mut bytes = made.snapshot();
            for _ in 0..random.usize(1..6) {
                let at = random.usize(512..bytes.len());
                bytes[at] = random.u8(..);
                let at = 512 + random.usize(16..36);
                bytes[at] = random.u8(..);
            }
            if random.bool() {
                bytes[63] = 4;
                bytes[67] = bytes[67].wrapping_sub(1);
            }
            let file: Arc<dyn Storage> = Arc::new(MemStorage::with_bytes(bytes));
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
