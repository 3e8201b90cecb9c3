//! The jobs on raw devices in memory.

use std::sync::Arc;

use vellum::{BlockDevice, Raw, RawOptions};
use vellum_io::lane;
use vellum_jobs::compare::{CompareOptions, Outcome, compare};
use vellum_jobs::copy::{CHUNK_BYTES, CopyOptions, Silent, copy};
use vellum_jobs::map::map;
use vellum_storage::MemStorage;

fn device(bytes: Vec<u8>) -> (Arc<MemStorage>, Arc<dyn BlockDevice>) {
    let storage = Arc::new(MemStorage::with_bytes(bytes));
    let raw = Raw::open(storage.clone(), RawOptions::default()).expect("a raw device");
    (storage, raw)
}

/// Bytes of which some 4 KiB blocks are zeroes.
fn content(len_bytes: usize, seed: u8) -> Vec<u8> {
    (0..len_bytes)
        .map(|at| {
            let block = (at / 4096) as u8;
            if block.is_multiple_of(3) {
                0
            } else {
                block ^ seed
            }
        })
        .collect()
}

#[test]
fn sources_are_copied_end_to_end_in_every_way() {
    let (one, two) = (
        content(3 * CHUNK_BYTES as usize + 512, 1),
        content(70 * 1024, 2),
    );
    let whole = [one.clone(), two.clone()].concat();
    for (out_of_order, min_sparse_bytes, target_is_zero) in [
        (false, Some(4096), true),
        (true, Some(65536), true),
        (false, Some(4096), false),
        (true, None, false),
    ] {
        let sources = [device(one.clone()).1, device(two.clone()).1];
        let before = if target_is_zero { 0 } else { 0xee };
        let (storage, target) = device(vec![before; whole.len()]);
        let options = CopyOptions {
            out_of_order,
            min_sparse_bytes,
            target_is_zero,
            ..CopyOptions::default()
        };
        lane::block_on(copy(&sources, &target, &options, &mut Silent)).expect("a copy");
        assert!(storage.snapshot() == whole, "{options:?}");
    }
}

#[test]
fn a_part_may_be_copied() {
    let bytes = content(1 << 20, 3);
    let (storage, target) = device(vec![0; 1 << 19]);
    let options = CopyOptions {
        skip_bytes: 4096,
        len_bytes: Some(4096 + (1 << 19)),
        ..CopyOptions::default()
    };
    let sources = [device(bytes.clone()).1];
    lane::block_on(copy(&sources, &target, &options, &mut Silent)).expect("a copy");
    assert!(storage.snapshot() == bytes[4096..4096 + (1 << 19)]);
}

#[test]
fn the_first_difference_is_found() {
    find_the_first_difference(5 << 20, 3 << 20);
    // So large that other threads help; the first of two differences counts.
    find_the_first_difference(20 << 20, 3 << 20);
    find_the_first_difference(20 << 20, 17 << 20);
}

fn find_the_first_difference(len_bytes: usize, at: usize) {
    let bytes = content(len_bytes, 4);
    let mut other = bytes.clone();
    other[at + 700] ^= 1;
    other[len_bytes - 1] ^= 1;
    let (one, two) = (device(bytes.clone()).1, device(other).1);
    let longer = device([bytes, vec![0; 4096]].concat()).1;
    let found = |a: &Arc<dyn BlockDevice>, b: &Arc<dyn BlockDevice>, strict| {
        lane::block_on(compare(a, b, CompareOptions { strict }, |_, _| {})).expect("an answer")
    };
    assert_eq!(
        found(&one, &two, false),
        Outcome::ContentMismatch(at as u64 + 512)
    );
    assert_eq!(found(&one, &one, true), Outcome::Identical);
    assert_eq!(found(&one, &longer, false), Outcome::Identical);
    assert_eq!(found(&longer, &one, true), Outcome::SizeMismatch);
}

#[test]
fn extents_of_one_kind_are_merged() {
    let (_, device) = device(vec![1; 1 << 20]);
    let mut entries = Vec::new();
    lane::block_on(map(&device, 4096, 1 << 20, |entry| entries.push(entry))).expect("a map");
    assert_eq!(entries.len(), 1);
    assert_eq!(entries[0].start_bytes, 4096);
    assert_eq!(entries[0].extent.len_bytes, (1 << 20) - 4096);
}
