//! Who may change a node while others need it as it is, also where nodes lie between them.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::place::Step::Ask;
use crate::place::{NAME, Place, Step, Tolerance, add, alike};

const SERVER: &[&str] = &["--nbd-server", "addr.type=unix,addr.path=sock"];

fn file(name: &str, filename: &str) -> Step {
    let options = json!({"driver": "file", "node-name": name, "filename": filename});
    Ask("blockdev-add", options)
}

fn over(driver: &str, name: &str, below: &str) -> Step {
    let options = json!({"driver": driver, "node-name": name, "file": below});
    Ask("blockdev-add", options)
}

fn image_over(name: &str, backing: &str) -> Step {
    let file = json!({"driver": "file", "filename": "o"});
    let options = json!({
        "driver": "qcow2", "node-name": name, "file": file, "backing": backing,
    });
    Ask("blockdev-add", options)
}

fn null(name: &str, size: u64) -> Step {
    let options = json!({"driver": "null-co", "node-name": name, "size": size});
    Ask("blockdev-add", options)
}

/// Debugs what lies below, as one who needs more of it than it would.
fn debug(name: &str, below: Value, permissions: &str) -> Step {
    let mut options = json!({"driver": "blkdebug", "node-name": name, "image": below});
    options[permissions] = json!(["write"]);
    Ask("blockdev-add", options)
}

fn export(node: &str, writable: bool) -> Step {
    let arguments = json!({"type": "nbd", "id": node, "node-name": node, "writable": writable});
    Ask("block-export-add", arguments)
}

fn unexport(node: &str) -> Step {
    Ask("block-export-del", json!({"id": node, "mode": "hard"}))
}

fn backup(source: &str, target: &str) -> Step {
    let arguments = json!({
        "job-id": "backup", "device": source, "target": target, "sync": "none",
    });
    Ask("blockdev-backup", arguments)
}

fn resize(node: &str, size: u64) -> Step {
    Ask("block_resize", json!({"node-name": node, "size": size}))
}

/// At the end exports go in the order of a hash.
fn told_alike(script: &[Step]) {
    let tolerance = Tolerance {
        by_job: true,
        ..Tolerance::default()
    };
    alike(SERVER, script, &tolerance);
}

#[test]
fn a_format_keeps_its_file_from_those_who_write_through_another_node() {
    let script = [
        file("file", "o"),
        over("raw", "raw", "file"),
        export("raw", true),
        over("qcow2", "image", "file"),
        unexport("raw"),
        over("qcow2", "image", "file"),
        export("raw", true),
        export("raw", false),
    ];
    told_alike(&script);
}

#[test]
fn a_format_over_another_node_keeps_the_file_below_too() {
    let script = [
        file("file", "o"),
        over("raw", "raw", "file"),
        over("raw", "beside", "file"),
        over("qcow2", "image", "raw"),
        export("file", true),
        export("beside", true),
        export("raw", true),
        export("image", true),
    ];
    told_alike(&script);
}

#[test]
fn a_size_that_users_were_told_stays_also_below() {
    let script = [
        file("file", "o"),
        over("raw", "raw", "file"),
        over("raw", "beside", "file"),
        export("raw", true),
        resize("file", 2 << 20),
        resize("beside", 2 << 20),
        over("qcow2", "image", "file"),
        unexport("raw"),
        resize("beside", 2 << 20),
    ];
    told_alike(&script);
}

#[test]
fn a_file_of_which_a_part_is_shown_keeps_its_size() {
    let part = json!({
        "driver": "raw", "node-name": "part", "file": "file", "offset": 65536, "size": 65536,
    });
    let script = [
        file("file", "o"),
        Ask("blockdev-add", part),
        resize("file", 2 << 20),
        Ask("blockdev-del", json!({"node-name": "part"})),
        resize("file", 2 << 20),
    ];
    told_alike(&script);
}

/// What is written around the filter would not be in the backup.
#[test]
fn nobody_writes_around_a_backup() {
    let size = 1 << 20;
    let base = json!({"driver": "null-co", "node-name": "base", "size": size});
    let script = [
        null("target", size),
        debug("source", base, "unshare-child-perms"),
        Ask("blockdev-del", json!({"node-name": "source"})),
        null("base", size),
        over("raw", "raw", "base"),
        over("raw", "beside", "base"),
        export("beside", true),
        backup("raw", "target"),
        unexport("beside"),
        backup("raw", "target"),
        export("beside", true),
        export("base", true),
        export("base", false),
        debug("writer", json!("base"), "take-child-perms"),
        Ask("block-job-cancel", json!({"device": "backup"})),
        Step::Wait("backup", "null"),
        debug("writer", json!("base"), "take-child-perms"),
        export("beside", true),
    ];
    told_alike(&script);
}

#[test]
fn nobody_writes_to_what_an_image_stands_on_that_is_backed_up() {
    let script = [
        null("base", 1 << 20),
        null("target", 1 << 20),
        over("raw", "raw", "base"),
        image_over("image", "raw"),
        export("raw", true),
        backup("image", "target"),
        unexport("raw"),
        backup("image", "target"),
        export("raw", true),
        export("base", true),
    ];
    told_alike(&script);
}

#[test]
fn nobody_writes_around_a_copy_before_write_filter() {
    let filter = json!({
        "driver": "copy-before-write", "node-name": "filter", "file": "raw", "target": "target",
    });
    let script = [
        null("base", 1 << 20),
        null("target", 1 << 20),
        over("raw", "raw", "base"),
        Ask("blockdev-add", filter),
        export("raw", true),
        export("filter", true),
        unexport("raw"),
        export("filter", true),
        export("raw", true),
        export("base", true),
        resize("target", 2 << 20),
        export("target", true),
    ];
    told_alike(&script);
}

#[test]
fn nobody_writes_to_children_of_a_quorum() {
    let quorum = |name: &str, first: &str| {
        let options = json!({
            "driver": "quorum", "node-name": name, "vote-threshold": 1,
            "children": [first, "other"],
        });
        Ask("blockdev-add", options)
    };
    let script = [
        null("one", 1 << 20),
        null("other", 1 << 20),
        over("raw", "raw", "one"),
        export("one", true),
        quorum("quorum", "raw"),
        unexport("one"),
        quorum("quorum", "raw"),
        export("one", true),
        export("raw", true),
        export("quorum", true),
        export("other", false),
    ];
    told_alike(&script);
}

#[test]
fn what_is_streamed_is_written_to_by_nobody() {
    let stream = |id: &str| {
        let arguments = json!({"job-id": id, "device": "image"});
        Ask("block-stream", arguments)
    };
    let script = [
        null("base", 1 << 20),
        over("raw", "raw", "base"),
        over("raw", "beside", "base"),
        image_over("image", "raw"),
        export("beside", true),
        stream("refused"),
        unexport("beside"),
        stream("stream"),
        Step::Wait("stream", "null"),
        export("beside", true),
    ];
    told_alike(&script);
}

#[test]
fn debuggers_take_and_keep_what_they_are_told() {
    let script = [
        file("file", "o"),
        debug("keeper", json!("file"), "unshare-child-perms"),
        export("file", true),
        debug("writer", json!("file"), "take-child-perms"),
        Ask("blockdev-del", json!({"node-name": "keeper"})),
        debug("writer", json!("file"), "take-child-perms"),
        over("qcow2", "image", "file"),
        debug("keeper", json!("file"), "unshare-child-perms"),
    ];
    told_alike(&script);
}

/// What QEMU's program says that makes a file anew.
fn make_anew(folder: &Path, name: &str) -> String {
    let output = Command::new("qemu-img")
        .args(["create", "-f", "raw", name, "1M"])
        .current_dir(folder)
        .output()
        .expect("the program of `cargo xtask setup`");
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asking for a node must not change who else may open its file.
#[test]
fn nodes_that_are_asked_for_keep_their_locks() {
    let bitmap = |node: &str| {
        let arguments = json!({"node": node, "name": "dirty"});
        Ask("block-dirty-bitmap-add", arguments)
    };
    let script = [
        add("image", "o", json!(null)),
        file("file", "b"),
        over("qcow2", "over", "file"),
        file("unused", "t"),
        Ask("query-named-block-nodes", json!({"flat": true})),
        bitmap("file"),
    ];
    for program in [None, Some(PathBuf::from(NAME))] {
        let place = Place::new();
        let program = program.unwrap_or_else(|| place.path(NAME));
        let mut daemon = place.start(&program, "");
        for step in &script {
            let Ask(command, arguments) = step else {
                panic!("no question")
            };
            daemon.must(command, arguments.clone());
        }
        for used in ["o", "b"] {
            let said = make_anew(place.root(), used);
            assert!(said.contains("Failed to get \"write\" lock"), "{said}");
        }
        assert_eq!(make_anew(place.root(), "t"), "", "{program:?}");
        daemon.end();
    }
}
