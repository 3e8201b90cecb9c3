//! QEMU and sealed images.

use std::path::Path;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::qcow2::seal::{SealOptions, VerifyOptions, VerifyReads};
use vellum::qcow2::{OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, Storage};
use vellum_format::features::Autoclear;
use vellum_io::lane;
use vellum_storage::{FileOptions, FileStorage};

use crate::common::{qemu_ok, qemu_verdict, vellum_verdict};

fn file(path: &Path, read_only: bool) -> Arc<dyn Storage> {
    let options = FileOptions::default().read_only(read_only);
    FileStorage::open(path, &options).unwrap()
}

async fn is_sealed(path: &Path) -> bool {
    let header = read_header(&file(path, true)).await.unwrap();
    header.autoclear.contains(Autoclear::SEALED)
}

/// Seals the image at `path`.
async fn seal(path: &Path) {
    let options = OpenOptions::default();
    let image = Qcow2::open(file(path, false), Arc::new(DenyAll), options).await;
    let image = image.unwrap();
    image.seal(SealOptions::default()).await.unwrap();
    image.close().await.unwrap();
}

fn qemu_finds_nothing_wrong(path: &Path) {
    let told = qemu_ok("qemu-img", path.parent().unwrap(), &["check", "disk.qcow2"]);
    assert!(told.contains("No errors were found"), "{told}");
}

#[test]
fn qemu_reads_a_sealed_image_and_takes_the_seal_off_when_it_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.qcow2");
    let qemu_io = |words: &[&str]| {
        qemu_ok("qemu-io", dir.path(), &[words, &["disk.qcow2"]].concat());
    };
    let words = ["create", "-q", "-f", "qcow2", "disk.qcow2", "64M"];
    qemu_ok("qemu-img", dir.path(), &words);
    qemu_io(&["-c", "write -P 7 1M 3M", "-c", "write -z 8M 1M"]);
    lane::block_on(seal(&path));
    assert!(qemu_verdict(&path) == vellum_verdict(&path));
    qemu_finds_nothing_wrong(&path);
    qemu_io(&["-r", "-c", "read -P 7 1M 3M"]);
    lane::block_on(async { assert!(is_sealed(&path).await, "reading changes nothing") });
    qemu_io(&["-c", "write -P 9 20M 8M", "-c", "read -P 7 1M 3M"]);
    qemu_finds_nothing_wrong(&path);
    lane::block_on(async {
        assert!(!is_sealed(&path).await, "another has written");
        let options = OpenOptions::default().read_only(true);
        let image = Qcow2::open(file(&path, true), Arc::new(DenyAll), options).await;
        let image = image.unwrap();
        assert!(!image.verifies_reads());
        let bytes = image
            .read(20 << 20, Buffer::for_read(8 << 20))
            .await
            .unwrap();
        assert!(bytes.iter().all(|byte| *byte == 9));
    });
    // Sealed anew over what is left of the old seal.
    lane::block_on(async {
        seal(&path).await;
        let options = OpenOptions::default().read_only(true);
        let options = options.verify(Some(VerifyReads::Off));
        let image = Qcow2::open(file(&path, true), Arc::new(DenyAll), options).await;
        let report = image
            .unwrap()
            .verify(VerifyOptions::default())
            .await
            .unwrap();
        assert_eq!(report.differences, 0);
    });
    qemu_finds_nothing_wrong(&path);
}
