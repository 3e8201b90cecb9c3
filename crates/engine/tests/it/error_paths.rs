//! Errors on the way: what fails leaves the image as it was, in use as before and
//! without a leaked cluster. A debugger below strikes at chosen moments.

use std::sync::Arc;

use crate::common::run_on_memory as run;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{NewSnapshot, OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, RequestFlags, Result, Storage};
use vellum_storage::nodes::debug::{Action, DebugStorage, Debugger, Injection, Limits, Rule};
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use vellum_storage::{Event, MemStorage};

const EIO: i32 = 5;
const CLUSTER_BYTES: u64 = 1024;
const SIZE_BYTES: u64 = 1 << 20;

/// Strikes once, after `event`, the next request.
fn strike(event: Event) -> Rule {
    let injection = Injection {
        errno: EIO,
        kind: None,
        sector: None,
        once: true,
        immediately: true,
    };
    Rule {
        event,
        state: 0,
        action: Action::Inject(injection),
    }
}

async fn empty_file() -> Arc<dyn Storage> {
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(SIZE_BYTES)
        .cluster_size_bytes(CLUSTER_BYTES);
    create(memory.clone(), None, &options).await.unwrap();
    memory
}

async fn open(file: Arc<dyn Storage>) -> Arc<Qcow2> {
    let image = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default());
    image.await.unwrap()
}

/// An image under which a rule is in force.
async fn image(rule: Rule) -> (Arc<dyn Storage>, Arc<Qcow2>) {
    let memory = empty_file().await;
    let debugger = Debugger::new(vec![rule], |_| ());
    let debug = DebugStorage::new(memory.clone(), debugger, Limits::default());
    (memory, open(Arc::new(debug)).await)
}

async fn write(image: &Qcow2, at: u64) -> Result<()> {
    let bytes = Buffer::copy_of(&[1; 4096]);
    let written = image.write(at, bytes, RequestFlags::default()).await;
    written.map(drop)
}

async fn assert_clean(file: &Arc<dyn Storage>) {
    let report = check(file.clone(), &CheckOptions::default()).await.unwrap();
    assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
}

#[test]
fn a_switch_of_the_header_that_fails_is_taken_back() {
    run(async {
        for data in [false, true] {
            let memory = empty_file().await;
            let faulty = FaultStorage::new(memory.clone());
            let image = open(faulty.clone()).await;
            if data {
                write(&image, 0).await.unwrap();
            }
            // Not the field that tells of leaks, of which nobody hears when it fails.
            let header = Matching::operation(Operation::Write).touching(60..72);
            faulty.fail(header, 0, Times::Once, EIO);
            let failed = image.create_snapshot(NewSnapshot::default()).await;
            assert_eq!(failed.unwrap_err().errno(), EIO);
            assert!(image.snapshots().is_empty());
            write(&image, 8192).await.unwrap();
            let made = image.create_snapshot(NewSnapshot::default()).await;
            assert_eq!(made.unwrap().id, "1");
            write(&image, 0).await.unwrap();
            image.close().await.unwrap();
            assert_clean(&memory).await;
        }
    });
}

#[test]
fn after_a_switch_that_cannot_be_taken_back_nothing_changes() {
    run(async {
        let memory = empty_file().await;
        let faulty = FaultStorage::new(memory.clone());
        let image = open(faulty.clone()).await;
        let header = Matching::operation(Operation::Write).touching(0..CLUSTER_BYTES);
        faulty.fail(header, 0, Times::Always, EIO);
        let failed = image.create_snapshot(NewSnapshot::default()).await;
        assert_eq!(failed.unwrap_err().errno(), EIO);
        faulty.heal();
        assert_eq!(write(&image, 0).await.unwrap_err().errno(), EIO);
        assert!(image.close().await.is_err());
    });
}

#[test]
fn an_l1_table_that_cannot_grow_stays() {
    for event in [
        Event::L1GrowAllocTable,
        Event::L1GrowWriteTable,
        Event::L1GrowActivateTable,
    ] {
        run(async move {
            let (file, image) = image(strike(event)).await;
            write(&image, 0).await.unwrap();
            let before = read_header(&file).await.unwrap();
            // More than one cluster of L1 entries.
            let larger = 64 << 20;
            let failed = image.truncate(larger).await.unwrap_err();
            assert_eq!(failed.errno(), EIO, "{event:?}");
            let after = read_header(&file).await.unwrap();
            assert_eq!(after.l1_table_offset, before.l1_table_offset, "{event:?}");
            write(&image, 8192).await.unwrap();
            image.truncate(larger).await.unwrap();
            write(&image, larger - 4096).await.unwrap();
            image.close().await.unwrap();
            let grown = read_header(&file).await.unwrap();
            assert_ne!(grown.l1_table_offset, before.l1_table_offset, "{event:?}");
            assert_clean(&file).await;
        });
    }
}

#[test]
fn an_error_as_clusters_are_counted_fails_one_write() {
    for event in [
        Event::RefblockAlloc,
        Event::RefblockLoad,
        Event::ClusterAlloc,
    ] {
        run(async move {
            let (file, image) = image(strike(event)).await;
            assert_eq!(
                write(&image, 0).await.unwrap_err().errno(),
                EIO,
                "{event:?}"
            );
            write(&image, 0).await.unwrap();
            image.close().await.unwrap();
            assert_clean(&file).await;
        });
    }
}
