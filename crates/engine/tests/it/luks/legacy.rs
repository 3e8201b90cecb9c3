//! The AES-CBC of old qcow2 images, in both directions with QEMU.

use std::sync::Arc;

use vellum::io::lane;
use vellum::qcow2::create::{self, CreateOptions, Encryption};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Preallocation, ZeroRequest};
use vellum_storage::Storage;
use vellum_storage::wrap::{Matching, Operation, TraceStorage};

use super::{SECRET, file, open, qemu, read, write};

/// Where an old image is written, and with what.
const AES_WRITES: [(usize, usize, u8); 4] = [
    (1000, 100, 5),
    (300_000, 200_000, 6),
    (300_100, 7, 7),
    (65_530, 20, 8),
];

fn as_written(writes: &[(usize, usize, u8)]) -> Vec<u8> {
    let mut expected = vec![0; 1 << 20];
    for &(start, length, byte) in writes {
        expected[start..start + length].fill(byte);
    }
    expected
}

async fn check_content(device: &Qcow2, expected: &[u8]) {
    for (start, end) in [(0, 1 << 20), (999, 1101), (1050, 1051), (299_990, 500_123)] {
        let found = read(device, start as u64, end - start).await;
        assert_eq!(found[..], expected[start..end], "{start}..{end}");
    }
}

fn old_aes(path: &str) -> String {
    format!("driver=qcow2,encrypt.key-secret=s,file.filename={path}")
}

#[test]
fn old_aes_images_of_qemu_are_read_and_written() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("old").display().to_string();
    let create = "encrypt.format=aes,encrypt.key-secret=s";
    qemu(
        "qemu-img",
        &[
            "create", "-q", "--object", SECRET, "-f", "qcow2", "-o", create, &path, "1M",
        ],
    );
    for (start, length, byte) in &AES_WRITES[..2] {
        let command = format!("write -P {byte} {start} {length}");
        let opened = old_aes(&path);
        qemu(
            "qemu-io",
            &["--object", SECRET, "--image-opts", &opened, "-c", &command],
        );
    }
    lane::block_on(async {
        let gate = Arc::new(vellum::gate::DenyAll);
        let options = OpenOptions::default().passphrase(Some("secret".into()));
        let device = Qcow2::open(file(&path), gate, options).await.unwrap();
        check_content(&device, &as_written(&AES_WRITES[..2])).await;
        for &(start, length, byte) in &AES_WRITES[2..] {
            write(&*device, start as u64, &vec![byte; length]).await;
        }
        check_content(&device, &as_written(&AES_WRITES)).await;
        device.close().await.unwrap();
    });
    qemu_reads(&path, &AES_WRITES);
}

/// Has QEMU compare the bytes of each write, as far as later ones left them.
fn qemu_reads(path: &str, writes: &[(usize, usize, u8)]) {
    let expected = as_written(writes);
    let mut at = 0;
    while at < expected.len() {
        let same = expected[at..]
            .iter()
            .take_while(|&&byte| byte == expected[at]);
        let length = same.count();
        let command = format!("read -P {} {at} {length}", expected[at]);
        let opened = old_aes(path);
        qemu(
            "qemu-io",
            &["--object", SECRET, "--image-opts", &opened, "-c", &command],
        );
        at += length;
    }
}

#[test]
fn old_aes_images_are_made_for_qemu() {
    for (version, preallocation) in [
        (2, Preallocation::Off),
        (2, Preallocation::Full),
        (3, Preallocation::Metadata),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("old").display().to_string();
        std::fs::write(&path, b"").unwrap();
        lane::block_on(async {
            let options = CreateOptions::default()
                .size_bytes(1 << 20)
                .version(version)
                .preallocation(preallocation)
                .encryption(Some(Encryption::LegacyAes("secret".into())));
            create::create(file(&path), None, &options).await.unwrap();
            let device = open(&file(&path), "secret").await.unwrap();
            check_content(&device, &as_written(&[])).await;
            for &(start, length, byte) in &AES_WRITES {
                write(&*device, start as u64, &vec![byte; length]).await;
            }
            check_content(&device, &as_written(&AES_WRITES)).await;
            device.close().await.unwrap();
        });
        qemu_reads(&path, &AES_WRITES);
    }
}

/// What was discarded and not flushed reads as it was, or as zeroes, after a crash: not as decrypted zeroes.
#[test]
fn space_that_a_mapping_still_leads_to_is_not_given_back() {
    lane::block_on(async {
        let file = TraceStorage::new(Arc::new(MemStorage::new()));
        let options = CreateOptions::default()
            .size_bytes(1 << 20)
            .encryption(Some(Encryption::LegacyAes("secret".into())));
        create::create(file.clone(), None, &options).await.unwrap();
        let mut options = OpenOptions::default()
            .passphrase(Some("secret".into()))
            .discard(true);
        options.discard_no_unref = true;
        let gate = Arc::new(vellum::gate::DenyAll);
        let device = Qcow2::open(file.clone(), gate, options).await.unwrap();
        write(&*device, 0, &[7; 65536]).await;
        device.flush().await.unwrap();
        file.take();
        device.discard(0, 65536).await.unwrap();
        assert_eq!(file.count(&Matching::operation(Operation::Discard)), 0);
        assert_eq!(read(&*device, 0, 512).await[..], [0; 512]);
        device.close().await.unwrap();
    });
}

/// An old image with its data in another file, which holds one byte all over.
async fn open_beside(image: Arc<MemStorage>, data: Arc<MemStorage>) -> Arc<Qcow2> {
    let options = OpenOptions::default()
        .passphrase(Some("secret".into()))
        .data_file(Some(data))
        .discard(true);
    let gate = Arc::new(vellum::gate::DenyAll);
    Qcow2::open(image, gate, options).await.unwrap()
}

/// Whatever was written of it before the program is killed, each sector is as it was or zero.
#[test]
fn what_is_given_up_in_a_data_file_is_never_decrypted_zeroes() {
    const DISK: u64 = 256 << 10;
    for raw in [false, true] {
        for change in ["discard", "unmap", "zero", "shrink"] {
            lane::block_on(async {
                let (image, data) = (Arc::new(MemStorage::new()), Arc::new(MemStorage::new()));
                let options = CreateOptions::default()
                    .size_bytes(DISK)
                    .data_file(Some("data".into()))
                    .data_file_raw(raw)
                    .encryption(Some(Encryption::LegacyAes("secret".into())));
                let beside: Arc<dyn Storage> = data.clone();
                create::create(image.clone(), Some(beside), &options)
                    .await
                    .unwrap();
                let device = open_beside(image.clone(), data.clone()).await;
                write(&*device, 0, &[7; DISK as usize]).await;
                device.flush().await.unwrap();
                let before = image.snapshot();
                let zeroes = ZeroRequest::default().may_unmap(change == "unmap");
                match change {
                    "discard" => device.discard(0, DISK).await.unwrap(),
                    "shrink" => device.truncate(DISK / 2).await.unwrap(),
                    _ => device.write_zeroes(0, DISK, zeroes).await.unwrap(),
                }
                let mut left = data.snapshot();
                // What was cut in the end is cut later than the mapping is durable.
                left.resize(if change == "shrink" { DISK / 2 } else { DISK } as usize, 0);
                let killed = Arc::new(MemStorage::with_bytes(before));
                let killed = open_beside(killed, Arc::new(MemStorage::with_bytes(left))).await;
                let seen = read(
                    &*killed,
                    0,
                    if change == "shrink" { DISK / 2 } else { DISK } as usize,
                )
                .await;
                let is_noise =
                    |sector: &[u8]| ![[0; 512], [7; 512]].iter().any(|one| one == sector);
                let noise = seen.chunks(512).filter(|sector| is_noise(sector)).count();
                assert_eq!(noise, 0, "{change} of a data file, raw: {raw}");
                device.close().await.unwrap();
            });
        }
    }
}
