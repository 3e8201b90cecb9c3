//! Lazy refcounts, side by side with QEMU: who left an image dirty does not matter
//! to who opens it next.

use std::sync::Arc;

use crate::common::{open, qemu_ok, qemu_verdict};
use vellum::gate::DenyAll;
use vellum::qcow2::{OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags};
use vellum_format::features::Incompatible;
use vellum_io::lane;
use vellum_storage::file::Create;

fn create(dir: &std::path::Path, options: &str) {
    let create = ["create", "-q", "-f", "qcow2", "-o", options, "image", "64M"];
    qemu_ok("qemu-img", dir, &create);
}

fn is_dirty(path: &std::path::Path) -> bool {
    let path = path.to_owned();
    lane::block_on(async move {
        let storage: Arc<dyn vellum::Storage> = open(&path, Create::No);
        let header = read_header(&storage).await.expect("a header");
        header.incompatible.contains(Incompatible::DIRTY)
    })
}

/// Writes 3 MiB of `fill` at 1 MiB and flushes; closes the image if `close`.
fn write(path: &std::path::Path, lazy: Option<bool>, fill: u8, close: bool) {
    let path = path.to_owned();
    lane::block_on(async move {
        let options = OpenOptions::default().lazy_refcounts(lazy);
        let storage = open(&path, Create::No);
        let image = Qcow2::open(storage, Arc::new(DenyAll), options)
            .await
            .expect("opened");
        let mut buffer = Buffer::zeroed(3 << 20);
        buffer.fill(fill);
        let write = image.write(1 << 20, buffer, RequestFlags::default());
        write.await.expect("written");
        image.flush().await.expect("flushed");
        if close {
            image.close().await.expect("closed");
        }
    });
}

#[test]
fn a_clean_close_leaves_a_clean_image() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    create(dir.path(), "lazy_refcounts=on");
    write(&path, None, 5, true);
    assert!(!is_dirty(&path));
    let verdict = qemu_verdict(&path);
    assert_eq!((verdict.exit_code, verdict.messages), (0, vec![]));
}

#[test]
fn qemu_repairs_what_we_left_dirty() {
    for (options, lazy) in [("lazy_refcounts=on", None), ("compat=1.1", Some(true))] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("image");
        create(dir.path(), options);
        write(&path, lazy, 5, false);
        assert!(is_dirty(&path), "{options}");
        let before = qemu_verdict(&path);
        assert_ne!(before.exit_code, 0, "{options}: counts were postponed");
        // Opening it for writing repairs it.
        let read = ["-f", "qcow2", "-c", "read -P 5 1M 3M", "image"];
        let text = qemu_ok("qemu-io", dir.path(), &read);
        assert!(!text.contains("verification failed"), "{options}: {text}");
        assert!(!is_dirty(&path), "{options}");
        assert_eq!(qemu_verdict(&path).exit_code, 0, "{options}");
    }
}

#[test]
fn we_repair_what_we_left_dirty() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    create(dir.path(), "lazy_refcounts=on,cluster_size=4k");
    write(&path, None, 5, false);
    assert!(is_dirty(&path));
    write(&path, Some(false), 6, true);
    assert!(!is_dirty(&path));
    assert_eq!(qemu_verdict(&path).exit_code, 0);
    let read = ["-r", "-f", "qcow2", "-c", "read -P 6 1M 3M", "image"];
    let text = qemu_ok("qemu-io", dir.path(), &read);
    assert!(!text.contains("verification failed"), "{text}");
}

/// Counts that a crash has left for clusters behind the end of the file, which are not there: they go with the repair, and
/// do not leak when the file grows.
#[test]
fn a_repair_counts_nothing_behind_the_end_of_the_file() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    create(dir.path(), "lazy_refcounts=on,cluster_size=4k");
    write(&path, None, 5, false);
    let mut bytes = std::fs::read(&path).expect("an image");
    let be64 = |at: u64| {
        let at = at as usize;
        u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
    };
    let (table, clusters) = (be64(48), bytes.len() / 4096);
    let index = clusters + 40;
    // A block of 4 KiB has 2048 counts.
    let block = be64(table + 8 * (index as u64 / 2048)) as usize;
    let behind = block + 2 * (index % 2048);
    for count in bytes[behind..behind + 6].chunks_mut(2) {
        count.copy_from_slice(&1u16.to_be_bytes());
    }
    std::fs::write(&path, &bytes).expect("an image");
    lane::block_on(async {
        let storage = open(&path, Create::No);
        let image = Qcow2::open(storage, Arc::new(DenyAll), OpenOptions::default());
        let image = image.await.expect("opened");
        let bytes = Buffer::zeroed(3 << 20);
        let written = image.write(8 << 20, bytes, RequestFlags::default());
        drop(written.await.expect("written"));
        image.close().await.expect("closed");
    });
    let verdict = qemu_verdict(&path);
    assert_eq!((verdict.exit_code, verdict.messages), (0, vec![]));
}

#[test]
fn the_option_switches_lazy_refcounts_off() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    create(dir.path(), "lazy_refcounts=on");
    write(&path, Some(false), 5, false);
    assert!(!is_dirty(&path));
    assert_eq!(qemu_verdict(&path).exit_code, 0, "nothing was postponed");
}

#[test]
fn old_images_refuse_lazy_refcounts() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    create(dir.path(), "compat=0.10");
    for read_only in [false, true] {
        let path = path.clone();
        let error = lane::block_on(async move {
            let options = OpenOptions::default()
                .lazy_refcounts(Some(true))
                .read_only(read_only);
            let storage = open(&path, Create::No);
            Qcow2::open(storage, Arc::new(DenyAll), options)
                .await
                .expect_err("version 2")
        });
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        assert_eq!(
            error.message(),
            "Lazy refcounts require a qcow2 image with at least qemu 1.1 compatibility level"
        );
    }
}
