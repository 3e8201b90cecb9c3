//! `snapshot` and `-l` beside the real tool.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 base 6M",
    "qemu-io base: write -P 7 0 6M",
    "qemu-img create -q -f qcow2 -b base -F qcow2 a 4M",
    "qemu-io a: write -P 1 1M 100k; write -P 2 3M 300k",
    "qemu-img create -q -f qcow2 -o compat=0.10 old 5M",
    "qemu-io old: write -P 1 1M 100k",
    "qemu-img create -q -f qcow2 -o refcount_bits=1 narrow 1M",
    "qemu-io narrow: write 0 64k",
    "qemu-img create -q -f qcow2 -o data_file=data external 1M",
    "qemu-img create -q -f qcow2 marked 1M",
    "qemu-img bitmap --add marked bitmap",
    "qemu-img create -q -f raw raw 1M",
];

/// Each line is a command line that both must answer alike.
#[track_caller]
fn alike(twins: &Twins, lines: &[&str]) {
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().collect();
        twins.same_words(&words);
    }
}

/// Both images must be sound, for both tools, and hold the same.
#[track_caller]
fn same_images(twins: &Twins, image: &str) {
    for words in [["check", image], ["map", image], ["snapshot", image]] {
        let ours = twins.run_ours(&words);
        let theirs = twins.run_theirs_on_ours(&words);
        assert_eq!(ours, theirs, "{words:?}");
        assert_eq!(ours.code, Some(0), "{words:?}");
    }
    let names = [twins.ours(image), twins.theirs(image)];
    let names = names.map(|name| name.to_string_lossy().into_owned());
    let compared = twins.run_theirs_on_ours(&["compare", &names[0], &names[1]]);
    assert_eq!(compared.code, Some(0), "{image}: {compared:?}");
}

#[test]
fn snapshots_are_taken_applied_and_deleted_alike() {
    let twins = Twins::new(IMAGES);
    for image in ["a", "old", "marked"] {
        for step in [
            "snapshot -c first",
            "snapshot -c 1",
            "snapshot -c first",
            "snapshot",
            "snapshot -l",
            "snapshot -d 1",
            "snapshot -a 1",
            "snapshot -a first",
            "snapshot -d first",
            "snapshot -q -d 3",
            "snapshot -a 3",
            "snapshot -c again",
            "snapshot -U --list",
        ] {
            alike(&twins, &[&format!("{step} {image}")]);
            same_images(&twins, image);
        }
    }
}

#[test]
fn snapshots_of_other_sizes_come_back() {
    let twins = Twins::new(IMAGES);
    alike(
        &twins,
        &[
            "snapshot -c small a",
            "resize a 9M",
            "snapshot -c large a",
            "resize --shrink a 1M",
            "snapshot -a large a",
        ],
    );
    same_images(&twins, "a");
    alike(&twins, &["snapshot -a small a", "resize a 5M"]);
    same_images(&twins, "a");
    alike(&twins, &["snapshot -d small a", "snapshot -d large a"]);
    same_images(&twins, "a");
}

#[test]
fn what_cannot_be_done_is_told_in_the_same_words() {
    let twins = Twins::new(IMAGES);
    alike(
        &twins,
        &[
            "snapshot",
            "snapshot -z a",
            "snapshot -c",
            "snapshot -l -c x a",
            "snapshot -a nope a",
            "snapshot -d nope a",
            "snapshot -c x missing",
            "snapshot -U -c x a",
            "snapshot -f qcow2 --image-opts driver=qcow2,file.filename=a",
            "snapshot -c x --image-opts driver=qcow2,file.filename=a",
            "snapshot -c x -f raw raw",
            "snapshot -a x -f raw raw",
            "snapshot -d x -f raw raw",
            "snapshot -l -f raw raw",
            "snapshot -c x external",
            "snapshot -c x marked",
            "snapshot -a x marked",
            "snapshot -d x marked",
            "snapshot -c x old",
            "resize old 9M",
        ],
    );
    // QEMU leaks a cluster when the counts have no room.
    alike(&twins, &["snapshot -c x narrow"]);
    assert_eq!(twins.run_ours(&["check", "narrow"]).code, Some(0));
}

#[test]
fn snapshots_are_read_by_name() {
    let twins = Twins::new(IMAGES);
    alike(
        &twins,
        &[
            "snapshot -c one a",
            "snapshot -a one a",
            "convert -l one -O raw a out",
            "convert -l snapshot.id=1 -O raw a out",
            "convert -l snapshot.name=one,snapshot.id=1 -O raw a out",
            "convert -l snapshot.name=one,snapshot.id=2 -O raw a out",
            "convert -l snapshot.foo=1 -O raw a out",
            "convert -l nope -O raw a out",
            "convert -l one -O raw -f raw raw out",
            "convert -l one -O raw a a out",
            "measure -l one -O qcow2 a",
            "measure -l nope -O qcow2 a",
        ],
    );
    let [ours, theirs] = [twins.ours("out"), twins.theirs("out")];
    let read = |path| std::fs::read(path).expect("a copy");
    assert!(read(ours) == read(theirs));
}
