//! `info` beside the real one.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -z 5M 64k",
    "qemu-img create -q -f qcow2 -b a -F qcow2 b",
    "qemu-img create -q -f qcow2 -o compat=0.10 v2 10M",
    "qemu-img create -q -f qcow2 -o data_file=d.raw,lazy_refcounts=on d 10M",
    "qemu-img create -q -f qcow2 -o extended_l2=on,refcount_bits=8 e 10M",
    "qemu-img create -q -f qcow2 -u -b none -F raw n 10M",
    "qemu-img create -q -f raw r 1M",
    "qemu-img snapshot -c first a",
    "qemu-img snapshot -c second a",
    "qemu-img bitmap --add a all",
    "qemu-img bitmap --add --disable -g 32k a off",
];

#[test]
fn every_kind_of_image_is_described_alike() {
    let twins = Twins::new(IMAGES);
    for image in ["a", "b", "v2", "d", "e", "n", "r"] {
        twins.same(&format!("info {image}"));
        twins.same(&format!("info --output=json {image}"));
    }
    twins.all_same(&["info -U a", "info -f raw a", "info file:a"]);
}

#[test]
fn chains_are_followed() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "info --backing-chain b",
        "info --backing-chain --output=json b",
        "info --backing-chain n",
    ]);
}

#[test]
fn images_may_be_named_by_options() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "info --image-opts driver=qcow2,file.filename=a",
        "info --image-opts file.filename=a,read-only=on",
        "info --image-opts driver=raw,offset=512,size=1024,file.filename=a",
        "info --image-opts driver=qcow2,l2-cache-size=1M,cache-size=512k,file.filename=a",
        "info --image-opts driver=qcow2,l2-cache-entry-size=100,file.filename=a",
        "info --image-opts driver=qcow2,l2-cache-size=1x,file.filename=a",
        "info --image-opts driver=qcow2,overlap-check=foo,file.filename=a",
        "info --image-opts driver=qcow2,discard=x,file.filename=a",
        "info --image-opts driver=qcow2,detect-zeroes=unmap,file.filename=a",
        "info --image-opts driver=qcow2,cache.direct=x,file.filename=a",
        "info --image-opts driver=qcow2,file.aio=native,file.filename=a",
        "info --image-opts driver=qcow2,file.filename=a,foo=bar",
        "info --image-opts driver=qcow2,file.filename=a,file.foo=bar",
        "info --image-opts driver=qcow2",
        "info --image-opts a",
        "info -f raw --image-opts a",
    ]);
    twins.same_words(&[
        "info",
        r#"json:{"driver":"qcow2","file":{"driver":"file","filename":"a"}}"#,
    ]);
    twins.same_words(&["info", r#"json:{"file.filename":"b","backing":null}"#]);
    twins.same_words(&["info", "json:{"]);
}

#[test]
fn what_cannot_be_opened_is_refused_in_the_same_words() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "info",
        "info a b",
        "info none",
        "info .",
        "info foo:bar",
        "info -f qcow2 r",
        "info -f foo a",
        "info --output=foo a",
        "info --nope=1",
        "info --im=3",
    ]);
}

#[test]
fn the_cache_for_decompressed_clusters_has_an_option() {
    let twins = Twins::new(IMAGES);
    let with = |size: &str| {
        let node = format!("driver=qcow2,decompressed-cache-size={size},file.filename=a");
        twins.run_ours(&["info", "--image-opts", &node])
    };
    for size in ["0", "100", "64k", "1G", "8E"] {
        let answer = with(size);
        assert_eq!(answer.code, Some(0), "{answer:?}");
    }
    assert_eq!(with("much").code, Some(1));
}
