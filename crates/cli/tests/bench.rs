//! `vellum bench` as a person uses it, on images too small to tell anything.

use std::process::Stdio;

use serde_json::Value;
use sha2::{Digest, Sha256};
use vellum_testing::{Folder, Running, Said, until};

const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
const QUICK: [&str; 5] = [
    "bench",
    "--seconds=0.02",
    "--rounds=1",
    "--depth=4",
    "--seed=7",
];

fn bench(folder: &Folder, words: &[&str]) -> Said {
    folder.run("vellum", &[&QUICK, words].concat())
}

#[test]
fn every_table_is_measured_and_nothing_is_left() {
    let folder = Folder::new(VELLUM);
    let words = ["--size=64M", "--output=json", "--html=page.html"];
    let output = bench(&folder, &words).expect(0);
    assert_eq!(output.err, "", "no progress without a terminal");
    let value: Value = output.json();
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
    let page = folder.text("page.html");
    assert!(page.starts_with("<!DOCTYPE html>"));
    assert_eq!(folder.names(), ["page.html"]);
}

#[test]
fn a_write_log_is_measured_over_time_and_nothing_is_left() {
    let folder = Folder::new(VELLUM);
    let words = ["--journal", "--size=64M", "--journal-size=1M"];
    let output = bench(&folder, &words).expect(0);
    let shown = output.out;
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
    assert!(folder.names().is_empty());

    let more = ["--seconds=20", "--output=json", "--html=page.html"];
    let output = bench(&folder, &[&words[..], &more].concat()).expect(0);
    let value: Value = output.json();
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
    let page = folder.text("page.html");
    assert!(page.contains("journal-over-time"));
    assert_eq!(folder.names(), ["page.html"]);
}

#[test]
fn an_image_that_is_named_is_only_read() {
    let folder = Folder::new(VELLUM);
    folder.must("vellum", "create -f qcow2 disk.qcow2 1G");
    let empty = bench(&folder, &["disk.qcow2"]).expect(1);
    let message = "vellum bench: 'disk.qcow2' holds no data to read\n";
    assert_eq!(empty.err, message);

    let writes = "-c 'write -P 1 0 1M' -c 'write -P 1 512M 1M'";
    folder.must("vellum", &format!("io {writes} disk.qcow2"));
    let sum = || Sha256::digest(folder.read("disk.qcow2"));
    let before = sum();
    let output = bench(&folder, &["disk.qcow2"]).expect(0);
    let shown = output.out;
    assert!(shown.contains("this image  10 % (16 KiB)"), "{shown}");
    let used = "The mapping of this image's data takes 8 KiB of L2 tables";
    assert!(shown.contains(used), "{shown}");
    assert_eq!(before, sum());
    assert_eq!(folder.names(), ["disk.qcow2"]);
}

#[test]
fn an_image_is_never_replaced_by_a_page() {
    let folder = Folder::new(VELLUM);
    folder.write("disk.raw", [1; 512]);
    let output = bench(&folder, &["--size=64M", "--html=disk.raw"]).expect(1);
    let message = "vellum bench: 'disk.raw' exists and is no HTML page; it is left alone\n";
    assert_eq!(output.err, message);
}

#[test]
fn too_little_space_is_an_error_before_anything_is_made() {
    let folder = Folder::new(VELLUM);
    let output = bench(&folder, &["--size=15T"]).expect(1);
    let message = output.err;
    assert!(
        message.contains("Not enough space in '.': 30 TiB are needed"),
        "{message}"
    );
    assert!(folder.names().is_empty());
}

#[test]
fn wrong_words_point_to_the_help() {
    let folder = Folder::new(VELLUM);
    let output = bench(&folder, &["--deepness=3"]).expect(1);
    assert_eq!(
        output.err,
        "vellum bench: unrecognized option '--deepness=3'\nTry 'vellum bench --help' for more info\n"
    );
}

#[test]
fn an_interrupted_run_leaves_nothing() {
    let folder = Folder::new(VELLUM);
    interrupt(&folder, &["--seconds=60"], |names| !names.is_empty());
}

#[test]
fn an_interrupted_run_leaves_no_write_log() {
    let folder = Folder::new(VELLUM);
    // Short runs, so that one with a log comes soon, and many of them.
    let words = ["--journal", "--journal-size=256K", "--rounds=1000"];
    interrupt(&folder, &words, |names| {
        let inside = names.first().map(|name| folder.path(name));
        inside.is_some_and(|inside| inside.join("new.vlog").exists())
    });
}

/// Interrupts a run in `folder` once `is_time` says so of the names in it, and looks what is left.
fn interrupt(folder: &Folder, words: &[&str], is_time: impl Fn(&[String]) -> bool) {
    let words = [&["bench", "--size=64M", "--depth=4"], words].concat();
    let mut command = folder.command("vellum", &words);
    let mut run = Running::start(command.stdout(Stdio::null()));
    until("something to interrupt", || is_time(&folder.names()));
    run.signal("-INT");
    assert_eq!(run.wait().code(), Some(130));
    assert!(folder.names().is_empty());
}

#[test]
fn the_tool_of_qemu_is_found_by_its_longer_name() {
    let folder = Folder::new(VELLUM);
    let ours = folder.must("vellum", "bench --help");
    assert!(ours.contains("'vellum img bench'"), "{ours}");
    let theirs = folder.must("vellum", "img bench --help");
    assert!(theirs.contains("--flush-interval"), "{theirs}");
    assert!(theirs.contains("'vellum bench'"), "{theirs}");
}
