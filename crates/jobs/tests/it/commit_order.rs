//! The order in which a commit reads the image and lays out its base.

use std::sync::{Arc, Mutex};

use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Io, RequestFlags};
use vellum_io::Buffers;
use vellum_io::lane::block_on;
use vellum_jobs::commit::{CommitOptions, commit};
use vellum_jobs::copy::Silent;
use vellum_storage::{MemStorage, Storage, delegate};

const CLUSTER: usize = 64 << 10;
const CLUSTERS: usize = 48;

/// A storage that remembers where clusters and more were read.
#[derive(Debug, Default)]
struct Recording {
    below: MemStorage,
    reads: Mutex<Vec<u64>>,
}

impl Storage for Recording {
    delegate!(
        below: capabilities, len_bytes, name, write, write_zeroes, discard, allocate,
        truncate, block_status, flush,
    );

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let len_bytes = buffers.iter().map(|buffer| buffer.len()).sum::<usize>();
        if len_bytes >= CLUSTER {
            // Clusters side by side are read at once.
            let clusters = (offset_bytes..offset_bytes + len_bytes as u64).step_by(CLUSTER);
            self.reads.lock().unwrap().extend(clusters);
        }
        self.below.read(offset_bytes, buffers)
    }
}

async fn image(file: Arc<dyn Storage>, backing: Backing) -> Arc<dyn BlockDevice> {
    let options = CreateOptions::default().size_bytes((CLUSTERS * CLUSTER) as u64);
    create(file.clone(), None, &options).await.unwrap();
    let options = OpenOptions::default().backing(backing);
    Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap()
}

async fn write(device: &Arc<dyn BlockDevice>, cluster: usize, byte: u8) {
    let bytes = Buffer::copy_of(&[byte; CLUSTER]);
    let written = device.write((cluster * CLUSTER) as u64, bytes, RequestFlags::default());
    written.await.unwrap();
}

/// Where a cluster of the image lies in its file.
async fn host(device: &Arc<dyn BlockDevice>, cluster: usize) -> u64 {
    let status = device.block_status((cluster * CLUSTER) as u64, CLUSTER as u64, 0);
    status.await.unwrap().host.unwrap().offset_bytes
}

/// Every cluster but every fourth, in an order that is neither the guest's nor its reverse.
fn scattered() -> impl Iterator<Item = usize> {
    let clusters = (0..CLUSTERS).map(|number| number * 29 % CLUSTERS);
    clusters.filter(|cluster| !cluster.is_multiple_of(4))
}

/// The base holds the first half of what is committed to it.
async fn committed() -> (Arc<dyn BlockDevice>, Arc<Recording>, Vec<u64>) {
    let base = image(Arc::new(MemStorage::new()), Backing::None).await;
    for cluster in 0..CLUSTERS / 2 {
        write(&base, cluster, 255).await;
    }
    let file = Arc::new(Recording::default());
    let top = image(file.clone(), Backing::Given(base.clone())).await;
    for cluster in scattered() {
        write(&top, cluster, cluster as u8).await;
    }
    top.flush().await.unwrap();
    let mut held = Vec::new();
    for cluster in scattered().filter(|cluster| *cluster < CLUSTERS / 2) {
        held.push(host(&top, cluster).await);
    }
    file.reads.lock().unwrap().clear();
    // One piece after the other, so that there is an order.
    let options = CommitOptions {
        parallel: 1,
        ..CommitOptions::default()
    };
    commit(&top, &base, &options, &mut Silent).await.unwrap();
    top.close().await.unwrap();
    held.sort_unstable();
    (base, file, held)
}

#[test]
fn what_the_base_holds_is_read_in_the_order_of_the_file_and_the_rest_in_the_guests() {
    block_on(async {
        let (base, file, held) = committed().await;
        let bytes = Buffer::for_read(CLUSTERS * CLUSTER);
        let bytes = base.read(0, bytes).await.unwrap();
        for (cluster, bytes) in bytes.chunks(CLUSTER).enumerate() {
            let expected = match cluster {
                _ if !cluster.is_multiple_of(4) => cluster as u8,
                _ if cluster < CLUSTERS / 2 => 255,
                _ => 0,
            };
            assert!(bytes.iter().all(|&byte| byte == expected), "{cluster}");
        }
        let reads = file.reads.lock().unwrap().clone();
        let in_file: Vec<u64> = reads.into_iter().filter(|at| held.contains(at)).collect();
        assert_eq!(in_file, held);
        let mut new = Vec::new();
        for cluster in (CLUSTERS / 2..CLUSTERS).filter(|cluster| !cluster.is_multiple_of(4)) {
            new.push(host(&base, cluster).await);
        }
        assert!(new.is_sorted(), "{new:?}");
        base.close().await.unwrap();
    });
}
