//! Changes of key slots whose futures are dropped: they run to their end.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};
use vellum::io::lane;
use vellum::luks::{KeyChange, LuksHeader, format, read_header, unlock};
use vellum::qcow2::read_header as read_image_header;
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffers, ErrorKind, Result, Storage};
use vellum_storage::wrap::{DelayStorage, Matching, Operation};

use crate::luks::{QUICK, bytes_of, image, luks_device, open, quick, sized};

/// Begins a change, drops it while its first write is held, and lets that go on.
async fn drop_at_first_write(
    file: &DelayStorage,
    change: impl Future<Output = Result<LuksHeader>>,
) {
    let held = file.hold(Matching::operation(Operation::Write));
    match select(pin!(change), pin!(held.arrived())).await {
        Either::Left((done, _)) => panic!("it did not wait: {done:?}"),
        Either::Right(((), _)) => {}
    }
    held.release();
}

fn other() -> KeyChange {
    KeyChange::Add {
        known: None,
        slot: None,
        new: "other".into(),
        iteration_time: QUICK,
        force: false,
    }
}

fn erase_first() -> KeyChange {
    KeyChange::Erase {
        slot: Some(0),
        old: None,
        force: false,
    }
}

/// Expects that only the other passphrase unlocks the volume whose header is at `at`, and that nothing is
/// left of the key material that the first slot had.
async fn expect_exchanged(file: &Arc<dyn Storage>, at: u64, before: &[u8]) {
    let header = read_header(file, at, false).await.unwrap();
    assert!(!header.slots[0].active && header.slots[1].active);
    let refused = unlock(file, at, &header, &"secret".into()).await;
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Denied);
    unlock(file, at, &header, &"other".into()).await.unwrap();
    let material = (at + header.slots[0].key_offset_bytes()) as usize;
    let material = material..material + 100 * 512;
    let after = bytes_of(file).await;
    let same = before[material.clone()]
        .chunks(512)
        .zip(after[material].chunks(512))
        .filter(|(before, after)| before == after);
    assert_eq!(same.count(), 0, "key material is still there");
}

#[test]
fn a_dropped_change_of_a_volume_runs_to_its_end() {
    lane::block_on(async {
        let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let volume = format(&quick(), &"secret".into(), false).await.unwrap();
        let buffers = Buffers::from_iter([vellum::Buffer::copy_of(&volume.bytes)]);
        memory.write(0, buffers, Default::default()).await.unwrap();
        let before = bytes_of(&memory).await;
        for change in [other(), erase_first()] {
            let file = DelayStorage::new(memory.clone());
            let known = luks_device(file.clone()).await;
            drop_at_first_write(&file, known.change_keys(change)).await;
            known.close().await.unwrap();
        }
        expect_exchanged(&memory, 0, &before).await;
    });
}

#[test]
fn a_dropped_change_of_an_image_runs_to_its_end() {
    lane::block_on(async {
        let memory = image(sized(1 << 20)).await;
        let header = read_image_header(&memory).await.unwrap();
        let at = header.encryption_header().unwrap().offset.0;
        let before = bytes_of(&memory).await;
        for change in [other(), erase_first()] {
            let file = DelayStorage::new(memory.clone());
            let storage: Arc<dyn Storage> = file.clone();
            let device = open(&storage, "secret").await.unwrap();
            drop_at_first_write(&file, device.change_keys(change)).await;
            device.close().await.unwrap();
        }
        expect_exchanged(&memory, at, &before).await;
    });
}
