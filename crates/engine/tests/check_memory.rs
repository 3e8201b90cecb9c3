//! What a check and a repair of a huge image take, as the allocator sees it: less than
//! 256 MiB for 10 TiB, in proportion for less, and no more for hostile images. A survey
//! has a bound for these too.
//!
//! The huge image is nowhere: a storage makes its tables up as they are read, and keeps
//! what a repair writes in a few words a cluster.

#[path = "../../io/tests/common/heap.rs"]
mod heap;

use std::collections::HashMap;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vellum::qcow2::check::{CheckOptions, Fix, check, repair};
use vellum::qcow2::survey::{SurveyOptions, survey};
use vellum::{Result, Storage};
use vellum_io::{Buffers, Io, lane};
use vellum_storage::{
    BlockStatus, Capabilities, FileOptions, FileStorage, StorageExtent, WriteFlags, ZeroFlags,
};

use heap::peak_of;

const CLUSTER: u64 = 65536;
const WORDS: u64 = CLUSTER / 8;
/// Clusters that a refcount block counts.
const COUNTED: u64 = CLUSTER / 2;
const COPIED: u64 = 1 << 63;
const FOUR_ONES: u64 = 0x0001_0001_0001_0001;
const TIB: u64 = 1 << 40;
const TABLE: u64 = 1;
const L1: u64 = 2;

/// What was written to a cluster.
#[derive(Debug)]
enum Written {
    /// Refcounts of one everywhere.
    Ones,
    Other(Vec<u8>),
}

/// A full image of 64 KiB clusters, a quarter of whose data lies scattered.
#[derive(Debug)]
struct Made {
    guest_clusters: u64,
    l2_tables: u64,
    first_l2: u64,
    first_block: u64,
    blocks: u64,
    first_data: u64,
    /// This refcount block lies between two clusters.
    broken_block: Option<u64>,
    written: Mutex<HashMap<u64, Written>>,
    len_bytes: Mutex<u64>,
}

impl Made {
    fn new(size_bytes: u64, broken_block: Option<u64>) -> Arc<Self> {
        let guest_clusters = size_bytes / CLUSTER;
        let l2_tables = guest_clusters / WORDS;
        let first_l2 = L1 + l2_tables.div_ceil(WORDS);
        let first_block = first_l2 + l2_tables;
        let mut blocks = 1;
        while first_block + blocks + guest_clusters > blocks * COUNTED {
            blocks += 1;
        }
        let first_data = first_block + blocks;
        Arc::new(Made {
            guest_clusters,
            l2_tables,
            first_l2,
            first_block,
            blocks,
            first_data,
            broken_block,
            written: Mutex::default(),
            len_bytes: Mutex::new((first_data + guest_clusters) * CLUSTER),
        })
    }

    fn header(&self, word: u64) -> u64 {
        match word {
            0 => 0x5146_49fb_0000_0003,
            2 => 16,
            3 => self.guest_clusters * CLUSTER,
            4 => self.l2_tables,
            5 => L1 * CLUSTER,
            6 => TABLE * CLUSTER,
            7 => 1 << 32,
            12 => 4 << 32 | 104,
            _ => 0,
        }
    }

    /// A word of the image as it was made.
    fn word(&self, cluster: u64, word: u64) -> u64 {
        let number = |first: u64| (cluster - first) * WORDS + word;
        if cluster == 0 {
            self.header(word)
        } else if cluster == TABLE {
            let broken = if self.broken_block == Some(word) {
                512
            } else {
                0
            };
            match word < self.blocks {
                true => (self.first_block + word) * CLUSTER + broken,
                false => 0,
            }
        } else if cluster < self.first_l2 {
            match number(L1) < self.l2_tables {
                true => COPIED | ((self.first_l2 + number(L1)) * CLUSTER),
                false => 0,
            }
        } else if cluster < self.first_block {
            COPIED | ((self.first_data + self.place(number(self.first_l2))) * CLUSTER)
        } else if cluster < self.first_data {
            let counted = number(self.first_block) * 4;
            match counted + 4 <= self.first_data + self.guest_clusters {
                true => FOUR_ONES,
                false => self.last_counts(counted),
            }
        } else {
            0
        }
    }

    /// Four refcounts, the last of which are those of clusters beyond the end.
    fn last_counts(&self, first: u64) -> u64 {
        let end = self.first_data + self.guest_clusters;
        (0..4).fold(0, |word, index| word << 16 | u64::from(first + index < end))
    }

    /// Which data cluster a guest cluster has.
    fn place(&self, guest: u64) -> u64 {
        let scattered = self.guest_clusters / 4;
        match guest < scattered {
            // The number of clusters has no factors but 2 and 5.
            true => guest * 1_000_003 % scattered,
            false => guest,
        }
    }
}

impl Storage for Made {
    fn capabilities(&self) -> Capabilities {
        Capabilities {
            request_alignment_bytes: 1,
            memory_alignment_bytes: 1,
            can_punch: true,
            can_zero: true,
            has_zero_init: true,
            read_only: false,
            growable: true,
        }
    }

    fn name(&self) -> &str {
        "made"
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(*self.len_bytes.lock())
    }

    fn read(&self, offset_bytes: u64, mut buffers: Buffers) -> Io<Buffers> {
        let written = self.written.lock();
        let mut at = offset_bytes;
        for buffer in &mut buffers {
            for piece in buffer.chunks_mut(CLUSTER as usize) {
                let (cluster, inside) = (at / CLUSTER, at % CLUSTER);
                assert!(
                    inside + piece.len() as u64 <= CLUSTER,
                    "whole words of clusters"
                );
                let other = written.get(&cluster);
                for (index, place) in piece.chunks_mut(8).enumerate() {
                    let word = inside / 8 + index as u64;
                    let bytes = match other {
                        None => self.word(cluster, word).to_be_bytes(),
                        Some(Written::Ones) => FOUR_ONES.to_be_bytes(),
                        Some(Written::Other(bytes)) => {
                            bytes[word as usize * 8..][..8].try_into().unwrap()
                        }
                    };
                    place.copy_from_slice(&bytes[..place.len()]);
                }
                at += piece.len() as u64;
            }
        }
        Io::ready(Ok(buffers))
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, _flags: WriteFlags) -> Io<Buffers> {
        let mut written = self.written.lock();
        let mut at = offset_bytes;
        for piece in buffers
            .iter()
            .flat_map(|buffer| buffer.chunks(CLUSTER as usize))
        {
            let (cluster, inside) = (at / CLUSTER, (at % CLUSTER) as usize);
            let ones = piece.len() as u64 == CLUSTER
                && piece.chunks(8).all(|word| word == FOUR_ONES.to_be_bytes());
            if ones {
                written.insert(cluster, Written::Ones);
            } else {
                let whole = (0..WORDS).flat_map(|word| self.word(cluster, word).to_be_bytes());
                let other = written
                    .entry(cluster)
                    .or_insert_with(|| Written::Other(whole.collect()));
                let Written::Other(bytes) = other else {
                    panic!("a block is written once");
                };
                bytes[inside..inside + piece.len()].copy_from_slice(piece);
            }
            at += piece.len() as u64;
        }
        let mut len_bytes = self.len_bytes.lock();
        *len_bytes = at.max(*len_bytes);
        drop(len_bytes);
        Io::ready(Ok(buffers))
    }

    fn write_zeroes(&self, _offset: u64, _len_bytes: u64, _flags: ZeroFlags) -> Io<()> {
        panic!("nobody zeroes")
    }

    fn discard(&self, _offset_bytes: u64, _len_bytes: u64) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn allocate(&self, _offset_bytes: u64, _len_bytes: u64) -> Io<()> {
        panic!("nobody reserves")
    }

    fn flush(&self) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        *self.len_bytes.lock() = len_bytes;
        Io::ready(Ok(()))
    }

    fn block_status(&self, _offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        let status = BlockStatus::Data;
        Io::ready(Ok(StorageExtent { status, len_bytes }))
    }
}

/// Held by the test that runs: all share one heap.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock()
}

fn check_and_repair(size_bytes: u64) {
    // What the limit allows for an image of this size, and the reads in flight.
    let limit = size_bytes / (10 * TIB / (256 << 20)) + (20 << 20);
    let options = CheckOptions::default();
    let image = Made::new(size_bytes, None);
    let (report, peak) = peak_of(|| lane::block_on(check(image.clone(), &options)).unwrap());
    assert_eq!(
        (report.corruptions, report.leaks, report.check_errors),
        (0, 0, 0)
    );
    assert_eq!(report.allocated_clusters, size_bytes / CLUSTER);
    println!("check: {peak} bytes");
    assert!(peak < limit, "a check takes {peak} bytes");

    let image = Made::new(size_bytes, Some(1));
    let repaired = || lane::block_on(repair(image.clone(), Fix::All, &options));
    let (report, peak) = peak_of(|| repaired().unwrap());
    println!("repair: {peak} bytes, {report:?}");
    assert!(report.corruptions_fixed > 0);
    assert!(peak < limit, "a repair takes {peak} bytes");
    let report = lane::block_on(check(image, &options)).unwrap();
    assert_eq!(
        (report.corruptions, report.leaks, report.check_errors),
        (0, 0, 0)
    );
}

/// A header of version 2: clusters of 512 bytes, 64 MiB, a refcount table of one cluster
/// and an L1 table behind it.
fn small_clusters(l1_entries: u64) -> [u8; 72] {
    let words = [
        0x5146_49fb_0000_0002,
        0,
        9,
        64 << 20,
        l1_entries,
        1024,
        512,
        1 << 32,
        0,
    ];
    let bytes: Vec<u8> = words.into_iter().flat_map(u64::to_be_bytes).collect();
    bytes.try_into().expect("nine words")
}

#[test]
fn tables_that_lie_all_over_the_file_take_no_more_memory() {
    const TABLES: u64 = 1 << 20;
    let _alone = alone();
    let first = 2 + TABLES * 8 / 512;
    // Each entry leads somewhere else, in no order.
    let l1 = (0..TABLES).map(|index| (first + index * 1_000_003 % TABLES) * 512);
    let l1: Vec<u8> = l1.flat_map(u64::to_be_bytes).collect();
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file()
        .write_all_at(&small_clusters(TABLES), 0)
        .unwrap();
    file.as_file().write_all_at(&l1, 1024).unwrap();
    file.as_file().set_len((first + TABLES) * 512).unwrap();
    drop(l1);
    let image = FileStorage::open(file.path(), &FileOptions::default()).unwrap();
    let options = CheckOptions::default();
    let (report, peak) = peak_of(|| lane::block_on(check(image, &options)).unwrap());
    println!("check: {peak} bytes");
    // Nothing is counted: the header, both tables, and every L2 table.
    assert_eq!(report.corruptions, first + TABLES);
    assert!(peak < 56 << 20, "a check takes {peak} bytes");
}

#[test]
fn a_survey_of_tables_all_over_the_file_takes_no_more_memory() {
    const TABLES: u64 = 3 << 18;
    const L1_ENTRIES: u64 = 2048;
    const FIRST: u64 = 2 + L1_ENTRIES * 8 / 512 + 1 + TABLES * 8 / 512;
    let _alone = alone();
    let table = |index: u64| (FIRST + index * 1_000_003 % TABLES) * 512;
    let words = |words: &[u64]| -> Vec<u8> { words.iter().flat_map(|w| w.to_be_bytes()).collect() };
    // The disk and its snapshot lead to the same tables, and the snapshot to many others.
    let l1: Vec<u64> = (0..TABLES).map(table).collect();
    let (l1_at, snapshot_at) = (1024, 1024 + L1_ENTRIES * 8);
    let snapshot_l1_at = snapshot_at + 512;
    let snapshot = [snapshot_l1_at, TABLES << 32 | 1 << 16 | 1, 0, 0, 0];
    let file = tempfile::NamedTempFile::new().unwrap();
    let write = |bytes: &[u8], at: u64| file.as_file().write_all_at(bytes, at).unwrap();
    write(&small_clusters(L1_ENTRIES), 0);
    write(&1u32.to_be_bytes(), 60);
    write(&snapshot_at.to_be_bytes(), 64);
    write(&words(&l1[..L1_ENTRIES as usize]), l1_at);
    write(&words(&snapshot), snapshot_at);
    write(b"1s", snapshot_at + 40);
    write(&words(&l1), snapshot_l1_at);
    // Every 1024th table maps one cluster: two of them the disk's.
    for index in (0..TABLES).step_by(1024) {
        write(&words(&[table(index)]), table(index));
    }
    file.as_file().set_len((FIRST + TABLES) * 512).unwrap();
    drop(l1);
    let image = FileStorage::open(file.path(), &FileOptions::default()).unwrap();
    let options = SurveyOptions::default();
    let (survey, peak) = peak_of(|| lane::block_on(survey(image, &options)).unwrap());
    println!("survey: {peak} bytes");
    assert_eq!(survey.disk.data_clusters, 2);
    assert_eq!(survey.metadata.l2, L1_ENTRIES * 512);
    assert_eq!(survey.metadata.snapshot_l2, (TABLES - L1_ENTRIES) * 512);
    assert_eq!(survey.snapshots[0].total_bytes, TABLES / 1024 * 512);
    assert_eq!(survey.only_in_snapshots_bytes, (TABLES / 1024 - 2) * 512);
    assert!(peak < 68 << 20, "a survey takes {peak} bytes");
}

#[test]
fn memory_grows_with_the_image_and_not_with_the_damage() {
    let _alone = alone();
    check_and_repair(TIB / 8);
}

/// A minute; its figures stand in docs/PERFORMANCE.md.
#[test]
#[ignore = "takes a minute"]
fn ten_tebibytes_are_repaired_in_256_mebibytes() {
    let _alone = alone();
    check_and_repair(10 * TIB);
}
