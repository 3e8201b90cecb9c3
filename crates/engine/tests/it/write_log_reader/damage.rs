//! Logs that were damaged, cut, or are somebody else's: refused, with the image as it was.

use std::sync::Arc;
use std::time::Duration;

use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::{WriteLogOptions, read_header};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage};
use vellum_io::lane::{self, block_on};

use crate::common::Random;
use crate::write_log_reader::{
    content, content_read_only, content_replayed, memory, open, open_with, open_with_log, reader,
    world,
};

const BLOCK: usize = 4096;
const RING: usize = 2 * BLOCK;
const BATCHES: u8 = 5;

/// An image and its log after as many flushes as there are batches: each wrote a byte of the
/// batch's number, from 1, at a place of its own. Each batch takes one block.
fn killed(seed: u64) -> (Vec<u8>, Vec<u8>) {
    block_on(async move {
        let bytes = world::image_with(&mut Random::new(seed), false).await;
        let (file, log) = (memory(&bytes), memory(&[]));
        let image = open_with_log(file.clone(), log.clone())
            .await
            .expect("opened");
        for batch in 1..=BATCHES {
            let mut buffer = Buffer::zeroed(512);
            buffer.fill(batch);
            let flags = RequestFlags::default();
            let write = image.write(u64::from(batch) * 8192, buffer, flags);
            write.await.expect("written");
            image.flush().await.expect("flushed");
        }
        (file.snapshot(), log.snapshot())
    })
}

/// Nobody takes the log for one that counts, and nothing changes.
fn assert_refused(image: &[u8], log: &[u8]) {
    assert!(reader::replay(image, log).is_err());
    block_on(async {
        // The first opening that may write frees what the killed process has leaked, before it
        // looks at the log.
        let (file, log_file) = (memory(image), memory(log));
        let opened = open(file.clone(), log_file.clone(), false).await;
        opened.expect_err("damaged");
        let found = check(file.clone(), &CheckOptions::default()).await;
        assert_eq!(found.expect("checked").corruptions, 0);
        let image = &file.snapshot()[..];
        for read_only in [true, false] {
            let (file, log_file) = (memory(image), memory(log));
            let error = open(file.clone(), log_file.clone(), read_only)
                .await
                .expect_err("damaged");
            assert!(
                matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::InvalidImage),
                "{error}"
            );
            assert!(file.snapshot() == image && log_file.snapshot() == log);
        }
        let (file, log_file) = (memory(image), memory(log));
        open_with_log(file.clone(), log_file.clone())
            .await
            .expect_err("damaged");
        assert!(file.snapshot() == image && log_file.snapshot() == log);
    });
}

/// Everybody finds so many batches, and what they hold.
fn assert_holds(image: &[u8], log: &[u8], batches: u8) {
    assert_eq!(
        reader::replay(image, log).expect("a log").len(),
        usize::from(batches)
    );
    block_on(async {
        let shown = content_read_only(image, log).await.expect("opened");
        for batch in 1..=batches {
            assert_eq!(shown[usize::from(batch) * 8192], batch);
        }
        let (replayed, _) = content_replayed(image, log).await.expect("replayed");
        assert!(replayed == shown);
    });
}

#[test]
fn every_batch_is_found() {
    let (image, log) = killed(1);
    assert_eq!(
        reader::extension(&image).expect("one").1,
        crate::write_log_reader::NAME
    );
    assert_holds(&image, &log, BATCHES);
}

#[test]
fn a_bit_that_changed_before_the_last_batch_is_noticed() {
    let (image, log) = killed(2);
    // What is behind the payload of 512 bytes belongs to no record.
    let record_bits = (64 + 512) * 8;
    for batch in 0..usize::from(BATCHES) - 1 {
        for bit in (0..record_bits).step_by(389) {
            let mut log = log.clone();
            log[RING + batch * BLOCK + bit / 8] ^= 1 << (bit % 8);
            assert_refused(&image, &log);
        }
    }
}

#[test]
fn a_last_batch_that_is_not_whole_is_the_end() {
    let (image, log) = killed(3);
    let mut damaged = log.clone();
    damaged[RING + usize::from(BATCHES - 1) * BLOCK + 100] ^= 4;
    assert_holds(&image, &damaged, BATCHES - 1);
}

#[test]
fn one_superblock_is_enough_and_none_is_too_few() {
    let (image, log) = killed(4);
    let newest = reader::newest(&log).expect("one").expect("one");
    let newest_at = (newest.generation % 2) as usize * BLOCK;
    let mut damaged = log.clone();
    damaged[BLOCK - newest_at + 20] ^= 1;
    assert_holds(&image, &damaged, BATCHES);
    damaged[newest_at + 20] ^= 1;
    assert_refused(&image, &damaged);
}

/// The newest superblock cannot be read any more.
fn without_newest_superblock(log: &[u8]) -> Vec<u8> {
    let newest = reader::newest(log).expect("one").expect("one");
    let mut damaged = log.to_vec();
    damaged[(newest.generation % 2) as usize * BLOCK + 20] ^= 1;
    damaged
}

#[test]
fn a_newest_superblock_that_is_lost_is_noticed() {
    let (image, log) = killed(14);
    assert_refused(&image, &without_newest_superblock(&log));
}

async fn write(image: &dyn BlockDevice, at: u64, len: usize, byte: u8) {
    let bytes = Buffer::copy_of(&vec![byte; len]);
    let flags = RequestFlags::default();
    image.write(at, bytes, flags).await.expect("written");
    image.flush().await.expect("flushed");
}

#[test]
fn what_was_given_up_does_not_come_back_over_what_is_newer() {
    let (image, log, shown) = block_on(async {
        let bytes = world::image_with(&mut Random::new(15), false).await;
        let (file, log) = (memory(&bytes), memory(&[]));
        let image = open_with_log(file.clone(), log.clone()).await;
        let image = image.expect("opened");
        write(&*image, 8192, 512, 1).await;
        // Too long for the log: what it holds is given up.
        write(&*image, 0, 100_000, 2).await;
        write(&*image, 122_880, 512, 3).await;
        let (image, log) = (file.snapshot(), log.snapshot());
        let shown = content_read_only(&image, &log).await.expect("opened");
        (image, log, shown)
    });
    assert_eq!((shown[8192], shown[122_880]), (2, 3));
    assert_refused(&image, &without_newest_superblock(&log));
}

#[test]
fn the_log_of_another_image_is_refused() {
    let (image, log) = killed(5);
    let (other_image, other_log) = killed(6);
    assert_refused(&image, &other_log);
    assert_refused(&other_image, &log);
    // Nor does an image without the bit take it over.
    block_on(async {
        let fresh = world::image(&mut Random::new(7)).await;
        let (file, log_file) = (memory(&fresh), memory(&log));
        open_with_log(file.clone(), log_file.clone())
            .await
            .expect_err("another's");
        assert!(file.snapshot() == fresh && log_file.snapshot() == log);
    });
}

#[test]
fn a_log_that_was_cut_is_refused() {
    let (image, log) = killed(8);
    for len in [0, 100, 4096, 8192, 8192 + 3 * 4096 + 100, log.len() - 1] {
        assert_refused(&image, &log[..len]);
    }
}

/// Changes a superblock and gives it the right checksum.
fn with_superblock(log: &[u8], change: impl Fn(&mut [u8])) -> Vec<u8> {
    let newest = reader::newest(log).expect("one").expect("one");
    let at = (newest.generation % 2) as usize * BLOCK;
    let mut log = log.to_vec();
    let block = &mut log[at..at + 72];
    change(block);
    let crc = reader::crc32c(&[&block[..12], &block[16..]]) as u32;
    block[12..16].copy_from_slice(&crc.to_be_bytes());
    log
}

#[test]
fn what_no_superblock_says_is_refused() {
    let (image, log) = killed(9);
    let changes: [(usize, u64); 7] = [
        (8, 2 << 32),
        (32, 73_727),
        (32, 1 << 31),
        (40, 1 << 48),
        (48, 4096),
        (56, u64::MAX),
        (64, u64::MAX),
    ];
    for (at, value) in changes {
        let wrong = with_superblock(&log, |block| {
            block[at..at + 8].copy_from_slice(&value.to_be_bytes());
        });
        assert!(reader::replay(&image, &wrong).is_err(), "{at}");
        block_on(async {
            let file = memory(&image);
            open(file.clone(), memory(&wrong), false)
                .await
                .expect_err("refused");
            assert!(
                without_compatible_features(file.snapshot())
                    == without_compatible_features(image.clone())
            );
        });
    }
}

/// An image that tells of leaks has not changed otherwise.
fn without_compatible_features(mut image: Vec<u8>) -> Vec<u8> {
    image[80..88].fill(0);
    image
}

#[test]
fn a_record_beyond_the_end_of_the_disk_is_refused() {
    let (image, mut log) = killed(10);
    let last = RING + usize::from(BATCHES - 1) * BLOCK;
    log[last + 40..last + 48].copy_from_slice(&world::SIZE.to_be_bytes());
    let parts = [&log[last..last + 4], &log[last + 8..last + 64 + 512]];
    let crc = reader::crc32c(&parts) as u32;
    log[last + 4..last + 8].copy_from_slice(&crc.to_be_bytes());
    assert_refused(&image, &log);
}

#[test]
fn a_log_whose_numbers_are_used_up_is_not_taken_into_use() {
    let (_, log) = killed(11);
    let log = with_superblock(&log, |block| {
        block[16..32].fill(0);
        block[56..64].copy_from_slice(&(1u64 << 62).to_be_bytes());
    });
    block_on(async {
        let file = memory(&world::image(&mut Random::new(11)).await);
        let opened = open_with_log(file, memory(&log)).await;
        assert_eq!(opened.expect_err("used up").kind(), ErrorKind::Unsupported);
    });
}

#[test]
fn a_log_whose_generations_are_used_up_is_not_taken_into_use() {
    let (_, log) = killed(16);
    for (generation, is_taken) in [(1u64 << 47, false), ((1 << 47) - 1, true)] {
        let log = with_superblock(&log, |block| {
            block[16..32].fill(0);
            block[40..48].copy_from_slice(&generation.to_be_bytes());
        });
        block_on(async {
            let file = memory(&world::image(&mut Random::new(16)).await);
            let opened = open_with_log(file, memory(&log)).await;
            assert_eq!(opened.is_ok(), is_taken, "{generation:#x}");
        });
    }
}

#[test]
fn a_missing_extension_is_noticed() {
    let (mut image, log) = killed(12);
    let at = image
        .windows(4)
        .position(|word| word == 0x564c_4c4au32.to_be_bytes());
    image[at.expect("an extension") + 3] ^= 1;
    let file: Arc<dyn Storage> = memory(&image);
    assert!(reader::replay(&image, &log).is_err());
    block_on(open(file, memory(&log), true)).expect_err("no extension");
}

#[test]
fn the_last_of_two_extensions_counts() {
    let (mut image, log) = killed(13);
    let at = image
        .windows(4)
        .position(|word| word == 0x564c_4c4au32.to_be_bytes());
    let at = at.expect("an extension");
    // Its bytes once more in front of it, with another identity.
    let extension = image[at..at + 8 + 24].to_vec();
    let end = at + 2 * extension.len() + 8;
    let rest = image[at..end - extension.len()].to_vec();
    image[at + extension.len()..end].copy_from_slice(&rest);
    image[at..at + extension.len()].copy_from_slice(&extension);
    image[at + 8] ^= 1;
    assert_holds(&image, &log, BATCHES);
}

/// A header that says of clusters in use that a log has them, which holds nothing.
#[test]
fn no_cluster_is_taken_for_a_log_because_the_header_says_so() {
    block_on(async {
        let file = memory(&world::image_with(&mut Random::new(1), false).await);
        let image = open_with(file.clone(), WriteLogOptions::inside()).await?;
        let write = image.write(0, Buffer::copy_of(&[7; 4096]), RequestFlags::default());
        write.await?;
        image.flush().await?;
        // The writes are in the image, the log still has its place.
        lane::sleep(Duration::from_secs(3)).await;
        let idle = file.snapshot();
        image.close().await?;
        assert!(!reader::is_marked(&idle));
        let header = read_header(&(memory(&idle) as Arc<dyn Storage>)).await?;
        let log = header.write_log_inside().expect("inside");
        let cluster = header.geometry().cluster_size_bytes();
        let name = log.start.to_be_bytes();
        let at = idle[..cluster as usize]
            .windows(8)
            .position(|bytes| bytes == name);
        let at = at.expect("the place in the extension");
        for place in 1..log.start / cluster {
            let mut bytes = idle.clone();
            bytes[at..at + 8].copy_from_slice(&(place * cluster).to_be_bytes());
            bytes[at + 8..at + 16].copy_from_slice(&cluster.to_be_bytes());
            for log in [None, Some(WriteLogOptions::inside())] {
                let damaged = memory(&bytes);
                let opened = match log {
                    None => open(damaged.clone(), memory(&[]), false).await?,
                    Some(log) => open_with(damaged.clone(), log).await?,
                };
                assert_eq!(content(&opened).await[..4096], [7; 4096]);
                opened.close().await?;
                let report = check(damaged, &CheckOptions::default()).await?;
                assert_eq!((report.corruptions, report.check_errors), (0, 0));
            }
        }
        Ok::<_, vellum::Error>(())
    })
    .expect("no failure");
}
