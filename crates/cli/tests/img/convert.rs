//! `convert` beside the real one.

use std::path::Path;

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

/// Where nothing shows through in the source, the target's backing file must not.
#[test]
fn zeroes_of_a_source_without_a_backing_file_stay_zeroes() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 below 4M",
        "qemu-io below: write -P 7 0 4M",
        "qemu-img create -q -f qcow2 short 2M",
        "qemu-io short: write -P 8 0 2M",
        "qemu-img create -q -f qcow2 alone 4M",
        "qemu-io alone: write -P 1 64k 64k; write -z 1M 64k",
        "qemu-img snapshot -c x alone",
        "qemu-img create -q -f qcow2 -o compat=0.10 v2 4M",
        "qemu-io v2: write -P 2 64k 64k",
        "qemu-img create -q -f qcow2 -o extended_l2=on extended 4M",
        "qemu-io extended: write -P 3 64k 2k",
        "qemu-img create -q -f qcow2 -o data_file=d,data_file_raw=off apart 4M",
        "qemu-io apart: write -P 4 64k 64k",
        "qemu-img create -q -f qcow2 -b short -F qcow2 on-short 4M",
        "qemu-io on-short: write -P 5 3M 64k",
        "qemu-img create -q -f qcow2 -b below -F qcow2 out 4M",
    ]);
    for source in ["alone", "v2", "extended", "apart", "on-short"] {
        for options in ["-n", "-S 0", "-W", "-c", ""] {
            let backing = match source {
                "on-short" => "short",
                _ => "below",
            };
            let words = format!("-O qcow2 -B {backing} -F qcow2 {options} {source}");
            if options == "-n" && backing == "short" {
                continue;
            }
            converts(&twins, &words);
        }
    }
    converts(&twins, "-O qcow2 -B below -F qcow2 -l x alone");
}

/// The real tool takes any backing file of the target for the source's own; we do where its size
/// does not tell otherwise.
#[test]
fn a_target_on_a_backing_file_of_another_size_holds_the_same() {
    let twins = Twins::new(&[
        "qemu-img create -q -f qcow2 long 4M",
        "qemu-io long: write -P 7 0 4M",
        "qemu-img create -q -f qcow2 short 2M",
        "qemu-io short: write -P 7 0 2M",
        "qemu-img create -q -f qcow2 -b long -F qcow2 on-long 4M",
        "qemu-img create -q -f qcow2 -b short -F qcow2 on-short 4M",
    ]);
    for [source, backing] in [["on-long", "short"], ["on-short", "long"]] {
        let words = format!("convert -O qcow2 -B {backing} -F qcow2 {source} out");
        let words: Vec<&str> = words.split_whitespace().collect();
        assert_eq!(twins.run_ours(&words).code, Some(0), "{source}");
        let compared = twins.run_theirs_on_ours(&["compare", source, "out"]);
        assert_eq!(compared.code, Some(0), "{source}: {compared:?}");
    }
}

/// Converts with `-c` and both tools, and compares content and map.
#[track_caller]
fn compresses(twins: &Twins, arguments: &str) {
    converts(twins, arguments);
    twins.same("check out");
    let [ours, theirs] = twins.both(&["map", "--output=json", "out"]);
    let essence = |text: &str| -> Vec<(u64, u64, bool, bool)> {
        let value: serde_json::Value = serde_json::from_str(text).expect("JSON");
        let extents = value.as_array().expect("a list").iter();
        let of = |extent: &serde_json::Value| {
            let number = |key: &str| extent[key].as_u64().expect("a number");
            let flag = |key: &str| extent[key].as_bool().expect("a flag");
            let (data, compressed) = (flag("data"), flag("compressed"));
            (number("start"), number("length"), data, compressed)
        };
        extents.map(of).collect()
    };
    assert_eq!(essence(&ours.out), essence(&theirs.out), "{arguments}");
}

#[test]
fn compressed_targets_hold_the_same() {
    let twins = Twins::new(IMAGES);
    for source in ["a", "b", "c", "r"] {
        for options in [
            "-c -O qcow2",
            "-c -S 0 -O qcow2",
            "-c -W -m 16 -O qcow2",
            "-c -O qcow2 -o compression_type=zstd",
            "-c -O qcow2 -o cluster_size=4k,refcount_bits=1",
            "-c -t none -T none -O qcow2",
        ] {
            compresses(&twins, &format!("{options} {source}"));
        }
    }
    compresses(&twins, "-c -O qcow2 -o cluster_size=2M b");
    compresses(&twins, "-c -O qcow2 -o extended_l2=on b");
    compresses(&twins, "-c -O qcow2 -o compat=0.10 b");
    compresses(&twins, "-c -O qcow2 -B a -F qcow2 b");
    twins.all_same(&["convert -c -O qcow2 a r b joined", "check joined"]);
}

#[test]
fn an_existing_target_is_compressed_into() {
    let twins = Twins::new(IMAGES);
    twins.same("create -f qcow2 out 20M");
    twins.all_same(&["convert -n -c -O qcow2 a out", "check out"]);
    let compared = twins.run_theirs_on_ours(&["compare", "a", "out"]);
    assert_eq!(compared.code, Some(0), "{compared:?}");
    twins.same("convert -n -c -O raw a r");
}

#[test]
fn compression_goes_with_every_other_option() {
    let twins = Twins::new(IMAGES);
    for options in [
        "-t writethrough -T directsync",
        "-t directsync -T unsafe",
        "-m 1",
        "-m 1 -W",
        "-r 1G",
        "--salvage",
        "-S 128k",
    ] {
        compresses(&twins, &format!("-c {options} -O qcow2 b"));
    }
    twins.same("create -f qcow2 -o compression_type=zstd out 20M");
    twins.all_same(&[
        "convert -c -n --target-is-zero -O qcow2 b out",
        "check out",
        "convert -c -n --target-image-opts b driver=qcow2,file.filename=r",
    ]);
    let compared = twins.run_theirs_on_ours(&["compare", "b", "out"]);
    assert_eq!(compared.code, Some(0), "{compared:?}");
}

/// Breaks the data of the first compressed cluster from its first bit on.
fn break_first_compressed_cluster(path: &Path) {
    let mut image = std::fs::read(path).expect("an image");
    let number = |at: usize| -> usize {
        let bytes = image[at..at + 8].try_into().expect("eight bytes");
        u64::from_be_bytes(bytes) as usize
    };
    // With clusters of 64 KiB an entry has 54 bits of offset; bit 62 says compressed.
    let l2_table = number(number(40)) & 0x00ff_ffff_ffff_fe00;
    let mut entries = (0..8192).map(|index| number(l2_table + 8 * index));
    let entry = entries.find(|entry| entry >> 62 == 1);
    let data = entry.expect("a compressed cluster") & ((1 << 54) - 1);
    image[data..data + 16].fill(0xff);
    std::fs::write(path, image).expect("the image again");
}

#[test]
fn what_cannot_be_read_is_salvaged() {
    let twins = Twins::new(IMAGES);
    break_first_compressed_cluster(&twins.ours("c"));
    break_first_compressed_cluster(&twins.theirs("c"));
    let failed = twins.same("convert -O qcow2 c out");
    assert!(failed.err.contains("Input/output error"), "{failed:?}");
    for (options, told) in [
        ("-O raw c plain", true),
        ("-c -O qcow2 c packed", true),
        ("-q -O raw c quiet", false),
    ] {
        let salvaged = twins.same(&format!("convert --salvage {options}"));
        assert_eq!(salvaged.code, Some(0), "{salvaged:?}");
        let tells = salvaged.err.contains("error while reading offset");
        assert_eq!(tells, told, "{options}: {salvaged:?}");
    }
    twins.all_same(&["compare plain packed", "compare plain quiet"]);
}

#[test]
fn levels_and_windows_can_be_chosen() {
    let twins = Twins::new(&["qemu-img create -q -f raw r 8M"]);
    let lines: String = (0..300_000_u64)
        .map(|n| format!("line {n} {}\n", n * n % 97))
        .collect();
    std::fs::write(twins.ours("r"), &lines.as_bytes()[..4 << 20]).expect("a file");
    let len = |options: &str| {
        let line = format!("convert -c {options} -f raw -O qcow2 r out");
        let converted = twins.run_ours(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(converted.code, Some(0), "{options}: {converted:?}");
        let compared = twins.run_theirs_on_ours(&["compare", "-f", "raw", "r", "out"]);
        assert_eq!(compared.code, Some(0), "{options}: {compared:?}");
        std::fs::metadata(twins.ours("out")).expect("a file").len()
    };
    assert!(len("--level 12") < len("--level 1"));
    assert!(len("--level 9 --window 4k") > len("--level 9"));
    let zstd = "-o compression_type=zstd";
    assert!(len(&format!("{zstd} --level 19")) < len(&format!("{zstd} --level 1")));
    for (options, message) in [
        (
            "-c --level 13",
            "compression level 13 is not between 1 and 12",
        ),
        ("-c --level 0", "Invalid compression level specified"),
        (
            "-c --window 5k",
            "Invalid compression window specified: '5k'",
        ),
        ("--level 3", "--level and --window require use of -c flag"),
    ] {
        let line = format!("convert {options} -f raw -O qcow2 r out");
        let refused = twins.run_ours(&line.split_whitespace().collect::<Vec<_>>());
        assert_eq!(refused.code, Some(1), "{options}");
        assert!(refused.err.contains(message), "{refused:?}");
    }
}

#[test]
fn the_kernel_copies_from_file_to_file() {
    let twins = Twins::new(IMAGES);
    for source in ["a", "b", "c", "r"] {
        converts(&twins, &format!("-C -O qcow2 {source}"));
        twins.same(&format!("convert -C -O raw {source} out.raw"));
        let compared = twins.run_theirs_on_ours(&["compare", source, "out.raw"]);
        assert_eq!(compared.code, Some(0), "{source}: {compared:?}");
    }
}

#[test]
fn several_sources_are_laid_end_to_end() {
    let twins = Twins::new(IMAGES);
    // Quiet: which piece gets its clusters first, and so what check says about their
    // order, depends on how busy the machine is.
    twins.all_same(&["convert -O qcow2 a r b out", "check -q out", "info out"]);
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
        "convert -c a out",
        "convert -c -O raw a out",
        "convert -c -O qcow2 -o preallocation=metadata a out",
        "convert -c -O qcow2 -o preallocation=off a out",
        "convert -c -O qcow2 -o data_file=out.data a out",
        "convert -c -O qcow2 -o compression_type=lz4 a out",
        "convert --target-is-zero a out",
        "convert --target-image-opts a driver=raw,file.filename=out",
        "convert --image-opts -f qcow2 driver=qcow2,file.filename=a out",
        "convert --skip-broken-bitmaps -O qcow2 a out",
        "convert -r x a out",
        "convert -O qcow2 a a",
        // What is wrong with the target is told before what is wrong with bitmaps.
        "convert --bitmaps -O qcow2 a b out",
        "convert --bitmaps -O foo a b out",
        "convert --bitmaps -f raw -O qcow2 r out",
        "convert --bitmaps -f raw -O foo r out",
        "convert --bitmaps -f raw -O qcow2 -o foo=3 r out",
        "convert --bitmaps -f raw -c -O raw r out",
        "convert --bitmaps -f raw -O qcow2 -o cluster_size=3 r out",
        "convert -l s -O qcow2 a b out",
        "convert -l snapshot.foo=1 -O qcow2 a b out",
        "convert -l snapshot.foo=1 -O qcow2 none out",
        "convert -l snapshot.id=9 -O qcow2 a b out",
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
