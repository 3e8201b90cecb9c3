//! QEMU and sealed images, and power cuts while one is being sealed.

use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use vellum::gate::DenyAll;
use vellum::qcow2::seal::{SealOptions, VerifyOptions, VerifyReads};
use vellum::qcow2::{OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, Buffers, Error, ErrorKind, Io, Storage};
use vellum_format::features::Autoclear;
use vellum_io::lane;
use vellum_storage::{FileOptions, FileStorage, MemStorage, WriteFlags, delegate};

use crate::common::{Random, qemu_ok, qemu_verdict, vellum_verdict};
use crate::disk::{Disk, Kind};

fn file(path: &Path, read_only: bool) -> Arc<dyn Storage> {
    let options = FileOptions::default().read_only(read_only);
    FileStorage::open(path, &options).unwrap()
}

async fn is_sealed(path: &Path) -> bool {
    let header = read_header(&file(path, true)).await.unwrap();
    header.autoclear.contains(Autoclear::SEALED)
}

/// Seals the image at `path`.
async fn seal(path: &Path) {
    let options = OpenOptions::default();
    let image = Qcow2::open(file(path, false), Arc::new(DenyAll), options).await;
    let image = image.unwrap();
    image.seal(SealOptions::default()).await.unwrap();
    image.close().await.unwrap();
}

fn qemu_finds_nothing_wrong(path: &Path) {
    let told = qemu_ok("qemu-img", path.parent().unwrap(), &["check", "disk.qcow2"]);
    assert!(told.contains("No errors were found"), "{told}");
}

#[test]
fn qemu_reads_a_sealed_image_and_takes_the_seal_off_when_it_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    let qemu_io = |words: &[&str]| {
        qemu_ok("qemu-io", dir.path(), &[words, &["disk.qcow2"]].concat());
    };
    let words = ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"];
    qemu_ok("qemu-img", dir.path(), &words);
    qemu_io(&["-c", "write -P 7 1M 3M", "-c", "write -z 8M 1M"]);
    lane::block_on(seal(&path));
    assert!(qemu_verdict(&path) == vellum_verdict(&path));
    qemu_finds_nothing_wrong(&path);
    qemu_io(&["-r", "-c", "read -P 7 1M 3M"]);
    lane::block_on(async { assert!(is_sealed(&path).await, "reading changes nothing") });
    qemu_io(&["-c", "write -P 9 20M 8M", "-c", "read -P 7 1M 3M"]);
    qemu_finds_nothing_wrong(&path);
    lane::block_on(async {
        assert!(!is_sealed(&path).await, "another has written");
        let options = OpenOptions::default().read_only(true);
        let image = Qcow2::open(file(&path, true), Arc::new(DenyAll), options).await;
        let image = image.unwrap();
        assert!(!image.verifies_reads());
        let bytes = image
            .read(20 << 20, Buffer::for_read(8 << 20))
            .await
            .unwrap();
        assert!(bytes.iter().all(|byte| *byte == 9));
    });
    // Sealed anew over what is left of the old seal.
    lane::block_on(async {
        seal(&path).await;
        let options = OpenOptions::default().read_only(true);
        let options = options.verify(Some(VerifyReads::Off));
        let image = Qcow2::open(file(&path, true), Arc::new(DenyAll), options).await;
        let report = image
            .unwrap()
            .verify(VerifyOptions::default())
            .await
            .unwrap();
        assert_eq!(report.differences, 0);
    });
    qemu_finds_nothing_wrong(&path);
}

/// A disk that keeps what was flushed, and notes what was not.
#[derive(Debug)]
struct CutDisk {
    inner: MemStorage,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    durable: Vec<u8>,
    pending: Vec<(u64, Vec<u8>)>,
    /// Writes and flushes until the power fails.
    left: usize,
}

impl CutDisk {
    fn new(bytes: Vec<u8>, left: usize) -> Arc<CutDisk> {
        Arc::new(CutDisk {
            inner: MemStorage::with_bytes(bytes.clone()),
            state: Mutex::new(State {
                durable: bytes,
                pending: Vec::new(),
                left,
            }),
        })
    }

    /// Whether there is still power for a request.
    fn has_power(&self) -> bool {
        let mut state = self.state.lock();
        let has_power = state.left > 0;
        state.left = state.left.saturating_sub(1);
        has_power
    }

    /// What is on the disk: any sectors of what was not flushed.
    fn left(&self, random: &mut Random) -> Vec<u8> {
        let state = self.state.lock();
        let mut bytes = state.durable.clone();
        for (at, written) in &state.pending {
            for (index, sector) in written.chunks(512).enumerate() {
                if random.below(2) == 0 {
                    let at = *at as usize + index * 512;
                    let end = at + sector.len();
                    bytes.resize(bytes.len().max(end), 0);
                    bytes[at..end].copy_from_slice(sector);
                }
            }
        }
        bytes
    }
}

fn no_power<T>() -> Io<T> {
    Io::ready(Err(Error::from_errno("write", 5)))
}

impl Storage for CutDisk {
    delegate!(inner: capabilities, name, len_bytes, read, write_zeroes, discard, truncate);

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        if !self.has_power() {
            return no_power();
        }
        let bytes: Vec<u8> = buffers.iter().flat_map(|buffer| buffer.to_vec()).collect();
        self.state.lock().pending.push((offset_bytes, bytes));
        self.inner.write(offset_bytes, buffers, flags)
    }

    fn flush(&self) -> Io<()> {
        if !self.has_power() {
            return no_power();
        }
        let mut state = self.state.lock();
        state.durable = self.inner.snapshot();
        state.pending.clear();
        Io::ready(Ok(()))
    }
}

/// The power fails at each write and flush of sealing, and any sectors of what was not flushed
/// are there: the image has no seal then, or a whole one, and is otherwise as it was.
#[test]
fn a_power_cut_leaves_no_seal_or_all_of_it() {
    lane::block_on(async {
        let mut disk = Disk::new(Kind::Plain, 4).await;
        let before = disk.file.snapshot();
        let mut random = Random::new(1);
        let mut sealed_by_chance = 0;
        for cut in 0.. {
            let mut done = false;
            for _ in 0..8 {
                let cut_disk = CutDisk::new(before.clone(), cut);
                let options = OpenOptions::default();
                let image = Qcow2::open(cut_disk.clone(), Arc::new(DenyAll), options).await;
                done = image.unwrap().seal(SealOptions::default()).await.is_ok();
                disk.file = Arc::new(MemStorage::with_bytes(cut_disk.left(&mut random)));
                let is_sealed = match disk.verify().await {
                    Ok((report, told)) => {
                        assert_eq!(report.differences, 0, "cut {cut}: {told:?}");
                        true
                    }
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
                        false
                    }
                };
                assert!(is_sealed || !done, "cut {cut}");
                sealed_by_chance += u32::from(is_sealed && !done);
                assert_eq!(disk.read_all(None, 1 << 20).await, 0, "cut {cut}");
            }
            if done {
                assert!(cut > 3, "{cut} places to be cut off at");
                break;
            }
        }
        assert!(
            sealed_by_chance > 0,
            "no cut between the switch and its flush"
        );
    });
}
