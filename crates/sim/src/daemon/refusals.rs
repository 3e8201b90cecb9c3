//! Commands that must be refused: names that are taken, wherever in a description they stand, and changes that
//! would close a cycle, through any filter. And deep stacks of filters, which must not take long.
//!
//! A refused command leaves no node behind, and the disk's clients notice nothing.

use std::collections::BTreeSet;
use std::rc::Rc;

use serde_json::{Value, json};
use vellum_io::Buffer;

use super::guest_disk::GuestDisk;
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};

/// Filters above each other at most. Work that doubles with each does not end.
const MOST_FILTERS: u64 = 40;
/// As [`MOST_FILTERS`], where each is a command.
const MOST_NAMED: u64 = 4;

/// Tries one of them on a disk.
pub(super) async fn try_one(setup: &Setup, disk: &Rc<GuestDisk>, top: &str) {
    let before = own_names(setup, disk).await;
    match setup.draw_later(|rng| rng.below(3)) {
        0 => take_name(setup, disk, top).await,
        1 => close_cycle(setup, disk, top).await,
        _ => stack(setup, disk, top).await,
    }
    let after = own_names(setup, disk).await;
    if before != after && setup.failure().is_none() && !setup.faulty {
        let message = format!("nodes are left or gone: {before:?}, then {after:?}");
        setup.fail(Failure::new(FailureKind::Request, message));
    }
}

/// The names of a disk's nodes. Other disks have monitors of their own.
async fn own_names(setup: &Setup, disk: &GuestDisk) -> BTreeSet<String> {
    let nodes = setup.ask("query-named-block-nodes", json!({})).await;
    let Ok(Value::Array(nodes)) = nodes else {
        return BTreeSet::new();
    };
    let names = nodes.iter().filter_map(|node| node["node-name"].as_str());
    names
        .filter(|name| name.starts_with(&disk.name))
        .map(str::to_owned)
        .collect()
}

/// A filter over a node, which is named or described.
fn filter(setup: &Setup, below: Value) -> Value {
    let driver = setup.draw_later(|rng| *rng.pick(&["copy-on-read", "raw"]));
    json!({"driver": driver, "file": below})
}

/// Adds nodes above each other in one description, one of which has a name that is taken: by the disk, or by
/// another one of them.
async fn take_name(setup: &Setup, disk: &GuestDisk, top: &str) {
    let (depth, at, other) = setup.draw_later(|rng| {
        let depth = rng.between(1, MOST_NAMED);
        (depth, rng.below(depth), rng.below(depth))
    });
    let first = disk.new_name("t");
    let mut taken = top.to_owned();
    if at != other {
        taken.clone_from(&first);
    }
    let mut node = json!({"driver": "null-co", "size": 4096});
    for level in 0..depth {
        node = match setup.draw_later(|rng| rng.chance(1, 3)) {
            true => json!({"driver": "quorum", "vote-threshold": 1, "children": [node]}),
            false => filter(setup, node),
        };
        if level == at {
            node["node-name"] = json!(taken);
        } else if level == other {
            node["node-name"] = json!(first);
        }
    }
    refused(setup, "blockdev-add", node).await;
}

/// Puts filters over a disk, and tries to put the disk onto them.
async fn close_cycle(setup: &Setup, disk: &GuestDisk, top: &str) {
    let mut names = vec![top.to_owned()];
    for _ in 0..setup.draw_later(|rng| rng.between(1, MOST_NAMED)) {
        let name = disk.new_name("t");
        let mut node = filter(setup, json!(names.last()));
        node["node-name"] = json!(name);
        if !setup.demand("blockdev-add", node).await {
            break;
        }
        names.push(name);
    }
    if names.len() > 1 {
        let over = names.last().cloned().unwrap_or_default();
        let job = disk.new_name("j");
        let (command, arguments) = match setup.draw_later(|rng| rng.below(4)) {
            0 => ("blockdev-snapshot", json!({"node": top, "overlay": over})),
            1 => (
                "blockdev-mirror",
                json!({"job-id": job, "device": top, "target": over, "sync": "full"}),
            ),
            2 => (
                "blockdev-backup",
                json!({"job-id": job, "device": top, "target": over, "sync": "full"}),
            ),
            _ => {
                let mut options = filter(setup, json!(over));
                options["node-name"] = json!(names[1]);
                ("blockdev-reopen", json!({"options": [options]}))
            }
        };
        refused(setup, command, arguments).await;
    }
    for name in names.iter().skip(1).rev() {
        setup
            .demand("blockdev-del", json!({"node-name": name}))
            .await;
    }
}

/// Adds a deep stack of filters over a disk in one description, reads through it, and removes it.
async fn stack(setup: &Setup, disk: &GuestDisk, top: &str) {
    let mut node = json!(top);
    for _ in 0..setup.draw_later(|rng| rng.between(1, MOST_FILTERS)) {
        node = filter(setup, node);
    }
    let name = disk.new_name("t");
    node["node-name"] = json!(name);
    if !setup.demand("blockdev-add", node).await {
        return;
    }
    if let Ok(device) = setup.nodes.device(&name) {
        let len_bytes = disk.cluster_size_bytes.min(device.size_bytes());
        let begun = disk.model.borrow_mut().begin_watch();
        match device.read(0, Buffer::zeroed(len_bytes as usize)).await {
            Ok(buffer) => {
                let seen = disk.model.borrow_mut().end_read(begun, 0, &buffer);
                if let Err(failure) = seen {
                    setup.fail(Failure::from(failure).when("through a stack of filters"));
                }
            }
            Err(error) if !setup.faulty => {
                setup.fail(Failure::error(
                    FailureKind::Request,
                    "a stack's read",
                    &error,
                ));
            }
            Err(_) => {}
        }
    }
    setup
        .demand("blockdev-del", json!({"node-name": name}))
        .await;
}

async fn refused(setup: &Setup, command: &str, arguments: Value) {
    let shown = arguments.to_string();
    if setup.ask(command, arguments).await.is_ok() {
        let message = format!("{command} is carried out: {shown}");
        setup.fail(Failure::new(FailureKind::Request, message));
    }
}
