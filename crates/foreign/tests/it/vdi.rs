//! VDI images: made here and read by QEMU, made by QEMU and read and written here.

use crate::common::{Model, Place, compare_with_qemu, new_file, open_file, qemu, run};
use vellum::BlockDevice;
use vellum_foreign::vdi::{CreateOptions, check, create, open};

#[test]
fn what_is_written_here_is_read_there() {
    for (seed, size_bytes, is_static) in [(1, 9 << 20 | 0x600, false), (2, 6 << 20, true)] {
        let place = Place::default();
        let path = place.path("a.vdi");
        let mut model = Model::new(seed, size_bytes);
        run(async {
            let file = new_file(&path);
            let options = CreateOptions::default()
                .size_bytes(size_bytes)
                .is_static(is_static);
            create(&file, &options).await.unwrap();
            for _ in 0..3 {
                let device = open(file.clone(), false).await.unwrap();
                model.compare(&*device).await;
                model.exercise(&*device, 60).await;
                model.compare(&*device).await;
                device.close().await.unwrap();
            }
            let found = check(&*file).await.unwrap();
            assert_eq!(found.messages, Vec::<String>::new());
        });
        qemu("qemu-img", &["check", "-f", "vdi", &place.text("a.vdi")]);
        compare_with_qemu(&place, "vdi", "a.vdi", &model.bytes);
    }
}

#[test]
fn what_qemu_writes_is_read_here() {
    let place = Place::default();
    let image = place.text("a.vdi");
    qemu("qemu-img", &["create", "-q", "-f", "vdi", &image, "10M"]);
    let mut model = Model::new(3, 10 << 20);
    for (offset, len, pattern) in [(5 << 20, 4096, 7), (100, 3 << 20, 9), (9 << 20, 1 << 20, 1)] {
        let command = format!("write -P {pattern} {offset} {len}");
        qemu("qemu-io", &["-f", "vdi", "-c", &command, &image]);
        model.bytes[offset..offset + len].fill(pattern);
    }
    run(async {
        let device = open(open_file(&place.path("a.vdi")), false).await;
        let device = device.unwrap();
        model.compare(&*device).await;
        model.exercise(&*device, 100).await;
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "vdi", "a.vdi", &model.bytes);
    // And it goes on where we ended.
    qemu("qemu-io", &["-f", "vdi", "-c", "write -P 3 0 10M", &image]);
    qemu("qemu-img", &["check", "-f", "vdi", &image]);
}
