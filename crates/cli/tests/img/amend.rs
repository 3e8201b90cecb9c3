//! `amend` beside the real one.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f raw r 3M",
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -z 2M 200k; write -P 3 9M 300k; write -z 9M 128k",
    "qemu-img create -q -f qcow2 -b a -F qcow2 b 10M",
    "qemu-io b: write -z 1M 200k; write -P 5 2M 64k; write -z 2M 64k",
    "qemu-img create -q -f qcow2 -o compat=0.10 old 10M",
    "qemu-io old: write -P 5 2M 64k",
    "qemu-img create -q -f qcow2 -o compat=0.10 -b a -F qcow2 old-b 10M",
    "qemu-img create -q -f qcow2 -o data_file=d.data d 10M",
    "qemu-img create -q -f qcow2 -o data_file=raw.data,data_file_raw=on raw 10M",
    "qemu-img create -q -f qcow2 -o extended_l2=on sub 10M",
    "qemu-img create -q -f qcow2 -o compression_type=zstd zstd 10M",
    "qemu-io zstd: write -c 0 64k",
    "qemu-img create -q -f qcow2 -o compression_type=zstd zstd-plain 10M",
    "qemu-img create -q -f qcow2 -o refcount_bits=1 narrow 10M",
    "qemu-img create -q -f qcow2 snap 10M",
    "qemu-io snap: write -z 0 64k; write -P 9 1M 64k; write -z 1M 64k; write -P 1 3M 64k",
    "qemu-img snapshot -c one snap",
    "qemu-io snap: write -P 7 0 64k; write -z 3M 64k; write -P 2 5M 64k",
    "qemu-img create -q -f qcow2 -o compat=0.10 old-snap 10M",
    "qemu-io old-snap: write -P 9 1M 64k",
    "qemu-img snapshot -c one old-snap",
];

/// Amends with both tools, and compares what came out.
#[track_caller]
fn amends(twins: &Twins, options: &str, image: &str) {
    let answer = twins.same_words(&["amend", "-o", options, image]);
    assert_eq!(answer.code, Some(0), "{options}: {answer:?}");
    let [ours, theirs] = twins.both(&["info", image]).map(|answer| answer.out);
    let without_length = |text: &str| {
        let lines = text.lines().filter(|line| !line.contains("file length:"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(without_length(&ours), without_length(&theirs), "{options}");
    let checked = twins.run_theirs_on_ours(&["check", image]);
    assert_eq!(checked.code, Some(0), "{options}: {checked:?}");
    // Data files are named as seen from their own folder.
    for copy in [twins.ours("copy"), twins.theirs("copy")] {
        drop(std::fs::remove_file(copy));
    }
    for answer in twins.both(&["convert", "-O", "raw", image, "copy"]) {
        assert_eq!(answer.code, Some(0), "{options}: {answer:?}");
    }
    let names = [twins.ours("copy"), twins.theirs("copy")];
    let names = names.map(|path| path.to_string_lossy().into_owned());
    let compared =
        twins.run_theirs_on_ours(&["compare", "-f", "raw", "-F", "raw", &names[0], &names[1]]);
    assert_eq!(compared.code, Some(0), "{options}: {compared:?}");
}

#[test]
fn versions_go_down_and_up() {
    let twins = Twins::new(IMAGES);
    for image in ["a", "b", "zstd-plain", "snap"] {
        amends(&twins, "compat=0.10", image);
        amends(&twins, "compat=v3,lazy_refcounts=on", image);
        amends(&twins, "compat=v2", image);
        amends(&twins, "compat=0.10", image);
    }
    for image in ["old", "old-b", "old-snap"] {
        amends(&twins, "compat=1.1,size=12M,refcount_bits=32", image);
    }
}

#[test]
fn snapshots_survive_other_versions() {
    let twins = Twins::new(IMAGES);
    // QEMU writes zeroes over what a zero cluster shares with a snapshot, so its
    // image is no measure here.
    for (image, versions) in [("snap", &["0.10", "1.1"][..]), ("old-snap", &["1.1"])] {
        snapshot_to_raw(&twins, image, "before");
        for version in versions {
            amends(&twins, &format!("compat={version}"), image);
        }
        snapshot_to_raw(&twins, image, "after");
        let words = ["compare", "-f", "raw", "-F", "raw", "before", "after"];
        let compared = twins.run_theirs_on_ours(&words);
        assert_eq!(compared.code, Some(0), "{image}: {compared:?}");
        let applied = twins.run_theirs_on_ours(&["snapshot", "-a", "one", image]);
        assert_eq!(applied.code, Some(0), "{applied:?}");
        let checked = twins.run_theirs_on_ours(&["check", image]);
        assert_eq!(checked.code, Some(0), "{image}: {checked:?}");
    }
}

/// Copies the snapshot of our image to a raw file, with the real tool.
#[track_caller]
fn snapshot_to_raw(twins: &Twins, image: &str, target: &str) {
    let words = ["convert", "-l", "one", "-O", "raw", image, target];
    let copied = twins.run_theirs_on_ours(&words);
    assert_eq!(copied.code, Some(0), "{copied:?}");
}

#[test]
fn refcounts_get_every_width() {
    let twins = Twins::new(IMAGES);
    for bits in [64, 8, 2, 32, 4, 16] {
        for image in ["a", "snap", "d"] {
            amends(&twins, &format!("refcount_bits={bits}"), image);
        }
    }
    for bits in [64, 1, 2, 1] {
        amends(&twins, &format!("refcount_bits={bits}"), "narrow");
    }
    amends(&twins, "compat=1.1", "old-snap");
    twins.same("amend -o refcount_bits=1 old-snap");
}

#[test]
fn data_files_are_renamed_and_sizes_changed() {
    let twins = Twins::new(IMAGES);
    amends(&twins, "size=20M", "d");
    amends(&twins, "size=5M", "d");
    amends(&twins, "data_file_raw=on", "raw");
    amends(&twins, "size=20M", "raw");
    amends(&twins, "data_file_raw=off", "raw");
    amends(&twins, "data_file_raw=off,lazy_refcounts", "raw");
    amends(&twins, "size=512", "snap");
    amends(&twins, "size=0", "snap");
    amends(&twins, "backing_file=a,backing_fmt=qcow2", "b");
    let by_options = "--image-opts driver=qcow2,file.filename=d,data-file.filename=d.data";
    twins.same("amend -o data_file= d");
    twins.same_but_places("info d");
    twins.same_but_places(&format!("info {by_options}"));
    twins.same(&format!("amend -o data_file=raw.data {by_options}"));
    twins.same("check -q d");
}

#[test]
fn the_same_is_refused_in_the_same_words() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "amend a",
        "amend",
        "amend -o",
        "amend -o size=1000 a",
        "amend -o lazy_refcounts=maybe a",
        "amend -o encrypt.state=active a",
        "amend -o help",
        "amend -f raw -o help",
        "amend -f foo -o help x",
        "amend -f bochs -o help",
        "amend -f raw -o size=1M missing",
        "amend -f raw -o size=1M r",
        "amend -o help r",
        "amend -f qcow2 -o help",
        "amend -o help a",
        "amend -o size=1M,? a",
        "amend -t foo -o size=1M a",
        "amend -o backing_fmt=raw a",
        "amend -o backing_file= a",
        "amend -o compat= a",
        "amend -o compat a",
        "amend -o compat=0.42 a",
        "amend -o size=2M,foo=1 a b",
        "amend -o foo=bar a",
        "amend -o encryption=on a",
        "amend -o cluster_size=1k a",
        "amend -o preallocation=on a",
        "amend -o nocow=on a",
        "amend -o data_file=x a",
        "amend -o data_file_raw=on a",
        "amend -o data_file_raw=on d",
        "amend -o data_file_raw=off a",
        "amend -o refcount_bits=x a",
        "amend -o refcount_bits=0 a",
        "amend -o refcount_bits=3 a",
        "amend -o refcount_bits=128 a",
        "amend -o refcount_bits=8 old",
        "amend -o lazy_refcounts=on old",
        "amend -o compat=0.10,lazy_refcounts=on a",
        "amend -o compat=0.10 d",
        "amend -o compat=0.10 sub",
        "amend -o compat=0.10 zstd",
        "amend -o compat=0.10 narrow",
        "amend -o compat=0.10,refcount_bits=8 a",
        "amend -o compat=0.10,size=20M snap",
        "amend -o size=1E a",
        "amend -o size=8E a",
        "amend -o a=b, a",
        "amend -o ,help a",
        "amend --nonsense a",
        "amend -f qcow2 --image-opts -o size=1M a",
        "info a",
        "check a",
    ]);
}

#[test]
fn progress_is_told_alike() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 base 4G",
        "qemu-img create -q -f qcow2 -b base -F qcow2 a 4G",
        "qemu-io a: write -z 0 64k; write -z 1G 64k; write -z 2G 64k; write -z 3G 64k",
        "qemu-img snapshot -c one a",
        "qemu-img create -q -f qcow2 plain 1M",
    ]);
    twins.all_same(&[
        "amend -p -o compat=0.10 a",
        "amend -p -o compat=1.1 a",
        "amend -p -o size=2M plain",
        "amend -p -q -o size=3M plain",
        "amend -p -o refcount_bits=3 plain",
        "amend -q -p --force -o refcount_bits=8 plain",
    ]);
}
