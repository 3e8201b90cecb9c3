//! A monitor's client: changes the graph under a disk, one command after the other, at
//! moments that have nothing to do with those of the disk's clients.

use std::rc::Rc;

use serde_json::json;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::CacheOptions;

use super::exports::export_anew;
use super::files::is_raw;
use super::filters::Filter;
use super::guest_disk::GuestDisk;
use super::images::{MAX_LAYERS, add_image, add_raw, drop_unused};
use super::jobs::{OVER, back_up, end_of_job, judge};
use super::setup::Setup;
use super::{bitmaps, changes, clones, fleece, mirror, refusals, series};
use crate::failure::{Failure, FailureKind};

/// Gives so many commands, or sequences of some, while clients work.
pub(super) async fn monitor(setup: Rc<Setup>, disk: Rc<GuestDisk>, commands: u64) {
    for _ in 0..commands {
        if setup.failure().is_some() {
            return;
        }
        setup.pause().await;
        let Some(top) = setup.top(&disk) else {
            return;
        };
        let chain = setup.nodes.chain(&top);
        let deep = chain.len() > 1;
        if setup.draw_later(|rng| rng.chance(1, 6)) {
            refusals::try_one(&setup, &disk, &top).await;
        }
        let command = setup.draw(|rng| rng.below(40));
        // A place of full size has no room for bitmaps and snapshots inside.
        let command = match command {
            14..=24 | 29..=36 if disk.fixed_images => {
                *setup.draw_apart(|rng| rng.pick(&[0, 5, 7, 8, 10, 25, 37]))
            }
            _ => command,
        };
        let filter = match command {
            0..=12 | 25..=28 if setup.has_filters => Filter::begin(&setup, &disk, &top).await,
            _ => None,
        };
        match command {
            0..=4 if chain.len() < MAX_LAYERS => snapshot(&setup, &disk, &top).await,
            0..=6 if deep => active_commit(&setup, &disk, &chain).await,
            7 if chain.len() > 2 => commit(&setup, &disk, &chain).await,
            7..=9 if deep => stream(&setup, &disk, &chain).await,
            10..=12 => backup(&setup, &disk, &chain).await,
            13 => export_anew(&setup, &disk, &top).await,
            14 => set_caches(&setup, &top),
            15 => refused_resize(&setup, &disk, &top).await,
            16..=18 if !is_raw(&top) => series::go_on(&setup, &disk, &top).await,
            21..=24 if !is_raw(&top) => bitmaps::change(&setup, &disk, &top).await,
            25..=28 => mirror::mirror(&setup, &disk, &chain).await,
            37..=39 => clones::clones(&setup, &disk).await,
            29..=36 => changes::change(&setup, &disk, &chain).await,
            19 | 20 => fleece::fleece(&setup, &disk, &top).await,
            _ => snapshot(&setup, &disk, &top).await,
        }
        if let Some(filter) = filter {
            filter.end(&setup).await;
        }
    }
}

async fn snapshot(setup: &Setup, disk: &GuestDisk, top: &str) {
    let overlay = disk.new_name("n");
    if !add_image(setup, disk, &overlay, Some(top)).await {
        return;
    }
    let begun = disk.model.borrow_mut().begin_watch();
    let arguments = json!({"node": top, "overlay": overlay});
    if setup.demand("blockdev-snapshot", arguments).await {
        // Whoever took it may copy the base from now on.
        disk.keep(&setup.nodes.chain(top), begun, "the base of a snapshot");
    }
}

/// What a commit writes to may hold anything from now on, and so may what stands between.
fn forget_all(disk: &GuestDisk, chain: &[String]) {
    chain.iter().for_each(|file| disk.forget(file));
}

async fn active_commit(setup: &Setup, disk: &GuestDisk, chain: &[String]) {
    let base_at = setup.draw(|rng| rng.between(1, chain.len() as u64 - 1)) as usize;
    forget_all(disk, &chain[1..=base_at]);
    let job = disk.new_name("j");
    let arguments = json!({"job-id": job, "device": chain[0], "base-node": chain[base_at]});
    if !setup.demand("block-commit", arguments).await {
        return;
    }
    if setup.draw(|rng| rng.chance(1, 6)) {
        setup.pause().await;
        let _ = setup.ask("job-cancel", json!({"id": job})).await;
    }
    let names = [OVER[0], OVER[1], "BLOCK_JOB_READY"];
    let event = setup.heard.wait(&names, &job).await;
    if event["event"] == "BLOCK_JOB_READY" {
        setup.pause().await;
        // The job may fail at this moment.
        let _ = setup.ask("job-complete", json!({"id": job})).await;
        end_of_job(setup, &job).await;
    } else {
        judge(setup, &job, &event);
    }
    drop_unused(setup, disk).await;
}

async fn commit(setup: &Setup, disk: &GuestDisk, chain: &[String]) {
    let top_at = setup.draw(|rng| rng.between(1, chain.len() as u64 - 2)) as usize;
    let base_at = setup.draw(|rng| rng.between(top_at as u64 + 1, chain.len() as u64 - 1)) as usize;
    forget_all(disk, &chain[top_at + 1..=base_at]);
    let job = disk.new_name("j");
    let arguments = json!({
        "job-id": job,
        "device": chain[0],
        "top-node": chain[top_at],
        "base-node": chain[base_at],
    });
    if setup.demand("block-commit", arguments).await {
        end_of_job(setup, &job).await;
        drop_unused(setup, disk).await;
    }
}

async fn stream(setup: &Setup, disk: &GuestDisk, chain: &[String]) {
    let job = disk.new_name("j");
    let mut arguments = json!({"job-id": job, "device": chain[0]});
    if chain.len() > 2 && setup.draw(|rng| rng.chance(1, 2)) {
        let base_at = setup.draw(|rng| rng.between(2, chain.len() as u64 - 1)) as usize;
        arguments["base-node"] = json!(chain[base_at]);
    }
    if setup.demand("block-stream", arguments).await {
        end_of_job(setup, &job).await;
        drop_unused(setup, disk).await;
    }
}

async fn backup(setup: &Setup, disk: &GuestDisk, chain: &[String]) {
    let raw = setup.draw(|rng| rng.chance(1, 6));
    let target = disk.new_name(if raw { "br" } else { "b" });
    let added = match raw {
        true => add_raw(setup, disk, &target).await,
        false => add_image(setup, disk, &target, None).await,
    };
    if !added {
        return;
    }
    // A chain of one layer has nothing below the top.
    let top = chain.len() == 1 && setup.draw(|rng| rng.chance(1, 3));
    let sync = if top { "top" } else { "full" };
    let job = disk.new_name("j");
    let arguments = json!({"job-id": job, "device": chain[0], "target": target, "sync": sync});
    let (command, arguments) = match setup.draw(|rng| rng.chance(1, 3)) {
        false => ("blockdev-backup", arguments),
        true => {
            let action = json!({"type": "blockdev-backup", "data": arguments});
            ("transaction", json!({"actions": [action]}))
        }
    };
    back_up(setup, disk, (&job, &target), command, arguments).await;
}

fn set_caches(setup: &Setup, top: &str) {
    let Ok(device) = setup.nodes.device(top) else {
        return;
    };
    let size = setup.draw(|rng| *rng.pick(&[1, 4096, 1 << 20]));
    let sizes = CacheOptions::default()
        .l2_cache_size_bytes(Some(size))
        .refcount_cache_size_bytes(Some(size));
    if let Some(image) = device.as_qcow2()
        && let Err(error) = image.set_cache_sizes(&sizes)
    {
        setup.fail(Failure::error(FailureKind::Request, "cache sizes", &error));
    }
}

/// Clients rely on the size: it cannot change.
async fn refused_resize(setup: &Setup, disk: &GuestDisk, top: &str) {
    let size = disk.model.borrow().size_bytes() + 4096;
    let arguments = json!({"node-name": top, "size": size});
    if setup.ask("block_resize", arguments).await.is_ok() {
        let message = "block_resize of a disk that clients use";
        setup.fail(Failure::new(FailureKind::Request, message));
    }
}
