//! A state file that cannot be written, or is written while something else goes on: users find what they
//! have written whatever happens then.

use std::time::Duration;

use serde_json::{Value, json};

use crate::place::{Place, Service, VELLUM};
use crate::state::{WORDS, export, node, shown, snapshot};
use vellum_testing::{Qmp, until};

/// Starts a daemon whose state file is in a folder of its own.
fn serve(place: &Place) -> (Service, Qmp) {
    let mut words = WORDS;
    words[7] = "folder/state";
    let service = place.serve(&words);
    let client = place.monitor();
    (service, client)
}

fn make_folder(place: &Place) {
    std::fs::create_dir(place.path("folder")).expect("a folder");
}

fn remove_folder(place: &Place) {
    std::fs::remove_dir_all(place.path("folder")).expect("it is there");
}

#[test]
fn where_the_state_cannot_be_written_users_stay() {
    let place = Place::new();
    make_folder(&place);
    let (service, mut client) = serve(&place);
    for name in ["a", "b"] {
        client.must("blockdev-add", node(name, name));
    }
    client.must("block-export-add", export("a", "a"));
    let mirror = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full"});
    client.must("blockdev-mirror", mirror);
    client.take_event("BLOCK_JOB_READY");
    remove_folder(&place);

    client.send("job-complete", json!({"id": "j"}));
    let told = client.take_event("BLOCK_JOB_COMPLETED");
    let why = told["data"]["error"].as_str().expect("why");
    assert!(
        why.contains("cannot write the state file 'folder/state'"),
        "{told}"
    );
    client.send("blockdev-snapshot-sync", snapshot("a", "over"));
    // What was answered before this is the mirror's, whose end was an event.
    let refused = std::iter::from_fn(|| client.message()).find(|one| one.get("error").is_some());
    let refused = refused.expect("an answer")["error"]["desc"].to_string();
    assert!(refused.contains("cannot write the state file"), "{refused}");
    make_folder(&place);
    client.must("object-add", json!({"qom-type": "iothread", "id": "io"}));
    assert_eq!(shown(&mut client)["a"], "a");
    place.io("a", &["write -P 9 0 4k", "flush"]);
    service.kill();
    let (service, mut client) = serve(&place);
    assert_eq!(shown(&mut client)["a"], "a");
    place.io("a", &["read -P 9 0 4k"]);
    service.end();
}

/// What a client has nodes stand on is noted as where users are led is.
#[test]
fn where_the_state_cannot_be_written_nodes_stand_on_what_they_did() {
    let place = Place::new();
    make_folder(&place);
    let (service, mut client) = serve(&place);
    for name in ["a", "c", "d"] {
        client.must("blockdev-add", node(name, name));
    }
    let over = |backing: Value| json!({"driver": "qcow2", "node-name": "over", "file": "over-file", "backing": backing});
    let file = json!({"driver": "file", "node-name": "over-file", "filename": "b"});
    client.must("blockdev-add", file);
    client.must("blockdev-add", over(Value::Null));
    client.must(
        "object-add",
        json!({"qom-type": "throttle-group", "id": "t"}),
    );
    let limited = |below: &str| json!({"driver": "throttle", "node-name": "limited", "throttle-group": "t", "file": below});
    client.must("blockdev-add", limited("a"));
    let quorum =
        json!({"driver": "quorum", "node-name": "q", "vote-threshold": 1, "children": ["c", "d"]});
    client.must("blockdev-add", quorum);
    client.must("block-export-add", export("limited", "limited"));
    client.must("block-export-add", export("q", "q"));
    remove_folder(&place);

    let reopened = json!({"options": [over(json!("a")), limited("over")]});
    let without_d = json!({"parent": "q", "child": "children.1"});
    for (command, arguments) in [
        ("blockdev-reopen", reopened),
        ("x-blockdev-change", without_d),
    ] {
        let why = client.refused(command, arguments);
        assert!(why.starts_with("cannot write the state file"), "{why}");
    }
    make_folder(&place);
    client.must("object-add", json!({"qom-type": "iothread", "id": "io"}));
    for id in ["limited", "q"] {
        place.io(id, &["write -P 5 0 64k", "flush"]);
    }
    service.kill();
    let (service, client) = serve(&place);
    for id in ["limited", "q"] {
        place.io(id, &["read -P 5 0 64k"]);
    }
    drop(client);
    service.end();
    for file in ["a", "c", "d"] {
        let said = place.must(VELLUM, &["io", "-r", "-c", "read -P 5 0 64k", file]);
        assert!(!said.contains("failed"), "{file}: {said}");
    }
}

/// Who asks for something when the daemon is to end is told that it is done only if it comes back.
#[test]
fn what_is_acknowledged_while_the_daemon_ends_is_in_the_file() {
    let place = Place::new();
    let mut words = WORDS.to_vec();
    words.extend([
        "--chardev",
        "socket,id=n,path=other.sock,server=on,wait=off",
        "--monitor",
        "n",
    ]);
    place.must(VELLUM, "create -q -f qcow2 large 64M");
    place.must(VELLUM, "io -c 'write -q -P 1 0 4M' large");
    let service = place.serve(&words);
    let mut client = place.monitor();
    let mut other = Qmp::connect(place.path("other.sock"));
    let slow = json!({"qom-type": "throttle-group", "id": "t", "limits": {"iops-total": 3}});
    client.must("object-add", slow);
    client.must("blockdev-add", node("a", "a"));
    let limited = json!({"driver": "throttle", "throttle-group": "t", "file": node("below", "large")["file"]});
    let slow = json!({"driver": "qcow2", "node-name": "b", "file": limited});
    client.must("blockdev-add", slow);
    // One command after the other, and the end after those.
    client.send(
        "blockdev-snapshot-internal-sync",
        json!({"device": "b", "name": "s"}),
    );
    std::thread::sleep(Duration::from_millis(500));
    other.send("block-export-add", export("a", "a"));
    std::thread::sleep(Duration::from_millis(500));
    service.signal("-TERM");
    let answer = std::iter::from_fn(|| other.message()).find(|one| one.get("event").is_none());
    let is_done = answer.is_some_and(|answer| answer.get("return").is_some());
    service.wait();
    let text = place.text("state");
    let state: Value = serde_json::from_str(text.lines().nth(1).expect("a line")).expect("JSON");
    let exports = state["exports"].as_array().expect("a list").len();
    assert_eq!(exports > 0, is_done, "{exports}");
}

/// The jobs that the state file has.
fn jobs(place: &Place) -> Value {
    let text = std::fs::read_to_string(place.path("folder/state")).unwrap_or_default();
    let state: Option<Value> = text
        .lines()
        .nth(1)
        .and_then(|line| serde_json::from_str(line).ok());
    state.map_or(Value::Null, |state| state["jobs"].clone())
}

/// Begun anew it would have a target that is complete written over, with what is newer.
#[test]
fn a_job_that_ends_while_the_state_cannot_be_written_is_over() {
    for is_ended in [false, true] {
        let place = Place::new();
        make_folder(&place);
        let (service, mut client) = serve(&place);
        for name in ["a", "b"] {
            client.must("blockdev-add", node(name, name));
        }
        client.must("block-export-add", export("a", "a"));
        place.io("a", &["write -P 5 0 64k", "flush"]);
        let backup = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full",
            "auto-finalize": false});
        client.must("blockdev-backup", backup);
        client.take_event("BLOCK_JOB_PENDING");
        assert_eq!(jobs(&place)[0]["arguments"]["job-id"], "j");
        remove_folder(&place);
        client.must("job-finalize", json!({"id": "j"}));
        let told = client.take_event("BLOCK_JOB_COMPLETED");
        assert!(told["data"].get("error").is_none(), "{told}");
        place.io("a", &["write -P 6 0 64k", "flush"]);
        let said = service.log();
        assert!(
            said.contains("the job 'j' is over, and begins anew"),
            "{said}"
        );
        make_folder(&place);
        // Nobody asks for anything.
        match is_ended {
            true => service.end(),
            false => {
                until("the end of the job", || jobs(&place) == json!([]));
                service.kill();
            }
        }
        let (service, mut client) = serve(&place);
        assert_eq!(client.names("query-jobs", "id"), [""; 0]);
        drop(client);
        service.end();
        let said = place.must(VELLUM, "io -r -c 'read -P 5 0 64k' b");
        assert!(!said.contains("failed"), "{said}");
    }
}

/// Its client has been told of the end.
#[test]
fn a_job_that_is_cancelled_while_the_daemon_ends_is_over() {
    let place = Place::new();
    make_folder(&place);
    let (service, mut client) = serve(&place);
    for name in ["a", "b"] {
        client.must("blockdev-add", node(name, name));
    }
    let mirror = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full"});
    client.must("blockdev-mirror", mirror);
    client.take_event("BLOCK_JOB_READY");
    assert_eq!(jobs(&place)[0]["arguments"]["job-id"], "j");
    client.send("block-job-cancel", json!({"device": "j"}));
    client.send("quit", json!({}));
    service.wait();
    assert_eq!(jobs(&place), json!([]));
}
