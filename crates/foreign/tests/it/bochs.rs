//! Bochs images, made here: nothing on this side of the tests makes them. QEMU has to read the same.

use crate::common::{Model, Place, compare_with_qemu, open_file, run};
use vellum::BlockDevice;
use vellum_foreign::bochs;

const EXTENT_BYTES: usize = 8192;
const SECTOR_BYTES: usize = 512;

/// An image of some extents, of which every third is missing, with about half of the sectors of the
/// others, and what it reads as.
fn image(version: u32, seed: u64) -> (Vec<u8>, Vec<u8>) {
    let mut random = fastrand::Rng::with_seed(seed);
    let extents = 40;
    let size = extents * EXTENT_BYTES - 3 * SECTOR_BYTES;
    let mut header = vec![0; 512];
    let mut put = |at: usize, field: &[u8]| header[at..at + field.len()].copy_from_slice(field);
    put(0, b"Bochs Virtual HD Image");
    put(32, b"Redolog");
    put(48, b"Growing");
    put(64, &version.to_le_bytes());
    put(68, &512u32.to_le_bytes());
    put(72, &(extents as u32).to_le_bytes());
    put(76, &512u32.to_le_bytes());
    put(80, &(EXTENT_BYTES as u32).to_le_bytes());
    let size_at = if version == 0x10000 { 84 } else { 88 };
    put(size_at, &(size as u64).to_le_bytes());
    let mut order: Vec<u32> = (0..extents as u32).collect();
    random.shuffle(&mut order);
    let mut content = vec![0; extents * EXTENT_BYTES];
    let mut catalog = vec![u32::MAX; extents];
    let mut data = Vec::new();
    for (number, index) in order.into_iter().filter(|index| index % 3 != 0).enumerate() {
        catalog[index as usize] = number as u32;
        let mut bitmap = vec![0; 512];
        let mut extent = vec![0x55; EXTENT_BYTES];
        let guest = index as usize * EXTENT_BYTES;
        for sector in 0..EXTENT_BYTES / SECTOR_BYTES {
            if random.bool() {
                bitmap[sector / 8] |= 1 << (sector % 8);
                let range = sector * SECTOR_BYTES..(sector + 1) * SECTOR_BYTES;
                random.fill(&mut extent[range.clone()]);
                let there = guest + range.start..guest + range.end;
                content[there].copy_from_slice(&extent[range]);
            }
        }
        data.extend(bitmap);
        data.extend(extent);
    }
    content.truncate(size);
    let catalog = catalog.into_iter().flat_map(u32::to_le_bytes);
    (
        header.into_iter().chain(catalog).chain(data).collect(),
        content,
    )
}

#[test]
fn images_of_both_versions_read_as_qemu_reads_them() {
    for (seed, version) in [(1, 0x10000), (2, 0x20000)] {
        let place = Place::default();
        let (bytes, content) = image(version, seed);
        let path = place.path("disk.bochs");
        std::fs::write(&path, bytes).unwrap();
        compare_with_qemu(&place, "bochs", "disk.bochs", &content);
        let mut model = Model::new(seed, 0);
        model.bytes = content;
        run(async {
            let device = bochs::open(open_file(&path)).await.unwrap();
            model.compare(&*device).await;
            device.close().await.unwrap();
        });
    }
}

#[test]
fn damaged_images_end_in_errors() {
    let (good, _) = image(0x20000, 7);
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..300 {
        let mut bytes = good.clone();
        for _ in 0..random.usize(1..8) {
            let end = if random.bool() { bytes.len() } else { 256 };
            let at = random.usize(..end);
            bytes[at] = if random.bool() { random.u8(..) } else { 0xff };
        }
        run(async {
            let file = std::sync::Arc::new(vellum::storage::MemStorage::with_bytes(bytes));
            let Ok(device) = bochs::open(file).await else {
                return;
            };
            let size = device.size_bytes();
            for at in [0, 70_000, size.saturating_sub(10_000)] {
                let len = size.saturating_sub(at).min(70_000) as usize;
                let _ = device.read(at, vellum::Buffer::for_read(len)).await;
                let _ = device.block_status(at, len as u64, u32::MAX).await;
            }
        });
    }
}
