//! An image with its checksums in memory, and what its guest should see.

use std::ops::Range;
use std::sync::Arc;

use vellum::gate::{DenyAll, FileRequest, Gate};
use vellum::qcow2::checksums::ChecksumOptions;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, ErrorKind, Io, RequestFlags, Storage, ZeroRequest};
use vellum_io::Buffers;
use vellum_storage::MemStorage;
pub const SIZE_BYTES: u64 = 8 << 20;
pub const BLOCK: u64 = 4096;

/// An image and its checksums.
pub struct Disk {
    pub image: Arc<MemStorage>,
    pub sums: Arc<MemStorage>,
}

/// Opens the checksums that an image names.
#[derive(Debug)]
pub struct Beside(pub Arc<MemStorage>);

impl Gate for Beside {
    fn open_backing(&self, request: FileRequest) -> Io<Arc<dyn BlockDevice>> {
        DenyAll.open_backing(request)
    }

    fn open_data_file(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        DenyAll.open_data_file(request)
    }

    fn open_checksums(&self, request: FileRequest) -> Io<Arc<dyn Storage>> {
        assert_eq!(request.name, "disk.vsums");
        Io::ready(Ok(self.0.clone()))
    }
}

impl Disk {
    pub async fn new(cluster_bits: u32, extended_l2: bool) -> Disk {
        let image = Arc::new(MemStorage::new());
        let options = CreateOptions::default()
            .size_bytes(SIZE_BYTES)
            .cluster_size_bytes(1 << cluster_bits)
            .extended_l2(extended_l2);
        create(image.clone(), None, &options).await.unwrap();
        let sums = Arc::new(MemStorage::new());
        Disk { image, sums }
    }

    pub fn keep(&self) -> OpenOptions {
        OpenOptions::default()
            .backing(Backing::None)
            .discard(true)
            .checksums(Some(ChecksumOptions::Keep {
                storage: self.sums.clone(),
                name: "disk.vsums".to_owned(),
            }))
    }

    pub async fn open_with(&self, options: OpenOptions) -> vellum::Result<Arc<Qcow2>> {
        let gate = Arc::new(Beside(self.sums.clone()));
        Qcow2::open(self.image.clone(), gate, options).await
    }

    pub async fn open(&self) -> Arc<Qcow2> {
        self.open_with(self.keep()).await.unwrap()
    }

    pub async fn open_read_only(&self) -> Arc<Qcow2> {
        let options = OpenOptions::default().read_only(true);
        self.open_with(options).await.unwrap()
    }

    pub async fn flip(&self, byte: u64, bit: u8) {
        let read = self.image.read(byte, one(Buffer::zeroed(1))).await.unwrap();
        self.image.damage(byte, &[read[0][0] ^ (1 << bit)]);
    }
}

/// Where the data of a guest offset lies.
pub async fn host_of(image: &Qcow2, guest: u64) -> u64 {
    let extent = image.block_status(guest, 512, u32::MAX).await.unwrap();
    extent.host.expect("it is data").offset_bytes
}

pub fn one(buffer: Buffer) -> Buffers {
    Buffers::from_iter([buffer])
}

/// What the guest should see.
pub struct Model(pub Vec<u8>);

impl Model {
    pub fn new() -> Model {
        Model(vec![0; SIZE_BYTES as usize])
    }

    pub async fn write(&mut self, disk: &Qcow2, range: Range<u64>, value: u8) {
        let bytes = vec![value; (range.end - range.start) as usize];
        let written = disk.write(
            range.start,
            Buffer::copy_of(&bytes),
            RequestFlags::default(),
        );
        written.await.unwrap();
        self.0[range.start as usize..range.end as usize].fill(value);
    }

    /// Some requests of all kinds and lengths.
    pub async fn change(&mut self, disk: &Qcow2, rng: &mut fastrand::Rng, count: usize) {
        for _ in 0..count {
            let grain = [1, 512, 4096, 65536][rng.usize(..4)];
            let start = rng.u64(..SIZE_BYTES / grain) * grain;
            let len = (rng.u64(1..40) * grain).min(SIZE_BYTES - start);
            let range = start..start + len;
            match rng.u8(..8) {
                0 => {
                    disk.write_zeroes(start, len, ZeroRequest::default())
                        .await
                        .unwrap();
                    self.0[start as usize..(start + len) as usize].fill(0);
                }
                1 if grain == 65536 => {
                    let request = ZeroRequest::default().may_unmap(true);
                    disk.write_zeroes(start, len, request).await.unwrap();
                    self.0[start as usize..(start + len) as usize].fill(0);
                }
                2 => disk.flush().await.unwrap(),
                _ => self.write(disk, range, rng.u8(1..)).await,
            }
        }
    }

    /// Reads everything, in pieces of all lengths; what differs from the model, and what fails.
    pub async fn compare(&self, disk: &Qcow2, rng: &mut fastrand::Rng) -> usize {
        let mut failures = 0;
        let mut at = 0;
        while at < SIZE_BYTES {
            let grain = [1, 512, 4096, 65536][rng.usize(..4)];
            let len = (rng.u64(1..60) * grain).min(SIZE_BYTES - at);
            match disk.read(at, Buffer::for_read(len as usize)).await {
                Ok(bytes) => assert!(
                    bytes[..] == self.0[at as usize..(at + len) as usize],
                    "wrong bytes at {at}, {len} long"
                ),
                Err(error) => {
                    let kind = ErrorKind::ChecksumMismatch;
                    assert_eq!((error.kind(), error.errno()), (kind, 5), "{error}");
                    failures += 1;
                }
            }
            at += len;
        }
        failures
    }
}
