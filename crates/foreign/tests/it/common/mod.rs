//! What the tests of all formats share: QEMU's programs, and a model to compare with.
#![allow(dead_code, reason = "each test uses some of it")]

pub mod images;

use std::future::poll_fn;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;

use vellum::io::lane;
use vellum::storage::{Create, FileOptions, FileStorage, MemStorage};
use vellum::{BlockDevice, Buffer, Buffers, Io, RequestFlags, Storage, ZeroRequest};

/// Runs one of QEMU's programs; it has to succeed.
pub fn qemu(program: &str, arguments: &[&str]) -> String {
    let run = Command::new(program).args(arguments).output();
    let run =
        run.unwrap_or_else(|error| panic!("{program}: {error}; `cargo xtask setup` installs it"));
    let text = String::from_utf8_lossy(&run.stdout).into_owned();
    let errors = String::from_utf8_lossy(&run.stderr);
    assert!(
        run.status.success(),
        "{program} {arguments:?}: {text}{errors}"
    );
    text
}

/// A place for files that goes with the test.
pub struct Place(tempfile::TempDir);

impl Default for Place {
    fn default() -> Self {
        Place(tempfile::tempdir().expect("a folder"))
    }
}

impl Place {
    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }
}

pub fn new_file(path: &Path) -> Arc<dyn Storage> {
    let options = FileOptions::default().create(Create::Truncate);
    FileStorage::open(path.to_str().expect("a name"), &options).expect("a file")
}

pub fn open_file(path: &Path) -> Arc<dyn Storage> {
    FileStorage::open(path.to_str().expect("a name"), &FileOptions::default()).expect("a file")
}

/// Bytes of a disk, and what changes both.
pub struct Model {
    pub bytes: Vec<u8>,
    random: fastrand::Rng,
    seed: u64,
}

impl Model {
    pub fn new(seed: u64, size_bytes: u64) -> Model {
        Model {
            bytes: vec![0; size_bytes as usize],
            random: fastrand::Rng::with_seed(seed),
            seed,
        }
    }

    /// A range: small ones and large ones, aligned or not, some at the end.
    fn range(&mut self) -> (usize, usize) {
        let size = self.bytes.len();
        let len = match self.random.u8(0..4) {
            0 => self.random.usize(1..2048),
            1 => 512 * self.random.usize(1..64),
            2 => self.random.usize(1..200_000),
            _ => 65536 * self.random.usize(1..40),
        };
        let len = len.min(size);
        let offset = match self.random.u8(0..8) {
            0 => size - len,
            1 | 2 => (self.random.usize(0..=size - len)) & !0xffff,
            _ => self.random.usize(0..=size - len),
        };
        (offset, len)
    }

    /// Does `count` requests to a device and to the model, and compares what is read.
    pub async fn exercise(&mut self, device: &dyn BlockDevice, count: usize) {
        for _ in 0..count {
            let (offset, len) = self.range();
            match self.random.u8(0..10) {
                0..5 => {
                    let mut bytes = vec![0; len];
                    self.random.fill(&mut bytes);
                    self.bytes[offset..offset + len].copy_from_slice(&bytes);
                    let flags = RequestFlags::default().fua(self.random.u8(0..8) == 0);
                    let buffer = Buffer::copy_of(&bytes);
                    device.write(offset as u64, buffer, flags).await.unwrap();
                }
                5 | 6 => {
                    self.bytes[offset..offset + len].fill(0);
                    let request = ZeroRequest::default().may_unmap(self.random.bool());
                    let zeroed = device.write_zeroes(offset as u64, len as u64, request);
                    zeroed.await.unwrap();
                }
                7 => device.flush().await.unwrap(),
                _ => self.compare_range(device, offset, len).await,
            }
        }
    }

    async fn compare_range(&self, device: &dyn BlockDevice, offset: usize, len: usize) {
        let read = device.read(offset as u64, Buffer::for_read(len)).await;
        let read = read.unwrap();
        let wanted = &self.bytes[offset..offset + len];
        if let Some(at) = read.iter().zip(wanted).position(|(a, b)| a != b) {
            panic!("seed {}: byte {} differs", self.seed, offset + at);
        }
    }

    /// Compares all of a device, and what its block status says of zeroes.
    pub async fn compare(&self, device: &dyn BlockDevice) {
        assert_eq!(device.size_bytes(), self.bytes.len() as u64);
        let mut at = 0;
        while at < self.bytes.len() {
            let len = self.bytes.len() - at;
            let extent = device.block_status(at as u64, len as u64, u32::MAX).await;
            let extent = extent.unwrap();
            let end = at + extent.len_bytes as usize;
            assert!(end > at && end <= self.bytes.len(), "seed {}", self.seed);
            if extent.kind.is_zero() {
                let zeroes = self.bytes[at..end].iter().all(|&byte| byte == 0);
                assert!(zeroes, "seed {}: {at}..{end} are no zeroes", self.seed);
            }
            for from in (at..end).step_by(4 << 20) {
                let to = end.min(from + (4 << 20));
                self.compare_range(device, from, to - from).await;
            }
            at = end;
        }
    }
}

/// Compares an image with bytes by what qemu-img makes of it.
pub fn compare_with_qemu(place: &Place, format: &str, image: &str, bytes: &[u8]) {
    compare_by_words(place, &["-f", format, &place.text(image)], bytes);
}

/// Compares an image, which is named by several words, with bytes by what qemu-img makes of it.
pub fn compare_by_words(place: &Place, image: &[&str], bytes: &[u8]) {
    let raw = place.text("by-qemu.raw");
    qemu(
        "qemu-img",
        &[&["convert", "-O", "raw"], image, &[&raw]].concat(),
    );
    let read = std::fs::read(&raw).expect("what it made");
    assert!(read == bytes, "{image:?}: qemu-img reads something else");
}

pub fn run<T>(future: impl Future<Output = T>) -> T {
    lane::block_on(future)
}

/// A file in memory that counts the reads of more than a few bytes, and answers them later.
#[derive(Debug)]
pub struct Counted {
    file: Arc<MemStorage>,
    reads: AtomicUsize,
}

impl Counted {
    pub fn new(bytes: Vec<u8>) -> Arc<Counted> {
        Arc::new(Counted {
            file: Arc::new(MemStorage::with_bytes(bytes)),
            reads: AtomicUsize::new(0),
        })
    }

    pub fn reads(&self) -> usize {
        self.reads.load(Ordering::Relaxed)
    }
}

impl Storage for Counted {
    vellum_storage::delegate!(file: capabilities, name, len_bytes, write, write_zeroes, truncate, flush);

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let len_bytes: usize = buffers.iter().map(|buffer| buffer.len()).sum();
        if len_bytes > 16 {
            self.reads.fetch_add(1, Ordering::Relaxed);
        }
        let file = self.file.clone();
        Io::start(async move {
            let mut has_waited = false;
            poll_fn(|context| {
                context.waker().wake_by_ref();
                match std::mem::replace(&mut has_waited, true) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                }
            })
            .await;
            file.read(offset_bytes, buffers).await
        })
    }
}

/// Has many read pieces of some blocks side by side; each has to read as `content` does.
pub async fn read_side_by_side(device: &dyn BlockDevice, content: &[u8], blocks: &[u64]) {
    let readers = (0..60).map(|number| {
        let at = blocks[number % blocks.len()] + (number as u64 % 7) * 512;
        async move {
            let read = device.read(at, Buffer::for_read(512)).await.unwrap();
            assert!(read[..] == content[at as usize..][..512], "{at}");
        }
    });
    futures_util::future::join_all(readers).await;
}
