//! A disk from elsewhere: its partitions, and the files on them.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;

use vellum_files::{Contents, FileSystem, Kind, ROOT, ReadAt, Source, detect, open, partitions};

const DISK_BYTES: u64 = 1 << 20;
/// The least that mkfs.xfs makes is longer.
const XFS_BYTES: u64 = 32 << 20;
const SECTOR_BYTES: usize = 512;
/// So many files and partitions are looked at.
const FILES_MAX: usize = 200;
const PARTITIONS_MAX: usize = 8;

/// What a target does with its bytes.
pub type Check = fn(&[u8]);

/// Every check with the name of its fuzz target and corpus.
pub const ALL: [(&str, Check); 3] = [
    ("files", check_files),
    ("files_iso", check_iso),
    ("files_xfs", check_xfs),
];

/// A disk that is zero but for some sectors.
struct Sparse {
    sectors: HashMap<u64, Vec<u8>>,
    len_bytes: u64,
}

impl Sparse {
    /// The input is what is not zero: two bytes with the number of a sector, and its content,
    /// again and again.
    fn source(data: &[u8], len_bytes: u64) -> Source {
        let mut sectors = HashMap::new();
        for piece in data.chunks(2 + SECTOR_BYTES) {
            let [low, high, content @ ..] = piece else {
                break;
            };
            let sector = u64::from(u16::from_le_bytes([*low, *high]));
            let mut bytes = content.to_vec();
            bytes.resize(SECTOR_BYTES, 0);
            sectors.insert(sector % (len_bytes / SECTOR_BYTES as u64), bytes);
        }
        Source::new(Arc::new(Sparse { sectors, len_bytes }))
    }
}

impl ReadAt for Sparse {
    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        let (mut at, mut rest) = (offset_bytes, bytes);
        while !rest.is_empty() {
            let offset = (at % SECTOR_BYTES as u64) as usize;
            let len = rest.len().min(SECTOR_BYTES - offset);
            let (now, later) = rest.split_at_mut(len);
            match self.sectors.get(&(at / SECTOR_BYTES as u64)) {
                Some(sector) => now.copy_from_slice(&sector[offset..offset + len]),
                None => now.fill(0),
            }
            (at, rest) = (at + len as u64, later);
        }
        Ok(())
    }
}

/// Any disk.
///
/// Invariants:
/// - no bytes make it panic or go on for ever;
/// - partitions lie inside of the disk;
/// - names are such as the kernel may be told, and no read gives more than there is room for.
pub fn check_files(data: &[u8]) {
    let disk = Sparse::source(data, DISK_BYTES);
    look(&disk);
    let table = partitions::read(&disk).expect("readable");
    for partition in table.iter().flat_map(|table| &table.partitions) {
        let end = partition.start_bytes.checked_add(partition.len_bytes);
        assert!(end.is_some_and(|end| end <= DISK_BYTES));
    }
    let all = table.iter().flat_map(|table| &table.partitions);
    for partition in all.take(PARTITIONS_MAX) {
        look(&disk.part(partition.start_bytes, partition.len_bytes));
    }
}

/// What is taken for an ISO9660, without its mark if need be. Invariants as of [`check_files`].
pub fn check_iso(data: &[u8]) {
    look_as(Sparse::source(data, DISK_BYTES), Contents::Iso);
}

/// What is taken for an XFS. Invariants as of [`check_files`].
pub fn check_xfs(data: &[u8]) {
    look_as(Sparse::source(data, XFS_BYTES), Contents::Xfs);
}

fn look(volume: &Source) {
    let contents = detect(volume).expect("readable").contents;
    look_as(volume.clone(), contents);
}

fn look_as(volume: Source, contents: Contents) {
    if let Ok(files) = open(volume, contents) {
        look_at(&*files);
    }
}

fn look_at(files: &dyn FileSystem) {
    let mut next = vec![ROOT];
    let mut seen = 0;
    let mut bytes = [0; 3000];
    while let Some(id) = next.pop() {
        seen += 1;
        let Ok(attributes) = files.attributes(id) else {
            continue;
        };
        let size_bytes = attributes.size_bytes;
        for at in [0, size_bytes / 3, size_bytes.saturating_sub(9), u64::MAX] {
            assert!(files.read(id, at, &mut bytes).unwrap_or(0) <= bytes.len());
        }
        let target = files.read_link(id).unwrap_or_default();
        assert!(target.len() < 4096 && !target.contains(&0));
        if attributes.kind != Kind::Directory {
            continue;
        }
        let _ = files.lookup(id, b"name");
        let _ = files.list(id, 0, &mut |entry| {
            assert!((1..=255).contains(&entry.name.len()) && !entry.name.contains(&b'/'));
            assert!(entry.next > 0);
            next.push(entry.id);
            seen + next.len() < FILES_MAX
        });
        next.truncate(FILES_MAX.saturating_sub(seen));
    }
}
