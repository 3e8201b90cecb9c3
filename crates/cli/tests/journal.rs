//! `convert --journal`: copies that are killed go on, and end as if they had not been.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

fn shell(folder: &Path, line: &str) -> Output {
    let mut command = Command::new("bash");
    command.args(["-c", line]).current_dir(folder);
    command.env("VELLUM", VELLUM).env("LC_ALL", "C");
    command.output().expect("bash")
}

#[track_caller]
fn succeeds(folder: &Path, line: &str) -> Output {
    let output = shell(folder, line);
    assert!(output.status.success(), "{line}: {output:?}");
    output
}

/// A disk of 1 GiB with data all over it, some of it in a backing file.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    succeeds(
        folder.path(),
        "qemu-img create -q -f qcow2 base 1G && qemu-img create -q -f qcow2 -b base -F qcow2 src",
    );
    let writes = |first: u32| {
        let command = |n: u32| format!(" -c 'write -P {} {}M 5M'", n % 255 + 1, n * 20);
        (0..50)
            .map(|n| command(n * 2 % 50 + first))
            .collect::<String>()
    };
    succeeds(
        folder.path(),
        &format!("qemu-io base {} > /dev/null", writes(0)),
    );
    succeeds(
        folder.path(),
        &format!("qemu-io src {} > /dev/null", writes(1)),
    );
    folder
}

fn journal(folder: &Path) -> PathBuf {
    folder.join("target.vellum-journal")
}

/// How far the copy is, as its journal says; `None` without one, and while that is only locked.
fn done(folder: &Path) -> Option<u64> {
    let text = std::fs::read_to_string(journal(folder)).ok()?;
    if text.is_empty() {
        return None;
    }
    let value: Value = serde_json::from_str(&text).expect("a journal is never half written");
    value["done"].as_u64()
}

/// Starts a copy that takes a few seconds.
fn slowly(folder: &Path, words: &str) -> Child {
    Command::new(VELLUM)
        .args(["convert", "-f", "qcow2", "--journal", "-r", "60M"])
        .args(words.split_whitespace())
        .args(["src", "target"])
        .current_dir(folder)
        .stderr(Stdio::null())
        .spawn()
        .expect("the program runs")
}

/// Kills a copy once it is beyond `bytes` by its journal.
fn kill_beyond(folder: &Path, mut copy: Child, bytes: u64) {
    let start = Instant::now();
    while done(folder).is_none_or(|done| done < bytes) {
        assert!(start.elapsed() < Duration::from_secs(60), "no progress");
        assert!(copy.try_wait().unwrap().is_none(), "it ended too soon");
        std::thread::sleep(Duration::from_millis(5));
    }
    // In the middle of the next piece.
    std::thread::sleep(Duration::from_millis(150));
    copy.kill().unwrap();
    copy.wait().unwrap();
}

#[test]
fn a_killed_copy_goes_on_where_it_was() {
    let folder = folder();
    let folder = folder.path();
    for (options, format) in [
        ("-O qcow2", "qcow2"),
        ("-O raw", "raw"),
        ("-c -O qcow2", "qcow2"),
        // Its refcounts are late until it is closed.
        ("-O qcow2 -o lazy_refcounts=on", "qcow2"),
        // Rounds the size up.
        ("-O vpc", "vpc"),
    ] {
        kill_beyond(folder, slowly(folder, options), 256 << 20);
        let line = format!("$VELLUM convert -f qcow2 --journal {options} src target");
        let output = succeeds(folder, &line);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("going on at"), "{options}: {said}");
        assert!(!journal(folder).exists(), "the copy is complete");
        succeeds(
            folder,
            &format!("qemu-img compare -q -f qcow2 -F {format} src target"),
        );
        if format == "qcow2" {
            succeeds(
                folder,
                "qemu-img check -q target && $VELLUM check -q target",
            );
        }
        succeeds(folder, "rm target");
    }
}

#[test]
fn a_copy_may_be_killed_again_and_again() {
    let folder = folder();
    let folder = folder.path();
    for place in [0, 256 << 20, 512 << 20] {
        kill_beyond(folder, slowly(folder, "-O qcow2"), place);
    }
    succeeds(
        folder,
        "$VELLUM convert -f qcow2 --journal -O qcow2 src target",
    );
    succeeds(
        folder,
        "qemu-img compare -q src target && qemu-img check -q target",
    );
}

/// Two at once: the second is refused, and the first ends as if there had been none.
#[test]
fn a_second_copy_leaves_a_running_one_alone() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    succeeds(
        folder,
        "qemu-img create -q -f qcow2 src 1G && qemu-io -c 'write -P 1 0 20M' \
         -c 'write -P 2 300M 60M' src > /dev/null",
    );
    for format in ["qcow2", "raw"] {
        let mut first = slowly(folder, &format!("-r 20M -O {format}"));
        let start = Instant::now();
        while done(folder).is_none_or(|done| done < 256 << 20) {
            assert!(start.elapsed() < Duration::from_secs(60), "no progress");
            std::thread::sleep(Duration::from_millis(2));
        }
        let second = format!("$VELLUM convert -f qcow2 --journal -O {format} src target");
        let output = shell(folder, &second);
        assert!(first.try_wait().unwrap().is_none(), "it ended too soon");
        assert_eq!(output.status.code(), Some(1), "{format}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("'target' is being made"), "{said}");
        assert!(first.wait().unwrap().success());
        let compare = format!("qemu-img compare -q -f qcow2 -F {format} src target");
        succeeds(folder, &compare);
        succeeds(folder, "rm target");
    }
}

/// A copy that is ended before it has a target leaves an empty journal; the next one begins.
#[test]
fn a_copy_that_was_only_claimed_begins_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    succeeds(
        folder,
        "qemu-img create -q -f qcow2 src 64M && qemu-io -c 'write 0 1M' src > /dev/null",
    );
    // What cannot begin leaves no journal behind.
    let output = shell(
        folder,
        "$VELLUM convert --journal -O qcow2 -o cluster_size=3 src target",
    );
    assert_eq!(output.status.code(), Some(1));
    assert!(!journal(folder).exists());
    std::fs::write(journal(folder), "").unwrap();
    succeeds(folder, "$VELLUM convert --journal -O qcow2 src target");
    succeeds(folder, "qemu-img compare -q src target");
    assert!(!journal(folder).exists());
    let left: Vec<_> = std::fs::read_dir(folder).unwrap().flatten().collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

/// Nor does it go on while somebody else has the target open.
#[test]
fn a_target_in_use_is_not_gone_on_with() {
    let folder = folder();
    let folder = folder.path();
    kill_beyond(folder, slowly(folder, "-O qcow2"), 256 << 20);
    let before = std::fs::read(folder.join("target")).unwrap();
    let output = shell(
        folder,
        // The locks of the killed copy end with its last request. The shell stays to the end:
        // if it became its last command, qemu-io's input would end there.
        "until qemu-io -c quit target > /dev/null 2>&1; do sleep 0.1; done; \
         coproc qemu-io target; read -r -n 8 -u ${COPROC[0]}; \
         $VELLUM convert -f qcow2 --journal -O qcow2 src target; \
         exit $?",
    );
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("Failed to get \"write\" lock"), "{said}");
    assert!(journal(folder).exists());
    // The one who had it open has closed it cleanly, which changes nothing else.
    let after = std::fs::read(folder.join("target")).unwrap();
    assert_eq!(before.len(), after.len());
    let on = "$VELLUM convert -f qcow2 --journal -O qcow2 src target";
    succeeds(folder, on);
    succeeds(
        folder,
        "qemu-img compare -q src target && qemu-img check -q target",
    );
}

#[test]
fn another_copy_is_not_gone_on_with() {
    let folder = folder();
    let folder = folder.path();
    kill_beyond(folder, slowly(folder, "-O qcow2"), 256 << 20);
    let refused = |line: &str, words: &str| {
        let before = std::fs::read(folder.join("target")).unwrap();
        let output = shell(folder, line);
        assert_eq!(output.status.code(), Some(1), "{line}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(words), "{line}: {said}");
        assert!(journal(folder).exists());
        assert!(std::fs::read(folder.join("target")).unwrap() == before);
    };
    let other = "$VELLUM convert -f qcow2 --journal -O qcow2 -o cluster_size=4k src target";
    refused(other, "not those of the copy");
    let same = "$VELLUM convert -f qcow2 --journal -O qcow2 src target";
    refused(&same.replace("--journal", "--journal -t unsafe"), "unsafe");
    // The backing file of the source has been touched since.
    succeeds(folder, "qemu-io -c 'write -P 77 0 64k' base > /dev/null");
    refused(same, "not those of the copy");
    // So has a file with its data, though not the image that names it.
    succeeds(folder, "rm target target.vellum-journal");
    succeeds(
        folder,
        "mv src kept && qemu-img convert -O qcow2 -o data_file=data kept src",
    );
    kill_beyond(folder, slowly(folder, "-O qcow2"), 256 << 20);
    succeeds(folder, "touch data");
    refused(same, "not those of the copy");
    succeeds(folder, "mv kept src");
    // Another file has taken the target's place.
    succeeds(folder, "rm target.vellum-journal && cp target other");
    succeeds(folder, "rm target");
    kill_beyond(folder, slowly(folder, "-O qcow2"), 256 << 20);
    succeeds(folder, "mv other target");
    refused(same, "is not the file");
    std::fs::write(journal(folder), "{}").unwrap();
    refused(same, "is no journal");
}

/// A target that is another image by now has the same name and the same number.
#[test]
fn a_target_that_was_overwritten_is_not_gone_on_with() {
    let folder = folder();
    let folder = folder.path();
    for format in ["raw", "qcow2"] {
        let options = format!("-O {format}");
        let on = format!("$VELLUM convert -f qcow2 --journal {options} src target");
        kill_beyond(folder, slowly(folder, &options), 256 << 20);
        succeeds(
            folder,
            &format!("qemu-img create -q -f {format} target 1G && touch target"),
        );
        let output = shell(folder, &on);
        assert_eq!(output.status.code(), Some(1), "{format}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains("it was written to since"), "{said}");
        assert!(journal(folder).exists());
        // What this program makes in its place is known to be another one.
        for made in [
            format!("create -q -f {format} target 1G"),
            format!("convert -f qcow2 {options} src target"),
        ] {
            std::fs::write(journal(folder), "{}").unwrap();
            succeeds(folder, &format!("$VELLUM {made}"));
            assert!(!journal(folder).exists(), "{made}");
        }
        succeeds(folder, &on);
        succeeds(
            folder,
            &format!("qemu-img compare -q -f qcow2 -F {format} src target && rm target"),
        );
    }
}

/// As the last test, where no sample tells it: an image that differs in some bytes, by whatever of this program it
/// came there and whatever name of the target was used.
#[test]
fn a_target_that_this_program_has_written_to_is_made_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    succeeds(
        folder,
        "qemu-img create -q -f raw a 520M && qemu-io -f raw -c 'write -P 1 0 520M' a > /dev/null && \
         cp a b && printf 'of another disk.' | dd of=b bs=1 seek=100500000 conv=notrunc status=none",
    );
    for (name, change) in [
        ("target", "$VELLUM dd -f raw -O raw if=b of=target"),
        ("target", "cat b | $VELLUM convert -f raw -O raw - target"),
        ("target", "$VELLUM convert -n -f raw -O raw b target"),
        (
            "target",
            "$VELLUM io -f raw -c 'write -q -P 7 100500000 16' target",
        ),
        ("file:link", "$VELLUM convert -n -f raw -O raw b target"),
    ] {
        std::fs::remove_file(folder.join("target")).ok();
        if name != "target" {
            succeeds(folder, "ln -s target link");
        }
        let copy = Command::new(VELLUM)
            .args(["convert", "--journal", "-r", "150M", "-f", "raw", "a", name])
            .current_dir(folder)
            .stderr(Stdio::null())
            .spawn()
            .expect("the program runs");
        kill_beyond(folder, copy, 256 << 20);
        succeeds(folder, change);
        assert!(!journal(folder).exists(), "{change}");
        let again = format!("$VELLUM convert --journal -f raw a {name} && cmp a target");
        succeeds(folder, &again);
        assert!(!journal(folder).exists(), "{change}");
    }
    succeeds(folder, "ln target other");
    let output = shell(folder, "$VELLUM convert --journal -f raw a target");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("a target with one name"), "{said}");
}

/// Nor where the file that was written to is another one than the target is named by, or that has another name
/// meanwhile: what each file is marked with tells it.
#[test]
fn a_target_whose_files_were_written_to_elsewhere_is_made_anew() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    succeeds(folder, "mkdir sub && qemu-img create -q -f raw a 520M");
    succeeds(
        folder,
        "qemu-io -f raw -c 'write -P 1 0 520M' a > /dev/null",
    );
    let attribute = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(folder, "user.vellum.test", b"", attribute).is_err() {
        // Such a target is refused here, or known by its name alone.
        return;
    }
    let write = "$VELLUM io -f raw -c 'write -q -P 7 100500000 16'";
    for (format, options, change) in [
        ("qcow2", "-o data_file=d", format!("{write} d")),
        (
            "qcow2",
            "-o data_file=d,data_file_raw=on",
            format!("{write} d"),
        ),
        (
            "vmdk",
            "-o subformat=monolithicFlat",
            format!("{write} target-flat"),
        ),
        ("raw", "", format!("ln target u && {write} u && rm u")),
        (
            "raw",
            "",
            format!("mv target sub && {write} sub/target && mv sub/target ."),
        ),
    ] {
        let line = format!("convert --journal -f raw -O {format} {options} a target");
        let copy = Command::new(VELLUM)
            .args(line.split_whitespace().chain(["-r", "150M"]))
            .current_dir(folder)
            .stderr(Stdio::null())
            .spawn()
            .expect("the program runs");
        kill_beyond(folder, copy, 256 << 20);
        succeeds(folder, &change);
        let output = succeeds(folder, &format!("$VELLUM {line}"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!said.contains("going on at"), "{change}: {said}");
        succeeds(
            folder,
            &format!("qemu-img compare -q -f raw -F {format} a target"),
        );
        assert!(!journal(folder).exists(), "{change}");
        succeeds(folder, "rm -f target* d*");
    }
}

/// Nor where another file has the name of one that is not the target's first.
#[test]
fn a_target_with_another_data_file_is_not_gone_on_with() {
    let folder = folder();
    let folder = folder.path();
    let options = "-O qcow2 -o data_file=d";
    kill_beyond(folder, slowly(folder, options), 256 << 20);
    succeeds(folder, "cp d e && mv e d");
    let line = format!("$VELLUM convert -f qcow2 --journal {options} src target");
    let output = shell(folder, &line);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("is not the file"), "{said}");
}

/// All files of the source count, not the one alone that it is named by.
#[test]
fn a_source_whose_extents_were_changed_is_another_one() {
    let folder = tempfile::tempdir().expect("a folder");
    let folder = folder.path();
    succeeds(folder, "qemu-img create -q -f raw raw 600M");
    succeeds(
        folder,
        "qemu-io -f raw -c 'write -P 1 0 600M' raw > /dev/null",
    );
    let make = "qemu-img convert -O vmdk -o subformat=monolithicFlat -f raw raw src.vmdk";
    succeeds(folder, make);
    let copy = Command::new(VELLUM)
        .args([
            "convert",
            "--journal",
            "-r",
            "60M",
            "-f",
            "vmdk",
            "src.vmdk",
        ])
        .arg("target")
        .current_dir(folder)
        .stderr(Stdio::null())
        .spawn()
        .expect("the program runs");
    kill_beyond(folder, copy, 1);
    let change = "printf x | dd of=src-flat.vmdk bs=1 seek=1M conv=notrunc status=none";
    succeeds(folder, change);
    let again = shell(folder, "$VELLUM convert --journal -f vmdk src.vmdk target");
    assert_eq!(again.status.code(), Some(1));
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(said.contains("are not those of the copy"), "{said}");
}
