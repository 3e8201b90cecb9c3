//! Nodes of several children that must agree.

use serde_json::{Value, json};

use super::place::Step::{Ask, Io};
use super::place::{Place, Step, add, same};

/// `b`, `m` and `o` without their backing files: they differ where `b` or `m` hold something.
fn children() -> [Step; 3] {
    ["b", "m", "o"].map(|name| add(name, name, Value::Null))
}

fn quorum(name: &str, options: Value) -> Step {
    let mut all = json!({"driver": "quorum", "node-name": name, "children": ["b", "m", "o"]});
    let (Some(all_members), Some(members)) = (all.as_object_mut(), options.as_object()) else {
        unreachable!("both are objects")
    };
    all_members.extend(members.clone());
    Ask("blockdev-add", all)
}

fn serve(node: &str) -> [Step; 2] {
    let address = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    let export =
        json!({"type": "nbd", "id": "e", "node-name": node, "name": "x", "writable": true});
    [
        Ask("nbd-server-start", address),
        Ask("block-export-add", export),
    ]
}

#[test]
fn what_most_children_hold_is_shown_and_who_differs_is_an_event() {
    let mut script = Vec::from(children());
    script.push(quorum("q", json!({"vote-threshold": 2})));
    script.extend(serve("q"));
    script.push(Io("x", &["read -P 0 256k 64k", "read -P 0 64k 64k"]));
    script.push(Io("x", &["write -P 9 0 1M", "read -P 9 0 1M", "flush"]));
    script.push(Ask("block-export-del", json!({"id": "e", "mode": "hard"})));
    script.push(Ask("blockdev-del", json!({"node-name": "q"})));
    same(&[], &script);
}

#[test]
fn who_differs_gets_written_what_most_hold() {
    let mut script = Vec::from(children());
    script.push(quorum(
        "q",
        json!({"vote-threshold": 2, "rewrite-corrupted": true}),
    ));
    script.extend(serve("q"));
    script.push(Io("x", &["read -P 0 256k 64k", "read -P 0 256k 64k"]));
    same(&[], &script);
}

#[test]
fn the_first_child_answers_where_nobody_compares() {
    let mut script = Vec::from(children());
    script.push(quorum(
        "q",
        json!({"vote-threshold": 1, "read-pattern": "fifo"}),
    ));
    script.extend(serve("q"));
    script.push(Io("x", &["read -P 3 128k 64k"]));
    same(&[], &script);
}

#[test]
fn what_contradicts_itself_is_refused_alike() {
    let mut script = Vec::from(children());
    for options in [
        json!({"vote-threshold": 0}),
        json!({"vote-threshold": 4}),
        json!({"vote-threshold": 2, "blkverify": true}),
        json!({"vote-threshold": 2, "read-pattern": "x"}),
        json!({"vote-threshold": 1, "children": ["b", "nosuch"]}),
        json!({}),
    ] {
        script.push(quorum("q", options));
    }
    same(&[], &script);
}

fn change(arguments: Value) -> Step {
    let mut all = json!({"parent": "q"});
    let (Some(all_members), Some(members)) = (all.as_object_mut(), arguments.as_object()) else {
        unreachable!("both are objects")
    };
    all_members.extend(members.clone());
    Ask("x-blockdev-change", all)
}

#[test]
fn children_come_and_go_under_a_client() {
    let mut script = Vec::from(children());
    script.push(add("t", "t", Value::Null));
    script.push(quorum("q", json!({"vote-threshold": 2})));
    script.extend(serve("q"));
    script.push(Io("x", &["write -P 9 0 1M"]));
    script.push(change(json!({"node": "t"})));
    script.push(change(json!({"child": "children.1"})));
    // What is written now reaches the new child, and not the one that has gone.
    script.push(Io("x", &["write -P 5 0 1M", "read -P 5 0 1M", "flush"]));
    script.push(change(json!({"child": "children.0"})));
    script.push(change(json!({"child": "children.2"})));
    script.push(Io("x", &["read -P 5 0 1M"]));
    script.push(change(json!({"node": "m"})));
    script.push(Ask("blockdev-del", json!({"node-name": "b"})));
    script.push(Ask("block-export-del", json!({"id": "e", "mode": "hard"})));
    script.push(Ask("blockdev-del", json!({"node-name": "q"})));
    same(&[], &script);
}

#[test]
fn children_that_cannot_come_or_go_are_refused_alike() {
    let mut script = Vec::from(children());
    script.push(add("t", "t", Value::Null));
    let none = json!({"vote-threshold": 2, "children": ["b", "m"]});
    script.push(quorum("q", none));
    for arguments in [
        json!({}),
        json!({"node": "o", "child": "children.0"}),
        json!({"node": "nosuch"}),
        json!({"node": "b"}),
        json!({"node": "q"}),
        json!({"child": "children.0"}),
        json!({"child": "children.2"}),
        json!({"child": "file"}),
        json!({"parent": "t", "node": "o"}),
        json!({"parent": "t", "child": "file"}),
        json!({"parent": "t", "child": "nosuch"}),
        json!({"parent": "nosuch", "child": "file"}),
        // Numbers are free again from the end only.
        json!({"node": "o"}),
        json!({"child": "children.1"}),
        json!({"node": "m"}),
        json!({"child": "children.1"}),
        json!({"child": "children.3"}),
        json!({"node": "m"}),
        json!({"child": "children.3"}),
    ] {
        script.push(change(arguments));
    }
    let strict = json!({"node-name": "v", "vote-threshold": 2, "blkverify": true});
    script.push(change(json!({"child": "children.2"})));
    let strict_children = json!({"children": ["m", "t"]});
    let mut options = strict.clone();
    if let (Some(all), Some(more)) = (options.as_object_mut(), strict_children.as_object()) {
        all.extend(more.clone());
    }
    script.push(quorum("v", options));
    script.push(change(json!({"parent": "v", "node": "q"})));
    let reopened =
        json!({"driver": "quorum", "node-name": "q", "vote-threshold": 2, "children": ["b", "o"]});
    script.push(Ask("blockdev-reopen", json!({"options": [reopened]})));
    same(&[], &script);
}

#[test]
fn a_child_that_was_made_with_its_quorum_goes_with_its_place() {
    let made = |name: &str| json!({"driver": "qcow2", "backing": null, "file": {"driver": "file", "filename": name}});
    let mut named = made("m");
    named["node-name"] = json!("m");
    let all = json!({"vote-threshold": 1, "children": [made("b"), named, made("o")]});
    let script = [
        quorum("q", all),
        change(json!({"child": "children.0"})),
        change(json!({"child": "children.1"})),
        Ask("blockdev-del", json!({"node-name": "m"})),
        // Their files are free.
        add("m", "m", Value::Null),
        add("b", "b", Value::Null),
        change(json!({"node": "b"})),
        Ask("blockdev-del", json!({"node-name": "q"})),
    ];
    same(&[], &script);
}

/// The real daemon takes it, and fails every request from then on.
#[test]
fn a_child_of_another_size_is_refused() {
    let place = Place::new();
    place.img("create -q -f raw big 2M");
    let mut daemon = place.ours("");
    for step in children() {
        let Ask(command, arguments) = step else {
            unreachable!("nodes are asked for")
        };
        daemon.ask(command, arguments);
    }
    let all = json!({"driver": "quorum", "node-name": "q", "vote-threshold": 1, "children": ["b"]});
    daemon.ask("blockdev-add", all);
    let big =
        json!({"driver": "raw", "node-name": "big", "file": {"driver": "file", "filename": "big"}});
    daemon.ask("blockdev-add", big);
    let refused = daemon.ask("x-blockdev-change", json!({"parent": "q", "node": "big"}));
    let text = refused["error"]["desc"]
        .as_str()
        .unwrap_or_default()
        .to_owned();
    assert!(text.contains("give it one of the same size"), "{refused}");
    daemon.ask("x-blockdev-change", json!({"parent": "q", "node": "m"}));
}
