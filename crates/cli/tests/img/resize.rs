//! `resize` beside the real one.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -P 3 9M 300k",
    "qemu-img create -q -f qcow2 -b a -F qcow2 b 5M",
    "qemu-img create -q -f qcow2 -o compat=0.10 -b a -F qcow2 old 5M",
    "qemu-img create -q -f qcow2 -o compat=0.10 old-snapshot 5M",
    "qemu-img snapshot -c s old-snapshot",
    "qemu-img create -q -f raw r 3M",
    "qemu-io -f raw r: write -P 9 64k 70k",
];

/// Resizes with both tools, and compares what came out.
#[track_caller]
fn resizes(twins: &Twins, arguments: &str, image: &str) {
    let words: Vec<&str> = arguments.split_whitespace().collect();
    let (size, options) = words.split_last().expect("a size");
    let words = [&["resize"], options, &[image, size]].concat();
    assert_eq!(twins.same_words(&words).code, Some(0), "{arguments}");
    let [ours, theirs] = twins.both(&["info", image]).map(|answer| answer.out);
    let without_length = |text: &str| {
        let lines = text.lines().filter(|line| !line.contains("file length:"));
        lines.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(without_length(&ours), without_length(&theirs));
    let checked = twins.run_theirs_on_ours(&["check", image]);
    assert!(
        matches!(checked.code, Some(0 | 63)),
        "{arguments}: {checked:?}"
    );
    let (ours, theirs) = (twins.ours(image), twins.theirs(image));
    let len = |path| std::fs::metadata(path).expect("an image").len();
    // Where things lie in the file is each engine's own business; its length is not.
    let most = len(&theirs) + len(&theirs) / 4 + (256 << 10);
    assert!(
        len(&ours) <= most,
        "{arguments}: {} bytes, not {}",
        len(&ours),
        len(&theirs)
    );
    let names = [ours.to_string_lossy(), theirs.to_string_lossy()];
    let compared = twins.run_theirs_on_ours(&["compare", &names[0], &names[1]]);
    assert_eq!(compared.code, Some(0), "{arguments}: {compared:?}");
}

#[test]
fn images_grow_and_shrink_alike() {
    let kinds = [
        "cluster_size=512",
        "cluster_size=4k,refcount_bits=64",
        "cluster_size=2M",
        "compat=0.10",
        "extended_l2=on",
        "refcount_bits=1",
        "data_file=data",
        "data_file=data,data_file_raw=on",
    ];
    for kind in kinds {
        let create = format!("qemu-img create -q -f qcow2 -o {kind} x 1M");
        let twins = Twins::new(&[&create, "qemu-io x: write -P 5 0 700k"]);
        for arguments in [
            "10M",
            "--preallocation=metadata +7M",
            "--preallocation=falloc 20M",
            "--preallocation=full 24M",
            "300M",
            "--shrink 15M",
            "--shrink -14848k",
            "--shrink 100352",
        ] {
            resizes(&twins, arguments, "x");
        }
    }
}

#[test]
fn new_space_hides_a_longer_backing_file() {
    let twins = Twins::new(IMAGES);
    for size in ["5244416", "7M", "12M"] {
        resizes(&twins, size, "b");
        twins.same("map --output=json b");
    }
    resizes(&twins, "--preallocation=metadata 13M", "b");
    twins.same("resize old 10M");
}

#[test]
fn an_old_image_hides_a_longer_backing_file_to_the_end_of_its_last_cluster() {
    let twins = Twins::new(&[
        "qemu-img create -q -f raw base 3M",
        "qemu-io -f raw base: write -P 9 0 3M",
        "qemu-img create -q -f qcow2 -o compat=0.10,cluster_size=512k -b base -F raw old 2098k",
        "qemu-img create -q -f qcow2 -o compat=0.10,cluster_size=512k -b base -F raw cut 2M",
    ]);
    twins.same("resize --shrink cut 1538k");
    for image in ["old", "cut"] {
        twins.same(&format!("resize {image} 3M"));
    }
    for (size, cut_size) in [("2099k", "1539k"), ("2200k", "1600k"), ("2560k", "2M")] {
        resizes(&twins, size, "old");
        resizes(&twins, cut_size, "cut");
    }
    twins.same("map --output=json old");
    twins.same("map --output=json cut");
    twins.same("resize old 3M");
}

#[test]
fn snapshots_stay_as_they_are() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 a 10M",
        "qemu-io a: write -P 1 0 10M",
        "qemu-img snapshot -c s a",
        "qemu-io a: write -P 2 2M 3M",
    ]);
    resizes(&twins, "40G", "a");
    resizes(&twins, "--shrink 3M", "a");
    let back = twins.run_theirs_on_ours(&["snapshot", "-a", "s", "a"]);
    assert_eq!(back.code, Some(0), "{back:?}");
    let checked = twins.run_theirs_on_ours(&["check", "a"]);
    assert_eq!(checked.code, Some(0), "{checked:?}");
    assert!(twins.run_ours(&["info", "a"]).out.contains("10 MiB"));
}

#[test]
fn raw_files_are_resized() {
    let twins = Twins::new(IMAGES);
    for arguments in [
        "-f raw 5M",
        "-f raw +1000",
        "-f raw --preallocation=falloc 7M",
        "-f raw --preallocation=full +1M",
        "-f raw --shrink 700",
        "-f raw --preallocation=off 1M",
    ] {
        resizes_raw(&twins, arguments);
    }
    twins.same("resize r 9M");
}

#[track_caller]
fn resizes_raw(twins: &Twins, arguments: &str) {
    let (options, size) = arguments.rsplit_once(' ').expect("a size");
    let words: Vec<&str> = ["resize"]
        .into_iter()
        .chain(options.split_whitespace())
        .chain(["r", size])
        .collect();
    assert_eq!(twins.same_words(&words).code, Some(0));
    twins.same("map -f raw --output=json r");
    let len = |path: std::path::PathBuf| std::fs::metadata(path).map(|file| file.len()).ok();
    assert_eq!(len(twins.ours("r")), len(twins.theirs("r")), "{arguments}");
}

#[test]
fn contradictions_are_refused_in_the_same_words() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "resize",
        "resize a",
        "resize a b 10M",
        "resize --bogus",
        "resize -5 a",
        "resize a 5M",
        "resize a -1M",
        "resize a -- -1M",
        "resize --shrink a -100M",
        "resize --preallocation=full a 1M",
        "resize --preallocation=full a +0",
        "resize --preallocation=bogus a 20M",
        "resize a foo",
        "resize a 10Z",
        "resize a 100E",
        "resize a 17179869184G",
        "resize none 10M",
        "resize a 0",
        "resize a 10485761",
        "resize a 300P",
        "resize -f qcow2 -o x a 20M",
        "resize --image-opts -f qcow2 a 20M",
        "resize --object foo a 20M",
        "resize old-snapshot 6M",
        "resize --shrink old-snapshot 3M",
        "resize -f raw --preallocation=metadata r 4M",
        "resize -f raw --shrink --preallocation=full r 1M",
    ]);
    twins.same_words(&["resize", "a", ""]);
    twins.all_same(&[
        "resize -q a +1M",
        "resize a ++1M",
        "resize a +0",
        "resize a --preallocation=off 1.5G",
        "resize --image-opts driver=qcow2,file.filename=a 0x70000000",
    ]);
}
