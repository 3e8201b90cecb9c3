//! `vellum bench` as a person uses it, on images too small to tell anything.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

const QUICK: [&str; 4] = ["--seconds=0.02", "--rounds=1", "--depth=4", "--seed=7"];

fn vellum(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_vellum"));
    command.current_dir(folder).args(words);
    command
}

fn bench(folder: &Path, words: &[&str]) -> Output {
    let mut command = vellum(folder, &["bench"]);
    let output = command.args(QUICK).args(words).output();
    output.expect("the program runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).expect("a folder");
    let names = entries.map(|entry| entry.expect("an entry").file_name());
    let mut names: Vec<String> = names.map(|n| n.to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn every_table_is_measured_and_nothing_is_left() {
    let folder = TempDir::new().unwrap();
    let words = ["--size=64M", "--output=json", "--html=page.html"];
    let output = bench(folder.path(), &words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(text(&output.stderr), "", "no progress without a terminal");
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let tables = value["tables"].as_array().expect("tables");
    let ids: Vec<_> = tables.iter().map(|table| table["id"].as_str()).collect();
    let expected = ["cache", "slices", "writes", "overlay"].map(Some);
    assert_eq!(ids, expected);
    for table in tables {
        for row in table["rows"].as_array().expect("rows") {
            assert!(row["iops"].as_f64().is_some_and(|iops| iops > 0.0), "{row}");
            assert!(row.get("spread").is_some(), "{row}");
        }
        assert!(table["noisy"].is_boolean(), "{table}");
    }
    assert_eq!(value["run"]["seed"], 7);
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.starts_with("<!DOCTYPE html>"));
    assert_eq!(names(folder.path()), ["page.html"]);
}

#[test]
fn a_write_log_is_measured_over_time_and_nothing_is_left() {
    let folder = TempDir::new().unwrap();
    let words = ["--journal", "--size=64M", "--journal-size=1M"];
    let output = bench(folder.path(), &words);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for part in [
        "an overlay of a full backing file, a flush after each 32, over time\n",
        "below no log\n",
        "\n  raw, sparse ",
        "\n  without a log ",
        "\n  with a log of 1 MiB ",
        "A run ends after 10 MiB or 0.02 s.\n",
    ] {
        assert!(shown.contains(part), "{part}: {shown}");
    }
    assert!(names(folder.path()).is_empty());

    let more = ["--seconds=20", "--output=json", "--html=page.html"];
    let output = bench(folder.path(), &[&words[..], &more].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    let value: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let tables = value["tables"].as_array().expect("tables");
    assert_eq!(tables.len(), 1);
    let rows = tables[0]["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(row["samples"][0]["operations"], 2560, "10 MiB: {row}");
        let over_time = &row["samples"][0]["over-time"];
        assert_eq!(over_time["interval-seconds"], 0.05);
        assert!(over_time["operations"].is_array(), "{row}");
        assert!(row["request-p99.9-us"].is_number(), "{row}");
        assert!(row["flush-p99.9-us"].is_number(), "{row}");
    }
    assert_eq!(rows[2]["settings"]["journal-size"], 1 << 20);
    assert!(rows[2]["below-no-log"].is_string(), "{}", rows[2]);
    let page = std::fs::read_to_string(folder.path().join("page.html")).unwrap();
    assert!(page.contains("journal-over-time"));
    assert_eq!(names(folder.path()), ["page.html"]);
}

#[test]
fn an_image_that_is_named_is_only_read() {
    let folder = TempDir::new().unwrap();
    let run = |words: &[&str]| {
        let status = vellum(folder.path(), words).stdout(Stdio::null()).status();
        assert!(status.expect("the program runs").success(), "{words:?}");
    };
    run(&["create", "-f", "qcow2", "disk.qcow2", "1G"]);
    let empty = bench(folder.path(), &["disk.qcow2"]);
    assert_eq!(empty.status.code(), Some(1));
    let message = "vellum bench: 'disk.qcow2' holds no data to read\n";
    assert_eq!(text(&empty.stderr), message);

    run(&[
        "io",
        "-c",
        "write -P 1 0 1M",
        "-c",
        "write -P 1 512M 1M",
        "disk.qcow2",
    ]);
    let sum = || Sha256::digest(std::fs::read(folder.path().join("disk.qcow2")).unwrap());
    let before = sum();
    let output = bench(folder.path(), &["disk.qcow2"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.contains("this image  10 % (16 KiB)"), "{shown}");
    let used = "The mapping of this image's data takes 8 KiB of L2 tables";
    assert!(shown.contains(used), "{shown}");
    assert_eq!(before, sum());
    assert_eq!(names(folder.path()), ["disk.qcow2"]);
}

#[test]
fn an_image_is_never_replaced_by_a_page() {
    let folder = TempDir::new().unwrap();
    std::fs::write(folder.path().join("disk.raw"), [1; 512]).unwrap();
    let output = bench(folder.path(), &["--size=64M", "--html=disk.raw"]);
    assert_eq!(output.status.code(), Some(1));
    let message = "vellum bench: 'disk.raw' exists and is no HTML page; it is left alone\n";
    assert_eq!(text(&output.stderr), message);
}

#[test]
fn too_little_space_is_an_error_before_anything_is_made() {
    let folder = TempDir::new().unwrap();
    let output = bench(folder.path(), &["--size=15T"]);
    assert_eq!(output.status.code(), Some(1));
    let message = text(&output.stderr);
    assert!(
        message.contains("Not enough space in '.': 30 TiB are needed"),
        "{message}"
    );
    assert!(names(folder.path()).is_empty());
}

#[test]
fn wrong_words_point_to_the_help() {
    let folder = TempDir::new().unwrap();
    let output = bench(folder.path(), &["--deepness=3"]);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        text(&output.stderr),
        "vellum bench: unrecognized option '--deepness=3'\nTry 'vellum bench --help' for more info\n"
    );
}

/// Waits until something is true, for a while.
fn wait_for(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let folder = TempDir::new().unwrap();
    interrupt(folder.path(), &["--seconds=60"], |names| !names.is_empty());
}

#[test]
fn an_interrupted_run_leaves_no_write_log() {
    let folder = TempDir::new().unwrap();
    // Short runs, so that one with a log comes soon, and many of them.
    let words = ["--journal", "--journal-size=256K", "--rounds=1000"];
    interrupt(folder.path(), &words, |names| {
        let inside = names.first().map(|name| folder.path().join(name));
        inside.is_some_and(|inside| inside.join("new.vlog").exists())
    });
}

/// Interrupts a run in `folder` once `is_time` says so of the names in it, and looks what is left.
fn interrupt(folder: &Path, words: &[&str], is_time: impl Fn(&[String]) -> bool) {
    let mut command = vellum(folder, &["bench", "--size=64M", "--depth=4"]);
    let mut child = command
        .args(words)
        .stdout(Stdio::null())
        .spawn()
        .expect("the program runs");
    wait_for("something to interrupt", || is_time(&names(folder)));
    let pid = child.id().to_string();
    let killed = Command::new("kill").args(["-INT", &pid]).status();
    assert!(killed.expect("kill").success());
    let mut code = None;
    wait_for("the end", || {
        code = child
            .try_wait()
            .expect("a child")
            .map(|status| status.code());
        code.is_some()
    });
    assert_eq!(code, Some(Some(130)));
    assert!(names(folder).is_empty());
}

#[test]
fn the_tool_of_qemu_is_found_by_its_longer_name() {
    let folder = TempDir::new().unwrap();
    let help = |words: &[&str]| {
        let output = vellum(folder.path(), words)
            .output()
            .expect("the program runs");
        text(&output.stdout)
    };
    let ours = help(&["bench", "--help"]);
    assert!(ours.contains("'vellum img bench'"), "{ours}");
    let theirs = help(&["img", "bench", "--help"]);
    assert!(theirs.contains("--flush-interval"), "{theirs}");
    assert!(theirs.contains("'vellum bench'"), "{theirs}");
}
