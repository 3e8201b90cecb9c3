//! Images that QEMU left dirty, opened by us.

mod common;

use std::sync::Arc;

use common::{open, qemu, qemu_ok, qemu_verdict};
use vellum::BlockDevice;
use vellum::gate::DenyAll;
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum_storage::file::Create;
use vellum_storage::lane;

/// Opening an image for writing repairs it: QEMU then finds nothing wrong with it,
/// and the data is there.
#[test]
fn an_image_left_dirty_is_repaired_when_it_is_opened() {
    let kinds = [
        "cluster_size=64k",
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=1",
        "cluster_size=16k,extended_l2=on",
    ];
    for kind in kinds {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let options = format!("lazy_refcounts=on,{kind}");
        let create = ["create", "-q", "-f", "qcow2", "-o", &options, "image", "8M"];
        qemu_ok("qemu-img", dir.path(), &create);
        let steps = [
            "-f",
            "qcow2",
            "-c",
            "write -P 7 1M 500k",
            "-c",
            "flush",
            "-c",
            "abort",
        ];
        qemu("qemu-io", dir.path(), &[&steps[..], &["image"]].concat());
        let path = dir.path().join("image");
        let before = qemu_verdict(&path);
        assert_ne!(before.exit_code, 0, "{kind}: the crash left counts behind");

        lane::block_on(async {
            let storage = open(&path, Create::No);
            let image = Qcow2::open(storage, Arc::new(DenyAll), OpenOptions::default()).await;
            image.expect("repaired").close().await.expect("closed");
        });

        let after = qemu_verdict(&path);
        assert_eq!((after.exit_code, after.messages), (0, vec![]), "{kind}");
        let read = ["-r", "-f", "qcow2", "-c", "read -P 7 1M 500k", "image"];
        let text = qemu_ok("qemu-io", dir.path(), &read);
        assert!(!text.contains("verification failed"), "{kind}: {text}");
    }
}
