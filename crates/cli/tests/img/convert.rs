//! `convert` beside the real one.

use crate::twins::Twins;

const IMAGES: &[&str] = &[
    "qemu-img create -q -f qcow2 a 10M",
    "qemu-io a: write 1M 100k; write -z 5M 64k; write -P 3 9M 300k",
    "qemu-img create -q -f qcow2 -b a -F qcow2 b 12M",
    "qemu-io b: write 1M 10k; write -z 9M 64k; write 11M 64k",
    "qemu-img convert -c -O qcow2 b c",
    "qemu-img create -q -f raw r 3M",
    "qemu-io -f raw r: write -P 9 64k 70k; write 1M 5k",
];

/// Converts with both tools, and compares what came out. (`map` is compared for
/// raw targets only: in qcow2 ones the engines differ in which unwritten parts of
/// a cluster take space on the host.)
#[track_caller]
fn converts(twins: &Twins, arguments: &str) {
    twins.same(&format!("convert {arguments} out"));
    if arguments.contains("-O raw") {
        twins.same("map --output=json out");
    }
    let source = arguments.split_whitespace().last().unwrap_or_default();
    let compared = twins.run_theirs_on_ours(&["compare", source, "out"]);
    assert_eq!(compared.code, Some(0), "{arguments}: {compared:?}");
    let checked = twins.run_theirs_on_ours(&["check", "out"]);
    assert!(
        matches!(checked.code, Some(0 | 63)),
        "{arguments}: {checked:?}"
    );
}

#[test]
fn formats_and_sparseness_come_out_alike() {
    let twins = Twins::new(IMAGES);
    for source in ["a", "b", "c", "r"] {
        for options in [
            "-O raw",
            "-O qcow2",
            "-S 0 -O raw",
            "-S 64k -O raw",
            "-W -m 16 -O qcow2",
        ] {
            converts(&twins, &format!("{options} {source}"));
        }
    }
    for options in [
        "cluster_size=2M",
        "compat=0.10",
        "extended_l2=on",
        "refcount_bits=64",
    ] {
        converts(&twins, &format!("-O qcow2 -o {options} b"));
    }
}

#[test]
fn overlays_keep_their_backing_file() {
    let twins = Twins::new(IMAGES);
    converts(&twins, "-O qcow2 -B a -F qcow2 b");
    converts(&twins, "-O qcow2 -o backing_file=a,backing_fmt=qcow2 b");
}

#[test]
fn several_sources_are_laid_end_to_end() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&["convert -O qcow2 a r b out", "check out", "info out"]);
    twins.all_same(&["convert -O raw a r b out.raw", "map --output=json out.raw"]);
    twins.same("compare out out.raw");
}

#[test]
fn targets_that_exist_are_overwritten() {
    let twins = Twins::new(IMAGES);
    twins.same("create -f qcow2 out 20M");
    twins.all_same(&["convert -n -O qcow2 a out", "check out"]);
    twins.all_same(&[
        "convert -n --target-is-zero -O qcow2 b out",
        "compare b out",
    ]);
    twins.same("convert -n -O raw a r");
    twins.same("convert -n --target-image-opts a driver=raw,file.filename=r");
}

#[test]
fn cache_modes_make_no_difference() {
    let twins = Twins::new(IMAGES);
    for mode in ["none", "writeback", "writethrough", "directsync", "unsafe"] {
        converts(&twins, &format!("-t {mode} -T none -O qcow2 b"));
    }
}

#[test]
fn contradictions_are_refused_in_the_same_words() {
    let twins = Twins::new(IMAGES);
    twins.all_same(&[
        "convert",
        "convert a",
        "convert none out",
        "convert -O foo a out",
        "convert -O qcow2 a none/out",
        "convert -n -O qcow2 a none",
        "convert -n -O raw -o size=1 a r",
        "convert -O qcow2 -o cluster_size=3 a out",
        "convert -O qcow2 -o foo=3 a out",
        "convert -O qcow2 -B a b out",
        "convert -O raw -B a -F qcow2 b out",
        "convert -O qcow2 -B a -F qcow2 b r out",
        "convert -O qcow2 -B none -F qcow2 b out",
        "convert -S x a out",
        "convert -S 513 a out",
        "convert -m 0 a out",
        "convert -m x a out",
        "convert -t foo a out",
        "convert -T foo a out",
        "convert -C -S 4k a out",
        "convert -C -c a out",
        "convert --salvage -C a out",
        "convert --target-is-zero a out",
        "convert --target-image-opts a driver=raw,file.filename=out",
        "convert --image-opts -f qcow2 driver=qcow2,file.filename=a out",
        "convert --skip-broken-bitmaps -O qcow2 a out",
        "convert -r x a out",
        "convert -O qcow2 a a",
        "convert -u a out",
    ]);
}

#[test]
fn progress_begins_and_ends_alike() {
    let twins = Twins::new(IMAGES);
    let answer = twins.run_ours(&["convert", "-p", "-O", "qcow2", "a", "out"]);
    assert!(answer.out.starts_with("    (0.00/100%)\r"), "{answer:?}");
    assert!(answer.out.ends_with("    (100.00/100%)\n"), "{answer:?}");
    assert_eq!(twins.run_ours(&["convert", "-p", "-q", "a", "out"]).out, "");
}
