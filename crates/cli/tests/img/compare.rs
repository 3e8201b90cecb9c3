//! `compare` beside the real one.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -z 5M 64k",
    "qemu-img create -q -f qcow2 -b a -F qcow2 b",
    "qemu-img create -q -f qcow2 -b a -F qcow2 big 20M",
    "qemu-img create -q -f qcow2 -b a -F qcow2 other",
    "qemu-io other: write -P 7 3000001 1",
    "qemu-img create -q -f qcow2 empty 10M",
    "qemu-img create -q -f raw zero 20M",
];

#[test]
fn answers_and_codes_agree() {
    let twins = Twins::new(IMAGES);
    for (pair, code) in [
        ("a b", 0),
        ("a big", 0),
        ("big a", 0),
        ("a other", 1),
        ("other a", 1),
        ("a zero", 1),
        ("empty zero", 0),
        ("a empty", 1),
    ] {
        assert_eq!(
            twins.same(&format!("compare {pair}")).code,
            Some(code),
            "{pair}"
        );
        twins.same(&format!("compare -q {pair}"));
    }
    twins.all_same(&["compare -s a big", "compare -s empty b", "compare -s a a"]);
}

#[test]
fn failures_have_codes_above_one() {
    let twins = Twins::new(IMAGES);
    assert_eq!(twins.same("compare a none").code, Some(2));
    twins.all_same(&[
        "compare a",
        "compare none a",
        "compare -f qcow2 zero a",
        "compare -x a b",
    ]);
}
