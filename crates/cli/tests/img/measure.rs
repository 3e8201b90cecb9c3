//! `measure` and `dd` beside the real ones.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -z 5M 64k",
    "qemu-img bitmap --add a all",
    "qemu-img create -q -f qcow2 -b a -F qcow2 b 12M",
    "qemu-io b: write 1M 10k; write 11M 64k",
    "qemu-img create -q -f qcow2 -o compat=0.10 v2 10M",
];

#[test]
fn sizes_are_foretold_alike() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "measure a",
        "measure -O qcow2 a",
        "measure --output=json -O qcow2 a",
        "measure -O qcow2 v2",
        "measure -O qcow2 -o compat=0.10 a",
        "measure -O qcow2 -o cluster_size=4k b",
        "measure -O qcow2 -o preallocation=full b",
        "measure -O qcow2 -o backing_file=a b",
        "measure --size 1G -O qcow2",
        "measure --size 100G -O qcow2 -o extended_l2=on",
        "measure --size 100G -O qcow2 -o refcount_bits=64,cluster_size=512",
        "measure --size 1000 --output=json",
        "measure",
        "measure a b",
        "measure --size 1G a",
        "measure --size x",
        "measure -f raw --size 5",
        "measure -O qcow2 -o foo=3 --size 1G",
        "measure -O qcow2 -o cluster_size=3 --size 1G",
        "measure none",
    ]);
}

#[test]
fn blocks_are_copied_alike() {
    let twins = Twins::new(IMAGES);
    for arguments in [
        "if=b of=out bs=1M",
        "if=b of=out bs=1M count=3",
        "if=b of=out bs=1M skip=1 count=5",
        "-O qcow2 if=b of=out bs=4k skip=255 count=300",
        "if=b of=out skip=100000",
    ] {
        twins.same(&format!("dd {arguments}"));
        twins.same("map --output=json out");
    }
    twins.all_same(&[
        "dd if=a",
        "dd of=a",
        "dd if=a of=out foo=3",
        "dd if=a of=out bs=0",
        "dd if=a of=out count=-1",
        "dd if=none of=out",
        "dd -O foo if=a of=out",
    ]);
}
