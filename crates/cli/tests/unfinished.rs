//! Copies that do not come to their end: what is left of the target, and what is said.

use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

fn shell(folder: &Path, line: &str) -> Output {
    let mut command = Command::new("bash");
    command.args(["-c", line]).current_dir(folder);
    command.env("VELLUM", VELLUM).env("LC_ALL", "C");
    command.stdin(Stdio::null()).output().expect("bash")
}

fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    symlink(VELLUM, folder.path().join("qemu-img")).unwrap();
    let made = shell(folder.path(), "head -c 32M /dev/zero | tr '\\0' x > source");
    assert!(made.status.success());
    folder
}

fn start(folder: &Path, program: &Path, words: &str) -> Child {
    // Where the tests run in the background of a shell, an interrupt is ignored otherwise.
    Command::new("env")
        .arg("--default-signal=INT,HUP,TERM")
        .arg(program)
        .args(words.split_whitespace())
        .current_dir(folder)
        .stderr(Stdio::piped())
        .spawn()
        .expect("the program runs")
}

/// Starts a copy that takes long, and waits until it writes.
fn slowly(folder: &Path, program: &Path, words: &str) -> Child {
    let child = start(folder, program, words);
    let end = Instant::now() + Duration::from_secs(60);
    // The data of an image stands behind its metadata, that of a raw file at its start.
    let writes = || {
        let bytes = std::fs::read(folder.join("target")).unwrap_or_default();
        bytes.windows(16).any(|window| window == [b'x'; 16])
    };
    while !writes() {
        assert!(Instant::now() < end, "no progress");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

/// Ends a copy by a signal; says how it ended and what it said.
fn end(child: Child, signal: &str) -> (Option<i32>, String) {
    let id = child.id().to_string();
    let sent = Command::new("kill").args(["-s", signal, &id]).status();
    assert!(sent.unwrap().success());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.signal(), said)
}

#[test]
fn a_target_that_the_copy_has_made_goes_with_it() {
    let folder = folder();
    let folder = folder.path();
    let target = folder.join("target");
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
        let (ended_by, said) = end(slowly(folder, Path::new(VELLUM), words), signal);
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
    let folder = folder.path();
    let target = folder.join("target");
    for round in 0..12 {
        let words = match round % 3 {
            0 => "convert -r 1M -f raw -O qcow2 source target",
            1 => "convert -r 1M -f raw -O qcow2 -o preallocation=full source target",
            _ => "convert -r 1M -f raw -O raw source target",
        };
        let child = start(folder, Path::new(VELLUM), words);
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
    let folder = folder.path();
    let create = "qemu-img create -q -f qcow2 target 32M";
    for words in [
        "convert -r 1M -f raw -O qcow2 source target",
        "convert -n -r 1M -f raw -O qcow2 source target",
    ] {
        assert!(shell(folder, create).status.success());
        let (ended_by, said) = end(slowly(folder, Path::new(VELLUM), words), "INT");
        assert_eq!(ended_by, Some(libc::SIGINT));
        assert!(said.contains("'target' is not complete"), "{words}: {said}");
        assert!(folder.join("target").exists());
    }
}

#[test]
fn under_the_name_of_qemus_program_everything_stays() {
    let folder = folder();
    let folder = folder.path();
    let words = "convert -r 1M -f raw -O qcow2 source target";
    let child = slowly(folder, &folder.join("qemu-img"), words);
    assert_eq!(end(child, "INT"), (Some(libc::SIGINT), String::new()));
    assert!(folder.join("target").exists());
}

#[test]
fn a_copy_that_can_be_gone_on_with_says_so() {
    let folder = folder();
    let folder = folder.path();
    let words = "convert --journal -r 1M -f raw -O qcow2 source target";
    let (ended_by, said) = end(slowly(folder, Path::new(VELLUM), words), "INT");
    assert_eq!(ended_by, Some(libc::SIGINT));
    assert!(said.contains("the same command goes on with it"), "{said}");
    let on = shell(folder, &format!("$VELLUM {}", words.replace("-r 1M ", "")));
    assert!(on.status.success(), "{on:?}");
    let same = shell(folder, "qemu-img compare -f raw -F qcow2 source target");
    assert!(same.status.success(), "{same:?}");
}

/// A file may get no longer than this, which is to a copy what a full disk is.
const LIMIT: &str = "ulimit -f 4096; trap '' XFSZ; ";

#[test]
fn a_target_that_does_not_fit_goes_too() {
    let folder = folder();
    let folder = folder.path();
    for words in [
        "$VELLUM convert -f raw -O qcow2 source target",
        "$VELLUM convert -f raw -O qcow2 - target < <(cat source)",
        "cat source | $VELLUM convert -O qcow2 - target",
        "$VELLUM dd -f raw -O qcow2 if=source of=target",
    ] {
        let output = shell(folder, &format!("{LIMIT}{words}"));
        assert_eq!(output.status.code(), Some(1), "{words}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("File too large"), "{words}: {said}");
        assert!(
            said.contains("was not complete and is removed"),
            "{words}: {said}"
        );
        assert!(!folder.join("target").exists(), "{words}");
    }
    let line = format!("{LIMIT}./qemu-img convert -f raw -O qcow2 source target");
    let output = shell(folder, &line);
    assert_eq!(output.status.code(), Some(1));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("complete"));
    assert!(folder.join("target").exists());
}

/// Whoever refuses, or fails before it is changed, removes nothing.
#[test]
fn what_the_copy_has_not_made_stays() {
    let folder = folder();
    let folder = folder.path();
    let create =
        "qemu-img create -q -f qcow2 target 32M && qemu-io -c 'write 0 1M' target > /dev/null";
    assert!(shell(folder, create).status.success());
    let before = std::fs::read(folder.join("target")).unwrap();
    let output = shell(folder, "$VELLUM convert -f qcow2 -O qcow2 source target");
    assert_eq!(output.status.code(), Some(1));
    assert!(std::fs::read(folder.join("target")).unwrap() == before);
    // The error is a wrong option of the target, after which the old file is as it was.
    let output = shell(
        folder,
        "$VELLUM convert -f raw -O qcow2 -o cluster_size=3 source target",
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(std::fs::read(folder.join("target")).unwrap() == before);
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
        let output = shell(folder.path(), &line);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{format}: {output:?}");
        assert!(said.contains("too large"), "{format}: {said}");
    }
}
