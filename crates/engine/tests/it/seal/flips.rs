//! Every single flipped bit is found, and named with its guest range.
//!
//! `VELLUM_SEAL_FLIPS=10000` flips more bits than the tests do by themselves.

use std::ops::Range;

use vellum::qcow2::read_header;
use vellum::{BlockDevice, Buffer, Buffers, Storage};
use vellum_format::extension::{Extension, kind};
use vellum_format::seal::{LEAF_BYTES, NODE_BYTES, Node, Root, SealPointer, Shape, Superblock};
use vellum_format::{Geometry, L1Entry};
use vellum_io::lane;
use vellum_storage::MemStorage;

use crate::common::Random;
use crate::seal::disk::{Disk, Kind};

/// Bytes of a file, and the guest bytes that are concerned where one of them changes.
struct Target {
    what: &'static str,
    /// It is in the external data file.
    in_data: bool,
    host: Range<u64>,
    /// Of which unit of the bytes which guest bytes depend: (unit, guest bytes of one).
    guest: Range<u64>,
    unit_bytes: u64,
    unit_guest_bytes: u64,
}

impl Target {
    fn guest_of(&self, host: u64) -> Range<u64> {
        let index = (host - self.host.start) / self.unit_bytes;
        let start = self.guest.start + index * self.unit_guest_bytes;
        start..(start + self.unit_guest_bytes).min(self.guest.end)
    }
}

async fn read(file: &MemStorage, at: u64, len: u64) -> Vec<u8> {
    let buffers = Buffers::from_buf([Buffer::for_read(len as usize)]);
    file.read(at, buffers).into_single().await.unwrap().to_vec()
}

/// Everything whose change must be found.
async fn targets(disk: &Disk) -> Vec<Target> {
    let mut targets = Vec::new();
    data_targets(disk, &mut targets).await;
    let storage: std::sync::Arc<dyn Storage> = disk.file.clone();
    let header = read_header(&storage).await.unwrap();
    let geometry = header.geometry();
    table_targets(
        disk,
        &geometry,
        header.l1_table_offset.bytes(),
        header.l1_entries,
        &mut targets,
    )
    .await;
    let data = header
        .extensions
        .iter()
        .find_map(|extension| match extension {
            Extension::Unknown { kind, data } if *kind == kind::SEAL => Some(data),
            _ => None,
        });
    let pointer = SealPointer::decode(data.unwrap(), geometry.cluster_size_bytes()).unwrap();
    seal_targets(disk, &geometry, &pointer, &mut targets).await;
    targets
}

async fn data_targets(disk: &Disk, targets: &mut Vec<Target>) {
    if disk.kind == Kind::Encrypted {
        // Status tells no places there; the content is flipped in the same way.
        return;
    }
    let image = disk.open_to_read(None).await.unwrap();
    let (mut at, size) = (0, disk.kind.size_bytes());
    while at < size {
        let extent = image.block_status(at, size - at, 0).await.unwrap();
        if let Some(host) = extent.host.filter(|_| extent.kind.needs_reading()) {
            targets.push(Target {
                what: "data",
                in_data: disk.data.is_some(),
                host: host.offset_bytes..host.offset_bytes + extent.len_bytes,
                guest: at..at + extent.len_bytes,
                unit_bytes: 1,
                unit_guest_bytes: 1,
            });
        }
        at += extent.len_bytes;
    }
}

async fn table_targets(
    disk: &Disk,
    geometry: &Geometry,
    l1_at: u64,
    l1_entries: u32,
    targets: &mut Vec<Target>,
) {
    let per_table = geometry.bytes_per_l2_table();
    targets.push(Target {
        what: "L1",
        in_data: false,
        host: l1_at..l1_at + u64::from(l1_entries) * 8,
        guest: 0..u64::from(l1_entries) * per_table,
        unit_bytes: 8,
        unit_guest_bytes: per_table,
    });
    let l1 = read(&disk.file, l1_at, u64::from(l1_entries) * 8).await;
    for index in 0..l1_entries as usize {
        let entry = L1Entry::read(&l1, index).unwrap();
        if let Some(table) = entry.decode(geometry).unwrap() {
            let start = index as u64 * per_table;
            targets.push(Target {
                what: "L2",
                in_data: false,
                host: table.bytes()..table.bytes() + geometry.cluster_size_bytes(),
                guest: start..start + per_table,
                unit_bytes: geometry.l2_entry_size_bytes(),
                unit_guest_bytes: geometry.cluster_size_bytes(),
            });
        }
    }
}

async fn seal_targets(
    disk: &Disk,
    geometry: &Geometry,
    pointer: &SealPointer,
    targets: &mut Vec<Target>,
) {
    let area = read(&disk.file, pointer.offset_bytes, pointer.length_bytes).await;
    let superblock = Superblock::decode(&area).unwrap();
    let at = pointer.offset_bytes;
    targets.push(whole("superblock", at, 0..disk.kind.size_bytes()));
    let slice_guest = u64::from(superblock.slice_bytes) / geometry.l2_entry_size_bytes()
        * geometry.cluster_size_bytes();
    let trees = [
        (
            "content",
            superblock.content,
            superblock.content_shape(),
            LEAF_BYTES,
        ),
        (
            "mapping",
            superblock.mapping,
            superblock.mapping_shape(),
            slice_guest,
        ),
    ];
    for (what, root, shape, leaf_guest) in trees {
        for (offset, leaves) in nodes(&area, shape, root) {
            let guest = leaves.start * leaf_guest..leaves.end * leaf_guest;
            targets.push(whole(what, at + offset, guest));
        }
    }
}

fn whole(what: &'static str, at: u64, guest: Range<u64>) -> Target {
    let unit_guest_bytes = guest.end - guest.start;
    Target {
        what,
        in_data: false,
        host: at..at + NODE_BYTES as u64,
        guest,
        unit_bytes: NODE_BYTES as u64,
        unit_guest_bytes,
    }
}

/// The nodes of a tree, and the leaves under each.
fn nodes(area: &[u8], shape: Shape, root: Option<Root>) -> Vec<(u64, Range<u64>)> {
    let mut open: Vec<(u32, u64, Root)> = root
        .map(|root| (shape.depth, 0, root))
        .into_iter()
        .collect();
    let mut found = Vec::new();
    while let Some((level, number, place)) = open.pop() {
        let at = place.offset_bytes as usize;
        let node = Node::checked(&area[at..at + NODE_BYTES], level, &place.hash).unwrap();
        found.push((place.offset_bytes, shape.leaves_under(level, number)));
        if level > 0 {
            for index in 0..64 {
                if let Some(entry) = node.entry(index, area.len() as u64).unwrap() {
                    open.push((level - 1, number * 64 + index as u64, entry));
                }
            }
        }
    }
    found
}

/// Flips a bit; again, and it is as before.
async fn flip(storage: &MemStorage, at: u64, bit: u8) {
    let mut byte = read(storage, at, 1).await;
    byte[0] ^= 1 << bit;
    let buffers = Buffers::from_iter([Buffer::copy_of(&byte)]);
    storage
        .write(at, buffers, Default::default())
        .await
        .unwrap();
}

fn flips() -> u64 {
    let wanted = std::env::var("VELLUM_SEAL_FLIPS").ok();
    wanted.map_or(440, |number| number.parse().expect("a number of flips"))
}

async fn check_kind(kind: Kind, flips: u64) {
    let disk = Disk::new(kind, 7).await;
    disk.seal().await.unwrap();
    let (report, told) = disk.verify().await.unwrap();
    assert_eq!((report.differences, told), (0, Vec::new()), "{kind:?}");
    assert_eq!(disk.read_all(None, 65536).await, 0, "{kind:?}");
    let targets = targets(&disk).await;
    let kinds = ["data", "L2", "L1", "superblock", "content", "mapping"];
    let mut random = Random::new(kind as u64);
    for number in 0..flips {
        // Each kind of place as often as the others, whatever its size.
        let what = kinds[(number % kinds.len() as u64) as usize];
        let of_kind: Vec<_> = targets
            .iter()
            .filter(|target| target.what == what)
            .collect();
        let Some(last) = of_kind.len().checked_sub(1) else {
            assert!(what == "data" && kind == Kind::Encrypted);
            continue;
        };
        let target = of_kind[random.below(last as u64 + 1) as usize];
        let host = target.host.start + random.below(target.host.end - target.host.start);
        let bit = random.below(8) as u8;
        let storage = match &disk.data {
            Some(data) if target.in_data => data,
            _ => &disk.file,
        };
        flip(storage, host, bit).await;
        let guest = target.guest_of(host);
        let named = format!("{kind:?}: {what} at {host:#x}, bit {bit}: {guest:x?}");
        let (report, told) = disk.verify().await.expect(&named);
        assert!(report.differences > 0, "not found: {named}");
        let is_named = told
            .iter()
            .any(|found| found.guest.start < guest.end && guest.start < found.guest.end);
        assert!(is_named, "{named}: {told:?}");
        if number % 4 == 0 {
            let step = [4096, 65536, 1000][random.below(3) as usize];
            disk.read_all(None, step).await;
        }
        flip(storage, host, bit).await;
    }
    assert_eq!(disk.verify().await.unwrap().0.differences, 0, "{kind:?}");
}

#[test]
fn every_flipped_bit_is_named_with_its_guest_range() {
    let each = flips() / Kind::ALL.len() as u64;
    for kind in Kind::ALL {
        lane::block_on(check_kind(kind, each));
    }
}

/// Damage to data of an encrypted image, and to compressed data, which has no place by itself.
#[test]
fn damage_anywhere_is_found_or_means_nothing() {
    for kind in [Kind::Encrypted, Kind::Deflate, Kind::Zstd] {
        lane::block_on(async move {
            let disk = Disk::new(kind, 11).await;
            disk.seal().await.unwrap();
            let len = disk.file.len_bytes().unwrap();
            // Key material takes most of an encrypted image as small as this one.
            let first = match kind {
                Kind::Encrypted => len * 4 / 5,
                _ => 4096,
            };
            let mut random = Random::new(3);
            let mut found = 0;
            for _ in 0..40 {
                let at = first + random.below(len - first);
                let bit = random.below(8) as u8;
                flip(&disk.file, at, bit).await;
                if let Ok((report, _)) = disk.verify().await {
                    found += u64::from(report.differences > 0);
                    // Wrong bytes are a panic.
                    disk.read_all(None, 65536).await;
                }
                flip(&disk.file, at, bit).await;
            }
            assert!(found > 10, "{kind:?}: {found} of 40");
        });
    }
}
