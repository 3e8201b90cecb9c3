//! `bitmap`, and the bitmaps of `convert`, beside the real ones.

use std::process::Command;

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-img bitmap --add a b",
    "qemu-img create -q -f qcow2 -o cluster_size=4k fine 10M",
    "qemu-img bitmap --add -g 512 fine f",
    "qemu-io fine: write 1M 4k; write 3M 100",
    "qemu-img create -q -f qcow2 larger 20M",
    "qemu-img bitmap --add larger b",
    "qemu-img create -q -f qcow2 -o compat=0.10 old 1M",
    "qemu-img create -q -f raw r 1M",
];

/// The image's bitmaps and health as both tools see them, in both folders.
#[track_caller]
fn compare(twins: &Twins, image: &str) {
    twins.same(&format!("measure -O qcow2 {image}"));
    let list = |words: &[&str]| {
        let [ours, theirs] = twins.both(words).map(|answer| answer.out);
        let bitmaps = |text: String| {
            let from = text.find("bitmaps:").unwrap_or(text.len());
            let to = text.find("refcount bits").unwrap_or(text.len());
            text[from.min(to)..to].to_owned()
        };
        assert_eq!(bitmaps(ours), bitmaps(theirs));
    };
    list(&["info", image]);
    for checked in [
        twins.run_theirs_on_ours(&["check", image]),
        twins.run_ours(&["check", image]),
    ] {
        assert_eq!(checked.code, Some(0), "{checked:?}");
    }
}

#[test]
fn bitmaps_are_changed_alike() {
    let twins = Twins::new(IMAGES);
    for line in [
        "bitmap --add a c",
        "bitmap --add -g 4k a d",
        "bitmap --add --granularity 1M --disable a e",
        "bitmap --add --disable -f qcow2 a g",
        "bitmap --disable a b",
        "bitmap --enable --merge b --clear a e",
        "bitmap --merge f -b fine -F qcow2 a d",
        "bitmap --merge d a c",
        "bitmap --remove a b",
        "bitmap --add --image-opts driver=qcow2,file.filename=a z",
        "bitmap --clear a z",
        "bitmap --add --enable a 7",
    ] {
        assert_eq!(twins.same(line).code, Some(0), "{line}");
        compare(&twins, "a");
    }
    for name in ["c", "d", "e", "g", "z", "7"] {
        twins.same_words(&["bitmap", "--remove", "a", name]);
    }
    compare(&twins, "a");
    assert!(!twins.run_ours(&["info", "a"]).out.contains("bitmaps"));
}

#[test]
fn what_is_merged_is_the_same() {
    let twins = Twins::new(IMAGES);
    twins.same("bitmap --add --disable -g 64k fine coarse");
    twins.same("bitmap --merge f fine coarse");
    // Bitmaps are read by the tool that did not write them.
    for folder in [twins.ours("fine"), twins.theirs("fine")] {
        let folder = folder.to_str().expect("a plain name");
        for source in ["f", "coarse"] {
            let fresh = ["create", "-q", "-f", "qcow2", "fresh", "10M"];
            twins.same_words(&fresh);
            let words = [
                "bitmap", "--add", "-g", "512", "--merge", source, "-b", folder, "fresh", "x",
            ];
            twins.same_words(&words);
            let bytes = |path| std::fs::read(path).expect("an image");
            let bits = |bytes: Vec<u8>| -> u32 { bytes.iter().map(|byte| byte.count_ones()).sum() };
            // Headers and tables say nothing else than where things lie.
            let (ours, theirs) = (
                bits(bytes(twins.ours("fresh"))),
                bits(bytes(twins.theirs("fresh"))),
            );
            assert!(ours.abs_diff(theirs) < 64, "{ours} and {theirs} bits");
        }
    }
}

#[test]
fn a_bitmap_goes_from_an_overlay_into_what_it_stands_on() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 base 10M",
        "qemu-img create -q -f qcow2 -b base -F qcow2 top",
        "qemu-img bitmap --add top t",
        "qemu-img bitmap --add base b",
    ]);
    twins.all_same(&[
        "bitmap --add --merge t -b top -F qcow2 -f qcow2 base u",
        "bitmap --merge b -b base -F qcow2 -f qcow2 top t",
        "bitmap --merge b -b base -F qcow2 -f qcow2 base b",
    ]);
    compare(&twins, "base");
    compare(&twins, "top");
}

#[test]
fn contradictions_are_refused_in_the_same_words() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "bitmap",
        "bitmap a",
        "bitmap a b",
        "bitmap --bogus a b",
        "bitmap --add a",
        "bitmap --add a b c",
        "bitmap --add a b",
        "bitmap --add -g 511 a x",
        "bitmap --add -g 3k a x",
        "bitmap --add -g 256 a x",
        "bitmap --add -g 4G a x",
        "bitmap --add -g foo a x",
        "bitmap --add -g -5 a x",
        "bitmap --clear -g 512 a",
        "bitmap --clear -F raw a",
        "bitmap --clear -b larger a b",
        "bitmap --remove a none",
        "bitmap --clear a none",
        "bitmap --enable a none",
        "bitmap --disable a none",
        "bitmap --merge none a b",
        "bitmap --merge b a none",
        "bitmap --merge none -b larger a b",
        "bitmap --merge b -b larger a b",
        "bitmap --merge b -b none a b",
        "bitmap --add --image-opts -f qcow2 a x",
        "bitmap --add none x",
        "bitmap --object foo --add a x",
        "bitmap -f raw --remove r x",
    ]);
    twins.same_words(&["bitmap", "--add", "a", ""]);
    compare(&twins, "a");
}

/// What names a node differs; all else does not.
#[test]
fn refusals_that_name_the_node() {
    let twins = Twins::new(IMAGES);
    let long = "x".repeat(1024);
    for words in [
        vec!["bitmap", "--add", "old", "x"],
        vec!["bitmap", "--add", "-f", "raw", "r", "x"],
        vec!["bitmap", "--add", "a", &long],
    ] {
        let [ours, theirs] = twins.both(&words).map(|answer| {
            let err = answer.err.replace(|c: char| c.is_ascii_digit(), "");
            (answer.code, answer.out, err)
        });
        assert_eq!(ours, theirs);
    }
}

#[test]
fn what_a_killed_program_left_is_refused() {
    let twins = Twins::new(IMAGES);
    twins.same("bitmap --add a b2");
    for folder in [twins.ours("a"), twins.theirs("a")] {
        let killed = Command::new("qemu-io")
            .args(["-c", "write 0 64k", "-c", "sigraise 9"])
            .arg(folder)
            .output()
            .expect("qemu-io; run `cargo xtask setup`");
        assert!(!killed.status.success());
    }
    twins.all_same(&[
        "bitmap --add a fresh",
        "bitmap --add a b",
        "bitmap --clear a b",
        "bitmap --enable a b",
        "bitmap --disable a b",
        "bitmap --merge b a fresh",
        "bitmap --merge fresh a b",
        "resize a 20M",
        "convert -O qcow2 --bitmaps a copy",
        "convert -O qcow2 --bitmaps --skip-broken-bitmaps a copy",
    ]);
    compare(&twins, "a");
    compare(&twins, "copy");
    twins.same("bitmap --remove a b");
    twins.same("bitmap --remove a b2");
    compare(&twins, "a");
    twins.same("resize a 20M");
    compare(&twins, "a");
}

#[test]
fn bitmaps_that_another_program_has_ignored() {
    let twins = Twins::new(IMAGES);
    for path in [twins.ours("a"), twins.theirs("a")] {
        let mut bytes = std::fs::read(&path).expect("an image");
        bytes[88..96].fill(0);
        std::fs::write(path, bytes).expect("written");
    }
    twins.all_same(&[
        "snapshot -l a",
        "map a",
        "bitmap --add a c",
        "bitmap --remove a b",
    ]);
}

#[test]
fn bitmaps_in_an_image_that_has_no_word_for_them() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 old 1M",
        "qemu-img bitmap --add old b",
        "qemu-img amend -f qcow2 -o compat=0.10 old",
    ]);
    twins.all_same(&[
        "snapshot -l old",
        "check old",
        "map old",
        "check -r leaks old",
    ]);
}

#[test]
fn conversions_take_bitmaps_along() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "bitmap --add --disable fine off",
        "convert -O qcow2 --bitmaps fine copy",
        "convert -O raw --bitmaps fine copy.raw",
        "convert -O qcow2 --bitmaps fine a copy2",
        "convert -O qcow2 --bitmaps -f raw r copy3",
        "convert -O qcow2 --skip-broken-bitmaps fine copy4",
        "convert -O qcow2 -o compat=0.10 --bitmaps fine copy5",
        "convert -O qcow2 fine copy6",
    ]);
    compare(&twins, "copy");
    compare(&twins, "copy6");
    twins.all_same(&[
        "bitmap --add copy6 f",
        "convert -n -O qcow2 --bitmaps fine copy6",
    ]);
}
