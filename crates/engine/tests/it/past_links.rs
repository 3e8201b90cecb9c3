//! A chain over links is read as one mapping, and whoever exchanges what a link leads to waits for
//! those that read past it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::FutureExt;
use vellum::gate::DenyAll;
use vellum::nodes::Link;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{AsQcow2, Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Io, RequestFlags, Storage};
use vellum_io::lane::{block_on, yield_now};
use vellum_io::{Buffers, spawn};
use vellum_storage::MemStorage;

const LAYERS: usize = 6;
const SIZE_BYTES: u64 = 1 << 20;
const CLUSTER_BYTES: u64 = 65536;

/// A file whose reads of data wait while it is told to hold them.
#[derive(Debug)]
struct Held(Arc<MemStorage>, Arc<AtomicBool>);

impl Storage for Held {
    vellum_storage::delegate!(
        0: capabilities, name, len_bytes, write, write_zeroes, discard, allocate, flush,
        truncate, block_status, close,
    );
    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let (file, holds) = (self.0.clone(), self.1.clone());
        Io::task(spawn(async move {
            while holds.load(Ordering::SeqCst) {
                yield_now().await;
            }
            file.read(offset_bytes, buffers).await
        }))
    }
}

/// An image that holds one byte over and over in one cluster.
async fn file(cluster: usize, byte: u8) -> Arc<MemStorage> {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(SIZE_BYTES);
    create(file.clone(), None, &options).await.unwrap();
    let options = OpenOptions::default();
    let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options);
    let image = image.await.unwrap();
    let bytes = Buffer::copy_of(&[byte; CLUSTER_BYTES as usize]);
    let at = cluster as u64 * CLUSTER_BYTES;
    let written = image.write(at, bytes, RequestFlags::default());
    written.await.unwrap();
    image.close().await.unwrap();
    file
}

async fn open(
    file: Arc<dyn Storage>,
    below: Option<Arc<dyn BlockDevice>>,
    read_only: bool,
) -> Arc<dyn BlockDevice> {
    let options = OpenOptions::default()
        .backing(below.map_or(Backing::None, Backing::Given))
        .read_only(read_only);
    let image = Qcow2::open(file, Arc::new(DenyAll), options);
    image.await.unwrap()
}

/// Images over links, the last one writable; layer n holds n + 1 in cluster n.
struct Chain {
    files: Vec<Arc<MemStorage>>,
    /// What leads to each image but the last.
    links: Vec<Arc<Link>>,
    holds: Arc<AtomicBool>,
    top: Arc<dyn BlockDevice>,
}

async fn chain() -> Chain {
    let holds = Arc::new(AtomicBool::new(false));
    let (mut files, mut links) = (Vec::new(), Vec::<Arc<Link>>::new());
    let mut top = None;
    for layer in 0..LAYERS {
        let memory = file(layer, layer as u8 + 1).await;
        files.push(memory.clone());
        let below = links
            .last()
            .cloned()
            .map(|link| link as Arc<dyn BlockDevice>);
        let is_last = layer + 1 == LAYERS;
        let storage = Arc::new(Held(memory, holds.clone()));
        let image = open(storage, below, !is_last).await;
        match is_last {
            true => top = Some(image),
            false => links.push(Link::new(image)),
        }
    }
    let top = top.unwrap();
    Chain {
        files,
        links,
        holds,
        top,
    }
}

impl Chain {
    fn read(&self, cluster: usize) -> Io<Buffer> {
        let at = cluster as u64 * CLUSTER_BYTES;
        self.top.read(at, Buffer::for_read(512))
    }

    async fn check(&self, expected: [u8; LAYERS]) {
        for (cluster, byte) in expected.into_iter().enumerate() {
            let read = self.read(cluster).await.unwrap();
            assert_eq!(read[..], [byte; 512], "cluster {cluster}");
        }
    }

    fn index_bytes(&self) -> u64 {
        let image = self.top.as_qcow2().unwrap();
        image.cache_usage().chain_index_bytes
    }

    /// Puts another image in the place of layer 2.
    async fn exchange(&self, byte: u8) {
        let below: Arc<dyn BlockDevice> = self.links[1].clone();
        let image = open(file(2, byte).await, Some(below), true).await;
        let drained = self.links[2].drain().await;
        drained.set(image);
    }
}

#[test]
fn a_chain_over_links_is_merged_until_one_is_drained() {
    block_on(async {
        let chain = chain().await;
        chain.check([1, 2, 3, 4, 5, 6]).await;
        assert!(chain.index_bytes() > 0);
        for byte in [7, 8] {
            chain.exchange(byte).await;
            assert_eq!(chain.index_bytes(), 0);
            chain.check([1, 2, byte, 4, 5, 6]).await;
            assert!(chain.index_bytes() > 0);
        }
        // One that may be written to ends the mapping, and a later exchange ends that.
        let below: Arc<dyn BlockDevice> = chain.links[1].clone();
        let writable = open(chain.files[2].clone(), Some(below), false).await;
        let drained = chain.links[2].drain().await;
        let before = drained.set(writable.clone());
        drop((drained, before));
        chain.check([1, 2, 3, 4, 5, 6]).await;
        let bytes = Buffer::copy_of(&[9; 512]);
        let at = 2 * CLUSTER_BYTES;
        let written = writable.write(at, bytes, RequestFlags::default());
        written.await.unwrap();
        chain.check([1, 2, 9, 4, 5, 6]).await;
        chain.exchange(3).await;
        chain.check([1, 2, 3, 4, 5, 6]).await;
    });
}

#[test]
fn a_drain_waits_for_those_who_read_past_the_link() {
    block_on(async {
        let chain = chain().await;
        chain.check([1, 2, 3, 4, 5, 6]).await;
        for link in &chain.links {
            // Of each layer, by whichever way.
            for cluster in [0, 2, 4] {
                chain.check([1, 2, 3, 4, 5, 6]).await;
                chain.holds.store(true, Ordering::SeqCst);
                let read = chain.read(cluster);
                for _ in 0..5 {
                    yield_now().await;
                }
                let waiting = link.clone();
                let is_drained = Arc::new(AtomicBool::new(false));
                let tell = is_drained.clone();
                let drain = spawn(async move {
                    drop(waiting.drain().await);
                    tell.store(true, Ordering::SeqCst);
                });
                // Given up, which changes nothing for the other.
                assert!(link.drain().now_or_never().is_none());
                for _ in 0..20 {
                    yield_now().await;
                }
                assert!(!is_drained.load(Ordering::SeqCst), "a read is under way");
                let other = chain.read(cluster);
                chain.holds.store(false, Ordering::SeqCst);
                drain.await;
                for read in [read, other] {
                    assert_eq!(read.await.unwrap()[0], cluster as u8 + 1);
                }
            }
        }
    });
}

#[test]
fn a_read_that_nobody_polls_holds_no_drain_up() {
    block_on(async {
        let chain = chain().await;
        chain.check([1, 2, 3, 4, 5, 6]).await;
        let (unpolled, dropped) = (chain.read(0), chain.read(1));
        drop(dropped);
        for link in &chain.links {
            drop(link.drain().await);
        }
        assert_eq!(unpolled.await.unwrap()[0], 1);
    });
}

/// What the drain's end of shortcuts is for: without it these tests see old bytes.
#[cfg(feature = "mutants")]
#[test]
fn a_shortcut_that_stays_open_is_noticed() {
    use vellum_storage::mutants::{self, Mutant};
    block_on(async {
        let chain = chain().await;
        chain.check([1, 2, 3, 4, 5, 6]).await;
        mutants::set(Some(Mutant::KeepShortcuts));
        chain.exchange(7).await;
        mutants::set(None);
        chain.check([1, 2, 3, 4, 5, 6]).await;
    });
}
