//! Mirrors of a disk in use, whose clients go on with the target in the end, or do not.

use serde_json::json;

use super::guest_disk::GuestDisk;
use super::images::{add_image, add_node_on, add_raw, drop_unused};
use super::jobs::{End, OVER, end_of_job, judge};
use super::setup::Setup;

/// Makes a mirror, and ends it in one way or another.
pub(super) async fn mirror(setup: &Setup, disk: &GuestDisk, chain: &[String]) {
    let below = chain.get(1).filter(|_| setup.draw(|rng| rng.chance(1, 2)));
    let raw = below.is_none() && setup.draw(|rng| rng.chance(1, 4));
    let target = disk.new_name(if raw { "nr" } else { "n" });
    let added = match below {
        Some(below) => add_node_on(setup, disk, &target, below).await,
        None if raw => add_raw(setup, disk, &target).await,
        None => add_image(setup, disk, &target, None).await,
    };
    if !added {
        return;
    }
    let job = disk.new_name("j");
    let mut arguments = json!({
        "job-id": job,
        "device": chain[0],
        "target": target,
        "sync": if below.is_some() { "top" } else { "full" },
        "copy-mode": *setup.draw(|rng| rng.pick(&["background", "write-blocking"])),
    });
    if setup.draw(|rng| rng.chance(1, 2)) {
        arguments["granularity"] = json!(setup.draw(|rng| 512_u64 << rng.below(8)));
    }
    if setup.demand("blockdev-mirror", arguments).await {
        end(setup, disk, &job, &target).await;
    }
    // The target, or what it has replaced.
    drop_unused(setup, disk).await;
}

async fn end(setup: &Setup, disk: &GuestDisk, job: &str, target: &str) {
    if setup.draw(|rng| rng.chance(1, 6)) {
        setup.pause().await;
        let _ = setup.ask("job-cancel", json!({"id": job})).await;
    }
    let names = [OVER[0], OVER[1], "BLOCK_JOB_READY"];
    let event = setup.heard.wait(&names, job).await;
    if event["event"] != "BLOCK_JOB_READY" {
        judge(setup, job, &event);
        return;
    }
    setup.pause().await;
    if setup.draw(|rng| rng.chance(2, 3)) {
        // The job may fail at this moment.
        let _ = setup.ask("job-complete", json!({"id": job})).await;
        end_of_job(setup, job).await;
        return;
    }
    // The target is a copy of some moment from now on.
    let begun = disk.model.borrow_mut().begin_watch();
    let _ = setup.ask("block-job-cancel", json!({"device": job})).await;
    let end = end_of_job(setup, job).await;
    let copy = setup.nodes.chain(target);
    let arguments = json!({"node-name": target});
    if setup.demand("blockdev-del", arguments).await && end == End::Done {
        disk.keep(&copy, begun, "a mirror");
    }
}
