//! A fault of another program that costs users of images data: `qemu-img check -r` deletes the internal
//! snapshots of an image that has an autoclear feature bit.

use vellum::BlockDevice;
use vellum::qcow2::Qcow2;

/// The warning that belongs to an image with internal snapshots and an autoclear bit (checksums, a seal, a write
/// log inside, persistent bitmaps); `None` for others.
pub fn snapshots_in_danger(image: &Qcow2) -> Option<String> {
    let has_autoclear = image.header().autoclear.bits() != 0;
    if !has_autoclear || image.snapshots().is_empty() {
        return None;
    }
    Some(format!(
        "'{}' has internal snapshots beside a seal, checksums, a write log or bitmaps: QEMU's 'qemu-img check \
         -r' deletes the internal snapshots of such an image. Repair it with 'vellum check -r' only",
        image.info().name
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use vellum::Storage;
    use vellum::gate::DenyAll;
    use vellum::qcow2::create::{CreateOptions, create};
    use vellum::qcow2::{BitmapOptions, NewSnapshot, OpenOptions};
    use vellum_io::lane;
    use vellum_storage::MemStorage;

    use super::*;

    #[test]
    fn only_snapshots_of_images_with_an_autoclear_bit_are_in_danger() {
        lane::block_on(async {
            for (with_bitmap, with_snapshot) in [(false, true), (true, false), (true, true)] {
                let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
                let options = CreateOptions::default().size_bytes(1 << 20);
                create(file.clone(), None, &options).await.unwrap();
                let image = Qcow2::open(file, Arc::new(DenyAll), OpenOptions::default());
                let image = image.await.unwrap();
                if with_bitmap {
                    let added = image.bitmaps().add("b", BitmapOptions::default());
                    added.await.unwrap();
                }
                if with_snapshot {
                    let new = NewSnapshot {
                        name: "s".to_owned(),
                        ..NewSnapshot::default()
                    };
                    image.create_snapshot(new).await.unwrap();
                }
                let warning = snapshots_in_danger(&image);
                assert_eq!(warning.is_some(), with_bitmap && with_snapshot);
                image.close().await.unwrap();
            }
        });
    }
}
