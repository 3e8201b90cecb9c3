//! `x-blockdev-amend`: passphrases of images in use.

use serde_json::{Value, json};

use crate::backup::{DISK, SERVER};
use crate::place::Step::{Ask, Wait};
use crate::place::{Daemon, Place, Step, same, with};

fn secret(id: &str, data: &str) -> Step {
    Ask(
        "object-add",
        json!({"qom-type": "secret", "id": id, "data": data}),
    )
}

fn encrypted() -> Value {
    json!({"driver": "qcow2", "node-name": "e", "encrypt": {"format": "luks", "key-secret": "s0"},
        "file": {"driver": "file", "filename": "e"}})
}

/// Two secrets, and a node of an image that the first one opens.
fn start() -> Vec<Step> {
    let image = json!({"driver": "qcow2", "file": "f", "size": 1 << 20,
        "encrypt": {"format": "luks", "key-secret": "s0", "iter-time": 10}});
    let file = json!({"driver": "file", "filename": "e", "size": 0});
    let dismiss = |id: &str| Ask("job-dismiss", json!({"id": id}));
    let create = |id: &str, options: Value| {
        Ask("blockdev-create", json!({"job-id": id, "options": options}))
    };
    let node = json!({"driver": "file", "node-name": "f", "filename": "e"});
    vec![
        secret("s0", "one"),
        secret("s1", "two"),
        create("file", file),
        Wait("file", "concluded"),
        dismiss("file"),
        Ask("blockdev-add", node),
        create("image", image),
        Wait("image", "concluded"),
        dismiss("image"),
        Ask("blockdev-del", json!({"node-name": "f"})),
        Ask("blockdev-add", encrypted()),
    ]
}

fn amend(id: &str, options: Value) -> Step {
    let arguments = json!({"job-id": id, "node-name": "e", "options": options});
    Ask("x-blockdev-amend", arguments)
}

fn slots(more: Value) -> Value {
    let encrypt = with(json!({"format": "luks"}), more);
    json!({"driver": "qcow2", "encrypt": encrypt})
}

/// Steps that play amendments, one after the other.
fn play_all(script: &mut Vec<Step>, all: Vec<(&'static str, Value)>) {
    for (id, options) in all {
        script.extend([
            amend(id, options),
            Wait(id, "concluded"),
            Ask("query-jobs", json!({})),
            Ask("query-block-jobs", json!({})),
            Ask("job-dismiss", json!({"id": id})),
        ]);
    }
}

#[test]
fn passphrases_come_and_go_alike() {
    let mut script = start();
    let another = json!({"state": "active", "new-secret": "s1", "iter-time": 10});
    let mut in_use = another.clone();
    in_use["keyslot"] = json!(1);
    let unlocked = json!({"state": "active", "new-secret": "s0", "iter-time": 10, "secret": "s1"});
    let all = vec![
        ("add", slots(another)),
        ("in-use", slots(in_use)),
        ("none", slots(json!({"state": "active"}))),
        ("beyond", slots(json!({"state": "inactive", "keyslot": 9}))),
        ("which", slots(json!({"state": "inactive"}))),
        (
            "both",
            slots(json!({"state": "inactive", "new-secret": "s1", "keyslot": 1})),
        ),
        (
            "erase",
            slots(json!({"state": "inactive", "old-secret": "s0"})),
        ),
        (
            "gone",
            slots(json!({"state": "active", "new-secret": "s0", "iter-time": 10})),
        ),
        ("unlocked", slots(unlocked)),
        ("again", slots(json!({"state": "inactive", "keyslot": 0}))),
        ("last", slots(json!({"state": "inactive", "keyslot": 1}))),
        ("nothing", json!({"driver": "qcow2"})),
        (
            "other",
            json!({"driver": "qcow2", "encrypt": {"format": "qcow"}}),
        ),
    ];
    play_all(&mut script, all);
    same(&[], &script);
}

#[test]
fn what_is_wrong_with_an_amendment_is_told_alike() {
    let raw = json!({"driver": "raw", "node-name": "raw",
        "file": {"driver": "file", "filename": "t"}});
    let plain = json!({"driver": "qcow2", "node-name": "plain",
        "file": {"driver": "file", "filename": "o"}});
    let add = slots(json!({"state": "active", "new-secret": "s1"}));
    let of = |node: &str, options: Value| {
        let arguments = json!({"job-id": "x", "node-name": node, "options": options});
        Ask("x-blockdev-amend", arguments)
    };
    let mut script = start();
    script.extend([
        Ask("blockdev-add", raw),
        Ask("blockdev-add", plain),
        of("no", add.clone()),
        of("raw", json!({"driver": "raw"})),
        of("raw", add.clone()),
        amend("x", json!({"driver": "luks", "state": "inactive"})),
        amend("x", json!({"driver": "bad"})),
        amend("x", json!({})),
        amend("x", slots(json!({}))),
        amend("x", slots(json!({"state": "bad"}))),
        amend("x", slots(json!({"state": "active", "bad": 1}))),
        amend("x", json!({"driver": "qcow2", "encrypt": {}})),
        amend("1", add.clone()),
        Ask(
            "x-blockdev-amend",
            json!({"node-name": "e", "options": add}),
        ),
        Ask("x-blockdev-amend", json!({"job-id": "x", "node-name": "e"})),
        of("plain", add),
        Wait("x", "concluded"),
        Ask("query-jobs", json!({})),
    ]);
    same(&[], &script);
}

fn play(daemon: &mut Daemon, script: Vec<Step>) {
    for step in script {
        match step {
            Ask(command, arguments) => drop(daemon.must(command, arguments)),
            Wait(id, status) => daemon.wait(id, status),
            _ => unreachable!("no other steps"),
        }
    }
}

/// Whether the real programs open an image with a passphrase.
fn opens(place: &Place, options: &str, passphrase: &str) -> bool {
    let secret = format!("secret,id=s,data={passphrase}");
    let words = [
        "--object",
        &secret,
        "--image-opts",
        "-c",
        "read 0 64k",
        options,
    ];
    let output = std::process::Command::new("qemu-io")
        .current_dir(place.root())
        .args(words)
        .output()
        .expect("qemu-io");
    output.status.success()
}

#[test]
fn clients_go_on_while_a_passphrase_is_exchanged() {
    let place = Place::new();
    let mut daemon = place.ours(SERVER);
    play(&mut daemon, start());
    let export =
        json!({"type": "nbd", "id": "x", "node-name": "e", "name": "disk", "writable": true});
    daemon.must("block-export-add", export);
    place.io(DISK, &["write -P 5 0 64k"]);
    let new = slots(json!({"state": "active", "new-secret": "s1", "iter-time": 10}));
    let old = slots(json!({"state": "inactive", "old-secret": "s0"}));
    play(&mut daemon, vec![amend("a", new), Wait("a", "concluded")]);
    place.io(DISK, &["read -P 5 0 64k", "write -P 6 64k 64k"]);
    play(&mut daemon, vec![amend("b", old), Wait("b", "concluded")]);
    place.io(DISK, &["read -P 6 64k 64k", "write -P 7 128k 64k"]);
    let jobs = daemon.must("query-jobs", json!({}));
    assert!(
        jobs.as_array()
            .expect("jobs")
            .iter()
            .all(|job| job.get("error").is_none())
    );
    daemon.end();
    let options = "driver=qcow2,file.filename=e,encrypt.key-secret=s";
    assert!(opens(&place, options, "two"));
    assert!(!opens(&place, options, "one"));
}

/// QEMU's daemon ends with a failed assertion here.
#[test]
fn a_volume_gets_another_passphrase() {
    let place = Place::new();
    let secret_of_volume = "secret,id=s0,data=one";
    let words = [
        "create",
        "-q",
        "--object",
        secret_of_volume,
        "-f",
        "luks",
        "-o",
        "key-secret=s0,iter-time=10",
        "l",
        "1M",
    ];
    place.img(&words);
    let mut daemon = place.ours("");
    let node = json!({"driver": "luks", "node-name": "e", "key-secret": "s0",
        "file": {"driver": "file", "filename": "l"}});
    let new = json!({"driver": "luks", "state": "active", "new-secret": "s1", "iter-time": 10});
    let old = json!({"driver": "luks", "state": "inactive", "old-secret": "s0"});
    let last = json!({"driver": "luks", "state": "inactive", "keyslot": 1});
    play(
        &mut daemon,
        vec![
            secret("s0", "one"),
            secret("s1", "two"),
            Ask("blockdev-add", node),
            amend("a", new),
            Wait("a", "concluded"),
            amend("b", old),
            Wait("b", "concluded"),
            amend("c", last),
            Wait("c", "concluded"),
        ],
    );
    let jobs = daemon.must("query-jobs", json!({}));
    let jobs = jobs.as_array().expect("jobs").iter();
    let failed: Vec<&Value> = jobs
        .filter(|job| job.get("error").is_some())
        .map(|job| &job["id"])
        .collect();
    assert_eq!(failed, ["c"]);
    daemon.end();
    assert!(opens(
        &place,
        "driver=luks,file.filename=l,key-secret=s",
        "two"
    ));
    assert!(!opens(
        &place,
        "driver=luks,file.filename=l,key-secret=s",
        "one"
    ));
}
