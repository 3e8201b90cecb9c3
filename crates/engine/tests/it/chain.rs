//! Long backing chains, read through the merged index and without it, beside a model.

use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, BackingName, OpenOptions, Qcow2};
use vellum::{
    BlockDevice, Buffer, Raw, RawOptions, RequestFlags, Storage, ZeroRequest, qcow2::read_header,
};
use vellum_storage::MemStorage;

use crate::common::{Random, run_on_memory};

const SECTOR: u64 = 512;

/// A chain and what it shows.
struct Chain {
    random: Random,
    bottom: Option<Arc<dyn BlockDevice>>,
    files: Vec<Arc<MemStorage>>,
    shown: Vec<u8>,
}

fn mem() -> Arc<MemStorage> {
    Arc::new(MemStorage::new())
}

async fn open(
    file: &Arc<MemStorage>,
    below: Option<Arc<dyn BlockDevice>>,
    options: OpenOptions,
) -> Arc<Qcow2> {
    let options = options
        .backing(below.map_or(Backing::None, Backing::Given))
        .discard(true);
    let storage: Arc<dyn Storage> = file.clone();
    Qcow2::open(storage, Arc::new(DenyAll), options)
        .await
        .expect("the image opens")
}

impl Chain {
    /// A chain that begins with a raw file, or with nothing.
    fn new(seed: u64, raw_bytes: u64) -> Chain {
        let mut random = Random::new(seed);
        let shown: Vec<u8> = (0..raw_bytes).map(|_| random.below(256) as u8).collect();
        let bottom = (raw_bytes > 0).then(|| {
            let storage = Arc::new(MemStorage::with_bytes(shown.clone()));
            let raw: Arc<dyn BlockDevice> =
                Raw::open(storage, RawOptions::default()).expect("a raw device");
            raw
        });
        Chain {
            random,
            bottom,
            files: Vec::new(),
            shown,
        }
    }

    /// Opens the whole chain read-only; the last image with `options`.
    async fn open_all(&self, options: OpenOptions) -> Option<Arc<dyn BlockDevice>> {
        let mut below = self.bottom.clone();
        for (index, file) in self.files.iter().enumerate() {
            let read_only = match index + 1 == self.files.len() {
                true => options.clone(),
                false => options.clone().read_only(true),
            };
            below = Some(open(file, below.take(), read_only).await);
        }
        below
    }

    /// Adds an image of this size on top, with some changes in it.
    async fn add(&mut self, size_bytes: u64) {
        let read_only = OpenOptions::default().read_only(true);
        let below = self.open_all(read_only).await;
        self.add_over(below, size_bytes).await;
    }

    /// The same over what is open of the chain.
    async fn add_over(&mut self, below: Option<Arc<dyn BlockDevice>>, size_bytes: u64) {
        let bits = self.random.pick(&[9, 12, 16]);
        let create_options = CreateOptions::default()
            .size_bytes(size_bytes)
            .cluster_size_bytes(1 << bits)
            .extended_l2(bits == 16 && self.random.below(2) == 0);
        let file = mem();
        create(file.clone(), None, &create_options)
            .await
            .expect("an image");
        self.shown.resize(size_bytes as usize, 0);
        let image = open(&file, below, OpenOptions::default()).await;
        for _ in 0..self.random.below(6) {
            self.change(&image).await;
        }
        image.close().await.expect("a close");
        self.files.push(file);
    }

    async fn change(&mut self, image: &Qcow2) {
        let size = self.shown.len() as u64;
        let offset = self.random.below(size / SECTOR) * SECTOR;
        let len = (self.random.below(64) + 1) * SECTOR;
        let len = len.min(size - offset);
        let range = offset as usize..(offset + len) as usize;
        if self.random.below(4) == 0 {
            let zeroes = image.write_zeroes(offset, len, ZeroRequest::default());
            zeroes.await.expect("zeroes");
            self.shown[range].fill(0);
        } else {
            let byte = self.random.below(255) as u8 + 1;
            self.shown[range].fill(byte);
            let bytes = Buffer::copy_of(&vec![byte; len as usize]);
            let written = image.write(offset, bytes, RequestFlags::default());
            written.await.expect("a write");
        }
    }

    async fn compare(&mut self, device: &dyn BlockDevice, reads: u64) {
        let size = self.shown.len() as u64;
        let whole = device.read(0, Buffer::for_read(size as usize));
        assert!(
            whole.await.expect("a read")[..] == self.shown,
            "all at once"
        );
        for _ in 0..reads {
            let offset = self.random.below(size);
            let len = (self.random.below(5000) + 1).min(size - offset);
            let read = device.read(offset, Buffer::for_read(len as usize)).await;
            let shown = &self.shown[offset as usize..(offset + len) as usize];
            assert!(read.expect("a read")[..] == *shown, "{len} at {offset}");
        }
    }
}

fn with_index(bytes: Option<u64>) -> OpenOptions {
    OpenOptions::default().chain_index_size_bytes(bytes)
}

#[test]
fn a_chain_shows_the_same_with_and_without_an_index() {
    for seed in 0..12 {
        run_on_memory(async move {
            let mut chain = Chain::new(seed, [0, 100_000, 700_000][seed as usize % 3] / 512 * 512);
            for _ in 0..6 {
                let size = [150_016, 400_384, 800_256][chain.random.below(3) as usize];
                chain.add(size).await;
            }
            // Room for everything, for nothing, and for a part.
            for index_bytes in [None, Some(0), Some(24_000)] {
                let device = chain.open_all(with_index(index_bytes)).await;
                let device = device.expect("an image");
                chain.compare(&*device, 200).await;
                let image = device.as_qcow2().expect("an image").clone();
                for _ in 0..20 {
                    chain.change(&image).await;
                    chain.compare(&*device, 5).await;
                }
                let used_bytes = image.cache_usage().chain_index_bytes;
                assert!(used_bytes <= index_bytes.unwrap_or(8 << 20));
                assert!(used_bytes > 0 || index_bytes.is_some());
                image.clean_caches();
                image.clean_caches();
                assert_eq!(image.cache_usage().chain_index_bytes, 0);
                chain.compare(&*device, 20).await;
                device.close().await.expect("a close");
            }
        });
    }
}

#[test]
fn five_hundred_images_read_as_one() {
    run_on_memory(async {
        let mut chain = Chain::new(500, 0);
        let mut below: Option<Arc<dyn BlockDevice>> = None;
        for number in 0..500 {
            // Some are shorter than what is below them, and some longer.
            let size = [1 << 20, (1 << 20) - 65536, 1 << 20][number % 97 % 3];
            chain.add_over(below.clone(), size).await;
            let file = chain.files.last().expect("just added").clone();
            let read_only = OpenOptions::default().read_only(true);
            below = Some(open(&file, below.take(), read_only).await);
        }
        for index_bytes in [None, Some(0)] {
            let device = chain.open_all(with_index(index_bytes)).await;
            let device = device.expect("an image");
            chain.compare(&*device, 100).await;
            let image = device.as_qcow2().expect("an image").clone();
            for _ in 0..10 {
                chain.change(&image).await;
            }
            chain.compare(&*device, 20).await;
            device.close().await.expect("a close");
        }
    });
}

#[test]
fn what_the_image_gives_up_and_grows_by_hides_the_chain() {
    run_on_memory(async {
        let mut chain = Chain::new(7, 600_064);
        for _ in 0..3 {
            chain.add(600_064).await;
        }
        let device = chain.open_all(with_index(None)).await.expect("an image");
        chain.compare(&*device, 50).await;
        // Discarded clusters read as zeroes, not as what lies below.
        let cluster = device.info().cluster_size_bytes.expect("clusters") as usize;
        let (start, end) = (cluster, (200_000 / cluster) * cluster);
        let discarded = device.discard(start as u64, (end - start) as u64);
        discarded.await.expect("a discard");
        chain.shown[start..end].fill(0);
        chain.compare(&*device, 50).await;
        // A smaller image that grows again shows zeroes there.
        device.truncate(300_032).await.expect("smaller");
        device.truncate(500_224).await.expect("larger");
        chain.shown.truncate(300_032);
        chain.shown.resize(500_224, 0);
        chain.compare(&*device, 50).await;
        device.close().await.expect("a close");
    });
}

#[test]
fn an_emptied_image_shows_its_backing_file() {
    run_on_memory(async {
        let mut chain = Chain::new(3, 0);
        chain.add(800_256).await;
        let below = chain.shown.clone();
        chain.add(800_256).await;
        let device = chain.open_all(with_index(None)).await.expect("an image");
        let image = device.as_qcow2().expect("an image").clone();
        for _ in 0..30 {
            chain.change(&image).await;
        }
        device.flush().await.expect("a flush");
        device.clear().await.expect("an empty image");
        chain.shown = below;
        chain.compare(&*device, 50).await;
        let len_bytes = device
            .storage()
            .expect("a file")
            .len_bytes()
            .expect("a length");
        let cluster_bytes = device.info().cluster_size_bytes.expect("clusters");
        assert!(len_bytes <= 6 * cluster_bytes, "{len_bytes}");
        // And it is an image like any other.
        for _ in 0..10 {
            chain.change(&image).await;
        }
        chain.compare(&*device, 50).await;
        device.close().await.expect("a close");
        let file: Arc<dyn Storage> = chain.files[1].clone();
        let options = CheckOptions::default();
        let report = check(file, &options).await.expect("a check");
        assert_eq!((report.corruptions, report.leaks), (0, 0));
    });
}

#[test]
fn a_backing_file_is_named_anew() {
    run_on_memory(async {
        let file = mem();
        let options = CreateOptions::default().size_bytes(1 << 20);
        create(file.clone(), None, &options)
            .await
            .expect("an image");
        let image = open(&file, None, OpenOptions::default()).await;
        let storage: Arc<dyn Storage> = file.clone();
        let names = |name: &str, format: Option<&str>| BackingName {
            name: name.to_owned(),
            format: format.map(str::to_owned),
        };
        let long = "n".repeat(1023);
        for backing in [
            Some(names("base", Some("raw"))),
            Some(names(&long, Some("qcow2"))),
            Some(names("other", None)),
            None,
        ] {
            image
                .set_backing_file(backing.clone())
                .await
                .expect("a name");
            let header = read_header(&storage).await.expect("a header");
            let found = header
                .backing_file_text()
                .map(|name| names(&name, header.backing_format().as_deref()));
            assert_eq!(found, backing);
        }
        for refused in [
            names("", None),
            names(&"n".repeat(1024), None),
            names("base", Some("sixteen letters!")),
        ] {
            let error = image.set_backing_file(Some(refused)).await;
            assert_eq!(error.expect_err("a refusal").errno(), 22);
        }
        image.close().await.expect("a close");
    });
}
