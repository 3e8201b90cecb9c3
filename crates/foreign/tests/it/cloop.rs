//! cloop images, made here: nothing on this side of the tests makes them. QEMU has to read the same.

use std::io::Write;

use crate::common::{Counted, Model, Place, compare_with_qemu, open_file, read_side_by_side, run};
use flate2::Compression;
use flate2::write::ZlibEncoder;
use vellum::BlockDevice;
use vellum_foreign::cloop;

const BLOCK_BYTES: usize = 65536;

fn image(seed: u64, blocks: usize) -> (Vec<u8>, Vec<u8>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut content = vec![0; blocks * BLOCK_BYTES];
    for piece in content.chunks_mut(1000) {
        let len = random.usize(0..=piece.len());
        random.fill(&mut piece[..len]);
    }
    let mut bytes = b"#!/bin/sh\n#V2.0 Format\n".to_vec();
    bytes.extend(b"modprobe cloop file=$0 && mount -r -t iso9660 /dev/cloop $1\n");
    bytes.resize(128, 0);
    bytes.extend((BLOCK_BYTES as u32).to_be_bytes());
    bytes.extend((blocks as u32).to_be_bytes());
    let mut at = bytes.len() + (blocks + 1) * 8;
    let mut data = Vec::new();
    for block in content.chunks(BLOCK_BYTES) {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(block).unwrap();
        let compressed = encoder.finish().unwrap();
        bytes.extend((at as u64).to_be_bytes());
        at += compressed.len();
        data.extend(compressed);
    }
    bytes.extend((at as u64).to_be_bytes());
    bytes.extend(data);
    (bytes, content)
}

#[test]
fn an_image_reads_as_qemu_reads_it() {
    let seed = 3;
    let place = Place::default();
    let (bytes, content) = image(seed, 20);
    assert!(cloop::probe(&bytes[..512]));
    let path = place.path("disk.cloop");
    std::fs::write(&path, bytes).unwrap();
    compare_with_qemu(&place, "cloop", "disk.cloop", &content);
    let mut model = Model::new(seed, 0);
    model.bytes = content;
    run(async {
        let device = cloop::open(open_file(&path)).await.unwrap();
        model.compare(&*device).await;
        device.close().await.unwrap();
    });
}

#[test]
fn a_block_is_inflated_once_for_all_who_read_it() {
    let (bytes, content) = image(5, 3);
    run(async {
        let file = Counted::new(bytes);
        let device = cloop::open(file.clone()).await.unwrap();
        let before = file.reads();
        read_side_by_side(&*device, &content, &[0, 2 * BLOCK_BYTES as u64]).await;
        assert_eq!(file.reads() - before, 2);
    });
}

#[test]
fn blocks_that_are_broken_fail_and_others_do_not() {
    let (mut bytes, content) = image(4, 3);
    let second = u64::from_be_bytes(bytes[144..152].try_into().unwrap()) as usize;
    bytes[second..second + 8].fill(0xff);
    run(async {
        let file = std::sync::Arc::new(vellum::storage::MemStorage::with_bytes(bytes));
        let device = cloop::open(file).await.unwrap();
        let block = BLOCK_BYTES as u64;
        let error = device.read(block, vellum::Buffer::for_read(512)).await;
        assert_eq!(error.unwrap_err().kind(), vellum::ErrorKind::Corrupt);
        let read = device
            .read(2 * block, vellum::Buffer::for_read(BLOCK_BYTES))
            .await;
        assert!(read.unwrap()[..] == content[2 * BLOCK_BYTES..]);
    });
}

#[test]
fn damaged_images_end_in_errors() {
    let (good, _) = image(7, 3);
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..300 {
        let mut bytes = good.clone();
        for _ in 0..random.usize(1..8) {
            let end = if random.bool() { bytes.len() } else { 256 };
            let at = random.usize(..end);
            bytes[at] = if random.bool() { random.u8(..) } else { 0xff };
        }
        run(async {
            let file = std::sync::Arc::new(vellum::storage::MemStorage::with_bytes(bytes));
            let Ok(device) = cloop::open(file).await else {
                return;
            };
            let size = device.size_bytes();
            for at in [0, 70_000, size.saturating_sub(10_000)] {
                let len = size.saturating_sub(at).min(70_000) as usize;
                let _ = device.read(at, vellum::Buffer::for_read(len)).await;
                let _ = device.block_status(at, len as u64, u32::MAX).await;
            }
        });
    }
}
