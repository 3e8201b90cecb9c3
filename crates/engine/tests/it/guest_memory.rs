//! Requests straight from and into a guest's memory: they do what requests with buffers do, and
//! nobody who looks at bytes takes them.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::io::lane;
use vellum::luks::{FormatOptions, IterationTime, Passphrase};
use vellum::qcow2::checksums::ChecksumOptions;
use vellum::qcow2::create::{CreateOptions, Encryption, create};
use vellum::qcow2::seal::SealOptions;
use vellum::qcow2::{NewSnapshot, OpenOptions, Qcow2, WriteLogOptions};
use vellum::storage::{Create, FileOptions, FileStorage};
use vellum::{
    BlockDevice, Buffer, Raw, RawOptions, RequestFlags, SharedBuffer, Storage, ZeroRequest,
};
use vellum_io::shared_memory::SharedMemory;
use vellum_storage::MemStorage;

const DISK_BYTES: usize = 4 << 20;
const MEMORY_BYTES: u64 = 1 << 20;
const SECTOR_BYTES: usize = 512;

fn guest_memory() -> Arc<SharedMemory> {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(MEMORY_BYTES).expect("a length");
    Arc::new(SharedMemory::map(file.as_fd(), 0, MEMORY_BYTES).expect("a mapping"))
}

fn whole(memory: &Arc<SharedMemory>, len_bytes: u64) -> Vec<SharedBuffer> {
    vec![memory.range(0, len_bytes).expect("a range")]
}

fn file(path: &Path, direct: bool) -> Arc<dyn Storage> {
    let options = FileOptions::default()
        .create(Create::IfMissing)
        .direct(direct);
    FileStorage::open(path, &options).expect("a file")
}

async fn open(storage: Arc<dyn Storage>, options: OpenOptions) -> Arc<Qcow2> {
    let image = Qcow2::open(storage, Arc::new(DenyAll), options).await;
    image.expect("an image")
}

/// A disk, what it should hold, and a guest's memory.
struct Disk {
    device: Arc<dyn BlockDevice>,
    model: Vec<u8>,
    memory: Arc<SharedMemory>,
    random: fastrand::Rng,
    /// Requests that went without a copy.
    direct: usize,
}

impl Disk {
    fn new(device: Arc<dyn BlockDevice>, seed: u64) -> Disk {
        Disk {
            device,
            model: vec![0; DISK_BYTES],
            memory: guest_memory(),
            random: fastrand::Rng::with_seed(seed),
            direct: 0,
        }
    }

    /// Some sectors of the disk, and as many bytes of memory in one to three pieces.
    fn pick(&mut self) -> (usize, Vec<SharedBuffer>) {
        let sectors = self.random.usize(1..64);
        let first = self.random.usize(..DISK_BYTES / SECTOR_BYTES - sectors);
        let mut left = sectors;
        let mut pieces = Vec::new();
        while left > 0 {
            let part = match pieces.len() {
                2 => left,
                _ => self.random.usize(1..=left),
            };
            let at = self.random.usize(..8) * (128 << 10);
            let range = self.memory.range(at as u64, (part * SECTOR_BYTES) as u64);
            pieces.push(range.expect("a range"));
            left -= part;
        }
        (first * SECTOR_BYTES, pieces)
    }

    async fn write(&mut self) {
        let (at, pieces) = self.pick();
        for piece in &pieces {
            // Pieces may be the same memory: the last one counts.
            piece.copy_from(0, &vec![self.random.u8(1..); piece.len()]);
        }
        let data = bytes_of(&pieces);
        self.model[at..at + data.len()].copy_from_slice(&data);
        let flags = RequestFlags::default();
        match self.device.write_from(at as u64, &pieces, flags) {
            Some(written) => {
                self.direct += 1;
                written.await.expect("written");
            }
            None => {
                let data = Buffer::copy_of(&data);
                let written = self.device.write(at as u64, data, flags).await;
                written.expect("written");
            }
        }
    }

    async fn read(&mut self) {
        let (at, pieces) = self.pick();
        let len = pieces.iter().map(SharedBuffer::len).sum();
        let expected = &self.model[at..at + len];
        // Where pieces are the same memory, what is read last stays.
        let overlap = pieces.iter().enumerate().any(|(index, one)| {
            let others = pieces[..index].iter();
            others.clone().any(|other| other.address() == one.address())
        });
        match self.device.read_into(at as u64, &pieces) {
            Some(read) => {
                self.direct += 1;
                read.await.expect("read");
                assert!(overlap || bytes_of(&pieces) == expected, "{at} {len}");
            }
            None => {
                let read = self.device.read(at as u64, Buffer::for_read(len)).await;
                assert!(&read.expect("read")[..] == expected, "{at} {len}");
            }
        }
    }

    async fn zero(&mut self) {
        let (at, pieces) = self.pick();
        let len: usize = pieces.iter().map(SharedBuffer::len).sum();
        self.model[at..at + len].fill(0);
        let request = ZeroRequest::default().may_unmap(true);
        let zeroed = self.device.write_zeroes(at as u64, len as u64, request);
        zeroed.await.expect("zeroed");
    }

    async fn play(&mut self, steps: usize) {
        for _ in 0..steps {
            match self.random.u8(..10) {
                0 => self.zero().await,
                1..5 => self.write().await,
                _ => self.read().await,
            }
        }
    }
}

fn bytes_of(pieces: &[SharedBuffer]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for piece in pieces {
        let mut part = vec![0; piece.len()];
        piece.copy_to(0, &mut part);
        bytes.extend(part);
    }
    bytes
}

#[test]
fn requests_without_a_copy_do_what_those_with_one_do() {
    const SEED: u64 = 17;
    for direct in [false, true] {
        let folder = tempfile::tempdir().expect("a folder");
        lane::block_on(async {
            let raw = file(&folder.path().join("raw"), direct);
            raw.truncate(DISK_BYTES as u64).await.expect("a length");
            let raw = Raw::open(raw, RawOptions::default()).expect("a device");
            let mut disk = Disk::new(raw, SEED);
            disk.play(2000).await;
            assert!(disk.direct > 1000, "{} of a raw disk", disk.direct);

            let storage = file(&folder.path().join("qcow2"), direct);
            let options = CreateOptions::default().size_bytes(DISK_BYTES as u64);
            create(storage.clone(), None, &options).await.expect("made");
            let image = open(storage, OpenOptions::default().discard(true)).await;
            let mut disk = Disk::new(image.clone(), SEED);
            for round in 0..4 {
                disk.play(500).await;
                // What is shared from now on is copied before it is overwritten.
                let snapshot = NewSnapshot {
                    name: format!("snapshot {round}"),
                    ..NewSnapshot::default()
                };
                image.create_snapshot(snapshot).await.expect("a snapshot");
            }
            disk.play(500).await;
            assert!(disk.direct > 1000, "{} of an image", disk.direct);
            image.close().await.expect("closed");
        });
    }
}

/// Whether a read and a write of the first 4 KiB, which hold data, go without a copy.
async fn goes_direct(device: &dyn BlockDevice) -> (bool, bool) {
    let memory = guest_memory();
    let pieces = whole(&memory, 4096);
    let read = device.read_into(0, &pieces);
    let reads = read.is_some();
    if let Some(read) = read {
        read.await.expect("read");
    }
    let written = device.write_from(0, &pieces, RequestFlags::default());
    let writes = written.is_some();
    if let Some(written) = written {
        written.await.expect("written");
    }
    (reads, writes)
}

async fn image_with_data(create_options: CreateOptions, options: OpenOptions) -> Arc<Qcow2> {
    let storage: Arc<dyn Storage> = FileStorage::from_descriptor(
        tempfile::tempfile().expect("a file").into(),
        "image",
        &FileOptions::default(),
    )
    .expect("a file");
    let create_options = create_options.size_bytes(DISK_BYTES as u64);
    create(storage.clone(), None, &create_options)
        .await
        .expect("made");
    let image = open(storage, options).await;
    let data = Buffer::copy_of(&[5; 65536]);
    let written = image.write(0, data, RequestFlags::default()).await;
    written.expect("written");
    image
}

#[test]
fn whoever_looks_at_bytes_takes_none_of_a_guests_memory() {
    lane::block_on(async {
        let plain = image_with_data(CreateOptions::default(), OpenOptions::default()).await;
        assert_eq!(goes_direct(&*plain).await, (true, true));

        let luks = Encryption::Luks {
            options: FormatOptions {
                iteration_time: IterationTime::Iterations(1000),
                ..FormatOptions::default()
            },
            passphrase: Passphrase::from("secret"),
        };
        let options = OpenOptions::default().passphrase(Some("secret".into()));
        let made = CreateOptions::default().encryption(Some(luks));
        let encrypted = image_with_data(made, options).await;
        assert_eq!(goes_direct(&*encrypted).await, (false, false));

        let log = WriteLogOptions::inside().len_bytes(WriteLogOptions::MIN_LEN_BYTES);
        let options = OpenOptions::default().write_log(Some(log));
        let logged = image_with_data(CreateOptions::default(), options).await;
        assert_eq!(goes_direct(&*logged).await, (true, false));
        logged.close().await.expect("closed");

        let keep = ChecksumOptions::Keep {
            storage: Arc::new(MemStorage::new()),
            name: "sums".to_owned(),
        };
        let options = OpenOptions::default().checksums(Some(keep));
        let summed = image_with_data(CreateOptions::default(), options).await;
        assert_eq!(goes_direct(&*summed).await, (false, false));
        summed.close().await.expect("closed");

        let data = Buffer::copy_of(&[6; 65536]);
        let compressed = plain.write_compressed(0, data, RequestFlags::default());
        compressed.await.expect("compressed");
        let pieces = whole(&guest_memory(), 4096);
        assert!(plain.read_into(0, &pieces).is_none());
        assert!(plain.read_into(1 << 20, &pieces).is_none(), "not allocated");
    });
}

#[test]
fn a_sealed_image_verifies_on_memory_of_its_own() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("image");
    lane::block_on(async {
        let storage = file(&path, false);
        let options = CreateOptions::default().size_bytes(DISK_BYTES as u64);
        create(storage.clone(), None, &options).await.expect("made");
        let image = open(storage, OpenOptions::default()).await;
        let data = Buffer::copy_of(&[5; 65536]);
        let written = image.write(0, data, RequestFlags::default()).await;
        written.expect("written");
        image.seal(SealOptions::default()).await.expect("sealed");
        image.close().await.expect("closed");
        drop(image);
        let options = OpenOptions::default().read_only(true);
        let sealed = open(file(&path, false), options).await;
        assert!(sealed.read_into(0, &whole(&guest_memory(), 4096)).is_none());
    });
}
