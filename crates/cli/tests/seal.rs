//! `vellum seal` and `vellum verify` as people use them: exit codes, what is printed, signatures
//! that `minisign` checks, manifests, and copies of images that were tampered with.

use std::fs::OpenOptions;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn run(program: &str, folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(words).current_dir(folder).env("LC_ALL", "C");
    command
        .output()
        .expect("the program runs; `cargo xtask setup`")
}

fn vellum(folder: &TempDir, line: &str) -> (i32, String, String) {
    let words: Vec<&str> = line.split_whitespace().collect();
    let output = run(env!("CARGO_BIN_EXE_vellum"), folder.path(), &words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().unwrap_or(-1);
    (code, text(&output.stdout), text(&output.stderr))
}

#[track_caller]
fn done(folder: &TempDir, line: &str) -> String {
    let (code, out, err) = vellum(folder, line);
    assert_eq!(code, 0, "{line}: {out}{err}");
    out
}

fn qemu(folder: &TempDir, words: &[&str]) -> String {
    let output = run(words[0], folder.path(), &words[1..]);
    assert!(output.status.success(), "{words:?}: {output:?}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A folder with the image `a` of 64 MiB, which has data at 1 MiB.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    done(&folder, "create -q -f qcow2 a 64M");
    qemu(&folder, &["qemu-io", "-c", "write -P 5 1M 5M", "a"]);
    folder
}

/// Changes a byte of the data of guest offset 1 MiB and a bit.
fn tamper(folder: &TempDir, name: &str) {
    let map = done(folder, &format!("map -U --output=json {name}"));
    let map: Value = serde_json::from_str(&map).expect("JSON");
    let extents = map.as_array().expect("extents");
    let data = extents.iter().find(|extent| extent["start"] == 1 << 20);
    let offset = data.expect("it is mapped")["offset"]
        .as_u64()
        .expect("a place");
    let path = folder.path().join(name);
    let file = OpenOptions::new()
        .write(true)
        .open(path)
        .expect("it is there");
    file.write_all_at(b"x", offset + 5000).expect("a write");
}

#[test]
fn changes_are_named_and_nothing_reads_them() {
    let folder = folder();
    done(&folder, "seal a");
    assert!(done(&folder, "verify a").starts_with("Everything is as it was sealed.\n"));
    tamper(&folder, "a");
    let (code, out, _) = vellum(&folder, "verify a");
    assert_eq!(code, 2, "{out}");
    let first = out.lines().next().unwrap_or_default();
    assert_eq!(
        first,
        "0x000000101000-0x000000102000  content     the content differs"
    );
    let (code, out, _) = vellum(&folder, "verify --output=json a");
    let found: Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!((code, &found["verified"]), (2, &Value::Bool(false)));
    assert_eq!(found["differences"][0]["start"], 0x101000);
    assert_eq!(found["differences"][0]["length"], 4096);
    // Whatever reads all of it stops there.
    qemu(
        &folder,
        &[
            "qemu-img", "create", "-q", "-f", "qcow2", "-b", "a", "-F", "qcow2", "top",
        ],
    );
    qemu(
        &folder,
        &[
            "qemu-img", "create", "-q", "-f", "qcow2", "-b", "top", "-F", "qcow2", "above",
        ],
    );
    for line in [
        "convert -O raw a out",
        "convert -W -m 8 -O qcow2 a out",
        "convert -c -O qcow2 a out",
        "convert -C -O raw a out",
        "convert -O raw top out",
        "convert -O raw above out",
        "compare a a",
        "dd if=a of=out bs=1M",
    ] {
        let (code, out, _) = vellum(&folder, line);
        assert_ne!(code, 0, "{line}: {out}");
        let _ = std::fs::remove_file(folder.path().join("out"));
    }
    // What does not read the place, or is told not to look.
    let reads = "io -r -c";
    let words = [
        env!("CARGO_BIN_EXE_vellum"),
        "io",
        "-r",
        "-c",
        "read -P 5 2M 4M",
        "a",
    ];
    let output = run(words[0], folder.path(), &words[1..]);
    assert!(output.status.success(), "{reads}: {output:?}");
    done(
        &folder,
        "convert --image-opts -O raw driver=qcow2,verify=off,file.filename=a out",
    );
}

#[test]
fn a_sealed_image_is_refused_to_writers() {
    let folder = folder();
    done(&folder, "seal -q a");
    for line in [
        "resize a 128M",
        "snapshot -c one a",
        "amend -o lazy_refcounts=on a",
        "rebase -u -b b -F raw a",
        "bitmap --add a b",
        "seal a",
        "check -r all a",
    ] {
        let (code, _, err) = vellum(&folder, line);
        assert_eq!(code, 1, "{line}");
        assert!(
            err.contains("is sealed") && err.contains("--unseal"),
            "{line}: {err}"
        );
    }
    assert!(qemu(&folder, &["qemu-img", "check", "a"]).starts_with("No errors"));
    assert_eq!(
        done(&folder, "seal --unseal a"),
        "The image is not sealed any more.\n"
    );
    assert_eq!(
        done(&folder, "seal --unseal a"),
        "The image was not sealed.\n"
    );
    let (code, _, err) = vellum(&folder, "verify a");
    assert_eq!(code, 1);
    assert!(err.contains("no seal"), "{err}");
    done(&folder, "resize a 128M");
    done(&folder, "seal a");
    let opened = "driver=qcow2,unseal=on,file.filename=a";
    done(&folder, &format!("snapshot --image-opts -c one {opened}"));
    assert_eq!(vellum(&folder, "verify a").0, 1);
}

#[test]
fn minisign_checks_what_is_signed() {
    let folder = folder();
    let keys = ["minisign", "-G", "-W", "-p", "public", "-s", "secret"];
    qemu(&folder, &keys);
    done(&folder, "seal --key secret a");
    done(
        &folder,
        "verify --public-key public --statement statement a",
    );
    let checked = ["minisign", "-Vm", "statement", "-p", "public"];
    assert!(qemu(&folder, &checked).contains("file:a"));
    let keys = ["minisign", "-G", "-W", "-p", "public2", "-s", "secret2"];
    qemu(&folder, &keys);
    let (code, out, _) = vellum(&folder, "verify --public-key public2 a");
    assert_eq!(code, 2);
    assert!(out.contains("Signature: bad."), "{out}");
    // Sealed anew by somebody who has no key.
    done(&folder, "seal --unseal a");
    done(&folder, "seal a");
    let (code, out, _) = vellum(&folder, "verify --public-key public a");
    assert_eq!(code, 2);
    assert!(out.contains("Signature: none"), "{out}");
    assert_eq!(
        vellum(&folder, "verify --public-key a a").0,
        1,
        "that is no key"
    );
}

#[test]
fn info_and_audit_tell_of_the_seal() {
    let folder = folder();
    let before: Value = serde_json::from_str(&done(&folder, "info --output=json a")).expect("JSON");
    assert_eq!(before["format-specific"]["data"].get("seal"), None);
    let sealed = done(&folder, "seal a");
    let root = sealed
        .trim()
        .strip_prefix("Content: ")
        .expect("a hash")
        .to_owned();
    let info: Value = serde_json::from_str(&done(&folder, "info --output=json a")).expect("JSON");
    assert_eq!(
        info["format-specific"]["data"]["seal"]["content"],
        root.as_str()
    );
    assert!(done(&folder, "info a").contains(&format!("content: {root}")));
    let audit: Value = serde_json::from_str(&done(&folder, "audit --output=json a")).expect("JSON");
    assert_eq!(audit["qcow2"]["seal-content"], root.as_str());
    assert_eq!(audit["findings"][0]["code"], "seal");
}

#[test]
fn a_manifest_is_the_same_for_every_format() {
    let folder = folder();
    done(&folder, "seal --manifest first a");
    done(&folder, "convert -O raw a raw");
    done(&folder, "convert -c -O qcow2 a packed");
    done(&folder, "create -q -f qcow2 -b a -F qcow2 top");
    for line in ["-f raw raw", "packed", "top", "a"] {
        done(&folder, &format!("verify --manifest first {line}"));
    }
    done(&folder, "seal --manifest second -f raw raw");
    let read = |name: &str| std::fs::read(folder.path().join(name)).expect("it is there");
    assert!(read("first") == read("second"));
    let (code, _, err) = vellum(&folder, "seal --manifest second a");
    assert!(code == 1 && err.contains("there already"), "{err}");
    qemu(
        &folder,
        &["qemu-io", "-f", "raw", "-c", "write -P 6 40M 4k", "raw"],
    );
    let (code, out, _) = vellum(&folder, "verify --manifest first -f raw raw");
    assert_eq!(code, 2);
    assert!(
        out.starts_with("0x000002800000-0x000002801000  content "),
        "{out}"
    );
    let (code, _, err) = vellum(&folder, "verify --manifest raw a");
    assert!(code == 1 && err.contains("no manifest"), "{err}");
    let manifest = OpenOptions::new()
        .write(true)
        .open(folder.path().join("first"));
    manifest
        .expect("it is there")
        .write_all_at(b"x", 4096 + 70)
        .expect("a write");
    let (code, out, _) = vellum(&folder, "verify --manifest first a");
    assert_eq!(code, 2);
    assert!(out.contains("  seal "), "{out}");
}

#[test]
fn qemus_name_has_no_such_commands() {
    let folder = folder();
    let link = folder.path().join("qemu-img");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_vellum"), &link).expect("a link");
    for name in ["seal", "verify"] {
        let output = run(link.to_str().expect("plain"), folder.path(), &[name, "a"]);
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            text.contains(&format!("Command not found: {name}")),
            "{text}"
        );
    }
}
