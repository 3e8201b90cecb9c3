//! `vellum compact` as people use it, on images of QEMU's program.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn run(program: &str, folder: &Path, words: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(words).current_dir(folder).env("LC_ALL", "C");
    command
        .output()
        .expect("the program runs; `cargo xtask setup`")
}

fn vellum(folder: &TempDir, words: &[&str]) -> (i32, String) {
    let output = run(env!("CARGO_BIN_EXE_vellum"), folder.path(), words);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let code = output.status.code().unwrap_or(-1);
    (code, text(&output.stdout) + &text(&output.stderr))
}

fn qemu(folder: &TempDir, words: &[&str]) -> String {
    let output = run(words[0], folder.path(), &words[1..]);
    assert!(output.status.success(), "{words:?}: {output:?}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(!said.contains("failed"), "{words:?}: {said}");
    said
}

fn len_bytes(folder: &TempDir) -> u64 {
    folder.path().join("d").metadata().expect("the image").len()
}

/// Options of `qemu-io` and others for the image `d`.
fn image(options: &str) -> Vec<String> {
    let mut words = Vec::new();
    if options.contains("encrypt") {
        words.extend(["--object", "secret,id=s,data=secret", "--image-opts"]);
        words.push("driver=qcow2,encrypt.key-secret=s,file.filename=d");
        return words.iter().map(|word| (*word).to_owned()).collect();
    }
    vec!["d".to_owned()]
}

fn io(folder: &TempDir, options: &str, commands: &[String]) {
    let mut words = vec!["qemu-io".to_owned()];
    words.extend(commands.iter().flat_map(|c| ["-c".to_owned(), c.clone()]));
    words.extend(image(options));
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    qemu(folder, &words);
}

/// What is read from `d`: the data at its end, and gaps before.
fn reads() -> Vec<String> {
    let pieces = (0..16).map(|piece| {
        let pattern = if piece < 12 { 0 } else { 7 };
        format!("read -P {pattern} {piece}M 1M")
    });
    pieces.collect()
}

#[test]
fn images_of_every_kind_get_short() {
    for options in [
        "cluster_size=64k",
        "cluster_size=4k,lazy_refcounts=on",
        "extended_l2=on",
        "compat=0.10",
        "refcount_bits=1",
        "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10",
        "encrypt.format=aes,encrypt.key-secret=s",
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let secret = "secret,id=s,data=secret";
        let create = [
            "qemu-img", "create", "-q", "-f", "qcow2", "--object", secret,
        ];
        qemu(
            &folder,
            &[&create[..], &["-o", options, "d", "16M"]].concat(),
        );
        let written = ["write -P 3 0 12M", "write -P 7 12M 4M", "discard 0 12M"];
        io(&folder, options, &written.map(str::to_owned));
        let before = len_bytes(&folder);
        assert!(before >= 16 * MIB, "{options}: {before}");
        let words = image(options);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let (code, said) = vellum(
            &folder,
            &[&["compact", "--output=json"], &words[..]].concat(),
        );
        assert_eq!(code, 0, "{options}: {said}");
        let report: Value = serde_json::from_str(&said).expect("JSON");
        assert_eq!(report["old-file-bytes"], before, "{options}");
        let after = len_bytes(&folder);
        // LUKS has a header of 2 MiB.
        assert!(after < 7 * MIB, "{options}: {after} of {before}");
        qemu(&folder, &[&["qemu-img", "check"], &words[..]].concat());
        io(&folder, options, &reads());
    }
}

#[test]
fn compressed_images_get_short() {
    for kind in ["zlib", "zstd"] {
        let folder = tempfile::tempdir().expect("a folder");
        // Bytes that compress a little.
        let mut random = fastrand::Rng::with_seed(1);
        let bytes: Vec<u8> = (0..8 * MIB).map(|_| random.u8(..64)).collect();
        std::fs::write(folder.path().join("raw"), &bytes).expect("written");
        let option = format!("compression_type={kind}");
        let convert = [
            "qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o",
        ];
        qemu(&folder, &[&convert[..], &[&option, "raw", "d"]].concat());
        let before = len_bytes(&folder);
        qemu(&folder, &["qemu-io", "-c", "discard 0 6M", "d"]);
        let (code, said) = vellum(&folder, &["compact", "d"]);
        assert_eq!(code, 0, "{said}");
        assert!(said.starts_with("The file had "), "{said}");
        assert!(
            4 * len_bytes(&folder) < 2 * before,
            "{} of {before}",
            len_bytes(&folder)
        );
        qemu(&folder, &["qemu-img", "check", "d"]);
        qemu(
            &folder,
            &["qemu-io", "-c", "write -q -z 0 6M", "-f", "raw", "raw"],
        );
        qemu(&folder, &["qemu-img", "compare", "raw", "d"]);
    }
}

#[test]
fn what_cannot_be_compacted_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    qemu(
        &folder,
        &["qemu-img", "create", "-q", "-f", "raw", "raw", "1M"],
    );
    let (code, said) = vellum(&folder, &["compact", "-f", "raw", "raw"]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("not compacted"), "{said}");
    let outside = ["-o", "data_file=data", "d", "1M"];
    qemu(
        &folder,
        &[&["qemu-img", "create", "-q", "-f", "qcow2"], &outside[..]].concat(),
    );
    let (code, said) = vellum(&folder, &["compact", "d"]);
    assert_eq!(code, 1, "{said}");
    assert!(said.contains("data file"), "{said}");
    let (code, said) = vellum(&folder, &["compact", "nowhere"]);
    assert_eq!(code, 1, "{said}");
}

/// Writes a few bytes into `d`, as damage.
fn damage(folder: &TempDir, at: u64, bytes: &[u8]) {
    use std::os::unix::fs::FileExt;
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).open(folder.path().join("d"));
    let written = file.expect("the image").write_all_at(bytes, at);
    written.expect("it is written");
}

#[test]
fn what_is_not_counted_is_no_gap() {
    // The entry of the refcount table, and the count of a data cluster that lies low.
    for (at, zeroes) in [(65536, 8), (131_072 + 2 * 5, 2)] {
        let folder = tempfile::tempdir().expect("a folder");
        qemu(
            &folder,
            &["qemu-img", "create", "-q", "-f", "qcow2", "d", "1G"],
        );
        let commands = [
            "write -P 1 0 64k",
            "write -P 2 64k 32M",
            "write -P 3 40M 8M",
            "discard 64k 32M",
        ];
        io(&folder, "", &commands.map(str::to_owned));
        damage(&folder, at, &vec![0; zeroes]);
        let before = len_bytes(&folder);
        let (code, said) = vellum(&folder, &["compact", "d"]);
        assert_eq!(code, 1, "{said}");
        assert!(said.contains("check -r all"), "{said}");
        assert_eq!(len_bytes(&folder), before);
        let (code, said) = vellum(&folder, &["check", "-q", "-r", "all", "d"]);
        assert_eq!(code, 0, "{said}");
        let (code, said) = vellum(&folder, &["compact", "d"]);
        assert_eq!(code, 0, "{said}");
        let reads = ["read -P 1 0 64k", "read -P 0 64k 32M", "read -P 3 40M 8M"];
        io(&folder, "", &reads.map(str::to_owned));
        assert!(len_bytes(&folder) < 10 * MIB, "{}", len_bytes(&folder));
    }
}

#[test]
fn holes_stay_holes() {
    use std::os::unix::fs::MetadataExt;
    let folder = tempfile::tempdir().expect("a folder");
    let create = ["qemu-img", "create", "-q", "-f", "qcow2", "-o"];
    qemu(
        &folder,
        &[&create[..], &["preallocation=metadata", "d", "256M"]].concat(),
    );
    let commands = ["discard 0 128M", "write -P 7 255M 64k"];
    io(&folder, "", &commands.map(str::to_owned));
    let (code, said) = vellum(&folder, &["compact", "d"]);
    assert_eq!(code, 0, "{said}");
    let taken = folder
        .path()
        .join("d")
        .metadata()
        .expect("the image")
        .blocks()
        * 512;
    assert!(taken < 4 * MIB, "{taken}");
    assert!(len_bytes(&folder) < 140 * MIB, "{}", len_bytes(&folder));
    qemu(&folder, &["qemu-img", "check", "d"]);
    let reads = ["read -P 0 0 255M", "read -P 7 255M 64k"];
    io(&folder, "", &reads.map(str::to_owned));
}
