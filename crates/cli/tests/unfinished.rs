//! Copies that do not come to their end: what is left of the target, and what is said.

use std::os::unix::process::ExitStatusExt;
use std::process::Stdio;
use std::time::Duration;

use vellum_testing::{Folder, Running, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.link("qemu-img");
    folder.done("head -c 32M /dev/zero | tr '\\0' x > source");
    folder
}

fn start(folder: &Folder, program: &str, words: &str) -> Running {
    // Where the tests run in the background of a shell, an interrupt is ignored otherwise.
    let line = format!("--default-signal=INT,HUP,TERM {program} {words}");
    Running::start(folder.command("env", &line).stderr(Stdio::piped()))
}

/// Starts a copy that takes long, and waits until it writes.
fn slowly(folder: &Folder, program: &str, words: &str) -> Running {
    let copy = start(folder, program, words);
    // The data of an image stands behind its metadata, that of a raw file at its start.
    until("progress", || {
        let bytes = std::fs::read(folder.path("target")).unwrap_or_default();
        bytes.windows(16).any(|window| window == [b'x'; 16])
    });
    copy
}

/// Ends a copy by a signal; says how it ended and what it said.
fn end(copy: Running, signal: &str) -> (Option<i32>, String) {
    copy.signal(&format!("-{signal}"));
    let (status, said) = copy.said();
    (status.signal(), said.err)
}

#[test]
fn a_target_that_the_copy_has_made_goes_with_it() {
    let folder = folder();
    let target = folder.path("target");
    for (words, signal, number) in [
        (
            "convert -r 1M -f raw -O qcow2 source target",
            "INT",
            libc::SIGINT,
        ),
        (
            "convert -r 1M -f raw -O raw source target",
            "TERM",
            libc::SIGTERM,
        ),
        (
            "convert -m 1 -r 1M -f raw -O qcow2 source target",
            "HUP",
            libc::SIGHUP,
        ),
    ] {
        let (ended_by, said) = end(slowly(&folder, VELLUM, words), signal);
        assert_eq!(ended_by, Some(number), "{words}: {said}");
        assert!(
            said.contains("was not complete and is removed"),
            "{words}: {said}"
        );
        assert!(!target.exists(), "{words}");
    }
}

/// The signal comes as soon as there is a file, or a little later: while the target is made.
#[test]
fn a_target_that_was_only_begun_goes_too() {
    let folder = folder();
    let target = folder.path("target");
    for round in 0..12 {
        let words = match round % 3 {
            0 => "convert -r 1M -f raw -O qcow2 source target",
            1 => "convert -r 1M -f raw -O qcow2 -o preallocation=full source target",
            _ => "convert -r 1M -f raw -O raw source target",
        };
        let child = start(&folder, VELLUM, words);
        while !target.exists() {
            std::thread::sleep(Duration::from_micros(200));
        }
        std::thread::sleep(Duration::from_millis(round / 3));
        let (ended_by, said) = end(child, "INT");
        assert_eq!(ended_by, Some(libc::SIGINT), "{words}: {said}");
        assert!(
            said.contains("was not complete and is removed"),
            "{words}: {said}"
        );
        assert!(!target.exists(), "{words}");
    }
}

#[test]
fn a_target_that_was_there_before_stays_and_is_told_of() {
    let folder = folder();
    let create = "qemu-img create -q -f qcow2 target 32M";
    for words in [
        "convert -r 1M -f raw -O qcow2 source target",
        "convert -n -r 1M -f raw -O qcow2 source target",
    ] {
        folder.done(create);
        let (ended_by, said) = end(slowly(&folder, VELLUM, words), "INT");
        assert_eq!(ended_by, Some(libc::SIGINT));
        assert!(said.contains("'target' is not complete"), "{words}: {said}");
        assert!(folder.has("target"));
    }
}

#[test]
fn under_the_name_of_qemus_program_everything_stays() {
    let folder = folder();
    let words = "convert -r 1M -f raw -O qcow2 source target";
    let child = slowly(&folder, "./qemu-img", words);
    assert_eq!(end(child, "INT"), (Some(libc::SIGINT), String::new()));
    assert!(folder.has("target"));
}

#[test]
fn a_copy_that_can_be_gone_on_with_says_so() {
    let folder = folder();
    let words = "convert --journal -r 1M -f raw -O qcow2 source target";
    let (ended_by, said) = end(slowly(&folder, VELLUM, words), "INT");
    assert_eq!(ended_by, Some(libc::SIGINT));
    assert!(said.contains("the same command goes on with it"), "{said}");
    folder.must("vellum", &words.replace("-r 1M ", ""));
    folder.img("compare -f raw -F qcow2 source target");
}

/// A file may get no longer than this, which is to a copy what a full disk is.
const LIMIT: &str = "ulimit -f 4096; trap '' XFSZ; ";

#[test]
fn a_target_that_does_not_fit_goes_too() {
    let folder = folder();
    for words in [
        "$VELLUM convert -f raw -O qcow2 source target",
        "$VELLUM convert -f raw -O qcow2 - target < <(cat source)",
        "cat source | $VELLUM convert -O qcow2 - target",
        "$VELLUM dd -f raw -O qcow2 if=source of=target",
    ] {
        let said = folder.fails(&format!("{LIMIT}{words}"));
        assert!(said.contains("File too large"), "{words}: {said}");
        assert!(
            said.contains("was not complete and is removed"),
            "{words}: {said}"
        );
        assert!(!folder.has("target"), "{words}");
    }
    let line = format!("{LIMIT}./qemu-img convert -f raw -O qcow2 source target");
    assert!(!folder.fails(&line).contains("complete"));
    assert!(folder.has("target"));
}

/// Whoever refuses, or fails before it is changed, removes nothing.
#[test]
fn what_the_copy_has_not_made_stays() {
    let folder = folder();
    let create =
        "qemu-img create -q -f qcow2 target 32M && qemu-io -c 'write 0 1M' target > /dev/null";
    folder.done(create);
    let before = folder.read("target");
    folder.fails("$VELLUM convert -f qcow2 -O qcow2 source target");
    assert!(folder.read("target") == before);
    // The error is a wrong option of the target, after which the old file is as it was.
    folder.fails("$VELLUM convert -f raw -O qcow2 -o cluster_size=3 source target");
    assert!(folder.read("target") == before);
}

/// What is beyond the limit of file sizes is an error, and no signal ends the program.
#[test]
fn a_limit_of_file_sizes_ends_no_program() {
    let folder = folder();
    for format in ["vhdx", "raw", "qcow2"] {
        let more = if format == "vhdx" {
            ""
        } else {
            "-o preallocation=full"
        };
        let line = format!("ulimit -f 100; $VELLUM create -q -f {format} {more} target 10M");
        let said = folder.fails(&line);
        assert!(said.contains("too large"), "{format}: {said}");
    }
}
