//! Encrypted qcow images, both ways: what is written here is read by QEMU, and the other way round.

use std::sync::Arc;

use crate::common::{Model, Place, compare_by_words, new_file, open_file, qemu, run};
use vellum::luks::Unlocking;
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, ErrorKind, Raw, RawOptions, RequestFlags, Storage, ZeroRequest};
use vellum_foreign::qcow::{self, CreateOptions, OpenOptions, QcowLayout, create};
use vellum_foreign::{ForeignImage, MappedDevice};

const PASSPHRASE: &str = "open sesame, longer than a key is";

fn unlocking() -> Unlocking {
    Unlocking::default().passphrase(Some(PASSPHRASE.into()))
}

async fn open(
    file: Arc<dyn Storage>,
    backing: Option<Arc<dyn BlockDevice>>,
) -> Arc<MappedDevice<QcowLayout>> {
    let options = OpenOptions::default().unlocking(unlocking());
    qcow::open(file, backing, options).await.unwrap()
}

async fn create_encrypted(file: &Arc<dyn Storage>, size_bytes: u64, backing: Option<String>) {
    let options = CreateOptions::default()
        .size_bytes(size_bytes)
        .backing_file(backing)
        .is_encrypted(true);
    create(file, &options).await.unwrap();
}

fn secret() -> String {
    format!("secret,id=s,data={}", PASSPHRASE.replace(',', ",,"))
}

fn image_options(image: &str) -> String {
    format!("driver=qcow,encrypt.key-secret=s,file.filename={image}")
}

fn compare_with_qemu(place: &Place, image: &str, bytes: &[u8]) {
    let options = image_options(&place.text(image));
    let words = ["--object", &secret(), "--image-opts", &options];
    compare_by_words(place, &words, bytes);
}

fn qemu_io(image: &str, command: &str) {
    let options = image_options(image);
    let words = ["--object", &secret(), "--image-opts", &options];
    qemu("qemu-io", &[&words[..], &["-c", command]].concat());
}

fn qemu_makes(image: &str, size: &str) {
    let options = "encrypt.format=aes,encrypt.key-secret=s";
    let words = ["create", "-q", "--object", &secret(), "-f", "qcow"];
    let words = [&words[..], &["-o", options, image, size]].concat();
    qemu("qemu-img", &words);
}

#[test]
fn what_is_written_here_is_read_there() {
    let (seed, size_bytes) = (11, 9 << 20 | 0x600);
    let place = Place::default();
    let path = place.path("a.qcow");
    let mut model = Model::new(seed, size_bytes);
    run(async {
        let file = new_file(&path);
        create_encrypted(&file, size_bytes, None).await;
        for _ in 0..3 {
            let device = open(file.clone(), None).await;
            model.compare(&*device).await;
            model.exercise(&*device, 60).await;
            model.compare(&*device).await;
            device.close().await.unwrap();
        }
    });
    compare_with_qemu(&place, "a.qcow", &model.bytes);
}

#[test]
fn what_qemu_writes_is_read_here() {
    let place = Place::default();
    let image = place.text("a.qcow");
    qemu_makes(&image, "10M");
    let mut model = Model::new(13, 10 << 20);
    for (offset, len, pattern) in [(5 << 20, 4096, 7), (512, 3 << 20, 9), (9 << 20, 1000, 1)] {
        qemu_io(&image, &format!("write -P {pattern} {offset} {len}"));
        model.bytes[offset..offset + len].fill(pattern);
    }
    run(async {
        let device = open(open_file(&place.path("a.qcow")), None).await;
        model.compare(&*device).await;
        model.exercise(&*device, 100).await;
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "a.qcow", &model.bytes);
    // And it goes on where we ended.
    qemu_io(&image, "write -P 3 0 10M");
    compare_with_qemu(&place, "a.qcow", &[3; 10 << 20]);
}

#[test]
fn a_backing_file_is_read_as_it_is_and_copied_encrypted() {
    let (seed, size_bytes) = (12, 5 << 20);
    let place = Place::default();
    let mut model = Model::new(seed, size_bytes);
    let base: Vec<u8> = (0..4u32 << 20).map(|at| (at / 100) as u8).collect();
    model.bytes[..base.len()].copy_from_slice(&base);
    std::fs::write(place.path("base.raw"), &base).unwrap();
    let open_base = || {
        let base = open_file(&place.path("base.raw"));
        Raw::open(base, RawOptions::default()).unwrap()
    };
    run(async {
        let file = new_file(&place.path("a.qcow"));
        create_encrypted(&file, size_bytes, Some(place.text("base.raw"))).await;
        let device = open(file.clone(), Some(open_base())).await;
        model.exercise(&*device, 60).await;
        model.compare(&*device).await;
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "a.qcow", &model.bytes);
    // With clusters larger than a sector, as no program of today makes them, something is copied.
    run(async {
        let memory = Arc::new(MemStorage::new());
        let file: Arc<dyn Storage> = memory.clone();
        create_encrypted(&file, size_bytes, None).await;
        let device = open(file.clone(), Some(open_base())).await;
        model.bytes.fill(0);
        model.bytes[..base.len()].copy_from_slice(&base);
        model.exercise(&*device, 60).await;
        model.compare(&*device).await;
        device.close().await.unwrap();
        let text = base.windows(64).nth(5000).unwrap();
        let stored = memory.snapshot();
        assert!(!stored.windows(64).any(|bytes| bytes == text));
    });
}

/// QEMU compresses into encrypted images all the same, and does not encrypt that.
#[test]
fn compressed_clusters_are_read_and_replaced_by_encrypted_ones() {
    let place = Place::default();
    let image = place.text("a.qcow");
    qemu_makes(&image, "1M");
    for (offset, pattern) in [(0, 5), (4096, 6), (40960, 7)] {
        qemu_io(&image, &format!("write -c -P {pattern} {offset} 4096"));
    }
    let mut model = Model::new(14, 1 << 20);
    model.bytes[..4096].fill(5);
    model.bytes[4096..8192].fill(6);
    model.bytes[40960..45056].fill(7);
    run(async {
        let device = open(open_file(&place.path("a.qcow")), None).await;
        model.compare(&*device).await;
        let flags = RequestFlags::default();
        // A part of one.
        let written = device.write(5000, Buffer::copy_of(&[8; 700]), flags);
        written.await.unwrap();
        model.bytes[5000..5700].fill(8);
        let request = ZeroRequest::default();
        device.write_zeroes(40960, 1000, request).await.unwrap();
        model.bytes[40960..41960].fill(0);
        model.compare(&*device).await;
        let compressed = device.write_compressed(8192, Buffer::copy_of(&[1; 4096]), flags);
        let error = compressed.await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let message = "encrypted images have no compressed clusters";
        assert_eq!(error.message(), message);
        device.close().await.unwrap();
    });
    compare_with_qemu(&place, "a.qcow", &model.bytes);
}

#[test]
fn an_image_is_opened_with_its_passphrase_or_without_data() {
    run(async {
        let memory = Arc::new(MemStorage::new());
        let file: Arc<dyn Storage> = memory.clone();
        create_encrypted(&file, 1 << 20, None).await;
        let device = open(file.clone(), None).await;
        let flags = RequestFlags::default();
        let text = Buffer::copy_of(&[9; 8192]);
        device.write(0, text, flags).await.unwrap();
        device.close().await.unwrap();
        let stored = memory.snapshot();
        assert!(!stored.windows(16).any(|bytes| bytes == [9; 16]));
        let facts = ForeignImage::of(&*device).unwrap().facts();
        assert!(facts.is_encrypted);
        for (unlocking, expected) in [
            (
                Unlocking::default(),
                "Parameter 'encrypt.key-secret' is required for cipher",
            ),
            (
                unlocking().format(Some("luks".to_owned())),
                "Header reported 'aes' encryption format but options specify 'luks'",
            ),
        ] {
            let options = OpenOptions::default().unlocking(unlocking);
            let error = qcow::open(file.clone(), None, options).await.unwrap_err();
            assert_eq!(error.message(), expected);
            assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        }
        let unlocking = Unlocking::default().no_data(true);
        let options = OpenOptions::default().unlocking(unlocking);
        let device = qcow::open(file.clone(), None, options).await.unwrap();
        let read = device.read(0, Buffer::for_read(512)).await;
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Denied);
        for offset in [0, 512 << 10] {
            let written = device.write(offset, Buffer::zeroed(512), flags).await;
            assert_eq!(written.unwrap_err().kind(), ErrorKind::Denied);
        }
        let extent = device.block_status(0, 512, 1).await.unwrap();
        assert!(extent.kind.is_data() && extent.host.is_none());
    });
}

#[test]
fn what_is_not_encrypted_is_not_taken_for_it() {
    run(async {
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default().size_bytes(1 << 20);
        create(&file, &options).await.unwrap();
        let demanded = unlocking().format(Some("aes".to_owned()));
        let options = OpenOptions::default().unlocking(demanded);
        let error = qcow::open(file, None, options).await.unwrap_err();
        let expected = "No encryption in image header, but options specified format 'aes'";
        assert_eq!(error.message(), expected);
    });
}
