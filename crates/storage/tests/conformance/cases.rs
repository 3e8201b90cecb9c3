//! The cases.

use std::sync::Arc;

use futures_util::future::join_all;
use vellum_io::lane::block_on;
use vellum_io::{Buffer, Buffers, ErrorKind, spawn};
use vellum_storage::{BlockStatus, Storage, WriteFlags, ZeroFlags};

use crate::everywhere;

type Shared = Arc<dyn Storage>;

fn pattern(offset_bytes: u64, len_bytes: usize) -> Vec<u8> {
    (0..len_bytes as u64)
        .map(|at| ((offset_bytes + at) * 7 + 1) as u8 | 1)
        .collect()
}

async fn write(storage: &Shared, offset_bytes: u64, bytes: &[u8]) {
    let buffers = Buffers::from_buf([Buffer::copy_of(bytes)]);
    let back = storage
        .write(offset_bytes, buffers, WriteFlags::default())
        .await
        .unwrap();
    assert_eq!(&back[0][..], bytes);
}

async fn read(storage: &Shared, offset_bytes: u64, len_bytes: usize) -> Vec<u8> {
    let mut buffer = Buffer::for_read(len_bytes);
    buffer.fill(0xee);
    let read = storage.read(offset_bytes, Buffers::from_buf([buffer]));
    read.into_single().await.unwrap().to_vec()
}

#[test]
fn what_is_written_is_read() {
    everywhere(|storage| {
        block_on(async {
            for (offset, len) in [
                (0, 4096),
                (8192, 512),
                (10_000, 1),
                (12_345, 70_001),
                (511, 2),
            ] {
                write(&storage, offset, &pattern(offset, len)).await;
                assert_eq!(read(&storage, offset, len).await, pattern(offset, len));
            }
        });
    });
}

#[test]
fn unaligned_writes_leave_their_neighbours_alone() {
    everywhere(|storage| {
        block_on(async {
            let len = 3 * 4096;
            let mut expected = pattern(0, len);
            write(&storage, 0, &expected).await;
            for (offset, len) in [
                (1, 1),
                (100, 411),
                (511, 2),
                (4000, 5000),
                (4095, 1),
                (0, 12_287),
            ] {
                let bytes = vec![len as u8; len];
                write(&storage, offset as u64, &bytes).await;
                expected[offset..offset + len].copy_from_slice(&bytes);
                assert_eq!(read(&storage, 0, expected.len()).await, expected);
            }
            assert_eq!(storage.len_bytes().unwrap(), len as u64);
        });
    });
}

#[test]
fn beyond_the_end_are_zeroes() {
    everywhere(|storage| {
        block_on(async {
            assert_eq!(read(&storage, 0, 100).await, vec![0; 100]);
            write(&storage, 0, &pattern(0, 1000)).await;
            let mut expected = pattern(0, 1000);
            expected.resize(9000, 0);
            assert_eq!(read(&storage, 0, 9000).await, expected);
            assert_eq!(read(&storage, 1 << 40, 4096).await, vec![0; 4096]);
        });
    });
}

#[test]
fn vectors_keep_their_order() {
    everywhere(|storage| {
        block_on(async {
            let sizes = [512, 4096, 1, 7000, 0, 512];
            let total: usize = sizes.iter().sum();
            let bytes = pattern(0, total);
            let mut at = 0;
            let mut pieces = Buffers::new();
            for size in sizes {
                pieces.push(Buffer::copy_of(&bytes[at..at + size]));
                at += size;
            }
            let back = storage
                .write(4096, pieces, WriteFlags::default())
                .await
                .unwrap();
            assert_eq!(back.iter().map(|b| b.len()).collect::<Vec<_>>(), sizes);
            assert_eq!(read(&storage, 4096, total).await, bytes);
            let pieces = sizes
                .iter()
                .rev()
                .map(|&size| Buffer::for_read(size))
                .collect();
            let read = storage.read(4096, pieces).await.unwrap();
            assert_eq!(read.concat_bytes(), bytes);
        });
    });
}

trait Concat {
    fn concat_bytes(&self) -> Vec<u8>;
}

impl Concat for Buffers {
    fn concat_bytes(&self) -> Vec<u8> {
        self.iter()
            .flat_map(|buffer| buffer.iter().copied())
            .collect()
    }
}

#[test]
fn more_pieces_than_one_call_takes() {
    everywhere(|storage| {
        block_on(async {
            let pieces: Buffers = (0..2500_u32)
                .map(|n| Buffer::copy_of(&[n as u8; 512]))
                .collect();
            let expected = pieces.concat_bytes();
            storage
                .write(0, pieces, WriteFlags { fua: true })
                .await
                .unwrap();
            let pieces = (0..2500).map(|_| Buffer::for_read(512)).collect();
            assert!(storage.read(0, pieces).await.unwrap().concat_bytes() == expected);
        });
    });
}

#[test]
fn zeroes_read_as_zeroes() {
    everywhere(|storage| {
        block_on(async {
            for (may_unmap, fua) in [(false, false), (true, false), (true, true)] {
                for (offset, len) in [(4096, 8192), (100, 50), (4000, 9000), (60_000, 10_000)] {
                    let mut expected = pattern(0, 64_000);
                    storage.truncate(0).await.unwrap();
                    write(&storage, 0, &expected).await;
                    let flags = ZeroFlags {
                        may_unmap,
                        no_fallback: false,
                        fua,
                    };
                    storage
                        .write_zeroes(offset as u64, len as u64, flags)
                        .await
                        .unwrap();
                    if expected.len() < offset + len {
                        expected.resize(offset + len, 0);
                    }
                    expected[offset..offset + len].fill(0);
                    assert_eq!(read(&storage, 0, expected.len()).await, expected);
                    assert!(storage.len_bytes().unwrap() >= expected.len() as u64);
                }
            }
        });
    });
}

#[test]
fn zeroes_grow_the_storage() {
    everywhere(|storage| {
        block_on(async {
            let flags = ZeroFlags {
                may_unmap: true,
                ..ZeroFlags::default()
            };
            storage.write_zeroes(1 << 20, 4096, flags).await.unwrap();
            assert_eq!(storage.len_bytes().unwrap(), (1 << 20) + 4096);
            assert_eq!(read(&storage, 1 << 20, 4096).await, vec![0; 4096]);
        });
    });
}

#[test]
fn discarded_space_reads_as_zeroes_and_keeps_the_length() {
    everywhere(|storage| {
        block_on(async {
            let mut expected = pattern(0, 65_536);
            write(&storage, 0, &expected).await;
            storage.discard(4096, 8192).await.unwrap();
            storage.discard(20_000, 100).await.unwrap();
            storage.discard(61_440, 1 << 20).await.unwrap();
            assert_eq!(storage.len_bytes().unwrap(), 65_536);
            for (from, to) in [(4096, 4096 + 8192), (20_000, 20_100), (61_440, 65_536)] {
                expected[from..to].fill(0);
            }
            assert_eq!(read(&storage, 0, 65_536).await, expected);
        });
    });
}

#[test]
fn truncate_cuts_and_grows_with_zeroes() {
    everywhere(|storage| {
        block_on(async {
            write(&storage, 0, &pattern(0, 10_000)).await;
            storage.truncate(5000).await.unwrap();
            assert_eq!(storage.len_bytes().unwrap(), 5000);
            storage.truncate(20_000).await.unwrap();
            let mut expected = pattern(0, 5000);
            expected.resize(20_000, 0);
            assert_eq!(read(&storage, 0, 20_000).await, expected);
        });
    });
}

#[test]
fn allocation_changes_no_bytes() {
    everywhere(|storage| {
        block_on(async {
            write(&storage, 0, &pattern(0, 4096)).await;
            storage.allocate(0, 1 << 20).await.unwrap();
            assert_eq!(storage.len_bytes().unwrap(), 1 << 20);
            let mut expected = pattern(0, 4096);
            expected.resize(8192, 0);
            assert_eq!(read(&storage, 0, 8192).await, expected);
        });
    });
}

#[test]
fn block_status_covers_everything_and_calls_no_data_a_hole() {
    everywhere(|storage| {
        block_on(async {
            let unit = 65_536;
            for block in [1, 2, 5] {
                write(&storage, block * unit, &pattern(0, unit as usize)).await;
            }
            let (mut at, end) = (0, 8 * unit);
            while at < end {
                let extent = storage.block_status(at, end - at).await.unwrap();
                assert!(extent.len_bytes > 0 && at + extent.len_bytes <= end);
                if extent.status == BlockStatus::Hole {
                    let len = extent.len_bytes as usize;
                    assert!(read(&storage, at, len).await.iter().all(|&byte| byte == 0));
                }
                at += extent.len_bytes;
            }
            let beyond = storage.block_status(end, 100).await.unwrap();
            assert_eq!((beyond.status, beyond.len_bytes), (BlockStatus::Hole, 100));
            // What becomes a hole is not remembered as data.
            let first = storage.block_status(unit, unit).await.unwrap();
            assert_eq!(first.status, BlockStatus::Data);
            write(&storage, unit, &pattern(9, 10)).await;
            storage.flush().await.unwrap();
        });
    });
}

#[test]
fn copied_ranges_are_equal() {
    everywhere(|storage| {
        block_on(async {
            write(&storage, 0, &pattern(0, 65_536)).await;
            match storage.copy_range(&*storage, 0, 131_072, 65_536).await {
                Ok(()) => assert_eq!(read(&storage, 131_072, 65_536).await, pattern(0, 65_536)),
                Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported),
            }
        });
    });
}

#[test]
fn many_requests_at_a_time() {
    everywhere(|storage| {
        block_on(async {
            let count = 2000_u64;
            let writes = (0..count).map(|n| {
                let buffers = Buffers::from_buf([Buffer::copy_of(&pattern(n, 4096))]);
                storage.write(n * 4096, buffers, WriteFlags::default())
            });
            for result in join_all(writes).await {
                result.unwrap();
            }
            storage.flush().await.unwrap();
            let reads = (0..count).map(|n| {
                storage
                    .read(n * 4096, Buffers::from_buf([Buffer::for_read(4096)]))
                    .into_single()
            });
            for (n, result) in join_all(reads).await.into_iter().enumerate() {
                assert!(result.unwrap()[..] == pattern(n as u64, 4096), "block {n}");
            }
        });
    });
}

#[test]
fn parts_of_one_block_written_at_a_time_all_arrive() {
    everywhere(|storage| {
        block_on(async {
            write(&storage, 0, &[0; 4096]).await;
            let tasks = (0..64_u64).map(|n| {
                let storage = storage.clone();
                spawn(async move { write(&storage, n * 64, &[n as u8 + 1; 64]).await })
            });
            join_all(tasks).await;
            let expected: Vec<u8> = (0..4096).map(|at| (at / 64 + 1) as u8).collect();
            assert_eq!(read(&storage, 0, 4096).await, expected);
        });
    });
}

#[test]
fn an_abandoned_write_still_happens() {
    everywhere(|storage| {
        block_on(async {
            for (offset, len) in [(0, 4096), (8192 + 7, 100)] {
                let buffers = Buffers::from_buf([Buffer::copy_of(&pattern(offset, len))]);
                drop(storage.write(offset, buffers, WriteFlags::default()));
                let due = std::time::Instant::now() + std::time::Duration::from_secs(10);
                while read(&storage, offset, len).await != pattern(offset, len) {
                    assert!(std::time::Instant::now() < due, "the write got lost");
                }
            }
        });
    });
}

#[test]
fn empty_requests_do_nothing() {
    everywhere(|storage| {
        block_on(async {
            storage.read(5, Buffers::new()).await.unwrap();
            storage
                .write(5, Buffers::new(), WriteFlags::default())
                .await
                .unwrap();
            storage
                .write_zeroes(5, 0, ZeroFlags::default())
                .await
                .unwrap();
            storage.discard(5, 0).await.unwrap();
            assert_eq!(storage.len_bytes().unwrap(), 0);
        });
    });
}
