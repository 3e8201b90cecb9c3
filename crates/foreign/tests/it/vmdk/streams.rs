//! Streams of compressed grains: written once, continued, read from QEMU.

use super::*;

#[test]
fn streams_are_read_there() {
    let place = Place::default();
    let path = place.path("a.vmdk");
    let bytes = stream_content(20, 70 * 65536 + 0x600);
    run(async {
        write_stream(&path, &bytes).await;
        compare_image(&path, &bytes).await;
        assert_eq!(check_image(&path).await, Vec::<String>::new());
    });
    // It ends as streams do.
    let file = std::fs::read(&path).unwrap();
    assert_eq!(file[file.len() - 512..], [0; 512]);
    qemu("qemu-img", &["check", "-f", "vmdk", &place.text("a.vmdk")]);
    compare_with_qemu(&place, "vmdk", "a.vmdk", &bytes);
}

#[test]
fn streams_are_continued_and_not_changed() {
    let place = Place::default();
    let path = place.path("a.vmdk");
    let mut bytes = stream_content(21, 40 * 65536);
    run(write_stream(&path, &bytes));
    let before = std::fs::metadata(&path).unwrap().len();
    let absent = absent_grain(&bytes);
    bytes[absent..absent + 65536].fill(7);
    run(async {
        let device = open_image(&path, None, OpenOptions::default())
            .await
            .unwrap();
        // A plain write of a whole grain is one of a compressed grain, and no other is taken.
        let grain = Buffer::copy_of(&bytes[absent..absent + 65536]);
        let flags = RequestFlags::default();
        device.write(absent as u64, grain, flags).await.unwrap();
        for (offset, len) in [(absent as u64, 65536), (0, 512)] {
            let again = device.write(offset, Buffer::zeroed(len), flags);
            assert!(again.await.is_err());
        }
        close(device).await;
        compare_image(&path, &bytes).await;
    });
    // In the place of what marked the end, and a new one behind it.
    assert_eq!(std::fs::metadata(&path).unwrap().len(), before + 512);
    compare_with_qemu(&place, "vmdk", "a.vmdk", &bytes);
}

#[test]
fn streams_have_parents() {
    let place = Place::default();
    let (base, image) = (place.text("base.vmdk"), place.text("a.vmdk"));
    qemu("qemu-img", &["create", "-q", "-f", "vmdk", &base, "1M"]);
    qemu("qemu-io", &["-f", "vmdk", "-c", "write -P 5 0 1M", &base]);
    let options = [
        "-o",
        "subformat=streamOptimized",
        "-b",
        &base,
        "-F",
        "vmdk",
        &image,
    ];
    qemu(
        "qemu-img",
        &[&["create", "-q", "-f", "vmdk"], &options[..]].concat(),
    );
    run(async {
        let read_only = OpenOptions::default().read_only(true);
        let parent = open_image(&place.path("base.vmdk"), None, read_only).await;
        let parent = parent.unwrap();
        let path = place.path("a.vmdk");
        let device = open_image(&path, Some(parent), OpenOptions::default()).await;
        let device = device.unwrap();
        let zeroes = device.write_zeroes(65536, 2 * 65536, ZeroRequest::default());
        zeroes.await.unwrap();
        let seven = Buffer::copy_of(&[7; 65536]);
        device
            .write(0, seven, RequestFlags::default())
            .await
            .unwrap();
        close(device).await;
    });
    let mut expected = vec![5; 1 << 20];
    expected[..65536].fill(7);
    expected[65536..3 * 65536].fill(0);
    compare_with_qemu(&place, "vmdk", "a.vmdk", &expected);
}

#[test]
fn streams_of_qemu_are_read_here() {
    let place = Place::default();
    let bytes = stream_content(22, 40 * 65536);
    std::fs::write(place.path("raw"), &bytes).unwrap();
    let arguments = [
        "convert",
        "-f",
        "raw",
        "-O",
        "vmdk",
        "-o",
        "subformat=streamOptimized",
    ];
    let names = [&*place.text("raw"), &place.text("a.vmdk")];
    qemu("qemu-img", &[&arguments[..], &names].concat());
    run(compare_image(&place.path("a.vmdk"), &bytes));
}
