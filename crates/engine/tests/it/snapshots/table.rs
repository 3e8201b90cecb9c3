//! What the snapshot table holds, and the VM state that belongs to it.

use std::sync::Arc;
use std::time::Instant;

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{CacheOptions, NewSnapshot, OpenOptions, Qcow2, SnapshotSelector, read_header};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags, Storage};
use vellum_format::snapshot::{SnapshotEntry, decode_table, encode_table};
use vellum_format::types::HostOffset;
use vellum_io::Buffers;
use vellum_storage::{MemStorage, WriteFlags};

use super::{Case, assert_sound, open};
use crate::common::{qemu_ok, run_on_memory as run};

const SIZE_BYTES: u64 = 1 << 20;
const CLUSTER_BYTES: u64 = 4096;

/// A new image, and how to open it.
async fn image(version: u32, change: impl FnOnce(&mut CreateOptions)) -> (Arc<dyn Storage>, Case) {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let mut options = CreateOptions::default()
        .size_bytes(SIZE_BYTES)
        .cluster_size_bytes(CLUSTER_BYTES)
        .version(version);
    change(&mut options);
    create(file.clone(), None, &options).await.unwrap();
    let case = Case {
        options,
        cache: CacheOptions::default(),
        backing: None,
    };
    (file, case)
}

async fn take(image: &Qcow2, name: &str) {
    let new = NewSnapshot {
        name: name.into(),
        ..NewSnapshot::default()
    };
    image.create_snapshot(new).await.unwrap();
}

fn named(name: &str) -> SnapshotSelector {
    SnapshotSelector::Name(name.into())
}

async fn fill(image: &Qcow2, byte: u8) {
    let mut buffer = Buffer::zeroed(SIZE_BYTES as usize);
    buffer.fill(byte);
    let write = image.write(0, buffer, RequestFlags::default());
    drop(write.await.unwrap());
}

/// The table of a closed image.
async fn entries(file: &Arc<dyn Storage>) -> Vec<SnapshotEntry> {
    let header = read_header(file).await.unwrap();
    let at = header.snapshots_offset.bytes();
    let len = (file.len_bytes().unwrap() - at) as usize;
    let read = file.read(at, Buffers::from_iter([Buffer::zeroed(len)]));
    let bytes = read.into_single().await.unwrap();
    decode_table(&bytes, header.snapshot_count).unwrap().0
}

/// Changes the table of a closed image, as another program may have written it.
async fn edit(file: &Arc<dyn Storage>, change: impl FnOnce(&mut Vec<SnapshotEntry>)) {
    let header = read_header(file).await.unwrap();
    let mut table = entries(file).await;
    change(&mut table);
    let bytes = encode_table(&table).unwrap();
    assert!(
        bytes.len() as u64 <= CLUSTER_BYTES,
        "the table stays in its cluster"
    );
    let buffers = Buffers::from_iter([Buffer::copy_of(&bytes)]);
    let at = header.snapshots_offset.bytes();
    let written = file.write(at, buffers, WriteFlags::default());
    written.await.map(drop).unwrap();
}

#[test]
fn counts_of_an_empty_disk_stay_where_they_are() {
    run(async {
        let (file, case) = image(3, |_| ()).await;
        let new = read_header(&file).await.unwrap();
        for name in ["a", "b", "c"] {
            let image = open(&file, &case).await;
            take(&image, name).await;
            image.close().await.unwrap();
            assert_sound(&file).await;
        }
        let taken = read_header(&file).await.unwrap();
        assert_eq!(taken.refcount_table_offset, new.refcount_table_offset);
        let image = open(&file, &case).await;
        image.apply_snapshot(named("a")).await.unwrap();
        image.delete_snapshot(named("b")).await.unwrap();
        fill(&image, 1).await;
        image.close().await.unwrap();
        assert_sound(&file).await;
        let places: Vec<u64> = entries(&file)
            .await
            .iter()
            .map(|e| e.l1_table_offset.0)
            .collect();
        // Behind the header, the refcount table and block, and the L1 table; the first
        // snapshot table, after "a", has made room for the L1 table of "c".
        assert_eq!(places, [4, 5].map(|cluster| cluster * CLUSTER_BYTES));
    });
}

#[test]
fn a_table_that_is_counted_too_often_keeps_no_flags_back() {
    run(async {
        let (file, case) = image(3, |_| ()).await;
        let opened = open(&file, &case).await;
        fill(&opened, 1).await;
        take(&opened, "a").await;
        opened.close().await.unwrap();
        drop(opened);
        // As a crash leaves it that came before a table that was left was counted less.
        let header = read_header(&file).await.unwrap();
        let word = async |at| {
            let read = file.read(at, Buffers::from_iter([Buffer::zeroed(8)]));
            let bytes = read.await.unwrap().pop().unwrap();
            u64::from_be_bytes(bytes[..8].try_into().unwrap())
        };
        let table = word(header.l1_table_offset.bytes()).await & !(1 << 63);
        let block = word(header.refcount_table_offset.bytes()).await;
        let count_at = block + table / CLUSTER_BYTES * 2;
        assert_eq!(word(count_at).await >> 48, 2);
        let count = Buffers::from_iter([Buffer::copy_of(&3_u16.to_be_bytes())]);
        let written = file.write(count_at, count, WriteFlags::default());
        drop(written.await.unwrap());

        let opened = open(&file, &case).await;
        opened.delete_snapshot(named("a")).await.unwrap();
        opened.close().await.unwrap();
        let report = check(file.clone(), &CheckOptions::default()).await.unwrap();
        let found = (report.corruptions, report.leaks, report.check_errors);
        assert_eq!(found, (0, 1, 0));
    });
}

#[test]
fn what_nobody_knows_stays_in_its_entry() {
    run(async {
        let (file, case) = image(3, |_| {}).await;
        let image = open(&file, &case).await;
        for name in ["a", "b"] {
            take(&image, name).await;
        }
        image.close().await.unwrap();
        edit(&file, |table| {
            table[0].unknown_extra_data = b"important".to_vec();
            table[0].vm_clock_nanoseconds = 7;
            table[0].icount = Some(8);
            table[1].date_seconds = 9;
        })
        .await;
        let before = entries(&file).await;
        let image = open(&file, &case).await;
        take(&image, "c").await;
        image.apply_snapshot(named("a")).await.unwrap();
        image.delete_snapshot(named("c")).await.unwrap();
        image.close().await.unwrap();
        assert_eq!(entries(&file).await, before);
        assert_sound(&file).await;
    });
}

/// Version 2 need not say how large the disk was: as large as it is.
#[test]
fn entries_without_a_size_have_that_of_the_disk() {
    run(async {
        let (file, case) = image(2, |_| {}).await;
        let image = open(&file, &case).await;
        fill(&image, 1).await;
        take(&image, "a").await;
        fill(&image, 2).await;
        image.close().await.unwrap();
        edit(&file, |table| {
            table[0].disk_size_bytes = None;
            table[0].icount = None;
        })
        .await;
        let image = open(&file, &case).await;
        assert_eq!(image.snapshots()[0].disk_size_bytes, SIZE_BYTES);
        image.apply_snapshot(named("a")).await.unwrap();
        assert_eq!(image.size_bytes(), SIZE_BYTES);
        let read = image.read(0, Buffer::zeroed(SIZE_BYTES as usize)).await;
        assert!(read.unwrap().iter().all(|byte| *byte == 1));
        image.close().await.unwrap();
        assert_eq!(entries(&file).await[0].disk_size_bytes, None);
        assert_sound(&file).await;
    });
}

#[test]
fn a_broken_snapshot_does_no_harm() {
    run(async {
        let (file, case) = image(3, |_| {}).await;
        let image = open(&file, &case).await;
        fill(&image, 1).await;
        for name in ["misplaced", "large", "good"] {
            take(&image, name).await;
        }
        image.close().await.unwrap();
        edit(&file, |table| {
            table[0].l1_table_offset = HostOffset(table[0].l1_table_offset.bytes() + 512);
            table[1].l1_entries = 1 << 28;
        })
        .await;
        let before = entries(&file).await;
        let image = open(&file, &case).await;
        for name in ["misplaced", "large"] {
            let errors = [
                image.open_snapshot(named(name)).await.map(drop),
                image.apply_snapshot(named(name)).await,
                image.delete_snapshot(named(name)).await,
            ];
            for error in errors {
                assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidImage, "{name}");
            }
        }
        fill(&image, 2).await;
        image.apply_snapshot(named("good")).await.unwrap();
        let read = image.read(0, Buffer::zeroed(512)).await.unwrap();
        assert!(read.iter().all(|byte| *byte == 1));
        image.close().await.unwrap();
        assert_eq!(entries(&file).await, before);
    });
}

/// A reference to a cluster that no refcount block counts.
#[test]
fn what_cannot_be_counted_is_not_shared() {
    run(async {
        let (file, case) = image(3, |_| {}).await;
        let image = open(&file, &case).await;
        let write = image.write(0, Buffer::zeroed(512), RequestFlags::default());
        drop(write.await.unwrap());
        image.close().await.unwrap();
        let word = async |at: u64| {
            let read = file.read(at, Buffers::from_iter([Buffer::zeroed(8)]));
            let bytes = read.into_single().await.unwrap();
            u64::from_be_bytes(bytes[..].try_into().unwrap())
        };
        let l1 = read_header(&file).await.unwrap().l1_table_offset;
        let l2 = word(l1.bytes()).await & 0x00ff_ffff_ffff_fe00;
        let far = (1_u64 << 63) + (1 << 28);
        let buffers = Buffers::from_iter([Buffer::copy_of(&far.to_be_bytes())]);
        let written = file.write(l2 + 8, buffers, WriteFlags::default());
        drop(written.await.unwrap());
        let image = open(&file, &case).await;
        let error = image.create_snapshot(NewSnapshot::default()).await;
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Corrupt);
        assert!(image.snapshots().is_empty());
    });
}

#[test]
fn snapshots_change_only_where_they_may() {
    run(async {
        let (file, case) = image(3, |_| {}).await;
        let image = open(&file, &case).await;
        take(&image, "a").await;
        image.close().await.unwrap();
        let read_only = OpenOptions::default().read_only(true);
        let image = Qcow2::open(file.clone(), Arc::new(DenyAll), read_only).await;
        let error = image
            .unwrap()
            .delete_snapshot(named("a"))
            .await
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnly);
        let shown = OpenOptions::default().snapshot(Some(named("a")));
        let writable = Qcow2::open(file, Arc::new(DenyAll), shown).await;
        assert_eq!(writable.unwrap_err().kind(), ErrorKind::InvalidArgument);
    });
}

async fn state(image: &Qcow2, len: usize) -> Vec<u8> {
    let loaded = image.load_vm_state(100, Buffer::zeroed(len)).await;
    loaded.unwrap().to_vec()
}

#[test]
fn vm_state_goes_with_its_snapshot() {
    run(async {
        let (file, case) = image(3, |_| {}).await;
        let image = open(&file, &case).await;
        fill(&image, 1).await;
        for (name, byte) in [("first", 3), ("second", 4)] {
            let mut saved = Buffer::zeroed(3 << 20);
            saved.fill(byte);
            drop(image.save_vm_state(100, saved).await.unwrap());
            let new = NewSnapshot {
                name: name.into(),
                vm_state_size_bytes: 100 + (3 << 20),
                ..NewSnapshot::default()
            };
            let made = image.create_snapshot(new).await.unwrap();
            assert_eq!(made.vm_state_size_bytes, 100 + (3 << 20));
            assert!(state(&image, 3 << 20).await.iter().all(|byte| *byte == 0));
        }
        assert_eq!(image.size_bytes(), SIZE_BYTES);
        let far = image.save_vm_state(u64::MAX - 5, Buffer::zeroed(512)).await;
        assert_eq!(far.unwrap_err().errno(), 27);
        let shown = image.open_snapshot(named("first")).await.unwrap();
        assert_eq!(state(&shown, 3 << 20).await, [3; 3 << 20]);
        image.apply_snapshot(named("second")).await.unwrap();
        assert_eq!(state(&image, 3 << 20).await, [4; 3 << 20]);
        image.close().await.unwrap();
        assert_sound(&file).await;
        let image = open(&file, &case).await;
        image.apply_snapshot(named("first")).await.unwrap();
        assert_eq!(state(&image, 3 << 20).await, [3; 3 << 20]);
        for name in ["first", "second"] {
            image.delete_snapshot(named(name)).await.unwrap();
        }
        image
            .resize(2 * SIZE_BYTES, Default::default())
            .await
            .unwrap();
        image.close().await.unwrap();
        assert_sound(&file).await;
    });
}

/// Takes `count` snapshots, says what the first and the last hundred took, and has QEMU
/// and us look at them.
fn take_many(count: usize) {
    run(async move {
        let (file, case) = image(3, |options| options.cluster_size_bytes = 65536).await;
        let image = open(&file, &case).await;
        fill(&image, 1).await;
        let mut started = Instant::now();
        for number in 1..=count {
            let new = NewSnapshot::default();
            image.create_snapshot(new).await.unwrap();
            if number.is_multiple_of(count / 10) {
                println!("{} up to {number} in {:?}", count / 10, started.elapsed());
                started = Instant::now();
            }
        }
        fill(&image, 2).await;
        image.close().await.unwrap();
        let image = open(&file, &case).await;
        assert_eq!(image.snapshots().len(), count);
        let id = |number: usize| SnapshotSelector::Id(number.to_string());
        for number in [1, count / 2, count] {
            let shown = image.open_snapshot(id(number)).await.unwrap();
            let read = shown.read(0, Buffer::zeroed(512)).await.unwrap();
            assert!(read.iter().all(|byte| *byte == 1));
        }
        seen_by_qemu(&file, count).await;
        image.apply_snapshot(id(77)).await.unwrap();
        let started = Instant::now();
        for number in 77..87 {
            image.delete_snapshot(id(number)).await.unwrap();
        }
        println!("10 of {count} deleted in {:?}", started.elapsed());
        let shown = image.open_snapshot(id(87)).await.unwrap();
        let read = shown.read(0, Buffer::zeroed(512)).await.unwrap();
        assert!(read.iter().all(|byte| *byte == 1));
        image.close().await.unwrap();
        let started = Instant::now();
        assert_sound(&file).await;
        println!("checked in {:?}", started.elapsed());
        seen_by_qemu(&file, count - 10).await;
    });
}

/// What QEMU says of an image in memory: so many snapshots, and nothing wrong.
async fn seen_by_qemu(file: &Arc<dyn Storage>, count: usize) {
    let len = file.len_bytes().unwrap();
    let dir = tempfile::tempdir().unwrap();
    let bytes = Buffer::for_read(len as usize);
    let bytes = file
        .read(0, Buffers::from_iter([bytes]))
        .into_single()
        .await;
    std::fs::write(dir.path().join("image"), &*bytes.unwrap()).unwrap();
    let list = qemu_ok("qemu-img", dir.path(), &["snapshot", "-l", "image"]);
    assert_eq!(list.lines().count(), count + 2, "{list:.300}");
    qemu_ok("qemu-img", dir.path(), &["check", "-q", "image"]);
}

#[test]
fn a_thousand_snapshots_fit_into_an_image() {
    take_many(1_000);
}

/// Minutes without optimisation; its figures stand in docs/PERFORMANCE.md.
#[test]
#[ignore = "takes minutes in a debug build"]
fn ten_thousand_snapshots_fit_into_an_image() {
    take_many(10_000);
}
