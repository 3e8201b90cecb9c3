//! What was asked of disks: `query-blockstats`, histograms, thresholds, and events about them.

use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use serde_json::{Value, json};

use super::place::Step::Ask;
use super::place::{Daemon, NAME, Place, same, with};

/// The image `b` on a file node that has a name.
const DISK: [&str; 4] = [
    "--blockdev",
    "driver=file,filename=b,node-name=f",
    "--blockdev",
    "driver=qcow2,file=f,node-name=d",
];

fn serve(daemon: &mut Daemon, node: &str) {
    let address = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    daemon.must("nbd-server-start", address);
    let export =
        json!({"type": "nbd", "id": "e", "node-name": node, "name": "x", "writable": true});
    daemon.must("block-export-add", export);
}

const CLIENT: &str = "nbd+unix:///x?socket=sock";

#[test]
fn thresholds_and_empty_statistics_are_those_of_the_real_daemon() {
    let set = |node: &str, bytes: Value| {
        let arguments = json!({"node-name": node, "write-threshold": bytes});
        Ask("block-set-write-threshold", arguments)
    };
    same(
        &["--blockdev", "driver=file,filename=b,node-name=f"],
        &[
            Ask("query-block", json!({})),
            Ask("query-block", json!({"a": 1})),
            Ask("query-blockstats", json!({})),
            Ask("query-blockstats", json!({"query-nodes": 1})),
            Ask("query-blockstats", json!({"query-nodes": true})),
            set("f", json!(100_000)),
            set("f", json!(0)),
            set("f", json!("x")),
            set("nosuch", json!(1)),
            Ask("block-set-write-threshold", json!({"node-name": "f"})),
        ],
    );
}

#[test]
fn an_export_counts_what_its_client_asks_for() {
    let place = Place::new();
    let mut daemon = place.ours(&DISK);
    serve(&mut daemon, "d");
    let boundaries = json!({"id": "e", "boundaries": [1, 1_000_000_000_000_u64]});
    daemon.must("block-latency-histogram-set", boundaries);
    place.io(
        CLIENT,
        &[
            "write 0 64k",
            "write -z 64k 64k",
            "read 0 4k",
            "discard 0 64k",
            "flush",
        ],
    );
    let stats = daemon.must("query-blockstats", json!({}));
    let export = &stats[0];
    assert_eq!(
        (&export["device"], &export["node-name"]),
        (&json!("e"), &json!("d"))
    );
    let counted = &export["stats"];
    for (key, wanted) in [
        ("wr_operations", 2),
        ("wr_bytes", 128 << 10),
        ("wr_highest_offset", 128 << 10),
        ("unmap_operations", 1),
        ("unmap_bytes", 64 << 10),
        ("failed_wr_operations", 0),
    ] {
        assert_eq!(counted[key], json!(wanted), "{key}: {counted}");
    }
    // The client looks at the disk by itself, too.
    let number = |key: &str| counted[key].as_u64().expect("a number");
    assert!(
        number("rd_operations") >= 1 && number("rd_bytes") >= 4096,
        "{counted}"
    );
    assert!(number("flush_operations") >= 1 && number("wr_total_time_ns") > 0);
    assert_eq!(counted["wr_latency_histogram"]["bins"], json!([0, 2, 0]));
    assert_eq!(export["parent"]["node-name"], json!("f"));
    let nodes = daemon.must("query-blockstats", json!({"query-nodes": true}));
    let node = |name: &str| {
        let mut nodes = nodes.as_array().expect("nodes").iter();
        nodes
            .find(|node| node["node-name"] == name)
            .expect("the node")
            .clone()
    };
    assert_eq!(node("d")["stats"]["wr_bytes"], json!(128 << 10));
    let highest = node("f")["stats"]["wr_highest_offset"].as_u64();
    assert!(highest > Some(128 << 10), "{highest:?}");
    daemon.must("block-latency-histogram-set", json!({"id": "e"}));
    let stats = daemon.must("query-blockstats", json!({}));
    assert!(stats[0]["stats"].get("wr_latency_histogram").is_none());
    for (id, boundaries) in [
        ("no", json!([1])),
        ("e", json!([])),
        ("e", json!([2, 1])),
        ("e", json!([0])),
    ] {
        let arguments = json!({"id": id, "boundaries": boundaries});
        let answer = daemon.ask("block-latency-histogram-set", arguments);
        assert!(answer.get("error").is_some(), "{answer}");
    }
    daemon.end();
}

#[test]
fn a_write_beyond_the_threshold_is_an_event() {
    let place = Place::new();
    let mut daemon = place.ours(&DISK);
    serve(&mut daemon, "d");
    let threshold = json!({"node-name": "f", "write-threshold": 600_000});
    daemon.must("block-set-write-threshold", threshold);
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let file = nodes
        .as_array()
        .expect("nodes")
        .iter()
        .find(|node| node["node-name"] == "f");
    assert_eq!(file.expect("the node")["write_threshold"], json!(600_000));
    place.io(CLIENT, &["write 0 1M", "flush"]);
    let event = daemon.event("BLOCK_WRITE_THRESHOLD");
    assert_eq!(event["node-name"], json!("f"));
    assert_eq!(event["write-threshold"], json!(600_000));
    assert!(event["amount-exceeded"].as_u64() > Some(0), "{event}");
    let answer = daemon.ask(
        "block-set-write-threshold",
        json!({"node-name": "d", "write-threshold": 1}),
    );
    assert!(answer.get("error").is_some(), "{answer}");
    daemon.end();
}

#[test]
fn a_request_that_fails_is_an_event() {
    let place = Place::new();
    let mut daemon = place.ours(&[
        "--blockdev",
        "driver=raw,node-name=d,file.driver=blkdebug,file.image.driver=null-co,\
         file.image.size=1048576,file.inject-error.0.event=none,\
         file.inject-error.0.iotype=write,file.inject-error.0.errno=28,\
         file.inject-error.0.once=off",
    ]);
    serve(&mut daemon, "d");
    let written = std::process::Command::new("qemu-io")
        .current_dir(place.root())
        .args(["-f", "raw", "-c", "write 0 4k", CLIENT])
        .output()
        .expect("the program of `cargo xtask setup`");
    assert!(!written.status.success());
    let event = daemon.event("BLOCK_IO_ERROR");
    assert_eq!(event["device"], json!("e"));
    assert_eq!(
        (&event["operation"], &event["nospace"], &event["action"]),
        (&json!("write"), &json!(true), &json!("report"))
    );
    let stats = daemon.must("query-blockstats", json!({}));
    assert_eq!(stats[0]["stats"]["failed_wr_operations"], json!(1));
    daemon.end();
}

/// What a client may not do never reaches the disk, which has not failed.
#[test]
fn what_a_file_refuses_is_no_failure_of_the_disk() {
    let place = Place::new();
    let mut daemon = place.ours(&DISK);
    for (id, writable) in [("read", false), ("write", true)] {
        std::fs::write(place.path(id), "").expect("a file");
        let export = json!({
            "type": "fuse", "id": id, "node-name": "d", "mountpoint": place.path(id),
            "writable": writable, "growable": false,
        });
        daemon.must("block-export-add", export);
    }
    let write = |name: &str, at: u64| {
        let file = std::fs::File::options()
            .write(true)
            .open(place.path(name))?;
        file.write_at(&[1; 4096], at)
    };
    let errno = |written: std::io::Result<usize>| written.expect_err("refused").raw_os_error();
    assert_eq!(errno(write("read", 0)), Some(libc::EROFS));
    assert_eq!(errno(write("write", 1 << 20)), Some(libc::EIO));
    assert_eq!(write("write", 0).expect("written"), 4096);
    let stats = daemon.must("query-blockstats", json!({}));
    for one in stats.as_array().expect("a list") {
        assert_eq!(one["stats"]["failed_wr_operations"], json!(0), "{one}");
    }
    let events = daemon.end();
    let mut failed = events.iter().map(|event| &event["event"]);
    assert!(!failed.any(|name| name == "BLOCK_IO_ERROR"), "{events:?}");
}

/// It is gone, so its name is free; as in QEMU that is no error of the command.
#[test]
fn a_node_that_loses_what_was_written_goes_and_that_is_an_event() {
    let place = Place::new();
    let node = json!({
        "driver": "blkdebug",
        "node-name": "d",
        "image": {"driver": "null-co", "size": 1 << 20},
        "inject-error": [{"event": "none", "iotype": "flush", "errno": 28, "once": false}],
    });
    let mut daemon = place.ours("");
    daemon.must("blockdev-add", node.clone());
    serve(&mut daemon, "d");
    let client = std::process::Command::new("qemu-io")
        .current_dir(place.root())
        .args(["-f", "raw", "-c", "write 0 4k", CLIENT])
        .output();
    client.expect("the program of `cargo xtask setup`");
    daemon.must("block-export-del", json!({"id": "e", "mode": "hard"}));
    daemon.must("blockdev-del", json!({"node-name": "d"}));
    daemon.must("blockdev-add", node);
    let events = daemon.end();
    let lost = events.iter().find(|event| {
        event["event"] == json!("BLOCK_IO_ERROR") && event["data"]["device"] == json!("")
    });
    let data = &lost.expect("it is told")["data"];
    assert_eq!(
        (&data["node-name"], &data["nospace"], &data["operation"]),
        (&json!("d"), &json!(true), &json!("write"))
    );
}

/// Each node with those that are told inside of it.
fn nested(stats: &Value) -> Value {
    let one = |stats: &Value| {
        let mut told = json!({"node": stats["node-name"]});
        for key in ["parent", "backing"] {
            if let Some(inside) = stats.get(key) {
                told[key] = nested(&json!([inside]))[0].clone();
            }
        }
        told
    };
    let mut all: Vec<Value> = stats.as_array().expect("a list").iter().map(one).collect();
    all.sort_by_key(|one| one["node"].to_string());
    all.into()
}

/// A node is told with what holds its data, and not with all of the chain below it.
#[test]
fn nodes_are_told_with_their_files_as_by_qemu() {
    let told = |real: bool| {
        let place = Place::new();
        place.img("create -q -f qcow2 -o data_file=d x 1M");
        place.img("create -q -f raw one 1M");
        place.img("create -q -f raw two 1M");
        let program = match real {
            true => PathBuf::from(NAME),
            false => place.path(NAME),
        };
        let mut daemon = place.start(&program, "--object throttle-group,id=g");
        let file = |name: &str, file: &str| {
            let file = json!({"driver": "file", "node-name": name, "filename": file});
            ("blockdev-add", file)
        };
        let node = |driver: &str, name: &str, more: Value| {
            let node = json!({"driver": driver, "node-name": name});
            ("blockdev-add", with(node, more))
        };
        for (command, arguments) in [
            file("b-file", "b"),
            node("qcow2", "b", json!({"file": "b-file", "backing": null})),
            file("m-file", "m"),
            node("qcow2", "m", json!({"file": "m-file", "backing": "b"})),
            file("t-file", "t"),
            node("qcow2", "t", json!({"file": "t-file", "backing": "m"})),
            node(
                "throttle",
                "limited",
                json!({"file": "t", "throttle-group": "g"}),
            ),
            file("x-file", "x"),
            file("x-data", "d"),
            node(
                "qcow2",
                "x",
                json!({"file": "x-file", "data-file": "x-data"}),
            ),
            file("one", "one"),
            file("two", "two"),
            node(
                "blkverify",
                "compared",
                json!({"test": "one", "raw": "two"}),
            ),
            node("null-co", "null", json!({"size": 1 << 20})),
            node("blkdebug", "fails", json!({"image": "null"})),
            (
                "block-commit",
                json!({"device": "limited", "job-id": "j", "base-node": "b",
                "top-node": "m", "filter-node-name": "filter", "auto-finalize": false}),
            ),
        ] {
            daemon.must(command, arguments);
        }
        nested(&daemon.must("query-blockstats", json!({"query-nodes": true})))
    };
    assert_eq!(told(false), told(true));
}
