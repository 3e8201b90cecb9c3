//! Images that are the same byte by byte whenever they are made.

use std::path::Path;
use std::process::{Command, Output};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const MIB: usize = 1 << 20;

fn run(folder: &Path, date: Option<&str>, words: &[&str]) -> Output {
    let mut command = Command::new(VELLUM);
    command.current_dir(folder).args(words);
    match date {
        Some(date) => command.env("SOURCE_DATE_EPOCH", date),
        None => command.env_remove("SOURCE_DATE_EPOCH"),
    };
    command.output().expect("it runs")
}

#[track_caller]
fn must(folder: &Path, words: &[&str]) {
    let output = run(folder, None, words);
    assert!(output.status.success(), "{words:?}: {output:?}");
}

/// Zeroes, repeated bytes and noise in turns.
fn write_source(folder: &Path) {
    let mut random = fastrand::Rng::with_seed(7);
    let mut source = vec![0; 24 * MIB];
    for part in source.chunks_mut(20 << 10) {
        match random.u8(..3) {
            0 => {}
            1 => part.fill(random.u8(..)),
            _ => random.fill(part),
        }
    }
    std::fs::write(folder.join("source"), source).unwrap();
}

#[test]
fn copies_are_the_same_every_time() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    write_source(folder);
    for options in [
        &[][..],
        &["-c"],
        &["-c", "-o", "compression_type=zstd,cluster_size=4k"],
        &["-o", "cluster_size=1k"],
        &["-o", "extended_l2=on,cluster_size=128k", "-m", "16"],
    ] {
        let images = ["a", "b", "c"].map(|name| {
            let convert = [
                &["convert", "--reproducible", "-f", "raw", "-O", "qcow2"],
                options,
            ];
            let words = [&convert.concat(), &["source", name][..]].concat();
            must(folder, &words);
            must(
                folder,
                &["compare", "-q", "-f", "raw", "-F", "qcow2", "source", name],
            );
            std::fs::read(folder.join(name)).unwrap()
        });
        assert!(
            images[0] == images[1] && images[1] == images[2],
            "{options:?}"
        );
    }
}

#[test]
fn what_depends_on_time_or_chance_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    std::fs::write(folder.join("source"), [1; 4096]).unwrap();
    let convert = ["convert", "--reproducible", "-f", "raw", "-O", "qcow2"];
    for (options, message) in [
        (&["-W"][..], "--reproducible excludes -W, -C and -n"),
        (&["-C"], "--reproducible excludes -W, -C and -n"),
        (
            &[
                "--object",
                "secret,id=s,data=x",
                "-o",
                "encrypt.format=luks,encrypt.key-secret=s",
            ],
            "--reproducible excludes encryption",
        ),
    ] {
        let words = [&convert, options, &["source", "target"]].concat();
        let output = run(folder, None, &words);
        assert_eq!(output.status.code(), Some(1), "{words:?}");
        let told = String::from_utf8_lossy(&output.stderr);
        assert!(told.contains(message), "{told}");
        assert!(!folder.join("target").exists());
    }
}

#[test]
fn snapshots_have_the_date_that_is_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let folder = directory.path();
    let snapshot = ["snapshot", "-c", "s", "image"];
    let images = [0, 1].map(|_| {
        must(folder, &["create", "-q", "-f", "qcow2", "image", "64M"]);
        let output = run(folder, Some("1234567890"), &snapshot);
        assert!(output.status.success(), "{output:?}");
        std::fs::read(folder.join("image")).unwrap()
    });
    assert!(images[0] == images[1]);
    let info = run(folder, None, &["info", "--output=json", "image"]);
    let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
    assert_eq!(info["snapshots"][0]["date-sec"], 1_234_567_890);
    let wrong = run(folder, Some("yesterday"), &snapshot);
    assert_eq!(wrong.status.code(), Some(1));
    let told = String::from_utf8_lossy(&wrong.stderr);
    assert!(told.contains("SOURCE_DATE_EPOCH"), "{told}");
}
