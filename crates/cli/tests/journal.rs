//! `convert --journal`: copies that are killed go on, and end as if they had not been.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use vellum_testing::{Folder, Running, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// A disk of 1 GiB with data all over it, some of it in a backing file.
fn folder() -> Folder {
    let folder = Folder::new(VELLUM);
    folder.done(
        "qemu-img create -q -f qcow2 base 1G && qemu-img create -q -f qcow2 -b base -F qcow2 src",
    );
    let writes = |first: u32| {
        let command = |n: u32| format!(" -c 'write -P {} {}M 5M'", n % 255 + 1, n * 20);
        (0..50)
            .map(|n| command(n * 2 % 50 + first))
            .collect::<String>()
    };
    folder.done(&format!("qemu-io base {} > /dev/null", writes(0)));
    folder.done(&format!("qemu-io src {} > /dev/null", writes(1)));
    folder
}

fn journal(folder: &Folder) -> PathBuf {
    folder.path("target.vellum-journal")
}

/// How far the copy is, as its journal says; `None` without one, and while that is only locked.
fn done(folder: &Folder) -> Option<u64> {
    let text = std::fs::read_to_string(journal(folder)).ok()?;
    if text.is_empty() {
        return None;
    }
    let value: Value = serde_json::from_str(&text).expect("a journal is never half written");
    value["done"].as_u64()
}

/// Starts a copy that takes a few seconds.
fn slowly(folder: &Folder, words: &str) -> Running {
    start(folder, &format!("-f qcow2 -r 60M {words} src target"))
}

/// Starts a copy.
fn start(folder: &Folder, words: &str) -> Running {
    let mut command = folder.command("vellum", &format!("convert --journal {words}"));
    Running::start(command.stderr(Stdio::null()))
}

/// Kills a copy once it is beyond `bytes` by its journal.
fn kill_beyond(folder: &Folder, mut copy: Running, bytes: u64) {
    until("progress", || {
        assert!(!copy.has_ended(), "it ended too soon");
        done(folder).is_some_and(|done| done >= bytes)
    });
    // In the middle of the next piece.
    std::thread::sleep(Duration::from_millis(150));
    copy.kill();
}

#[test]
fn a_killed_copy_goes_on_where_it_was() {
    let folder = folder();
    for (options, format) in [
        ("-O qcow2", "qcow2"),
        ("-O raw", "raw"),
        ("-c -O qcow2", "qcow2"),
        // Its refcounts are late until it is closed.
        ("-O qcow2 -o lazy_refcounts=on", "qcow2"),
        // Rounds the size up.
        ("-O vpc", "vpc"),
    ] {
        kill_beyond(&folder, slowly(&folder, options), 256 << 20);
        let line = format!("$VELLUM convert -f qcow2 --journal {options} src target");
        let said = folder.shell(&line).expect(0).err;
        assert!(said.contains("going on at"), "{options}: {said}");
        assert!(!journal(&folder).exists(), "the copy is complete");
        folder.done(&format!(
            "qemu-img compare -q -f qcow2 -F {format} src target"
        ));
        if format == "qcow2" {
            folder.done("qemu-img check -q target && $VELLUM check -q target");
        }
        folder.done("rm target");
    }
}

#[test]
fn a_copy_may_be_killed_again_and_again() {
    let folder = folder();
    for place in [0, 256 << 20, 512 << 20] {
        kill_beyond(&folder, slowly(&folder, "-O qcow2"), place);
    }
    folder.done("$VELLUM convert -f qcow2 --journal -O qcow2 src target");
    folder.done("qemu-img compare -q src target && qemu-img check -q target");
}

/// Two at once: the second is refused, and the first ends as if there had been none.
#[test]
fn a_second_copy_leaves_a_running_one_alone() {
    let folder = Folder::new(VELLUM);
    folder.done(
        "qemu-img create -q -f qcow2 src 1G && qemu-io -c 'write -P 1 0 20M' \
         -c 'write -P 2 300M 60M' src > /dev/null",
    );
    for format in ["qcow2", "raw"] {
        let mut first = slowly(&folder, &format!("-r 20M -O {format}"));
        until("progress", || {
            done(&folder).is_some_and(|done| done >= 256 << 20)
        });
        let second = format!("$VELLUM convert -f qcow2 --journal -O {format} src target");
        let output = folder.shell(&second);
        assert!(!first.has_ended(), "it ended too soon");
        let said = output.expect(1).err;
        assert!(said.contains("'target' is being made"), "{said}");
        first.wait_for_success();
        let compare = format!("qemu-img compare -q -f qcow2 -F {format} src target");
        folder.done(&compare);
        folder.done("rm target");
    }
}

/// A copy that is ended before it has a target leaves an empty journal; the next one begins.
#[test]
fn a_copy_that_was_only_claimed_begins_anew() {
    let folder = Folder::new(VELLUM);
    folder.done("qemu-img create -q -f qcow2 src 64M && qemu-io -c 'write 0 1M' src > /dev/null");
    // What cannot begin leaves no journal behind.
    folder.fails("$VELLUM convert --journal -O qcow2 -o cluster_size=3 src target");
    assert!(!journal(&folder).exists());
    std::fs::write(journal(&folder), "").unwrap();
    folder.done("$VELLUM convert --journal -O qcow2 src target");
    folder.done("qemu-img compare -q src target");
    assert!(!journal(&folder).exists());
    assert_eq!(folder.names(), ["src", "target"]);
}

/// Nor does it go on while somebody else has the target open.
#[test]
fn a_target_in_use_is_not_gone_on_with() {
    let folder = folder();
    kill_beyond(&folder, slowly(&folder, "-O qcow2"), 256 << 20);
    let before = folder.read("target");
    let said = folder.fails(
        // The locks of the killed copy end with its last request. The shell stays to the end:
        // if it became its last command, qemu-io's input would end there.
        "until qemu-io -c quit target > /dev/null 2>&1; do sleep 0.1; done; \
         coproc qemu-io target; read -r -n 8 -u ${COPROC[0]}; \
         $VELLUM convert -f qcow2 --journal -O qcow2 src target; \
         exit $?",
    );
    assert!(said.contains("Failed to get \"write\" lock"), "{said}");
    assert!(journal(&folder).exists());
    // The one who had it open has closed it cleanly, which changes nothing else.
    let after = folder.read("target");
    assert_eq!(before.len(), after.len());
    let on = "$VELLUM convert -f qcow2 --journal -O qcow2 src target";
    folder.done(on);
    folder.done("qemu-img compare -q src target && qemu-img check -q target");
}

#[test]
fn another_copy_is_not_gone_on_with() {
    let folder = folder();
    kill_beyond(&folder, slowly(&folder, "-O qcow2"), 256 << 20);
    let refused = |line: &str, words: &str| {
        let before = folder.read("target");
        let said = folder.fails(line);
        assert!(said.contains(words), "{line}: {said}");
        assert!(journal(&folder).exists());
        assert!(folder.read("target") == before);
    };
    let other = "$VELLUM convert -f qcow2 --journal -O qcow2 -o cluster_size=4k src target";
    refused(other, "not those of the copy");
    let same = "$VELLUM convert -f qcow2 --journal -O qcow2 src target";
    refused(&same.replace("--journal", "--journal -t unsafe"), "unsafe");
    // The backing file of the source has been touched since.
    folder.done("qemu-io -c 'write -P 77 0 64k' base > /dev/null");
    refused(same, "not those of the copy");
    // So has a file with its data, though not the image that names it.
    folder.done("rm target target.vellum-journal");
    folder.done("mv src kept && qemu-img convert -O qcow2 -o data_file=data kept src");
    kill_beyond(&folder, slowly(&folder, "-O qcow2"), 256 << 20);
    folder.done("touch data");
    refused(same, "not those of the copy");
    folder.done("mv kept src");
    // Another file has taken the target's place.
    folder.done("rm target.vellum-journal && cp target other");
    folder.done("rm target");
    kill_beyond(&folder, slowly(&folder, "-O qcow2"), 256 << 20);
    folder.done("mv other target");
    refused(same, "is not the file");
    std::fs::write(journal(&folder), "{}").unwrap();
    refused(same, "is no journal");
}

/// A target that is another image by now has the same name and the same number.
#[test]
fn a_target_that_was_overwritten_is_not_gone_on_with() {
    let folder = folder();
    for format in ["raw", "qcow2"] {
        let options = format!("-O {format}");
        let on = format!("$VELLUM convert -f qcow2 --journal {options} src target");
        kill_beyond(&folder, slowly(&folder, &options), 256 << 20);
        folder.done(&format!(
            "qemu-img create -q -f {format} target 1G && touch target"
        ));
        let said = folder.fails(&on);
        assert!(said.contains("it was written to since"), "{said}");
        assert!(journal(&folder).exists());
        // What this program makes in its place is known to be another one.
        for made in [
            format!("create -q -f {format} target 1G"),
            format!("convert -f qcow2 {options} src target"),
        ] {
            std::fs::write(journal(&folder), "{}").unwrap();
            folder.done(&format!("$VELLUM {made}"));
            assert!(!journal(&folder).exists(), "{made}");
        }
        folder.done(&on);
        folder.done(&format!(
            "qemu-img compare -q -f qcow2 -F {format} src target && rm target"
        ));
    }
}

/// As the last test, where no sample tells it: an image that differs in some bytes, by whatever of this program it
/// came there and whatever name of the target was used.
#[test]
fn a_target_that_this_program_has_written_to_is_made_anew() {
    let folder = Folder::new(VELLUM);
    folder.done("qemu-img create -q -f raw a 520M && qemu-io -f raw -c 'write -P 1 0 520M' a > /dev/null && \
         cp a b && printf 'of another disk.' | dd of=b bs=1 seek=100500000 conv=notrunc status=none");
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
        std::fs::remove_file(folder.path("target")).ok();
        if name != "target" {
            folder.done("ln -s target link");
        }
        let copy = start(&folder, &format!("-r 150M -f raw a {name}"));
        kill_beyond(&folder, copy, 256 << 20);
        folder.done(change);
        assert!(!journal(&folder).exists(), "{change}");
        let again = format!("$VELLUM convert --journal -f raw a {name} && cmp a target");
        folder.done(&again);
        assert!(!journal(&folder).exists(), "{change}");
    }
    folder.done("ln target other");
    let said = folder.fails("$VELLUM convert --journal -f raw a target");
    assert!(said.contains("a target with one name"), "{said}");
}

/// Nor where the file that was written to is another one than the target is named by, or that has another name
/// meanwhile: what each file is marked with tells it.
#[test]
fn a_target_whose_files_were_written_to_elsewhere_is_made_anew() {
    let folder = Folder::new(VELLUM);
    folder.done("mkdir sub && qemu-img create -q -f raw a 520M");
    folder.done("qemu-io -f raw -c 'write -P 1 0 520M' a > /dev/null");
    let attribute = rustix::fs::XattrFlags::empty();
    if rustix::fs::setxattr(folder.root(), "user.vellum.test", b"", attribute).is_err() {
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
        let words = format!("-f raw -O {format} {options} a target");
        let copy = start(&folder, &format!("{words} -r 150M"));
        kill_beyond(&folder, copy, 256 << 20);
        folder.done(&change);
        let said = folder.shell(&format!("$VELLUM convert --journal {words}"));
        let said = said.expect(0).err;
        assert!(!said.contains("going on at"), "{change}: {said}");
        folder.done(&format!("qemu-img compare -q -f raw -F {format} a target"));
        assert!(!journal(&folder).exists(), "{change}");
        folder.done("rm -f target* d*");
    }
}

/// Nor where another file has the name of one that is not the target's first.
#[test]
fn a_target_with_another_data_file_is_not_gone_on_with() {
    let folder = folder();
    let options = "-O qcow2 -o data_file=d";
    kill_beyond(&folder, slowly(&folder, options), 256 << 20);
    folder.done("cp d e && mv e d");
    let line = format!("$VELLUM convert -f qcow2 --journal {options} src target");
    let said = folder.fails(&line);
    assert!(said.contains("is not the file"), "{said}");
}

/// All files of the source count, not the one alone that it is named by.
#[test]
fn a_source_whose_extents_were_changed_is_another_one() {
    let folder = Folder::new(VELLUM);
    folder.done("qemu-img create -q -f raw raw 600M");
    folder.done("qemu-io -f raw -c 'write -P 1 0 600M' raw > /dev/null");
    let make = "qemu-img convert -O vmdk -o subformat=monolithicFlat -f raw raw src.vmdk";
    folder.done(make);
    let copy = start(&folder, "-r 60M -f vmdk src.vmdk target");
    kill_beyond(&folder, copy, 1);
    let change = "printf x | dd of=src-flat.vmdk bs=1 seek=1M conv=notrunc status=none";
    folder.done(change);
    let said = folder.fails("$VELLUM convert --journal -f vmdk src.vmdk target");
    assert!(said.contains("are not those of the copy"), "{said}");
}
