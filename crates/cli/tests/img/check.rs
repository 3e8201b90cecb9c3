//! `check` beside the real one.

use std::os::unix::fs::FileExt;

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -z 5M 64k; write 9M 1k",
    "qemu-img convert -c -O qcow2 a c",
    "qemu-img create -q -f qcow2 -o cluster_size=512,refcount_bits=2 s 1M",
    "qemu-io s: write 0 300k",
    "qemu-img create -q -f raw r 1M",
    "qemu-img create -q -f qcow2 -u -b none -F raw n 10M",
];

/// Changes bytes of an image in both folders.
fn damage(twins: &Twins, name: &str, offset_bytes: u64, bytes: &[u8]) {
    let ours = twins.ours(name);
    let theirs = twins.ours("../theirs").join(name);
    for path in [ours, theirs] {
        let file = std::fs::OpenOptions::new()
            .write(true)
            .open(path)
            .expect("the image");
        file.write_all_at(bytes, offset_bytes).expect("a write");
    }
}

#[test]
fn sound_images_are_counted_alike() {
    let twins = Twins::new(IMAGES);
    for image in ["a", "c", "s"] {
        let answer = twins.same(&format!("check {image}"));
        assert_eq!(answer.code, Some(0));
        twins.same(&format!("check --output=json {image}"));
    }
}

#[test]
fn damage_and_leaks_have_their_own_codes() {
    let twins = Twins::new(IMAGES);
    // Refcounts are 16 bits wide and begin at the third cluster.
    let counts = 2 * 65536;
    damage(&twins, "a", counts + 2 * 5, &[0, 0]);
    assert_eq!(twins.same("check a").code, Some(2));
    twins.same("check --output=json a");
    damage(&twins, "a", counts + 2 * 5, &[0, 1]);
    damage(&twins, "a", counts + 2 * 40, &[0, 1]);
    let length = twins.ours("a").metadata().expect("the image").len();
    damage(&twins, "a", length.max(41 * 65536) - 1, &[0]);
    assert_eq!(twins.same("check a").code, Some(3));
    twins.all_same(&["check -q a", "check --output=json a"]);
}

#[test]
fn what_cannot_be_checked_says_so() {
    let twins = Twins::new(IMAGES);
    assert_eq!(twins.same("check r").code, Some(63));
    twins.all_same(&[
        "check",
        "check none",
        "check n",
        "check -f qcow2 r",
        "check -r foo a",
        "check -U -r all a",
        "check -T foo a",
        "check --output=foo a",
    ]);
}
