//! What becomes of the space that discarded clusters took, by the options of QEMU.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::common::{qemu_ok, qemu_verdict};
use vellum::gate::DenyAll;
use vellum::qcow2::{OpenOptions, Qcow2, SnapshotSelector};
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags};
use vellum_io::lane;
use vellum_storage::file::{FileOptions, FileStorage};

const MIB: u64 = 1 << 20;

fn options(change: impl FnOnce(&mut OpenOptions)) -> OpenOptions {
    let mut options = OpenOptions::default().discard(true);
    change(&mut options);
    options
}

async fn open(path: &Path, options: OpenOptions) -> vellum::Result<Arc<Qcow2>> {
    let file = FileOptions::default().discard(true);
    let storage = FileStorage::open(path, &file)?;
    Qcow2::open(storage, Arc::new(DenyAll), options).await
}

fn taken_mib(path: &Path) -> u64 {
    let file = std::fs::File::open(path).expect("the image");
    file.sync_all().expect("synced");
    (path.metadata().expect("the image").blocks() * 512 + MIB / 2) / MIB
}

/// Makes an image of 8 MiB of data, takes a snapshot of it if `snapshot`, and
/// discards the first 4 MiB; returns the MiB that the file takes afterwards.
fn after_discard(dir: &Path, snapshot: bool, options: OpenOptions) -> u64 {
    let path = dir.join("image");
    qemu_ok(
        "qemu-img",
        dir,
        &["create", "-q", "-f", "qcow2", "image", "64M"],
    );
    let write = ["-f", "qcow2", "-c", "write -P 3 0 8M", "image"];
    qemu_ok("qemu-io", dir, &write);
    if snapshot {
        qemu_ok("qemu-img", dir, &["snapshot", "-c", "one", "image"]);
    }
    assert_eq!(taken_mib(&path), 8);
    let at = path.clone();
    lane::block_on(async move {
        let image = open(&at, options).await.expect("opened");
        image.discard(0, 4 * MIB).await.expect("discarded");
        image.close().await.expect("closed");
    });
    let verdict = qemu_verdict(&path);
    assert_eq!((verdict.exit_code, verdict.messages), (0, vec![]));
    let read = [
        "-r",
        "-f",
        "qcow2",
        "-c",
        "read -P 0 0 4M",
        "-c",
        "read -P 3 4M 4M",
        "image",
    ];
    let text = qemu_ok("qemu-io", dir, &read);
    assert!(!text.contains("verification failed"), "{text}");
    taken_mib(&path)
}

#[test]
fn the_guests_discards_are_passed_on_unless_that_is_switched_off() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let passed = after_discard(dir.path(), false, options(|_| {}));
    assert_eq!(passed, 4);
    let kept = |o: &mut OpenOptions| o.pass_discard_request = Some(false);
    assert_eq!(after_discard(dir.path(), false, options(kept)), 8);
    let ignored = |o: &mut OpenOptions| o.discard = false;
    let path = dir.path().join("image");
    lane::block_on(async move {
        let image = open(&path, options(ignored)).await.expect("opened");
        image.discard(4 * MIB, 4 * MIB).await.expect("ignored");
        let read = image.read(4 * MIB, Buffer::for_read(512)).await;
        assert_eq!(read.expect("read")[..], [3; 512]);
        image.close().await.expect("closed");
    });
}

#[test]
fn discarded_clusters_keep_their_place_without_unref() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let keep = |o: &mut OpenOptions| o.discard_no_unref = true;
    assert_eq!(after_discard(dir.path(), false, options(keep)), 4);
    let map = ["map", "--output=json", "-f", "qcow2", "image"];
    let text = qemu_ok("qemu-img", dir.path(), &map);
    let zero = r#""present": true, "zero": true, "data": false, "compressed": false, "offset""#;
    assert!(text.contains(zero), "{text}");
    let neither = |o: &mut OpenOptions| {
        o.discard_no_unref = true;
        o.pass_discard_request = Some(false);
    };
    assert_eq!(after_discard(dir.path(), false, options(neither)), 8);
}

#[test]
fn what_a_snapshot_shares_is_never_punched() {
    for discard_no_unref in [false, true] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let keep = |o: &mut OpenOptions| o.discard_no_unref = discard_no_unref;
        assert_eq!(after_discard(dir.path(), true, options(keep)), 8);
        qemu_ok("qemu-img", dir.path(), &["snapshot", "-a", "one", "image"]);
        let read = ["-r", "-f", "qcow2", "-c", "read -P 3 0 8M", "image"];
        let text = qemu_ok("qemu-io", dir.path(), &read);
        assert!(!text.contains("verification failed"), "{text}");
    }
}

#[test]
fn what_a_deleted_snapshot_had_is_given_back_unless_that_is_switched_off() {
    for (passed, kept) in [(None, false), (Some(false), true)] {
        let dir = tempfile::tempdir().expect("a temporary directory");
        assert_eq!(after_discard(dir.path(), true, options(|_| {})), 8);
        let path = dir.path().join("image");
        lane::block_on(async move {
            let all = |o: &mut OpenOptions| o.pass_discard_snapshot = passed;
            let image = open(&path, options(all)).await.expect("opened");
            let one = SnapshotSelector::Name("one".into());
            image.delete_snapshot(one).await.expect("deleted");
            image.close().await.expect("closed");
        });
        let taken = taken_mib(&dir.path().join("image"));
        assert_eq!(taken >= 8, kept, "{passed:?}: {taken}");
    }
}

#[test]
fn replaced_clusters_are_used_again_and_not_punched() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    after_discard(dir.path(), false, options(|_| {}));
    let path = dir.path().join("image");
    lane::block_on(async move {
        let all = |o: &mut OpenOptions| o.pass_discard_other = true;
        let image = open(&path, options(all)).await.expect("opened");
        for fill in 1..4 {
            let mut buffer = Buffer::zeroed(MIB as usize);
            buffer.fill(fill);
            let write = image.write(0, buffer, RequestFlags::default());
            write.await.expect("written");
            image.discard(0, MIB).await.expect("discarded");
            image.flush().await.expect("flushed");
        }
        image.close().await.expect("closed");
        let len = path.metadata().expect("the image").len();
        assert!(len < 9 * MIB, "{len}: freed clusters are used again");
    });
    assert_eq!(qemu_verdict(&dir.path().join("image")).exit_code, 0);
}

#[test]
fn old_images_refuse_discard_no_unref() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let create = [
        "create",
        "-q",
        "-f",
        "qcow2",
        "-o",
        "compat=0.10",
        "image",
        "64M",
    ];
    qemu_ok("qemu-img", dir.path(), &create);
    let path = dir.path().join("image");
    let error = lane::block_on(async move {
        open(&path, options(|o| o.discard_no_unref = true))
            .await
            .expect_err("version 2")
    });
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    let message = "discard-no-unref is only supported since qcow2 version 3";
    assert_eq!(error.message(), message);
}
