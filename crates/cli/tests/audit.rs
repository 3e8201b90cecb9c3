//! `vellum audit` as a pipeline uses it: verdict, exit code, and what is opened.

use serde_json::Value;
use vellum_testing::Folder;

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

/// A folder in which command lines of the real `qemu-img` have been run.
fn folder(lines: &[&str]) -> Folder {
    let folder = Folder::new(VELLUM);
    lines.iter().for_each(|line| drop(folder.img(*line)));
    folder
}

/// The exit code, and the answer as JSON.
fn audit(folder: &Folder, words: &[&str]) -> (i32, Value) {
    let said = folder.run("vellum", &[&["audit", "--output=json"], words].concat());
    (said.code.unwrap_or(-1), said.json())
}

fn codes(value: &Value, level: &str) -> Vec<String> {
    let findings = value["findings"].as_array().expect("findings");
    let of_level = findings.iter().filter(|finding| finding["level"] == level);
    let mut codes: Vec<String> = of_level
        .map(|finding| finding["code"].as_str().expect("a code").to_owned())
        .collect();
    codes.dedup();
    codes
}

#[track_caller]
fn rejected(folder: &Folder, words: &[&str], reasons: &[&str]) -> Value {
    let (code, value) = audit(folder, words);
    assert_eq!(code, 2, "{value:#}");
    assert_eq!(value["verdict"], "rejected");
    assert_eq!(codes(&value, "reject"), reasons, "{value:#}");
    value
}

#[track_caller]
fn safe(folder: &Folder, words: &[&str]) -> Value {
    let (code, value) = audit(folder, words);
    assert_eq!(code, 0, "{value:#}");
    assert_eq!(value["verdict"], "safe");
    value
}

#[test]
fn images_that_stand_alone_are_safe() {
    let folder = folder(&[
        "create -q -f qcow2 plain 10M",
        "create -q -f qcow2 -o extended_l2=on,lazy_refcounts=on sub 10M",
        "create -q -f qcow2 -o compat=0.10 old 10M",
        "create -q -f raw disk 10M",
        "snapshot -c s plain",
        "bitmap --add sub b",
    ]);
    for name in ["plain", "sub", "old", "disk"] {
        safe(&folder, &[name]);
    }
    let value = safe(&folder, &["-f", "qcow2", "plain"]);
    assert_eq!(value["qcow2"]["snapshots"], 1);
    assert_eq!(value["check"]["corruptions"], 0);
    safe(&folder, &["-f", "raw", "disk"]);
}

/// CVE-2024-32498 (OpenStack): a qcow2 image whose data lies in a file of the host.
#[test]
fn an_image_with_an_external_data_file_is_rejected() {
    let folder = folder(&["create -q -f qcow2 -o data_file=data evil 1M"]);
    // The image that is uploaded names what the uploader wants to read.
    folder.img("amend -f qcow2 -o data_file=/etc/passwd evil");
    let value = rejected(&folder, &["evil"], &["data-file"]);
    assert_eq!(value["references"][0]["name"], "/etc/passwd");
    assert_eq!(value["references"][0]["in-effect"], true);
    // The same, uploaded as a raw image in the hope that it is probed later.
    rejected(
        &folder,
        &["-f", "raw", "evil"],
        &["format-mismatch", "data-file"],
    );
    safe(&folder, &["--allow-data-file", "evil"]);
    let within = ["--allow-data-file", "--within", ".", "evil"];
    rejected(&folder, &within, &["data-file"]);
}

/// CVE-2026-27211 (cloud-hypervisor): a guest overwrites the start of its raw disk with a
/// qcow2 header, and the next start, which probes the format, follows the backing file.
#[test]
fn a_raw_disk_with_a_header_from_the_guest_is_rejected() {
    let folder = folder(&["create -q -f qcow2 -u -b /etc/shadow -F raw header 64M"]);
    let mut disk = folder.read("header");
    disk.resize(64 << 20, 0);
    folder.write("disk", disk);
    let value = rejected(
        &folder,
        &["-f", "raw", "disk"],
        &["format-mismatch", "backing-file"],
    );
    assert_eq!(value["references"][0]["name"], "/etc/shadow");
    rejected(&folder, &["disk"], &["backing-file"]);
    // The mismatch stays, whatever the header may name.
    rejected(
        &folder,
        &["-f", "raw", "--allow-backing", "disk"],
        &["format-mismatch"],
    );
}

#[test]
fn backing_files_are_confined() {
    let folder = folder(&[
        "create -q -f raw base 1M",
        "create -q -f qcow2 -b base -F raw overlay",
        "create -q -f qcow2 -u -b /etc/hostname -F raw escape 1M",
        "create -q -f qcow2 -u -b nbd://localhost/x -F raw remote 1M",
    ]);
    rejected(&folder, &["overlay"], &["backing-file"]);
    let confined = ["--allow-backing", "--within", "."];
    let with = |name| confined.iter().copied().chain([name]).collect::<Vec<_>>();
    let value = safe(&folder, &with("overlay"));
    assert_eq!(value["references"][0]["allowed"], true);
    rejected(&folder, &with("escape"), &["backing-file"]);
    rejected(&folder, &with("remote"), &["backing-file"]);
}

#[test]
fn images_of_other_formats_are_checked_and_told_with_what_they_name() {
    let folder = folder(&[
        "create -q -f vmdk -o subformat=monolithicFlat flat.vmdk 1M",
        "create -q -f vmdk sparse.vmdk 1M",
        "create -q -f vdi x.vdi 1M",
        "create -q -f vpc x.vpc 1M",
        "create -q -f vhdx x.vhdx 8M",
    ]);
    let value = rejected(&folder, &["flat.vmdk"], &["extent"]);
    assert_eq!(value["references"][0]["name"], "flat-flat.vmdk");
    for name in ["sparse.vmdk", "x.vdi", "x.vpc", "x.vhdx"] {
        let value = safe(&folder, &[name]);
        // To open it is all that can be done with that format.
        assert_eq!(value["check"].is_null(), name == "x.vpc", "{value:#}");
        rejected(&folder, &["--max-size", "64K", name], &["virtual-size"]);
    }
    for name in ["sparse.vmdk", "x.vdi", "x.vpc", "x.vhdx"] {
        let (code, value) = audit(&folder, &["-f", "raw", name]);
        assert_eq!(code, 2, "{name}");
        assert!(
            codes(&value, "reject").contains(&"format-mismatch".to_owned()),
            "{value:#}"
        );
    }
}

#[test]
fn what_cannot_be_read_has_a_code_of_its_own() {
    let folder = folder(&[]);
    for name in ["missing", ".", "/dev/null"] {
        let (code, value) = audit(&folder, &[name]);
        assert_eq!(code, 1, "{value}");
        assert_eq!(value["verdict"], "unreadable");
    }
    for words in [
        &["audit"][..],
        &["audit", "-f", "qcow3", "a"],
        &["audit", "--nope"],
    ] {
        assert!(folder.refused("vellum", words).contains("--help"));
    }
}

/// No file but the image is opened, whatever it names: strace sees every one.
#[test]
fn files_of_other_machines_are_refused_with_what_to_do() {
    let folder = folder(&[]);
    for words in [
        &["audit", "s3://b/k"][..],
        &["bench", "ssh://host/disk"],
        &["oci", "push", "s3://b/k", "127.0.0.1:1/x"],
        &["receive", "-O", "raw", "rbd:pool/image"],
    ] {
        let said = folder.refused("vellum", words);
        let reason = "is on another machine, and this command takes files of this one only";
        assert!(said.contains(reason), "{words:?}: {said}");
    }
}

#[test]
fn nothing_else_is_opened() {
    let folder = folder(&[
        "create -q -f raw secret 1M",
        "create -q -f qcow2 -b secret -F raw overlay",
        "create -q -f vmdk secret.vmdk 1M",
        "create -q -f vmdk -b secret.vmdk -F vmdk difference",
        "create -q -f vmdk -o subformat=monolithicFlat parts.vmdk 1M",
    ]);
    let secret =
        "# Disk DescriptorFile\nversion=1\ncreateType=\"custom\"\n RW 9 FLAT \"secret\" 0\n";
    folder.write("text", secret);
    for (image, code) in [
        ("overlay", 0),
        ("difference", 2),
        ("parts.vmdk", 2),
        ("text", 2),
    ] {
        let words = "-f -o trace -e trace=open,openat,openat2";
        let audit = "audit --allow-backing --within .";
        let line = format!("{words} {VELLUM} {audit} {image}");
        folder.run("strace", &line).expect(code);
        let trace = folder.text("trace");
        assert!(trace.contains(image), "{trace}");
        assert!(
            !trace.contains("secret") && !trace.contains("parts-flat"),
            "{trace}"
        );
    }
}

#[test]
fn words_for_people_hold_no_colours_in_a_pipe() {
    let folder = folder(&["create -q -f qcow2 -u -b /etc/shadow -F raw evil 1M"]);
    let text = folder.run("vellum", "audit evil").expect(2).out;
    assert!(text.starts_with("evil: rejected\n"), "{text}");
    assert!(text.contains("backing-file"), "{text}");
    assert!(!text.contains('\x1b'), "{text}");
}

/// A reason that an option takes away names that option, and with it the image is safe.
#[test]
fn the_option_that_allows_is_named() {
    let folder = folder(&[
        "create -q -f raw base 1M",
        "create -q -f qcow2 -b base -F raw overlay",
        "create -q -f qcow2 -u -b nbd://localhost/x -F raw remote 1M",
        "create -q -f qcow2 -o data_file=data external 1M",
        "create -q -f qcow2 large 1G",
    ]);
    for (words, option) in [
        (&["overlay"][..], "--allow-backing"),
        (&["external"], "--allow-data-file"),
        (&["--allow-backing", "remote"], "--allow-protocols"),
        (&["--max-size", "1M", "large"], "--max-size"),
        (&["--max-memory", "1", "large"], "--max-memory"),
        (
            &["--allow-backing", "--within", "/usr", "overlay"],
            "--within",
        ),
    ] {
        let (code, value) = audit(&folder, words);
        assert_eq!(code, 2, "{value:#}");
        assert_eq!(value["findings"][0]["option"], option, "{value:#}");
        let text = folder.run("vellum", &[&["audit"], words].concat()).out;
        assert!(text.contains(&format!("(allowed by {option})")), "{text}");
    }
}

/// Several images: each has its verdict, and the code is that of the worst.
#[test]
fn several_images_have_the_code_of_the_worst() {
    let folder = folder(&[
        "create -q -f qcow2 good 1M",
        "create -q -f qcow2 -u -b x -F raw bad 1M",
    ]);
    for (images, expected) in [
        (&["good", "good"][..], 0),
        (&["good", "missing"], 1),
        (&["missing", "bad", "good"], 2),
    ] {
        let (code, value) = audit(&folder, images);
        assert_eq!(code, expected, "{value:#}");
        let answers = value.as_array().expect("a list");
        let named: Vec<_> = answers
            .iter()
            .map(|answer| answer["image"].as_str())
            .collect();
        let images: Vec<_> = images.iter().copied().map(Some).collect();
        assert_eq!(named, images);
    }
    let text = folder.run("vellum", "audit bad good").out;
    assert!(
        text.ends_with("2 images: 1 safe, 1 rejected, 0 unreadable\n"),
        "{text}"
    );
}

#[test]
fn encryption_and_what_is_no_disk_are_told() {
    let folder = folder(&[
        "create -q -f qcow2 --object secret,id=s,data=x -o encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10 secret 1M",
        "create -q -f qcow2 --object secret,id=s,data=x -o encrypt.format=aes,encrypt.key-secret=s old.qcow2 1M",
        "create -q -f qcow --object secret,id=s,data=x -o encrypt.format=aes,encrypt.key-secret=s old.qcow 1M",
    ]);
    let value = safe(&folder, &["secret"]);
    assert_eq!(codes(&value, "note"), ["encrypted"]);
    for name in ["old.qcow2", "old.qcow"] {
        let value = safe(&folder, &[name]);
        assert_eq!(codes(&value, "note"), ["encrypted"]);
        assert_eq!(codes(&value, "warning"), ["weak-encryption"]);
    }
    for (name, bytes, code) in [
        ("empty", &b""[..], "empty"),
        ("disk.gz", b"\x1f\x8b\x08\0\0\0\0\0", "not-a-disk"),
        ("program", b"\x7fELF\x02\x01\x01", "not-a-disk"),
    ] {
        folder.write(name, bytes);
        let value = safe(&folder, &[name]);
        assert_eq!(codes(&value, "warning"), [code]);
    }
}
