//! A disk from elsewhere: its partitions, and the files on them.

use std::sync::Arc;

use vellum_files::{FileSystem, Kind, ROOT, Source, detect, open, partitions};

const DISK_BYTES: usize = 1 << 20;
const SECTOR_BYTES: usize = 512;
/// So many files and partitions are looked at.
const FILES_MAX: usize = 200;
const PARTITIONS_MAX: usize = 8;

/// The input is what of a disk is not zero: two bytes with the number of a sector, and its
/// content, again and again.
///
/// Invariants:
/// - no bytes make it panic or go on for ever;
/// - partitions lie inside of the disk;
/// - names are such as the kernel may be told, and no read gives more than there is room for.
pub fn check_files(data: &[u8]) {
    let mut disk = vec![0; DISK_BYTES];
    for piece in data.chunks(2 + SECTOR_BYTES) {
        let [low, high, content @ ..] = piece else {
            break;
        };
        let sector = usize::from(u16::from_le_bytes([*low, *high]));
        let at = sector % (DISK_BYTES / SECTOR_BYTES) * SECTOR_BYTES;
        disk[at..at + content.len()].copy_from_slice(content);
    }
    let disk = Source::new(Arc::new(disk));
    look(&disk);
    let table = partitions::read(&disk).expect("readable");
    for partition in table.iter().flat_map(|table| &table.partitions) {
        let end = partition.start_bytes.checked_add(partition.len_bytes);
        assert!(end.is_some_and(|end| end <= DISK_BYTES as u64));
    }
    let all = table.iter().flat_map(|table| &table.partitions);
    for partition in all.take(PARTITIONS_MAX) {
        look(&disk.part(partition.start_bytes, partition.len_bytes));
    }
}

fn look(volume: &Source) {
    let contents = detect(volume).expect("readable").contents;
    if let Ok(files) = open(volume.clone(), contents) {
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
