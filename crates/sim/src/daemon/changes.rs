//! Changes of nodes that stay where they are: opened anew with other options, with snapshots
//! inside, shorter, with another spelling of what they stand on, inactive for a while; and snapshots and
//! backups whose files the command opens itself; and policies that make chains shorter.

use std::rc::Rc;
use std::time::Duration;

use serde_json::{Value, json};
use vellum_io::lane;

use super::files::is_raw;
use super::guest_disk::GuestDisk;
use super::images::{MAX_LAYERS, drop_unused, make_image, node_of, raw_node_of};
use super::jobs::{back_up, end_of_job};
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};

/// How often it is asked how it stands with a policy, and how often at most.
const LOOK: Duration = Duration::from_millis(500);
const MOST_LOOKS: u64 = 2000;

/// One of them.
pub(super) async fn change(setup: &Setup, disk: &Rc<GuestDisk>, chain: &[String]) {
    let top = &chain[0];
    if chain.len() > 1 && setup.draw_apart(|rng| rng.chance(1, 4)) {
        // A policy is about the node that its disk's users stand on.
        if disk.served_through.borrow().is_none() {
            keep_short(setup, disk, chain).await;
        }
        return;
    }
    match setup.draw(|rng| rng.below(12)) {
        0..=3 => reopen(setup, chain).await,
        4..=6 if !is_raw(top) => snapshot_inside(setup, disk, top).await,
        7 if chain.len() > 1 => name_backing(setup, chain).await,
        8 | 9 if chain.len() < MAX_LAYERS => snapshot_sync(setup, disk, chain).await,
        _ if !is_raw(top) && setup.draw(|rng| rng.chance(1, 2)) => compact(setup, disk, top).await,
        _ => drive_backup(setup, disk, top).await,
    }
}

/// Opens nodes of a chain anew: one, or several at one moment.
async fn reopen(setup: &Setup, chain: &[String]) {
    let first = setup.draw(|rng| rng.below(chain.len() as u64)) as usize;
    let count = setup.draw(|rng| rng.between(1, (chain.len() - first) as u64)) as usize;
    let options: Vec<Value> = (first..first + count)
        .map(|at| {
            let mut options = match is_raw(&chain[at]) {
                true => raw_node_of(&chain[at]),
                false => node_of(setup, &chain[at]),
            };
            if !is_raw(&chain[at]) {
                options["backing"] = json!(chain.get(at + 1));
            }
            // Nobody writes to what others stand on.
            if at > 0 && setup.draw(|rng| rng.chance(1, 2)) {
                options["read-only"] = json!(true);
            }
            options
        })
        .collect();
    setup
        .demand("blockdev-reopen", json!({"options": options}))
        .await;
}

/// A snapshot inside the image, which is gone after a while, or stays.
async fn snapshot_inside(setup: &Setup, disk: &GuestDisk, top: &str) {
    let name = disk.new_name("s");
    let arguments = json!({"device": top, "name": name});
    let taken = setup.demand("blockdev-snapshot-internal-sync", arguments.clone());
    if !taken.await || setup.draw(|rng| rng.chance(1, 3)) {
        return;
    }
    setup.pause().await;
    setup
        .demand("blockdev-snapshot-delete-internal-sync", arguments)
        .await;
}

/// Writes once more into a header what the image stands on.
async fn name_backing(setup: &Setup, chain: &[String]) {
    let at = setup.draw(|rng| rng.below(chain.len() as u64 - 1)) as usize;
    let arguments = json!({
        "device": chain[0],
        "image-node-name": chain[at],
        "backing-file": chain[at + 1],
    });
    setup.demand("change-backing-file", arguments).await;
}

/// A snapshot whose file is opened by the command.
async fn snapshot_sync(setup: &Setup, disk: &GuestDisk, chain: &[String]) {
    let overlay = disk.new_name("n");
    if !make_image(setup, disk, &overlay, Some(&chain[0])) {
        return;
    }
    let begun = disk.model.borrow_mut().begin_watch();
    let arguments = json!({
        "node-name": chain[0],
        "snapshot-file": overlay,
        "snapshot-node-name": overlay,
        "mode": "existing",
        "format": "qcow2",
    });
    if setup.demand("blockdev-snapshot-sync", arguments).await {
        disk.keep(chain, begun, "the base of a snapshot");
    }
}

/// Makes the file of an image in use short.
async fn compact(setup: &Setup, disk: &GuestDisk, top: &str) {
    let job = disk.new_name("j");
    let arguments = json!({"job-id": job, "device": top});
    if setup.demand("x-vellum-compact", arguments).await {
        end_of_job(setup, &job).await;
    }
}

/// A backup to a file that the command opens, and closes at the end.
async fn drive_backup(setup: &Setup, disk: &Rc<GuestDisk>, top: &str) {
    let target = disk.new_name("b");
    if !make_image(setup, disk, &target, None) {
        return;
    }
    let job = disk.new_name("j");
    let arguments = json!({
        "job-id": job,
        "device": top,
        "target": target,
        "sync": "full",
        "mode": "existing",
        "format": "qcow2",
    });
    back_up(setup, disk, (&job, &target), "drive-backup", arguments).await;
}

/// Has a node that nobody uses be another program's for a while.
pub(super) async fn hand_around(setup: &Setup, node: &str) {
    for active in [false, true] {
        let arguments = json!({"node-name": node, "active": active});
        if !setup.demand("blockdev-set-active", arguments).await {
            return;
        }
        setup.pause().await;
    }
}

/// Has a policy bring a chain to fewer layers, after which it is gone again.
async fn keep_short(setup: &Setup, disk: &GuestDisk, chain: &[String]) {
    let (own, most) = setup.draw_apart(|rng| {
        let own = rng.below(chain.len() as u64) as usize;
        (own, rng.between(1, chain.len() as u64 - 1))
    });
    // It may commit into any of those below the top.
    chain.iter().for_each(|file| disk.forget(file));
    let mut policy = json!({"node-name": chain[own], "max-layers": most});
    if setup.draw_apart(|rng| rng.chance(1, 3)) {
        // Nothing over the disk's own image, whatever the number of layers.
        policy["max-overlay-bytes"] = json!(0);
    }
    if !setup
        .demand("x-vellum-set-chain-policy", policy.clone())
        .await
    {
        return;
    }
    if setup.draw_apart(|rng| rng.chance(1, 4)) {
        setup.pause().await;
        lane::sleep(setup.draw_apart(|rng| Duration::from_millis(rng.below(4000)))).await;
        // It may be over, or not begun; another one is begun after a while.
        let job = format!("chain-{}", chain[own]);
        let _ = setup.ask("job-cancel", json!({"id": job})).await;
    }
    until_short(setup, &policy).await;
    let none = json!({"node-name": chain[own]});
    setup.demand("x-vellum-set-chain-policy", none).await;
    drop_unused(setup, disk).await;
}

/// Waits until a chain is as its policy says and no job does anything with it, or something has failed.
async fn until_short(setup: &Setup, policy: &Value) {
    let is_within = |told: &Value, key: &str, bound: &str| {
        let most = policy[bound].as_u64();
        most.is_none_or(|most| told[key].as_u64().is_some_and(|now| now <= most))
    };
    let mut told = Value::Null;
    for _ in 0..MOST_LOOKS {
        lane::sleep(LOOK).await;
        let all = setup.ask("x-vellum-query-chain-policies", json!({})).await;
        let Ok(Value::Array(all)) = all else {
            return;
        };
        let is_it = |told: &Value| told["node-name"] == policy["node-name"];
        told = all.into_iter().find(is_it).unwrap_or_default();
        if told.get("job").is_some() {
            continue;
        }
        // What failed, was cancelled or is in the way now may be over the next time.
        if told.get("error").is_some() {
            match setup.faulty {
                true => return,
                false => continue,
            }
        }
        if is_within(&told, "layers", "max-layers")
            && is_within(&told, "overlay-bytes", "max-overlay-bytes")
        {
            return;
        }
    }
    if !setup.faulty {
        let message = format!("a chain is not made shorter: {told}");
        setup.fail(Failure::new(FailureKind::Request, message));
    }
}
