//! Images to seal, of every kind, and what is known of them.

use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::gate::DenyAll;
use vellum::luks::{FormatOptions, IterationTime, Passphrase};
use vellum::qcow2::checksums::ChecksumOptions;
use vellum::qcow2::create::{CreateOptions, Encryption, create};
use vellum::qcow2::seal::{
    Difference, SealInfo, SealOptions, VerifyOptions, VerifyReads, VerifyReport,
};
use vellum::qcow2::{Backing, NewSnapshot, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage, ZeroRequest};
use vellum_format::header::CompressionType;
use vellum_storage::MemStorage;

use crate::common::{Random, backing};

/// What kind of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Plain,
    SmallestClusters,
    LargeClusters,
    Subclusters,
    Overlay,
    Deflate,
    Zstd,
    Encrypted,
    ExternalData,
    Snapshots,
    OddSize,
}

impl Kind {
    pub const ALL: [Kind; 11] = [
        Kind::Plain,
        Kind::SmallestClusters,
        Kind::LargeClusters,
        Kind::Subclusters,
        Kind::Overlay,
        Kind::Deflate,
        Kind::Zstd,
        Kind::Encrypted,
        Kind::ExternalData,
        Kind::Snapshots,
        Kind::OddSize,
    ];

    pub fn cluster_bytes(self) -> u64 {
        match self {
            Kind::SmallestClusters => 512,
            Kind::LargeClusters => 2 << 20,
            Kind::Subclusters | Kind::Deflate => 65536,
            _ => 4096,
        }
    }

    pub fn size_bytes(self) -> u64 {
        match self {
            Kind::SmallestClusters => 1 << 20,
            Kind::LargeClusters => 24 << 20,
            Kind::OddSize => (3 << 20) + 1536,
            _ => 6 << 20,
        }
    }
}

fn passphrase() -> Passphrase {
    "secret".into()
}

/// An image with content.
pub struct Disk {
    pub kind: Kind,
    pub file: Arc<MemStorage>,
    pub data: Option<Arc<MemStorage>>,
    /// Its checksums, if it is to have some.
    pub sums: Option<Arc<MemStorage>>,
    below: Option<Vec<u8>>,
    /// What the guest sees.
    pub content: Vec<u8>,
}

impl Disk {
    /// One of random content, which `seed` decides.
    pub async fn new(kind: Kind, seed: u64) -> Disk {
        let mut random = Random::new(seed);
        let size_bytes = kind.size_bytes();
        let below = (kind == Kind::Overlay || kind == Kind::Subclusters).then(|| {
            (0..size_bytes)
                .map(|at| (at / 512 % 251) as u8 + 1)
                .collect()
        });
        let data = (kind == Kind::ExternalData).then(|| Arc::new(MemStorage::new()));
        let encryption = (kind == Kind::Encrypted).then(|| Encryption::Luks {
            options: FormatOptions {
                iteration_time: IterationTime::Iterations(1000),
                ..FormatOptions::default()
            },
            passphrase: passphrase(),
        });
        let options = CreateOptions::default()
            .size_bytes(size_bytes)
            .cluster_size_bytes(kind.cluster_bytes())
            .extended_l2(kind == Kind::Subclusters)
            .compression_type(match kind {
                Kind::Zstd => CompressionType::Zstd,
                _ => CompressionType::Zlib,
            })
            .data_file(data.as_ref().map(|_| "data".to_owned()))
            .encryption(encryption);
        let file = Arc::new(MemStorage::new());
        let data_file = data.clone().map(|data| data as Arc<dyn Storage>);
        create(file.clone(), data_file, &options).await.unwrap();
        let mut disk = Disk {
            kind,
            file,
            data,
            sums: None,
            below,
            content: Vec::new(),
        };
        let image = disk.open(OpenOptions::default()).await.unwrap();
        disk.fill(&image, &mut random).await;
        if kind == Kind::Snapshots {
            image.create_snapshot(NewSnapshot::default()).await.unwrap();
            disk.fill(&image, &mut random).await;
        }
        let all = Buffer::for_read(size_bytes as usize);
        disk.content = image.read(0, all).await.unwrap().to_vec();
        image.close().await.unwrap();
        disk
    }

    async fn fill(&self, image: &Qcow2, random: &mut Random) {
        let cluster = self.kind.cluster_bytes();
        let size = self.kind.size_bytes();
        for _ in 0..24 {
            // The last quarter stays as it is.
            let at = random.below(size * 3 / 4 / 512) * 512;
            let len = ((random.below(96) + 1) * 512).min(size - at);
            if matches!(self.kind, Kind::Deflate | Kind::Zstd) && random.below(2) == 0 {
                let at = at / cluster * cluster;
                let len = len.next_multiple_of(cluster).min(size - at);
                let text = Buffer::copy_of(&noise(random, len, 3));
                let flags = RequestFlags::default();
                image.write_compressed(at, text, flags).await.unwrap();
            } else if random.below(5) == 0 {
                let zeroes = ZeroRequest::default().may_unmap(true);
                image.write_zeroes(at, len, zeroes).await.unwrap();
            } else {
                let bytes = Buffer::copy_of(&noise(random, len, 256));
                let flags = RequestFlags::default();
                image.write(at, bytes, flags).await.unwrap();
            }
        }
        // The last bytes too, where the size is odd.
        let bytes = Buffer::copy_of(&noise(random, 512, 256));
        let flags = RequestFlags::default();
        image.write(size - 512, bytes, flags).await.unwrap();
    }

    /// Opens the image with what it needs.
    pub async fn open(&self, options: OpenOptions) -> vellum::Result<Arc<Qcow2>> {
        let encrypted = self.kind == Kind::Encrypted;
        let data = self.data.clone().map(|data| data as Arc<dyn Storage>);
        let below = match &self.below {
            Some(bytes) => backing(Some(bytes)),
            None => Backing::None,
        };
        let options = options
            .backing(below)
            .data_file(data)
            .checksums(self.sums.clone().map(|storage| ChecksumOptions::Keep {
                storage,
                name: "disk.vsums".to_owned(),
            }))
            .passphrase(encrypted.then(passphrase));
        Qcow2::open(self.file.clone(), Arc::new(DenyAll), options).await
    }

    /// Opens it for reading.
    pub async fn open_to_read(&self, verify: Option<VerifyReads>) -> vellum::Result<Arc<Qcow2>> {
        let options = OpenOptions::default().read_only(true);
        self.open(options.verify(verify)).await
    }

    /// Seals it.
    pub async fn seal(&self) -> vellum::Result<SealInfo> {
        let image = self.open(OpenOptions::default()).await?;
        let sealed = image.seal(SealOptions::default()).await;
        let closed = image.close().await;
        sealed.and_then(|sealed| closed.map(|()| sealed))
    }

    /// Verifies it; gives the differences too.
    pub async fn verify(&self) -> vellum::Result<(VerifyReport, Vec<Difference>)> {
        let image = self.open_to_read(Some(VerifyReads::Off)).await?;
        let told: Arc<Mutex<Vec<Difference>>> = Arc::default();
        let sink = told.clone();
        let note = move |difference: &Difference| sink.lock().push(difference.clone());
        let options = VerifyOptions::default().on_difference(Some(Arc::new(note)));
        let report = image.verify(options).await?;
        let told = std::mem::take(&mut *told.lock());
        Ok((report, told))
    }

    /// Reads everything, and asks for the status of everything: what comes without an error is
    /// as it was sealed. Gives how many requests failed.
    pub async fn read_all(&self, verify: Option<VerifyReads>, step: u64) -> u64 {
        let Ok(image) = self.open_to_read(verify).await else {
            return u64::MAX;
        };
        let mut failed = 0;
        let size = self.kind.size_bytes();
        for start in (0..size).step_by(step as usize) {
            let len = step.min(size - start);
            match image.read(start, Buffer::for_read(len as usize)).await {
                Ok(bytes) => {
                    let wanted = self.range(start..start + len);
                    assert!(bytes[..] == *wanted, "wrong bytes at {start:#x}");
                }
                Err(error) => {
                    assert_eq!(error.errno(), 5, "{error}");
                    failed += 1;
                }
            }
        }
        // Anew: what was read is not asked about again.
        let image = self.open_to_read(verify).await.unwrap();
        let mut at = 0;
        while at < size {
            let Ok(extent) = image.block_status(at, (size - at).min(step), 0).await else {
                failed += 1;
                at += step.min(size - at);
                continue;
            };
            let end = at + extent.len_bytes;
            if extent.kind.is_zero() {
                let zero = self.range(at..end).iter().all(|byte| *byte == 0);
                assert!(zero, "status zero at {at:#x}");
            } else if !extent.kind.is_present() {
                let below = self.below.as_ref().unwrap();
                let same = below[at as usize..end as usize] == *self.range(at..end);
                assert!(same, "status absent at {at:#x}");
            }
            at = end;
        }
        failed
    }

    fn range(&self, range: Range<u64>) -> &[u8] {
        &self.content[range.start as usize..range.end as usize]
    }
}

fn noise(random: &mut Random, len: u64, kinds: u64) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(len as usize);
    bytes.resize_with(len as usize, || (random.below(kinds) + 1) as u8);
    bytes
}
