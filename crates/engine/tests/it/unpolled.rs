//! A request that was started and that nobody polls holds up no other one: what it
//! loads, writebacks or locks for all of them goes on by itself.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{Either, select};
use vellum::gate::DenyAll;
use vellum::nodes::{RecordedDevice, RecordedStorage, Recorder};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, BitmapOptions, MemoryBitmap, OpenOptions, Qcow2};
use vellum::raw::{Raw, RawOptions};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
use vellum_io::{Buffers, lane};
use vellum_storage::file::{Create, FileOptions, FileStorage};
use vellum_storage::wrap::{DelayStorage, Matching, Operation};
use vellum_storage::{MemStorage, WriteFlags};

const CLUSTER_BYTES: u64 = 64 << 10;

/// What the future gives, soon.
async fn in_time<T>(future: impl Future<Output = T>) -> T {
    let patience = lane::sleep(Duration::from_secs(10));
    match select(Box::pin(future), patience).await {
        Either::Left((value, _)) => value,
        Either::Right(_) => panic!("somebody waits for a request that is not polled"),
    }
}

/// Starts a request as one does who awaits something else then.
fn start<T>(mut io: vellum::Io<T>) -> vellum::Io<T> {
    assert!((&mut io).now_or_never().is_none(), "it has to wait");
    io
}

fn file(folder: &tempfile::TempDir, name: &str) -> Arc<dyn Storage> {
    let options = FileOptions::default().create(Create::IfMissing);
    FileStorage::open(folder.path().join(name), &options).unwrap()
}

async fn new_image(file: &Arc<dyn Storage>) {
    let options = CreateOptions::default().size_bytes(64 << 20);
    create(file.clone(), None, &options).await.unwrap();
}

/// Opens an image over `backing`, with nothing in its caches.
async fn open(file: &Arc<dyn Storage>, backing: Backing) -> Arc<Qcow2> {
    let options = OpenOptions::default().backing(backing);
    Qcow2::open(file.clone(), Arc::new(DenyAll), options)
        .await
        .unwrap()
}

async fn write(image: &Qcow2, at: u64, len: usize) {
    let mut bytes = Buffer::zeroed(len);
    bytes.fill(7);
    image
        .write(at, bytes, RequestFlags::default())
        .await
        .unwrap();
}

#[test]
fn a_load_goes_on_for_those_who_joined_it() {
    lane::block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let file = file(&folder, "image");
        new_image(&file).await;
        let image = open(&file, Backing::None).await;
        write(&image, 0, 4 * CLUSTER_BYTES as usize).await;
        image.close().await.unwrap();

        let image = open(&file, Backing::None).await;
        let read = start(image.read(0, Buffer::for_read(4096)));
        let joined = in_time(image.read(CLUSTER_BYTES, Buffer::for_read(4096))).await;
        assert!(joined.unwrap().iter().all(|&byte| byte == 7));
        assert!(read.await.unwrap().iter().all(|&byte| byte == 7));
        image.close().await.unwrap();

        let image = open(&file, Backing::None).await;
        let status = start(image.block_status(0, CLUSTER_BYTES, 0));
        let joined = in_time(image.read(CLUSTER_BYTES, Buffer::for_read(4096))).await;
        assert!(joined.unwrap().iter().all(|&byte| byte == 7));
        assert!(status.await.unwrap().kind.is_data());
        image.close().await.unwrap();
    });
}

#[test]
fn a_question_that_drains_a_cluster_lets_it_go() {
    lane::block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let (below, above) = (file(&folder, "below"), file(&folder, "above"));
        new_image(&below).await;
        new_image(&above).await;
        let base = open(&below, Backing::None).await;
        write(&base, 0, 2 * CLUSTER_BYTES as usize).await;
        let image = open(&above, Backing::Given(base.clone())).await;

        // A cluster begun at its first byte waits in memory for more.
        write(&image, 0, 4096).await;
        let status = start(image.block_status(0, CLUSTER_BYTES, 1));
        in_time(write(&image, 8192, 4096)).await;
        assert!(status.await.unwrap().kind.is_present());
        image.close().await.unwrap();
        base.close().await.unwrap();
    });
}

#[test]
fn a_question_about_bitmaps_lets_writes_pass() {
    lane::block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let file = file(&folder, "image");
        new_image(&file).await;
        let image = open(&file, Backing::None).await;
        let options = BitmapOptions::default();
        image.bitmaps().add("daily", options).await.unwrap();

        let list = start(image.bitmaps().list());
        in_time(write(&image, 0, 4096)).await;
        assert_eq!(list.await.unwrap().len(), 1);
        image.close().await.unwrap();
    });
}

/// A write that runs when the first bitmap of a node comes ends behind that.
#[test]
fn a_first_bitmap_has_the_writes_that_run() {
    lane::block_on(async {
        let memory = Arc::new(MemStorage::new());
        memory.truncate(1 << 20).await.unwrap();
        let held = DelayStorage::new(memory);
        let writes = Matching::operation(Operation::Write);
        for is_awaited in [true, false] {
            let recorder = Recorder::new();
            let storage = RecordedStorage::new(held.clone(), recorder.clone());
            let raw = Raw::open(held.clone(), RawOptions::default()).unwrap();
            let device = RecordedDevice::new(raw, recorder.clone());
            let ones = || Buffer::copy_of(&[1; 4096]);
            let holds = [held.hold(writes.clone()), held.hold(writes.clone())];
            let first = start(device.write(8192, ones(), RequestFlags::default()));
            let one = Buffers::from_iter([ones()]);
            let second = start(storage.write(65_536, one, WriteFlags::default()));
            for held in &holds {
                in_time(held.arrived()).await;
            }
            let running = is_awaited.then_some((first, second));
            let bitmap = MemoryBitmap::new("b", 1 << 20, 4096, true);
            recorder.add(bitmap.clone());
            drop(holds);
            match running {
                Some((first, second)) => {
                    in_time(first).await.unwrap();
                    in_time(second).await.unwrap();
                }
                None => lane::sleep(Duration::from_millis(50)).await,
            }
            let dirty: Vec<_> = bitmap.read().ranges().collect();
            assert_eq!(
                dirty,
                [8192..12_288, 65_536..69_632],
                "awaited: {is_awaited}"
            );
        }
    });
}
