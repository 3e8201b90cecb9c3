//! Failures in the middle of a link.

use vellum_io::executor::Executor;
use vellum_storage::wrap::{FaultStorage, Matching, Operation, Times};
use vellum_storage::{MemStorage, Storage};

use super::*;
use crate::BlockDevice;
use crate::gate::DenyAll;
use crate::qcow2::OpenOptions;
use crate::qcow2::Qcow2;
use crate::qcow2::check::{CheckOptions, check};
use crate::qcow2::create::{CreateOptions, create};

const EIO: i32 = 5;
const CLUSTER: u64 = 4096;
/// Guest clusters that one L2 slice maps.
const PER_SLICE: u64 = CLUSTER / 8;

fn run<T: 'static>(future: impl Future<Output = T> + 'static) -> T {
    let executor = Executor::new(|| {});
    let (sender, receiver) = std::sync::mpsc::channel();
    drop(executor.spawn(async move { sender.send(future.await) }));
    executor.run_ready();
    receiver.try_recv().expect("memory never waits")
}

async fn open() -> (Arc<dyn Storage>, Arc<FaultStorage>, Arc<Qcow2>) {
    let memory: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions {
        size_bytes: 4 * PER_SLICE * CLUSTER,
        cluster_size_bytes: CLUSTER,
        ..CreateOptions::default()
    };
    create(memory.clone(), None, &options).await.unwrap();
    let file = FaultStorage::new(memory.clone());
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), OpenOptions::default());
    (memory, file, image.await.unwrap())
}

/// Writes the table of `at` to disk and forgets it, so that a link has to load it.
async fn forget_table(image: &Arc<Image>, at: u64) {
    image.commit().await.unwrap();
    let slice = image
        .mapper()
        .place(GuestOffset(at))
        .unwrap()
        .unwrap()
        .slice;
    image.l2.forget(slice.key);
}

async fn leaks(memory: Arc<dyn Storage>) -> u64 {
    let report = check(memory, &CheckOptions::default()).await.unwrap();
    assert_eq!(report.corruptions, 0);
    report.leaks
}

#[test]
fn a_table_that_cannot_be_loaded_for_a_link_leaks_nothing() {
    run(async {
        let (memory, file, qcow2) = open().await;
        let image = qcow2.image.clone();
        image
            .write(0, Buffer::zeroed(512), RequestFlags::default())
            .await
            .unwrap();
        let (start, end) = (8 * CLUSTER, 12 * CLUSTER);
        let exclusive = image
            .lock_clusters(start..end, Mode::Exclusive)
            .await
            .unwrap();
        let mappings = image.mappings(start, end).await.unwrap();
        let step = plan::first_step(&image.geometry, &mappings);
        let placed = image
            .place_step(&step, mappings, start..end, None)
            .await
            .unwrap();
        assert_eq!(placed.allocation.unwrap().clusters, 4);
        // The first cluster is linked, the others are not.
        image
            .link_cluster(&placed, 0, WriteOrder::AfterBarrier)
            .await
            .unwrap();
        forget_table(&image, start).await;
        file.fail(Matching::operation(Operation::Read), 0, Times::Once, EIO);
        let rest = PlacedStep {
            old: placed.old[1..].to_vec(),
            host: HostOffset(placed.host.bytes() + CLUSTER),
            allocation: placed.allocation.map(|new| new.skip(1, &image.geometry)),
            start: start + CLUSTER,
            fill_start: start + CLUSTER,
            ..placed
        };
        image
            .link(&rest, WriteOrder::AfterBarrier)
            .await
            .unwrap_err();
        drop(exclusive);
        drop(image);
        qcow2.close().await.unwrap();
        assert_eq!(leaks(memory).await, 0);
    });
}

#[test]
fn what_was_linked_before_the_failure_stays() {
    run(async {
        let (memory, file, qcow2) = open().await;
        let image = qcow2.image.clone();
        // Two tables; the second is away when the link comes to it.
        let border = PER_SLICE * CLUSTER;
        for at in [0, border] {
            image
                .write(at, Buffer::zeroed(512), RequestFlags::default())
                .await
                .unwrap();
        }
        let (start, end) = (border - 2 * CLUSTER, border + 3 * CLUSTER);
        let exclusive = image
            .lock_clusters(start..end, Mode::Exclusive)
            .await
            .unwrap();
        let old = image.mappings(start, end).await.unwrap();
        let allocation = image.allocate_near(5, None).await.unwrap();
        let placed = PlacedStep {
            old,
            host: allocation.start,
            reads_as_zeroes: allocation.reads_as_zeroes,
            refcount_durable: allocation.refcount_durable,
            allocation: Some(allocation),
            start,
            end,
            fill_start: start,
            fill_end: end,
        };
        forget_table(&image, border).await;
        file.fail(Matching::operation(Operation::Read), 0, Times::Once, EIO);
        image
            .link(&placed, WriteOrder::AfterBarrier)
            .await
            .unwrap_err();
        let linked = image.mappings(start, end).await.unwrap();
        assert_eq!(
            linked[1].host().unwrap().bytes(),
            allocation.start.bytes() + CLUSTER
        );
        assert_ne!(
            linked[2].host().map(|host| host.bytes()),
            Some(allocation.start.bytes() + 2 * CLUSTER)
        );
        drop(exclusive);
        drop(image);
        qcow2.close().await.unwrap();
        assert_eq!(leaks(memory).await, 0);
    });
}
