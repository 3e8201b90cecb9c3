//! What libvirt says to a daemon that serves its disks, played to ours and to the real one.
//!
//! Each script is one task of `virsh`. Names of nodes and jobs are those that libvirt makes up:
//! `libvirt-N-storage` for a file, `libvirt-N-format` for the image in it.

use serde_json::{Value, json};

use crate::place::Step::{Ask, Io, RemoveLeft, Wait};
use crate::place::{Step, Tolerance, alike, with};

/// Jobs may be at different places when they are asked; their events are in order for each.
const TOLERANCE: Tolerance = Tolerance {
    left_out: &["offset", "len", "speed"],
    by_job: true,
    events: false,
};

fn storage(number: u32) -> String {
    format!("libvirt-{number}-storage")
}

fn format(number: u32) -> String {
    format!("libvirt-{number}-format")
}

fn add_storage(number: u32, file: &str) -> Step {
    let options = json!({"driver": "file", "filename": file, "node-name": storage(number),
        "auto-read-only": true, "discard": "unmap"});
    Ask("blockdev-add", options)
}

/// The image in a file; `backing` is the number of the one that it stands on.
fn add_format(number: u32, read_only: bool, backing: Option<u32>) -> Step {
    let options = json!({"driver": "qcow2", "node-name": format(number), "file": storage(number),
        "read-only": read_only, "discard": "unmap",
        "backing": backing.map(format)});
    Ask("blockdev-add", options)
}

/// The job of a creation, which libvirt waits for and dismisses.
fn create(id: &'static str, options: Value) -> [Step; 3] {
    [
        Ask("blockdev-create", json!({"job-id": id, "options": options})),
        Wait(id, "concluded"),
        Ask("job-dismiss", json!({"id": id})),
    ]
}

/// A new image in a file of its own, added but for what it stands on.
fn create_image(number: u32, file: &str, more: Value) -> Vec<Step> {
    let made = json!({"driver": "file", "filename": file, "size": 0});
    let image = with(
        json!({"driver": "qcow2", "file": storage(number), "size": 1 << 20}),
        more,
    );
    // An earlier job of the same name would be taken for this one.
    let (first, second) = match number {
        4 => ("create-libvirt-4-storage", "create-libvirt-4-format"),
        _ => ("create-libvirt-5-storage", "create-libvirt-5-format"),
    };
    let mut steps = Vec::from(create(first, made));
    steps.push(add_storage(number, file));
    steps.extend(create(second, image));
    steps
}

/// A disk of a chain of images, `t` (1) on `m` (2) on `b` (3), which a guest uses.
fn start() -> Vec<Step> {
    let address = json!({"type": "unix", "data": {"path": "sock"}});
    let export = json!({"type": "nbd", "id": "guest", "node-name": format(1), "name": "vda",
        "writable": true});
    vec![
        add_storage(3, "b"),
        add_format(3, true, None),
        add_storage(2, "m"),
        add_format(2, true, Some(3)),
        add_storage(1, "t"),
        add_format(1, false, Some(2)),
        Ask("nbd-server-start", json!({"addr": address})),
        Ask("block-export-add", export),
    ]
}

/// What the guest does before a task, and after it.
const BEFORE: Step = Io("vda", &["write -P 5 0 64k", "read -P 2 128k 64k"]);
const AFTER: Step = Io("vda", &["read -P 5 0 64k", "write -P 6 64k 64k", "flush"]);

/// A job that was asked for: until it is over, or ready and told to end.
fn finish(id: &'static str, is_mirror: bool) -> Vec<Step> {
    let jobs = || Ask("query-jobs", json!({}));
    let mut steps = Vec::new();
    if is_mirror {
        steps.extend([
            Wait(id, "ready"),
            Ask("query-block-jobs", json!({})),
            AFTER,
            Ask("job-complete", json!({"id": id})),
        ]);
    }
    steps.extend([
        Wait(id, "concluded"),
        jobs(),
        Ask("job-dismiss", json!({"id": id})),
        jobs(),
    ]);
    steps
}

fn del(number: u32) -> [Step; 2] {
    [
        Ask("blockdev-del", json!({"node-name": format(number)})),
        Ask("blockdev-del", json!({"node-name": storage(number)})),
    ]
}

/// A job's arguments with what libvirt gives all of them.
fn job(id: &str, more: Value) -> Value {
    with(
        json!({"job-id": id, "auto-finalize": true, "auto-dismiss": false}),
        more,
    )
}

fn transaction(actions: Value) -> Step {
    Ask("transaction", json!({"actions": actions}))
}

fn play(script: Vec<Step>) {
    alike(&[], &script, &TOLERANCE);
}

#[test]
fn blockcopy_to_a_new_file_and_pivot() {
    let mut script = start();
    script.push(BEFORE);
    script.extend(create_image(4, "copy", json!({})));
    script.push(add_format(4, false, None));
    let mirror = json!({"device": format(1), "target": format(4), "sync": "full"});
    script.push(Ask(
        "blockdev-mirror",
        job("copy-vda-libvirt-1-format", mirror),
    ));
    script.extend(finish("copy-vda-libvirt-1-format", true));
    script.push(AFTER);
    for number in [1, 2, 3] {
        script.extend(del(number));
    }
    script.push(Ask("query-block-exports", json!({})));
    play(script);
}

#[test]
fn blockcopy_that_is_shallow_and_given_up() {
    let mut script = start();
    script.push(BEFORE);
    let backing = json!({"backing-fmt": "qcow2", "backing-file": "m"});
    script.extend(create_image(4, "copy", backing));
    script.push(add_format(4, false, Some(2)));
    let mirror = json!({"device": format(1), "target": format(4), "sync": "top",
        "speed": 1 << 30, "granularity": 65536, "buf-size": 1 << 20});
    script.extend([
        Ask("blockdev-mirror", job("copy-vda-libvirt-1-format", mirror)),
        Wait("copy-vda-libvirt-1-format", "ready"),
        AFTER,
        Ask(
            "block-job-cancel",
            json!({"device": "copy-vda-libvirt-1-format"}),
        ),
    ]);
    script.extend(finish("copy-vda-libvirt-1-format", false));
    script.extend(del(4));
    script.push(AFTER);
    play(script);
}

#[test]
fn backup_begin_that_pushes_all_and_then_what_is_new() {
    let backup = |id: &str, target: u32, more: Value| {
        let data = with(
            job(id, json!({"device": format(1), "target": format(target)})),
            more,
        );
        json!({"type": "blockdev-backup", "data": data})
    };
    let bitmap = |name: &str, persistent: bool| {
        let data = json!({"node": format(1), "name": name, "persistent": persistent,
            "disabled": !persistent});
        json!({"type": "block-dirty-bitmap-add", "data": data})
    };
    let merge = json!({"type": "block-dirty-bitmap-merge", "data": {"node": format(1),
        "target": "backup-vda", "bitmaps": [{"node": format(1), "name": "first"}]}});
    let temporary = json!({"node": format(1), "name": "backup-vda"});
    let mut script = start();
    script.push(BEFORE);
    script.extend(create_image(4, "full", json!({})));
    script.push(add_format(4, false, None));
    script.push(transaction(json!([
        bitmap("first", true),
        backup("backup-vda-libvirt-1-format", 4, json!({"sync": "full"}))
    ])));
    script.extend(finish("backup-vda-libvirt-1-format", false));
    script.extend(del(4));
    script.push(AFTER);
    let backing = json!({"backing-fmt": "qcow2", "backing-file": "full"});
    script.extend(create_image(5, "next", backing));
    script.push(add_format(5, false, None));
    script.push(transaction(json!([bitmap("backup-vda", false), merge])));
    let incremental = json!({"sync": "incremental", "bitmap": "backup-vda",
        "bitmap-mode": "on-success"});
    script.push(Ask("x-debug-block-dirty-bitmap-sha256", temporary.clone()));
    script.push(transaction(json!([
        bitmap("second", true),
        backup("backup-vdb-libvirt-1-format", 5, incremental)
    ])));
    script.extend(finish("backup-vdb-libvirt-1-format", false));
    script.push(Ask("x-debug-block-dirty-bitmap-sha256", temporary.clone()));
    script.push(Ask("block-dirty-bitmap-remove", temporary));
    script.extend(del(5));
    script.push(AFTER);
    play(script);
}

#[test]
fn backup_begin_that_is_pulled() {
    let backup = job(
        "backup-vda-libvirt-1-format",
        json!({"device": format(1), "target": format(4), "sync": "none"}),
    );
    let export = json!({"type": "nbd", "id": "libvirt-4-format", "node-name": format(4),
        "writable": false, "name": "pulled"});
    let mut script = start();
    script.push(BEFORE);
    let backing = json!({"backing-fmt": "qcow2", "backing-file": "t"});
    script.extend(create_image(4, "scratch", backing));
    script.extend([
        add_format(4, false, Some(1)),
        transaction(json!([{"type": "blockdev-backup", "data": backup}])),
        Ask("block-export-add", export),
        AFTER,
        Io(
            "pulled",
            &["read -P 5 0 64k", "read -P 1 64k 64k", "read -P 2 128k 64k"],
        ),
        RemoveLeft("libvirt-4-format"),
        Ask("job-cancel", json!({"id": "backup-vda-libvirt-1-format"})),
    ]);
    script.extend(finish("backup-vda-libvirt-1-format", false));
    script.extend(del(4));
    script.push(Io("vda", &["read -P 6 64k 64k"]));
    play(script);
}

/// An overlay over the disk, as the number 4.
fn snapshot() -> Vec<Step> {
    let backing = json!({"backing-fmt": "qcow2", "backing-file": "t"});
    let mut steps = create_image(4, "overlay", backing);
    let data = json!({"node": format(1), "overlay": format(4)});
    steps.extend([
        add_format(4, false, None),
        transaction(json!([{"type": "blockdev-snapshot", "data": data}])),
        Ask("query-block-exports", json!({})),
    ]);
    steps
}

#[test]
fn snapshot_create_as_disk_only_then_blockcommit_active_and_pivot() {
    let commit = json!({"device": format(4), "top-node": format(4), "base-node": format(1)});
    let mut script = start();
    script.push(BEFORE);
    script.extend(snapshot());
    script.push(AFTER);
    script.push(Ask(
        "block-commit",
        job("commit-vda-libvirt-4-format", commit),
    ));
    script.extend(finish("commit-vda-libvirt-4-format", true));
    script.push(AFTER);
    script.extend(del(4));
    script.push(Ask("query-block-exports", json!({})));
    play(script);
}

#[test]
fn blockcommit_of_a_layer_below() {
    let commit = json!({"device": format(1), "top-node": format(2), "base-node": format(3),
        "backing-file": "b"});
    let mut script = start();
    script.push(BEFORE);
    script.push(Ask(
        "block-commit",
        job("commit-vda-libvirt-2-format", commit),
    ));
    script.extend(finish("commit-vda-libvirt-2-format", false));
    script.push(AFTER);
    script.extend(del(2));
    play(script);
}

#[test]
fn blockpull_of_one_layer_and_of_all() {
    let pull = json!({"device": format(1), "base-node": format(3), "backing-file": "b"});
    let mut script = start();
    script.push(BEFORE);
    script.push(Ask("block-stream", job("pull-vda-libvirt-1-format", pull)));
    script.extend(finish("pull-vda-libvirt-1-format", false));
    script.push(AFTER);
    script.extend(del(2));
    let all = json!({"device": format(1)});
    script.push(Ask("block-stream", job("pull-all-libvirt-1-format", all)));
    script.extend(finish("pull-all-libvirt-1-format", false));
    script.push(AFTER);
    script.extend(del(3));
    play(script);
}
