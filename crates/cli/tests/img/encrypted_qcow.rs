//! Encrypted images of the first version of qcow beside the real `qemu-img`, in both directions.

use crate::twins::Twins;

const SECRET: &str = "--object secret,id=s,data=abc";
const E: &str = "driver=qcow,encrypt.key-secret=s,file.filename=e";
const O: &str = "driver=qcow,encrypt.key-secret=s,file.filename=o";

const IMAGES: &[&str] = &[
    "qemu-img create -q --object secret,id=s,data=abc -f qcow -o encrypt.format=aes,encrypt.key-secret=s e 1M",
    "qemu-io --object secret,id=s,data=abc --image-opts driver=qcow,encrypt.key-secret=s,file.filename=e: write -P 7 1000 300k",
    "qemu-img create -q -f qcow plain 1M",
    "qemu-img create -q -f raw r 1M",
    "qemu-io -f raw r: write -P 6 1000 300k",
    "qemu-img create -q --object secret,id=s,data=abc -f qcow -o encryption=on,encrypt.key-secret=s -b r -F raw o",
    "qemu-io --object secret,id=s,data=abc --image-opts driver=qcow,encrypt.key-secret=s,file.filename=o: write -P 8 100 4k",
];

#[test]
fn images_are_made_alike() {
    let twins = Twins::copied(IMAGES);
    for options in [
        "encryption=on,encrypt.key-secret=s",
        "encrypt.format=aes,encrypt.key-secret=s",
        "encrypt.format=qcow,encrypt.key-secret=s",
        "encryption=off,encrypt.format=aes,encrypt.key-secret=s",
        "encryption=on,encrypt.format=aes,encrypt.key-secret=s",
        "encryption=on",
        "encryption=maybe",
        "encrypt.format=aes",
        "encrypt.format=luks",
        "encrypt.format=foo,encrypt.key-secret=s",
        "encrypt.key-secret=s",
        "encrypt.format=aes,encrypt.key-secret=none",
        "encrypt.format=aes,encrypt.key-secret=s,encrypt.iter-time=2",
    ] {
        twins.same(&format!("create {SECRET} -f qcow -o {options} n 1M"));
    }
    for options in [
        "encrypt.format=qcow,encrypt.key-secret=s",
        "encryption=off,encrypt.format=aes,encrypt.key-secret=s",
    ] {
        twins.same(&format!("create {SECRET} -f qcow2 -o {options} n 1M"));
    }
    twins.same("create -f qcow -o help n");
    twins.same("measure -O qcow -o encryption=on --size 1M");
}

#[test]
fn images_are_described_and_changed_alike() {
    let twins = Twins::copied(IMAGES);
    twins.all_same(&[
        "info e",
        "info --output=json e",
        "info --backing-chain --output=json o",
        &format!("info {SECRET} --image-opts {E}"),
        "check e",
        "map e",
        "measure -O raw e",
        "resize -f qcow e 2M",
        "amend -f qcow -o encryption=off e",
        "convert e -O raw out",
        "map --image-opts driver=qcow,encrypt.format=aes,file.filename=e",
    ]);
    for command in [
        "map",
        "map --output=json",
        "check",
        "measure -O qcow2",
        "snapshot -c x",
        "amend -o encryption=off",
    ] {
        twins.same(&format!("{command} {SECRET} --image-opts {E}"));
    }
    twins.same(&format!("resize {SECRET} --image-opts {E} 2M"));
    let wrong = "driver=qcow,encrypt.key-secret=s,file.filename";
    for opened in [
        format!("{wrong}=e,encrypt.format=luks"),
        format!("{wrong}=e,encrypt.foo=1"),
        format!("{wrong}=plain,encrypt.format=aes"),
        format!("{wrong}=plain"),
    ] {
        twins.same(&format!("map {SECRET} --image-opts {opened}"));
    }
    twins.same(&format!("map {SECRET} --output=json --image-opts {O}"));
    twins.same_words(&[
        "rebase",
        "-b",
        "",
        "--object",
        "secret,id=s,data=abc",
        "--image-opts",
        O,
    ]);
}

#[test]
fn content_goes_both_ways() {
    let twins = Twins::copied(IMAGES);
    let compare = |opened: &str, with: &str| {
        let line =
            format!("compare {SECRET} --image-opts {opened} driver=raw,file.filename={with}");
        let words: Vec<&str> = line.split_whitespace().collect();
        for answer in [twins.run_ours(&words), twins.run_theirs_on_ours(&words)] {
            assert_eq!(answer.code, Some(0), "{line}: {answer:?}");
        }
    };
    twins.same(&format!("convert {SECRET} --image-opts {E} -O raw out"));
    compare(E, "out");
    let options = "encrypt.format=aes,encrypt.key-secret=s";
    twins.same(&format!("convert {SECRET} -c -O qcow -o {options} r new"));
    twins.same(&format!("convert {SECRET} -O qcow -o {options} r new"));
    let new = "driver=qcow,encrypt.key-secret=s,file.filename=new";
    compare(new, "r");
    twins.same(&format!(
        "convert -n {SECRET} --target-image-opts out {new}"
    ));
    compare(new, "out");
    // On top of something, and into what it stands on.
    twins.same(&format!("convert {SECRET} --image-opts {O} -O raw whole"));
    compare(O, "whole");
    let compressed = format!("convert -n -c {SECRET} --target-image-opts out {new}");
    let words: Vec<&str> = compressed.split_whitespace().collect();
    let answer = twins.run_ours(&words);
    assert_eq!(answer.code, Some(1), "{answer:?}");
    let line = format!("commit {SECRET} --image-opts {O}");
    let committed = twins.run_ours(&line.split_whitespace().collect::<Vec<_>>());
    assert_eq!(committed.code, Some(0), "{committed:?}");
    let same = twins.run_theirs_on_ours(&["compare", "-f", "raw", "-F", "raw", "r", "whole"]);
    assert_eq!(same.code, Some(0), "{same:?}");
}
