use std::future::Future;
use std::sync::Arc;

use vellum_format::features::Incompatible;
use vellum_format::header::field;
use vellum_format::l1::L1Entry;
use vellum_format::{L2Entry, refcount};
use vellum_io::executor::Executor;
use vellum_storage::MemStorage;

use super::*;
use crate::qcow2::create::{CreateOptions, create};
use crate::{Preallocation, Result};

fn run<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    let executor = Executor::new(|| {});
    let (sender, receiver) = std::sync::mpsc::channel();
    drop(executor.spawn(async move { sender.send(future.await) }));
    executor.run_ready();
    receiver.try_recv().expect("memory never waits")
}

/// A fully mapped image of 512-byte clusters: many tables in few bytes.
fn image(refcount_bits: u64) -> Vec<u8> {
    let options = CreateOptions {
        size_bytes: 256 << 10,
        cluster_size_bytes: 512,
        refcount_bits,
        preallocation: Preallocation::Metadata,
        ..CreateOptions::default()
    };
    let storage = Arc::new(MemStorage::new());
    let target = storage.clone();
    run(async move { create(target, None, &options).await }).expect("valid options");
    storage.snapshot()
}

fn check_bytes(bytes: &[u8]) -> Result<CheckReport> {
    let storage = Arc::new(MemStorage::with_bytes(bytes.to_vec()));
    run(async move { check(storage, &CheckOptions::default()).await })
}

fn repair_bytes(bytes: &[u8]) -> Result<Vec<u8>> {
    let storage = Arc::new(MemStorage::with_bytes(bytes.to_vec()));
    let target = storage.clone();
    run(async move { repair(target, Fix::All, &CheckOptions::default()).await })?;
    Ok(storage.snapshot())
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

fn put64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_be_bytes());
}

fn set_dirty(bytes: &mut [u8]) {
    put64(
        bytes,
        field::INCOMPATIBLE_FEATURES,
        Incompatible::DIRTY.bits(),
    );
}

fn set_refcount(bytes: &mut [u8], order: u32, cluster: usize, count: u64) {
    let per_block = (512 * 8) >> order;
    let table = be64(bytes, field::REFCOUNT_TABLE_OFFSET) as usize;
    let block = be64(bytes, table + cluster / per_block * 8) as usize;
    let set = refcount::set(
        &mut bytes[block..block + 512],
        order,
        cluster % per_block,
        count,
    );
    assert!(set, "the count fits");
}

fn first_l2_table(bytes: &[u8]) -> usize {
    let l1 = be64(bytes, field::L1_TABLE_OFFSET) as usize;
    L1Entry(be64(bytes, l1)).raw_offset() as usize
}

fn assert_repaired(bytes: &[u8]) {
    let report = check_bytes(bytes).expect("can be checked");
    assert_eq!(
        (report.corruptions, report.leaks, report.check_errors),
        (0, 0, 0)
    );
    assert_eq!(be64(bytes, field::INCOMPATIBLE_FEATURES), 0);
}

#[test]
fn a_new_image_is_clean() {
    let report = check_bytes(&image(16)).expect("can be checked");
    assert_eq!((report.corruptions, report.leaks), (0, 0));
    assert_eq!(
        (report.total_clusters, report.allocated_clusters),
        (512, 512)
    );
    assert_eq!(report.image_end_offset, image(16).len() as u64);
}

#[test]
fn wrong_counts_are_repaired_for_every_width() {
    for order in 0..=6 {
        let mut bytes = image(1 << order);
        let l2 = first_l2_table(&bytes);
        set_refcount(&mut bytes, order, 20, 0);
        set_refcount(&mut bytes, order, 21, if order > 0 { 3 } else { 0 });
        // A cluster that is leaked, and one with a flag that is wrong.
        put64(&mut bytes, l2 + 8, 0);
        let entry = L2Entry {
            descriptor: be64(&bytes, l2 + 16),
            bitmap: 0,
        };
        put64(&mut bytes, l2 + 16, entry.with_copied(false).descriptor);
        set_dirty(&mut bytes);
        let before = check_bytes(&bytes).expect("can be checked");
        assert!(before.corruptions > 0 && before.leaks > 0, "{before:?}");
        assert_repaired(&repair_bytes(&bytes).expect("only counts are wrong"));
    }
}

#[test]
fn a_missing_refcount_block_is_made_anew() {
    let mut bytes = image(64);
    let table = be64(&bytes, field::REFCOUNT_TABLE_OFFSET) as usize;
    put64(&mut bytes, table + 2 * 8, 0);
    set_dirty(&mut bytes);
    assert_repaired(&repair_bytes(&bytes).expect("only counts are wrong"));
}

#[test]
fn what_cannot_be_repaired_keeps_the_image_marked() {
    let mut bytes = image(16);
    let l2 = first_l2_table(&bytes);
    put64(&mut bytes, l2, 1 << 50);
    set_dirty(&mut bytes);
    let repaired = repair_bytes(&bytes).expect("all else can be put right");
    let report = check_bytes(&repaired).expect("can be checked");
    assert_eq!((report.corruptions, report.leaks), (1, 0));
    assert_eq!(
        be64(&repaired, field::INCOMPATIBLE_FEATURES),
        Incompatible::DIRTY.bits()
    );
}

#[test]
fn repairing_leaks_needs_sound_refcounts() {
    let mut bytes = image(16);
    set_refcount(&mut bytes, 4, 20, 0);
    let storage = Arc::new(MemStorage::with_bytes(bytes.clone()));
    let target = storage.clone();
    let error = run(async move { repair(target, Fix::Leaks, &CheckOptions::default()).await })
        .expect_err("refcounts have to be made anew");
    assert_eq!(error.errno(), 5);
    assert_eq!(storage.snapshot(), bytes, "nothing is written");
}

#[test]
fn what_is_no_image_is_refused() {
    assert!(check_bytes(&[]).is_err());
    assert!(check_bytes(&[0x55; 4096]).is_err());
    assert!(check_bytes(&image(16)[..60]).is_err());
}
