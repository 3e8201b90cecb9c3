//! `vellum convert` to standard output and from standard input.

use vellum_testing::Folder;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// A folder in which command lines of the real tools have been run.
fn folder(lines: &[&str]) -> Folder {
    let folder = Folder::new(VELLUM);
    lines.iter().for_each(|line| drop(folder.done(line)));
    folder
}

/// Runs a command line that must fail, and report something.
#[track_caller]
fn assert_fails(folder: &Folder, line: &str, words: &str) {
    let said = folder.fails(line);
    assert!(said.contains(words), "{line}: {said}");
}

const SCATTERED: &[&str] = &[
    "qemu-img create -q -f qcow2 base 300M",
    "qemu-io -c 'write -P 1 0 10M' -c 'write -P 2 100M 3M' -c 'write -P 3 299M 1M' base > /dev/null",
    "qemu-img create -q -f qcow2 -b base -F qcow2 image",
    "qemu-io -c 'write -P 4 5M 1M' -c 'write -z 101M 1M' -c 'write -c 200M 2M' \
     -c 'write -P 9 250000k 512' image > /dev/null",
];

/// Cluster sizes, versions and widths: whatever comes out of the pipe is a sound image
/// with the same content, for QEMU's tools and ours.
#[test]
fn what_comes_out_of_the_pipe_is_a_sound_image() {
    let folder = folder(SCATTERED);
    for options in [
        "",
        "-o cluster_size=512",
        "-o cluster_size=4k,refcount_bits=1",
        "-o cluster_size=2M,compat=0.10",
        "-o extended_l2=on,refcount_bits=64",
        "-o lazy_refcounts=on,compression_type=zstd",
    ] {
        folder.done(&format!(
            "$VELLUM convert -O qcow2 {options} image - | cat > out"
        ));
        folder.done("qemu-img check -q out && $VELLUM check -q out");
        folder.done("qemu-img compare -q image out && $VELLUM compare -q image out");
        let length = folder.len_bytes("out");
        assert!(
            length < 40 << 20,
            "{options}: {length} bytes for 17 MiB of data"
        );
        // It is an image like any other: it can be written to.
        folder.done("qemu-io -c 'write -P 7 150M 1M' -c 'write -P 8 0 64k' out > /dev/null");
        folder.done("qemu-img check -q out");
    }
}

#[test]
fn odd_and_empty_disks_are_streamed_too() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 empty 1G",
        "head -c 1000000 /dev/urandom > odd",
        "head -c 0 /dev/null > nothing",
        "qemu-img create -q -f qcow2 a 3M && qemu-io -c 'write -P 5 0 3M' a > /dev/null",
        "qemu-img create -q -f qcow2 -o cluster_size=2M b 5M && qemu-io -c 'write -P 6 1M 4M' b > /dev/null",
    ]);
    folder.done("$VELLUM convert -O qcow2 empty - > out && qemu-img check -q out");
    folder.done("qemu-img compare -q empty out");
    folder.done("$VELLUM convert -f raw -O qcow2 odd - > out && qemu-img check -q out");
    folder.done("qemu-img compare -q -f raw -F qcow2 odd out");
    folder.done("$VELLUM convert -f raw -O qcow2 nothing - > out && qemu-img check -q out");
    // Several sources, whose border lies inside of a cluster.
    folder
        .shell("$VELLUM convert -O qcow2 -o cluster_size=2M a b - > out && qemu-img check -q out");
    folder
        .done("qemu-img convert -O raw a b whole && qemu-img compare -q -F qcow2 -f raw whole out");
    folder.done("$VELLUM convert -O raw a b - | cmp - whole");
}

#[test]
fn what_cannot_be_streamed_is_refused_before_a_byte_is_written() {
    let folder = folder(&["qemu-img create -q -f qcow2 image 1M"]);
    for (options, words) in [
        ("-c -O qcow2", "-c"),
        (
            "-O qcow2 -o preallocation=full",
            "preallocation cannot be streamed",
        ),
        (
            "-O qcow2 -B image -F qcow2",
            "backing file cannot be streamed",
        ),
        ("-O luks", "luks"),
        ("-O qcow2 --bitmaps", "--bitmaps"),
    ] {
        assert_fails(
            &folder,
            &format!("$VELLUM convert {options} image - > out"),
            words,
        );
        assert_eq!(folder.len_bytes("out"), 0);
    }
    // A reader that goes away is an error, not a silence.
    folder.done("qemu-io -c 'write 0 1M' image > /dev/null");
    assert_fails(
        &folder,
        "$VELLUM convert -O qcow2 image - > /dev/full",
        "standard output",
    );
}

#[test]
fn raw_bytes_are_taken_from_a_pipe() {
    let folder = folder(&[
        "head -c 5000000 /dev/urandom > raw; truncate -s 40M raw; head -c 3333 /dev/urandom >> raw",
    ]);
    // A pipe gives its bytes in pieces as it likes.
    let slow = "(head -c 100001; sleep 0.2; cat) < raw";
    for options in [
        "-O qcow2",
        "-O raw",
        "-O qcow2 -c",
        "-O qcow2 -o cluster_size=512 -S 0",
    ] {
        folder.done(&format!("{slow} | $VELLUM convert {options} - out"));
        folder.done("qemu-img info out | grep -q '40.*MiB (4194.*bytes)'");
        let format = if options.contains("raw") {
            "raw"
        } else {
            "qcow2"
        };
        folder.done(&format!("qemu-img compare -q -f raw -F {format} raw out"));
        if format == "qcow2" {
            folder.done("qemu-img check -q out");
        }
    }
    let length = |name: &str| {
        use std::os::unix::fs::MetadataExt;
        std::fs::metadata(folder.path(name)).unwrap().blocks() * 512
    };
    folder.done("cat raw | $VELLUM convert -O qcow2 - out");
    assert!(length("out") < 8 << 20, "holes of zeroes take no room");
    folder.done("head -c 0 raw | $VELLUM convert -O qcow2 - out && qemu-img check -q out");
    folder.done("qemu-img info out | grep -q 'virtual size: 0 B'");
}

#[test]
fn a_file_on_standard_input_has_any_format() {
    let folder = folder(&[
        "qemu-img create -q -f qcow2 image 64M && qemu-io -c 'write -P 3 1M 5M' image > /dev/null",
    ]);
    folder.done("$VELLUM convert -f qcow2 -O qcow2 - out < image");
    folder.done("qemu-img compare -q image out");
    folder.done("$VELLUM convert -f qcow2 -O qcow2 - - < image | cat > out");
    folder.done("qemu-img compare -q image out && qemu-img check -q out");
    assert_fails(
        &folder,
        "cat image | $VELLUM convert -f qcow2 -O raw - out",
        "Only raw images",
    );
    assert_fails(
        &folder,
        "cat image | $VELLUM convert -O qcow2 - - > out",
        "into a file only",
    );
}

/// To QEMU's programs `-` is a file.
#[test]
fn by_the_name_of_qemu_img_a_dash_is_a_file() {
    let folder = folder(&["qemu-img create -q -f qcow2 image 1M"]);
    assert_eq!(folder.must("our qemu-img", "convert -O raw image -"), "");
    assert_eq!(folder.len_bytes("-"), 1 << 20);
}

/// An image in a pipe is none of ours to make raw bytes of, unless the user says so: they
/// would be an image again, whatever the target is called.
#[test]
fn an_image_in_a_pipe_is_not_taken_for_raw_bytes() {
    let folder = folder(SCATTERED);
    folder.done("echo mine > there && qemu-img create -q --object secret,id=s,data=x -f luks -o key-secret=s,iter-time=10 luks 1M");
    for (image, format) in [("image", "qcow2"), ("luks", "luks")] {
        for target in ["-O raw - out", "- out", "-O qcow2 - there"] {
            assert_fails(
                &folder,
                &format!("cat {image} | $VELLUM convert {target}"),
                &format!("Standard input looks like {format}"),
            );
        }
    }
    assert!(!folder.has("out"));
    folder.done("[ \"$(cat there)\" = mine ]");
    folder.done(
        "cat image | $VELLUM convert -f raw -O raw - out && cmp -n $(stat -c %s image) image out",
    );
    folder.done("$VELLUM convert -O raw - again < base && $VELLUM compare base again");
}

/// What the system says is told in its words, without the number that our language adds.
#[test]
fn errors_of_the_system_have_no_numbers() {
    let folder = folder(&["qemu-img create -q -f qcow2 image 1M"]);
    for line in [
        "$VELLUM convert -O raw image - > /dev/full",
        "$VELLUM convert --journal -O qcow2 image nowhere/out",
        "$VELLUM convert -O qcow2 - out < .",
        "$VELLUM info nowhere",
        "$VELLUM audit nowhere",
        "$VELLUM inspect nowhere",
        "$VELLUM inspect --html nowhere/page image",
        "$VELLUM bench --dir nowhere",
        "$VELLUM man /proc/nowhere",
        "$VELLUM install-links /proc/nowhere",
        "$VELLUM nbd --pid-file=nowhere/pid -k $PWD/socket image",
        "$VELLUM daemon --pidfile nowhere/pid",
        "$VELLUM io -c 'open nowhere'",
        "$VELLUM info --object secret,id=s,file=nowhere image",
    ] {
        let quoted = line.replace('\'', "'\\''");
        let text = folder
            .shell(&format!("timeout 60 bash -c '{quoted}'"))
            .all();
        assert!(!text.is_empty(), "{line}");
        assert!(!text.contains("os error"), "{line}: {text}");
    }
}
