//! `vellum scrub` and checksums as people use them: exit codes, what is printed, other programs.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const KEEP: &str = "--image-opts driver=qcow2,file.filename=a,checksums=on";

fn run(program: &str, folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(words).current_dir(folder).env("LC_ALL", "C");
    command
        .output()
        .expect("the program runs; `cargo xtask setup`")
}

fn vellum(folder: &TempDir, line: &str) -> (i32, String) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = run(env!("CARGO_BIN_EXE_vellum"), folder.path(), &words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().unwrap_or(-1);
    (code, text(&output.stdout) + &text(&output.stderr))
}

#[track_caller]
fn done(folder: &TempDir, line: &str) -> String {
    let (code, text) = vellum(folder, line);
    assert_eq!(code, 0, "{line}: {text}");
    text
}

fn qemu(folder: &TempDir, words: &[&str]) {
    let output = run(words[0], folder.path(), &words[1..]);
    assert!(output.status.success(), "{words:?}: {output:?}");
}

/// A folder with the image `a` over the image `base`, with checksums, and data of `base` at 64 KiB.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    done(&folder, "create -q -f qcow2 base 8M");
    qemu(&folder, &["qemu-io", "-c", "write -P 5 0 1M", "base"]);
    done(&folder, "create -q -f qcow2 -b base -F qcow2 a");
    qemu(&folder, &["qemu-io", "-c", "write -P 6 64k 512", "a"]);
    done(&folder, &format!("scrub -q {KEEP}"));
    folder
}

/// Changes a byte of the cluster that holds guest offset 64 KiB.
fn damage(folder: &TempDir, inside: u64) {
    let map: Value = serde_json::from_str(&done(folder, "map --output=json a")).expect("JSON");
    let extents = map.as_array().expect("extents");
    let data = extents.iter().find(|extent| extent["start"] == 64 << 10);
    let offset = data.expect("it is mapped")["offset"].as_u64();
    let at = offset.expect("a place") + inside;
    let options = &mut fs::OpenOptions::new();
    let file = options.write(true).open(folder.path().join("a"));
    let file = file.expect("the image");
    let before = file.metadata().expect("metadata").modified();
    file.write_all_at(b"X", at).expect("it is written");
    // A disk does not tell.
    let told = file.set_modified(before.expect("a time"));
    told.expect("the time is set");
}

#[test]
fn a_scrub_names_what_has_changed_and_repairs_it() {
    let folder = folder();
    assert!(done(&folder, "scrub a").ends_with("Nothing has changed on disk.\n"));
    damage(&folder, 8192);
    damage(&folder, 100);
    let (code, text) = vellum(&folder, "scrub --read-only a");
    assert_eq!(code, 2, "{text}");
    assert!(
        text.contains("disk 0x000000010000-0x000000011000\n"),
        "{text}"
    );
    assert!(
        text.contains("8 KiB have changed on disk, 8 KiB of them"),
        "{text}"
    );
    let (code, text) = vellum(&folder, "convert -f qcow2 -O raw a out");
    assert_eq!(code, 1, "{text}");
    // QEMU's words, and where the damage is.
    let expected = "error while reading at byte 65536: Input/output error";
    assert!(text.contains(expected), "{text}");
    let more = "warning: 'a': checksum mismatch in the 4096 bytes at offset ";
    assert!(
        text.contains(more) && text.contains("vellum scrub"),
        "{text}"
    );
    let words = ["io", "-r", "-c", "read 64k 512", "a"];
    let read = run(env!("CARGO_BIN_EXE_vellum"), folder.path(), &words);
    assert_eq!(read.stdout, b"read failed: Input/output error\n");
    assert!(
        String::from_utf8_lossy(&read.stderr).contains(more),
        "{read:?}"
    );
    let (code, text) = vellum(&folder, "scrub --repair --output=json a");
    assert_eq!(code, 2, "{text}");
    let report: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(report["damaged-bytes"], 8192);
    assert_eq!(report["left-bytes"], 4096);
    assert_eq!(report["damaged"][0]["repaired"], false);
    assert_eq!(report["damaged"][1]["guest"]["start"], (64 << 10) + 8192);
    // The guest writes all of the block that nobody else has.
    let words = ["io", "-c", "write -P 6 64k 4k", "a"];
    let written = run(env!("CARGO_BIN_EXE_vellum"), folder.path(), &words);
    assert!(written.status.success(), "{written:?}");
    assert!(done(&folder, "scrub a").ends_with("Nothing has changed on disk.\n"));
    qemu(&folder, &["qemu-img", "check", "-q", "a"]);
}

#[test]
fn other_programs_drop_the_checksums() {
    let folder = folder();
    let info: Value = serde_json::from_str(&done(&folder, "info --output=json a")).expect("JSON");
    assert_eq!(info["format-specific"]["data"]["checksums"], "a.vsums");
    qemu(&folder, &["qemu-io", "-c", "write -P 7 1M 64k", "a"]);
    let (code, text) = vellum(&folder, "scrub a");
    assert_eq!(code, 1);
    assert!(text.contains("checksums=on begins to keep some"), "{text}");
    done(&folder, &format!("scrub {KEEP}"));
    let off = "--image-opts driver=qcow2,file.filename=a,checksums=off";
    done(&folder, &format!("io {off} -c flush"));
    assert_eq!(vellum(&folder, "scrub a").0, 1);
}

/// QEMU opens a backing file that it commits into for reading first, and does not clear the bit of the checksums when
/// it goes on to write. What it has written is kept.
#[test]
fn what_qemu_has_committed_is_not_overwritten() {
    let folder = folder();
    qemu(&folder, &["qemu-io", "-c", "write -P 5 0 1M", "a"]);
    done(&folder, &format!("scrub -q {KEEP}"));
    let create = "qemu-img create -q -f qcow2 -b a -F qcow2 top";
    qemu(&folder, &create.split(' ').collect::<Vec<_>>());
    qemu(&folder, &["qemu-io", "-c", "write -P 9 0 64k", "top"]);
    qemu(&folder, &["qemu-img", "commit", "-q", "top"]);
    for io in ["io -r", "io"] {
        let words: Vec<&str> = io.split(' ').chain(["-c", "read 0 64k", "a"]).collect();
        let read = run(env!("CARGO_BIN_EXE_vellum"), folder.path(), &words);
        assert_eq!(read.stdout, b"read failed: Input/output error\n", "{io}");
        let told = String::from_utf8_lossy(&read.stderr);
        assert!(told.contains("or another program has"), "{told}");
    }
    let (code, text) = vellum(&folder, "scrub --repair a");
    assert_eq!(code, 2, "{text}");
    assert!(
        text.contains("a repair would bring back older ones"),
        "{text}"
    );
    qemu(&folder, &["qemu-io", "-r", "-c", "read -P 9 0 64k", "a"]);
    let off = "--image-opts driver=qcow2,file.filename=a,checksums=off";
    done(&folder, &format!("io {off} -c flush"));
    qemu(&folder, &["qemu-img", "check", "-q", "a"]);
    done(&folder, &format!("scrub -q {KEEP}"));
    let words = ["io", "-r", "-c", "read -P 9 0 64k", "a"];
    let read = run(env!("CARGO_BIN_EXE_vellum"), folder.path(), &words);
    assert!(read.status.success(), "{read:?}");
}

#[test]
fn checksums_that_are_gone_or_of_another_image_are_told_of() {
    let folder = folder();
    let sums = folder.path().join("a.vsums");
    fs::rename(&sums, folder.path().join("moved")).expect("it is renamed");
    let (code, text) = vellum(&folder, "scrub a");
    assert_eq!(code, 1);
    assert!(text.contains("give them up with checksums=off"), "{text}");
    done(&folder, "info a");
    let moved = "--image-opts driver=qcow2,file.filename=a,checksums=moved";
    assert!(done(&folder, &format!("scrub {moved}")).ends_with("Nothing has changed on disk.\n"));
    fs::write(&sums, vec![1; 8192]).expect("it is written");
    let (code, text) = vellum(&folder, "scrub a");
    assert_eq!(code, 1);
    assert!(text.contains("not the checksums of the image"), "{text}");
    assert_eq!(vellum(&folder, "scrub base").0, 1);
}

/// What is 300 GiB long and holds next to nothing is scrubbed at once, and in full.
#[test]
fn a_scrub_goes_past_long_holes() {
    let folder = folder();
    let options = &mut fs::OpenOptions::new();
    let file = options.write(true).open(folder.path().join("a"));
    let file = file.expect("the image");
    file.set_len(300 << 30).expect("it is longer");
    let scrub = |options: &str| -> Value {
        let (_, text) = vellum(&folder, &format!("scrub --output=json {options}a"));
        serde_json::from_str(&text).expect("JSON")
    };
    let started = std::time::Instant::now();
    let found = scrub("");
    assert_eq!(found["left-bytes"], 0);
    file.write_all_at(b"far", 200 << 30).expect("it is written");
    assert_eq!(scrub("")["new-bytes"], 1 << 20);
    file.write_all_at(b"X", (200 << 30) + 5000)
        .expect("it is written");
    let found = scrub("--read-only ");
    assert_eq!(found["damaged-bytes"], 4096);
    assert_eq!(found["damaged"][0]["file"]["start"], (200u64 << 30) + 4096);
    // Step by step it took some ten seconds each.
    assert!(started.elapsed().as_secs() < 20, "{:?}", started.elapsed());
}

/// What takes the place of an image may have checksums of its own; those of others stay.
#[test]
fn an_image_that_is_overwritten_takes_its_checksums_along() {
    let folder = folder();
    let sums = folder.path().join("a.vsums");
    fs::copy(&sums, folder.path().join("kept")).expect("a copy");
    done(&folder, "create -q -f qcow2 a 8M");
    assert!(!sums.exists());
    assert!(done(&folder, &format!("scrub {KEEP}")).ends_with("Nothing has changed on disk.\n"));
    // Those of another image, which may lie elsewhere by now; this one's get another name.
    let (kept, second) = (folder.path().join("kept"), folder.path().join("a.2.vsums"));
    done(&folder, "create -q -f qcow2 a 8M");
    fs::copy(&kept, &sums).expect("a copy");
    for _ in 0..2 {
        done(&folder, &format!("scrub {KEEP}"));
    }
    assert_eq!(fs::read(&sums).ok(), fs::read(&kept).ok());
    assert!(second.exists() && !folder.path().join("a.3.vsums").exists());
    done(&folder, "create -q -f qcow2 a 8M");
    assert!(sums.exists() && !second.exists());
    // Under a name that the user gives, nobody else's are overwritten.
    let named = "--image-opts driver=qcow2,file.filename=a,checksums=a.vsums";
    let (code, text) = vellum(&folder, &format!("scrub {named}"));
    assert_eq!(code, 1, "{text}");
    assert!(
        text.contains("a.vsums' holds the checksums of another image"),
        "{text}"
    );
    // What is no file.
    fs::remove_file(&sums).expect("it is there");
    done(&folder, &format!("scrub {KEEP}"));
    fs::rename(&sums, folder.path().join("kept")).expect("it is there");
    std::os::unix::fs::symlink("kept", &sums).expect("a link");
    done(&folder, "convert -f qcow2 -O qcow2 base a");
    assert!(sums.exists(), "a link leads elsewhere");
}
