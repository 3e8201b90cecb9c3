//! Power cuts while an image is being sealed or unsealed.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::gate::DenyAll;
use vellum::qcow2::checksums::ChecksumOptions;
use vellum::qcow2::seal::{SealOptions, unseal};
use vellum::qcow2::{OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffers, Error, ErrorKind, Io, Storage};
use vellum_format::features::Autoclear;
use vellum_io::lane;
use vellum_storage::{MemStorage, WriteFlags, delegate};

use crate::common::Random;
use crate::seal::disk::{Disk, Kind};

/// A disk that keeps what was flushed, and notes what was not.
#[derive(Debug)]
struct CutDisk {
    inner: MemStorage,
    state: Mutex<State>,
    /// Writes and flushes until the power fails, of all disks that have the same.
    power: Arc<Mutex<usize>>,
}

#[derive(Debug, Default)]
struct State {
    durable: Vec<u8>,
    pending: Vec<(u64, Vec<u8>)>,
}

impl CutDisk {
    fn new(bytes: Vec<u8>, power: Arc<Mutex<usize>>) -> Arc<CutDisk> {
        Arc::new(CutDisk {
            inner: MemStorage::with_bytes(bytes.clone()),
            state: Mutex::new(State {
                durable: bytes,
                pending: Vec::new(),
            }),
            power,
        })
    }

    /// Whether there is still power for a request.
    fn has_power(&self) -> bool {
        let mut left = self.power.lock();
        let has_power = *left > 0;
        *left = left.saturating_sub(1);
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
                let cut_disk = CutDisk::new(before.clone(), Arc::new(Mutex::new(cut)));
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

/// How a seal is given up.
#[derive(Debug, Clone, Copy)]
enum Way {
    Unseal,
    /// The image is opened for writing, and its checksums are kept, or begun.
    KeepChecksums,
    GiveUpChecksums,
}

/// The power fails at each write and flush while a seal is given up: the image is sealed or not, and reads as
/// before, and the seal can be given up again.
#[test]
fn a_power_cut_leaves_a_seal_that_is_given_up_whole_or_not_counting() {
    lane::block_on(async {
        for kind in [Kind::Plain, Kind::SmallestClusters] {
            for has_checksums in [true, false] {
                for way in [Way::Unseal, Way::KeepChecksums, Way::GiveUpChecksums] {
                    let what = format!("{kind:?}, checksums {has_checksums}, {way:?}");
                    give_up_at_each_cut(kind, has_checksums, way, &what).await;
                }
            }
        }
    });
}

async fn give_up_at_each_cut(kind: Kind, has_checksums: bool, way: Way, what: &str) {
    let mut disk = Disk::new(kind, 9).await;
    disk.sums = has_checksums.then(Arc::default);
    disk.seal().await.unwrap();
    let file: Arc<dyn Storage> = disk.file.clone();
    let header = read_header(&file).await.unwrap();
    assert_eq!(
        header.autoclear.contains(Autoclear::CHECKSUMS),
        has_checksums
    );
    let before = disk.file.snapshot();
    let sums_before = disk
        .sums
        .as_ref()
        .map_or_else(Vec::new, |sums| sums.snapshot());
    let mut random = Random::new(2);
    for cut in 0.. {
        let mut is_done = false;
        for _ in 0..4 {
            let power = Arc::new(Mutex::new(cut));
            let file = CutDisk::new(before.clone(), power.clone());
            let sums = CutDisk::new(sums_before.clone(), power);
            is_done = give_up(way, &file, &sums).await;
            disk.file = Arc::new(MemStorage::with_bytes(file.left(&mut random)));
            disk.sums = Some(Arc::new(MemStorage::with_bytes(sums.left(&mut random))));
            assert_eq!(disk.read_all(None, 1 << 20).await, 0, "{what}, cut {cut}");
            let storage: Arc<dyn Storage> = disk.file.clone();
            let was_sealed = unseal(&storage).await.unwrap();
            assert!(!(was_sealed && is_done), "{what}, cut {cut}");
            assert_eq!(disk.read_all(None, 1 << 20).await, 0, "{what}, cut {cut}");
        }
        if is_done {
            assert!(cut > 1, "{what}: {cut} places to be cut off at");
            break;
        }
    }
}

/// Gives the seal up, and says whether the power lasted.
async fn give_up(way: Way, file: &Arc<CutDisk>, sums: &Arc<CutDisk>) -> bool {
    let checksums = match way {
        Way::Unseal => {
            let file: Arc<dyn Storage> = file.clone();
            return unseal(&file).await.is_ok();
        }
        Way::KeepChecksums => ChecksumOptions::Keep {
            storage: sums.clone(),
            name: "disk.vsums".to_owned(),
        },
        Way::GiveUpChecksums => ChecksumOptions::GiveUp,
    };
    let options = OpenOptions::default()
        .unseal(true)
        .checksums(Some(checksums));
    let opened = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await;
    match opened {
        Ok(image) => image.close().await.is_ok(),
        Err(_) => false,
    }
}
