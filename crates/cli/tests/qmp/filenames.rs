//! What the files of nodes are called, and commands that name layers so.

use std::path::Path;

use serde_json::{Value, json};

use super::place::{Daemon, NAME, Place, Step, qcow2, same, with};

/// What is told of each node that depends on how nodes stand on each other, in the order of
/// the answer.
fn told(daemon: &mut Daemon, flat: bool) -> Vec<Value> {
    let answer = daemon.must("query-named-block-nodes", json!({"flat": flat}));
    let members = |object: &Value, keys: &[&str]| -> Vec<Value> {
        keys.iter().map(|key| object[*key].clone()).collect()
    };
    let describe = |node: &Value| {
        let image = &node["image"];
        let keys = ["file", "drv", "backing_file", "backing_file_depth"];
        let own = members(node, &[&keys[..], &["cache", "detect_zeroes"]].concat());
        let keys = ["filename", "format", "virtual-size", "dirty-flag"];
        let backing = ["backing-filename", "full-backing-filename"];
        let of_image = members(image, &[&keys[..], &backing].concat());
        let below = &image["backing-image"];
        let name = node["node-name"].as_str();
        json!({
            "name": name.filter(|name| !name.starts_with('#')),
            "own": own,
            "image": of_image,
            "below": [&below["filename"], &below["backing-image"]["filename"]],
        })
    };
    let nodes = answer.as_array().expect("a list");
    nodes.iter().map(describe).collect()
}

fn add(daemon: &mut Daemon, options: Value) {
    daemon.must("blockdev-add", options);
}

fn remove(daemon: &mut Daemon, names: &[&str]) {
    for name in names {
        daemon.must("blockdev-del", json!({"node-name": name}));
    }
}

fn play(program: &Path) -> Vec<Vec<Value>> {
    let place = Place::new();
    let mut daemon = place.start(program, "");
    let file = |name: &str| json!({"driver": "file", "filename": name});
    let mut all = Vec::new();
    // By what the headers name.
    add(
        &mut daemon,
        json!({"driver": "qcow2", "node-name": "t", "file": file("t"), "detect-zeroes": "on",
               "cache": {"no-flush": true}}),
    );
    all.push(told(&mut daemon, false));
    all.push(told(&mut daemon, true));
    let rename = json!({"device": "t", "image-node-name": "t", "backing-file": "null-co://"});
    daemon.must("change-backing-file", rename);
    all.push(told(&mut daemon, false));
    remove(&mut daemon, &["t"]);
    // By what somebody says, also that there is nothing.
    add(&mut daemon, json!({"driver": "null-co", "node-name": "n"}));
    add(
        &mut daemon,
        json!({"driver": "qcow2", "node-name": "m", "file": file("m"), "backing": "n"}),
    );
    add(
        &mut daemon,
        json!({"driver": "qcow2", "node-name": "o", "file": file("b"), "backing": null}),
    );
    all.push(told(&mut daemon, false));
    remove(&mut daemon, &["m", "o", "n"]);
    all
}

#[test]
fn nodes_are_called_alike() {
    let links = Place::new();
    let (ours, real) = (play(&links.path(NAME)), play(Path::new(NAME)));
    for (at, (ours, real)) in ours.iter().zip(&real).enumerate() {
        assert_eq!(ours, real, "answer {at}");
    }
}

#[test]
fn layers_are_named_by_their_files_alike() {
    let top =
        json!({"driver": "qcow2", "node-name": "t", "file": {"driver": "file", "filename": "t"}});
    let commit = |more: Value| {
        let arguments = with(json!({"job-id": "c", "device": "t"}), more);
        Step::Ask("block-commit", arguments)
    };
    let stream = |more: Value| {
        let arguments = with(json!({"job-id": "s", "device": "t"}), more);
        Step::Ask("block-stream", arguments)
    };
    let script = [
        Step::Ask("blockdev-add", top),
        commit(json!({"top": "nosuch"})),
        commit(json!({"base": "nosuch"})),
        commit(json!({"top": "b", "base": "m"})),
        commit(json!({"top": "m", "top-node": "t"})),
        commit(json!({"base": "m", "base-node": "t"})),
        commit(json!({"top": "m", "base": "m"})),
        stream(json!({"base": "nosuch"})),
        stream(json!({"base": "m", "base-node": "t"})),
        stream(json!({"base": "m", "bottom": "t"})),
        stream(json!({"bottom": "m", "base-node": "t"})),
        commit(json!({"top": "m", "base": "b", "backing-mask-protocol": true})),
        Step::Wait("c", "null"),
        stream(json!({"base": "b"})),
        Step::Wait("s", "null"),
    ];
    same(&[], &script);
}

/// The words of an image's header do not name what it was put on instead.
#[test]
fn a_layer_is_not_named_by_a_file_that_it_is_not() {
    let step = |command, arguments| Step::Ask(command, arguments);
    let below = json!({"driver": "qcow2", "file": {"driver": "file", "filename": "o"}});
    let top = qcow2("top", "t", below);
    let ask = |command, name: &str, id: &str| {
        let arguments = json!({"job-id": id, "device": "top", "base": name});
        step(command, arguments)
    };
    let script = [
        step("blockdev-add", top),
        ask("block-commit", "m", "one"),
        ask("block-commit", "./m", "two"),
        ask("block-stream", "m", "three"),
        ask("block-stream", "o", "four"),
        Step::Wait("four", "null"),
        ask("block-commit", "o", "five"),
        Step::Wait("five", "ready"),
        step("job-complete", json!({"id": "five"})),
        Step::Wait("five", "null"),
    ];
    same(&[], &script);
}
