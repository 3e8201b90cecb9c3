//! Nodes of several children that must agree.

use serde_json::{Value, json};

use super::place::Step::{Ask, Io};
use super::place::{Step, add, same};

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
