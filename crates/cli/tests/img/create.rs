//! `create` beside the real one.

use crate::twins::Twins;

#[test]
fn images_of_every_kind_are_announced_and_checked_alike() {
    let twins = Twins::new(&[]);
    let options = [
        "cluster_size=512",
        "cluster_size=2M",
        "compat=0.10",
        "compat=v3,lazy_refcounts=on",
        "refcount_bits=1",
        "refcount_bits=64",
        "extended_l2=on,cluster_size=128k",
        "compression_type=zstd",
        "preallocation=metadata",
        "preallocation=falloc",
        "preallocation=full",
        "data_file=d",
        "data_file=d,data_file_raw=on",
        "nocow=on,extent_size_hint=1M",
    ];
    for option in options {
        twins.same(&format!("create -f qcow2 -o {option} x 5M"));
        twins.same("check x");
        let theirs = twins.run_theirs_on_ours(&["check", "x"]);
        assert_eq!(theirs.code, Some(0), "{option}: {theirs:?}");
    }
    twins.all_same(&[
        "create -f raw r 1000",
        "create -f raw -o preallocation=full r 100k",
    ]);
    twins.same("map --output=json r");
}

#[test]
fn contradictions_are_refused_in_the_same_words() {
    let twins = Twins::new(&["qemu-img create -q -f raw base 1M"]);
    twins.all_same(&[
        "create",
        "create -x",
        "create -f",
        "create --foo",
        "create -f qcow2 x",
        "create -f qcow2 x 1Mx",
        "create -f qcow2 x 1M extra",
        "create -f qcow2 x 99E",
        "create -f qcow2 x 7E",
        "create -f foo x 1M",
        "create -f qcow2 -o foo=1 x 1M",
        "create -f qcow2 -o cluster_size=3 x 1M",
        "create -f qcow2 -o cluster_size=abc x 1M",
        "create -f qcow2 -o refcount_bits=3 x 1M",
        "create -f qcow2 -o refcount_bits=x x 1M",
        "create -f qcow2 -o lazy_refcounts=maybe x 1M",
        "create -f qcow2 -o compat=foo x 1M",
        "create -f qcow2 -o compat=0.10,refcount_bits=1 x 1M",
        "create -f qcow2 -o compat=0.10,extended_l2=on x 1M",
        "create -f qcow2 -o extended_l2=on,cluster_size=8k x 1M",
        "create -f qcow2 -o data_file_raw=on x 1M",
        "create -f qcow2 -o size=3M x 4M",
        "create -f qcow2 -o , x 1M",
        "create -f qcow2 -b base x",
        "create -f qcow2 -b base -F qcow2 x",
        "create -f qcow2 -b base -F foo x",
        "create -f qcow2 -b none -F raw x 1M",
        "create -f qcow2 -u -b none x 1M",
        "create -f qcow2 -F raw x 1M",
        "create -f qcow2 -b x -F raw x",
        "create -f raw -b base x 1M",
        "create -f raw -o preallocation=metadata x 1M",
        "create -f qcow2 none/x 1M",
    ]);
}

#[test]
fn backing_files_give_the_size() {
    let twins = Twins::new(&["qemu-img create -q -f raw base 1M"]);
    twins.all_same(&[
        "create -f qcow2 -b base -F raw x",
        "info x",
        "create -q -f qcow2 -o backing_file=base,backing_fmt=raw x 512k",
        "info --output=json x",
        "create -f qcow2 -u -b none -F qcow2 x 1M",
        "create -f qcow2 -u -b none -F bad x 1M",
    ]);
}

#[test]
fn the_list_of_options_is_the_same() {
    let twins = Twins::new(&[]);
    twins.all_same(&[
        "create -f qcow2 -o help",
        "create -f qcow2 -o help x 1M",
        "create -f raw -o ?",
        "create -f qcow2 -u -o backing_file=t,,help -F qcow2 x 1M",
    ]);
}
