//! `rebase` beside the real one.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 old 1M",
    "qemu-io old: write -P 1 0 512k; write -z 64k 64k",
    "qemu-img create -q -f qcow2 -o cluster_size=4k new 1280k",
    "qemu-io new: write -P 1 0 100k; write -P 2 256k 512k; write -P 3 1100k 4k",
    "qemu-img create -q -f raw plain 700k",
    "qemu-io -f raw plain: write -P 1 0 100k; write -P 9 600k 100k",
    "qemu-img create -q -f qcow2 -b old -F qcow2 mid",
    "qemu-io mid: write -P 4 128k 12k; write -P 5 900k 4k",
    "qemu-img create -q -f qcow2 -b mid -F qcow2 top 1200k",
    "qemu-io top: write -P 6 64k 4k; write -P 7 1000k 64k",
];

#[track_caller]
fn same_image(twins: &Twins, image: &str) {
    twins.same_but_places(&format!("info {image}"));
    twins.same_but_places(&format!("map --output=json {image}"));
    twins.same(&format!("convert -O raw {image} copy"));
    let copies = [twins.ours("copy"), twins.theirs("copy")];
    let [ours, theirs] = copies.map(|path| std::fs::read(path).expect("a copy"));
    assert!(ours == theirs, "{image} holds something else");
    let ours = twins.run_theirs_on_ours(&["check", image]);
    assert_eq!(ours.code, Some(0), "{image}: {ours:?}");
}

#[test]
fn content_stays_on_every_kind_of_backing_file() {
    for line in [
        "rebase -b new -F qcow2 top",
        "rebase -b plain -F raw top",
        "rebase -b old -F qcow2 top",
        "rebase -b mid -F qcow2 top",
        "rebase -q -b  top",
        "rebase -f qcow2 -t none -T none -b new -F qcow2 top",
        "rebase -t writethrough -b new -F qcow2 -U top",
        "rebase -b ./new -F qcow2 mid",
        "rebase -b new -F qcow2 old",
        "rebase -c -b new -F qcow2 top",
        "rebase -c -b  top",
    ] {
        let twins = Twins::new(IMAGES);
        let words: Vec<&str> = line.split(' ').collect();
        let image = *words.last().expect("an image");
        let before = twins.same(&format!("convert -O raw {image} before"));
        assert_eq!(before.code, Some(0));
        let answer = twins.same_words(&words);
        assert_eq!(answer.code, Some(0), "{line}: {answer:?}");
        same_image(&twins, image);
        let [before, after] = ["before", "copy"].map(|name| std::fs::read(twins.ours(name)));
        assert!(before.expect("a copy") == after.expect("a copy"), "{line}");
    }
}

#[test]
fn subclusters_are_the_grain() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 -o cluster_size=1k old 1M",
        "qemu-io old: write -P 1 10k 1k; write -P 2 500k 3k",
        "qemu-img create -q -f qcow2 new 1M",
        "qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=64k -b old -F qcow2 top",
        "qemu-img create -q -f qcow2 -o cluster_size=2M -b old -F qcow2 coarse",
    ]);
    for image in ["top", "coarse"] {
        twins.same(&format!("rebase -b new -F qcow2 {image}"));
        same_image(&twins, image);
        twins.same_but_places(&format!("map --output=json {image}"));
    }
}

#[test]
fn a_name_alone_can_be_changed() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "rebase -u -b new -F qcow2 top",
        "info top",
        "rebase -u -b none -F vmdk top",
        "info top",
        "rebase -u -b json:{\"driver\":\"qcow2\"} -F qcow2 top",
        "rebase -u top",
        "info top",
        "rebase -u -b new top",
        "rebase -u -b new -F bad top",
        "rebase -u -b new -F qcow2 plain",
    ]);
    twins.same_words(&["rebase", "-u", "-b", "", "mid"]);
    twins.same("info mid");
    let long = format!("rebase -u -F raw -b {} top", "n".repeat(1023));
    let longer = format!("rebase -u -F raw -b {} top", "n".repeat(1024));
    twins.all_same(&[&long, "info top", &longer]);
}

#[test]
fn what_cannot_be_is_refused_in_the_same_words() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "rebase",
        "rebase top",
        "rebase -b new -F qcow2 top mid",
        "rebase -b new -F bad top",
        "rebase -b none -F qcow2 top",
        "rebase -b plain -F qcow2 top",
        "rebase -t bad -b new -F qcow2 top",
        "rebase -T bad -b new -F qcow2 top",
        "rebase -b new none",
        "rebase -f raw -b new -F qcow2 top",
        "rebase -b new top",
        "rebase -c -b new -F qcow2 plain",
    ]);
}

#[test]
fn clusters_of_which_the_image_holds_a_part_are_not_compressed() {
    // QEMU's own tool does not survive this one.
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 old 1000k",
        "qemu-io old: write -P 1 0 300k; write -P 2 900k 100k",
        "qemu-img create -q -f qcow2 -o extended_l2=on -b old -F qcow2 top",
        "qemu-io top: write -P 3 66k 2k; write -P 4 200k 4k; write -z 140k 2k",
    ]);
    let before = twins.same("convert -O raw top before");
    assert_eq!(before.code, Some(0));
    let answer = twins.run_ours(&["rebase", "-c", "-b", "", "top"]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    let answer = twins.run_ours(&["convert", "-O", "raw", "top", "after"]);
    assert_eq!(answer.code, Some(0), "{answer:?}");
    let [before, after] = ["before", "after"].map(|name| std::fs::read(twins.ours(name)));
    assert!(before.expect("a copy") == after.expect("a copy"));
    let check = twins.run_theirs_on_ours(&["check", "top"]);
    assert_eq!(check.code, Some(0), "{check:?}");
}
