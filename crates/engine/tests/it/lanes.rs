//! Several lanes on one image in a real file: their requests share clusters,
//! tables and commits.

use std::sync::Arc;

use crate::common::on_lane;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CacheOptions, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage, ZeroRequest};
use vellum_io::lane::{self, Backend};
use vellum_storage::file::{FileOptions, FileStorage};

const LANES: u64 = 3;
const BLOCK_BYTES: u64 = 4096;
const BLOCKS: u64 = 1024;

/// The byte that fills a block after its `round`th write.
fn fill(block: u64, round: u64) -> u8 {
    ((block * 31 + round * 7) % 250) as u8 + 1
}

/// Writes this lane's blocks (every `LANES`th one), several at a time.
async fn hammer(image: Arc<Qcow2>, lane: u64) {
    for round in 0..4 {
        let mut running = Vec::new();
        for block in (lane..BLOCKS).step_by(LANES as usize) {
            if round % 2 == 1 && block % 5 == 0 {
                let zero = ZeroRequest::default().may_unmap(true);
                image
                    .write_zeroes(block * BLOCK_BYTES, BLOCK_BYTES, zero)
                    .await
                    .unwrap();
                continue;
            }
            let mut buffer = Buffer::zeroed(BLOCK_BYTES as usize);
            buffer.fill(fill(block, round));
            running.push(image.write(block * BLOCK_BYTES, buffer, RequestFlags::default()));
            if running.len() == 16 {
                for write in running.drain(..) {
                    write.await.unwrap();
                }
            }
        }
        for write in running {
            write.await.unwrap();
        }
        image.flush().await.unwrap();
    }
}

async fn verify(image: &Qcow2) {
    let all = image
        .read(0, Buffer::for_read((BLOCKS * BLOCK_BYTES) as usize))
        .await
        .unwrap();
    for (block, bytes) in all.chunks(BLOCK_BYTES as usize).enumerate() {
        let block = block as u64;
        let expected = if block.is_multiple_of(5) {
            0
        } else {
            fill(block, 3)
        };
        assert!(bytes.iter().all(|&byte| byte == expected), "block {block}");
    }
}

fn share_one_image(backend: Backend, cluster_size_bytes: u64, extended_l2: bool) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    std::fs::File::create(&path).unwrap();
    let file: Arc<dyn Storage> = FileStorage::open(&path, &FileOptions::default()).unwrap();
    let size_bytes = BLOCKS * BLOCK_BYTES;
    let options = CreateOptions::default()
        .size_bytes(size_bytes)
        .cluster_size_bytes(cluster_size_bytes)
        .extended_l2(extended_l2);
    let opened = {
        let file = file.clone();
        on_lane(backend, move || {
            lane::block_on(async move {
                create(file.clone(), None, &options).await.unwrap();
                let cache = CacheOptions::default().l2_cache_size_bytes(Some(4096));
                let options = OpenOptions::default().cache(cache).discard(true);
                Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap()
            })
        })
    };
    let image = opened.join().unwrap();
    let lanes: Vec<_> = (0..LANES)
        .map(|number| {
            let image = image.clone();
            on_lane(backend, move || lane::block_on(hammer(image, number)))
        })
        .collect();
    for lane in lanes {
        lane.join().unwrap();
    }
    let closing = on_lane(backend, move || {
        lane::block_on(async move {
            verify(&image).await;
            image.close().await.unwrap();
            check(file, &CheckOptions::default()).await.unwrap()
        })
    });
    let report = closing.join().unwrap();
    assert_eq!(
        (report.corruptions, report.leaks, report.check_errors),
        (0, 0, 0)
    );
}

#[test]
fn lanes_share_an_image_on_io_uring_or_what_there_is() {
    share_one_image(Backend::Auto, 65536, false);
    share_one_image(Backend::Auto, 512, false);
    share_one_image(Backend::Auto, 16384, true);
}

#[test]
fn lanes_share_an_image_on_threads() {
    share_one_image(Backend::Threads, 4096, false);
    share_one_image(Backend::Threads, 65536, true);
}
