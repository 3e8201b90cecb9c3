//! A commit between files that share blocks.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Raw, RawOptions, RequestFlags, Storage};
use vellum_io::lane::block_on;
use vellum_jobs::commit::{CommitOptions, commit};
use vellum_jobs::copy::Silent;
use vellum_storage::wrap::{ReflinkFileSystem, ReflinkStorage};

const MIB: u64 = 1 << 20;

async fn overlay(
    storage: Arc<ReflinkStorage>,
    base: &Arc<dyn BlockDevice>,
) -> Arc<dyn BlockDevice> {
    let options = CreateOptions::default().size_bytes(8 * MIB);
    create(storage.clone(), None, &options).await.unwrap();
    let options = OpenOptions::default().backing(Backing::Given(base.clone()));
    let opened = Qcow2::open(storage, Arc::new(DenyAll), options).await;
    opened.unwrap()
}

async fn write(device: &Arc<dyn BlockDevice>, at: u64, byte: u8, len_bytes: u64) {
    let bytes = Buffer::copy_of(&vec![byte; len_bytes as usize]);
    let written = device.write(at, bytes, RequestFlags::default());
    written.await.unwrap();
}

async fn committed(base: Arc<dyn BlockDevice>, top_file: Arc<ReflinkStorage>) {
    write(&base, 0, 1, 4 * MIB).await;
    let top = overlay(top_file, &base).await;
    write(&top, MIB, 2, 2 * MIB).await;
    write(&top, 6 * MIB, 3, MIB).await;
    // What is not made of blocks is copied.
    write(&top, 8 * MIB - 512, 4, 512).await;
    commit(&top, &base, &CommitOptions::default(), &mut Silent)
        .await
        .unwrap();
    let bytes = base.read(0, Buffer::for_read(8 << 20)).await.unwrap();
    for (at, byte) in [
        (0, 1),
        (MIB, 2),
        (3 * MIB - 1, 2),
        (3 * MIB, 1),
        (4 * MIB, 0),
        (6 * MIB, 3),
        (7 * MIB, 0),
        (8 * MIB - 1, 4),
    ] {
        assert_eq!(bytes[at as usize], byte, "{at}");
    }
    top.close().await.unwrap();
    base.close().await.unwrap();
}

#[test]
fn blocks_are_shared_and_not_copied() {
    for granted in [u64::MAX, 0] {
        block_on(async {
            let system = ReflinkFileSystem::granting(granted);
            let file: Arc<dyn Storage> = system.file(vec![0; 8 << 20]);
            let base = Raw::open(file, RawOptions::default()).unwrap();
            committed(base, system.file(Vec::new())).await;
            let shared = system.shared_bytes();
            assert_eq!(shared >= 3 * MIB, granted > 0, "{shared}");

            let system = ReflinkFileSystem::granting(granted);
            let file = system.file(Vec::new());
            let options = CreateOptions::default().size_bytes(8 * MIB);
            create(file.clone(), None, &options).await.unwrap();
            let base = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default());
            committed(base.await.unwrap(), system.file(Vec::new())).await;
            let shared = system.shared_bytes();
            assert_eq!(shared >= 3 * MIB, granted > 0, "{shared}");
        });
    }
}
