//! `map` beside the real one.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 128k; write -z 5M 64k",
    "qemu-img create -q -f qcow2 -b a -F qcow2 b 12M",
    "qemu-io b: write 1M 64k; write 11M 64k",
    "qemu-img convert -c -O qcow2 b c",
    "qemu-img create -q -f qcow2 -o extended_l2=on,cluster_size=128k e 10M",
    "qemu-io e: write 0 20k; write 1M 300k; write -z 4M 8k",
    "qemu-img create -q -f raw r 1M",
    "qemu-io -f raw r: write 64k 64k",
];

#[test]
fn every_kind_of_extent_is_shown_alike() {
    let twins = Twins::new(IMAGES);
    for image in ["a", "b", "c", "e", "r"] {
        twins.same(&format!("map --output=json {image}"));
        twins.same(&format!("map {image}"));
    }
}

#[test]
fn a_part_may_be_asked_for() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "map --start-offset 1M --max-length 64k --output json b",
        "map --start-offset 1049k --output json b",
        "map -s 1 b",
        "map --start-offset 20M --output json b",
        "map --start-offset x b",
        "map --start-offset 9E b",
        "map --max-length x b",
    ]);
}

#[test]
fn backing_files_may_be_replaced() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&["map --output=json --image-opts \
         driver=qcow2,file.filename=b,backing.driver=raw,backing.file.filename=r"]);
    let without =
        r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"b"},"backing":null}"#;
    twins.same_words(&["map", "--output=json", without]);
}
