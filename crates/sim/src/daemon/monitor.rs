//! A monitor's client: changes the graph under a disk, one command after the other, at
//! moments that have nothing to do with those of the disk's clients.

use std::rc::Rc;
use vellum::qcow2::AsQcow2;

use serde_json::{Value, json};
use vellum::qcow2::CacheOptions;
use vellum::qcow2::create::CreateOptions;

use super::files::{blank, is_raw};
use super::filters::Filter;
use super::setup::{ExpectedFile, GuestDisk, Setup};
use super::{bitmaps, changes, clones, fleece, greedy, mirror, refusals, series, sessions};
use crate::failure::{Failure, FailureKind};
use crate::scenario::ImageOptions;
use crate::space::full_bytes;
use crate::sparse_bytes::SparseBytes;

/// Layers of a chain at most.
pub(super) const MAX_LAYERS: usize = 5;

pub(super) const OVER: &[&str] = &["BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"];

/// How a job has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Done,
    Cancelled,
    Failed,
}

/// Gives so many commands, or sequences of some, while clients work.
pub(super) async fn monitor(setup: Rc<Setup>, disk: Rc<GuestDisk>, commands: u64) {
    for _ in 0..commands {
        if setup.failure().is_some() {
            return;
        }
        pause(&setup).await;
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

/// Lets others have some turns.
pub(super) async fn pause(setup: &Setup) {
    for _ in 0..setup.draw(|rng| rng.below(40)) {
        vellum_io::lane::yield_now().await;
    }
}

/// Makes an image file as long as the disk.
pub(super) fn make_image(
    setup: &Setup,
    disk: &GuestDisk,
    name: &str,
    backing: Option<&str>,
) -> bool {
    let format = |backing| if is_raw(backing) { "raw" } else { "qcow2" };
    let size_bytes = disk.model.borrow().size_bytes();
    let plain = ImageOptions::plain(size_bytes, disk.cluster_size_bytes.trailing_zeros());
    let made = blank(
        name,
        full_bytes(&plain),
        CreateOptions::default()
            .size_bytes(size_bytes)
            .cluster_size_bytes(disk.cluster_size_bytes)
            .backing_file(backing.map(str::to_owned))
            .backing_format(backing.map(|backing| format(backing).to_owned())),
    );
    match made {
        Ok(pages) => setup.files.add(name, pages),
        Err(failure) => {
            setup.fail(failure);
            return false;
        }
    }
    true
}

/// Options of the node of a raw image, in a file of the same name.
pub(super) fn raw_node_of(name: &str) -> Value {
    json!({
        "driver": "raw",
        "node-name": name,
        "file": {"driver": "file", "filename": name},
        "discard": "unmap",
    })
}

/// A node of an image, which stands on what the image says.
pub(super) fn node_of(setup: &Setup, name: &str) -> Value {
    let mut node = json!({
        "driver": "qcow2",
        "node-name": name,
        "file": {"driver": "file", "filename": name},
        "discard": "unmap",
    });
    if setup.draw(|rng| rng.chance(1, 3)) || setup.uncached {
        // Nothing is gathered: parts of clusters go to the file as they come.
        node["data-cache-size"] = json!(0);
    }
    // With the least cache requests beside each other write it out at every step: that nobody waits long
    // for what others have begun is not to be had then.
    let is_small = |disk: &Rc<GuestDisk>| disk.model.borrow().size_bytes() < greedy::SIZE_BYTES;
    let are_small = setup.disks.iter().all(is_small);
    if setup.draw(|rng| rng.chance(1, 3)) && are_small {
        node["l2-cache-size"] = json!(1);
        node["refcount-cache-size"] = json!(1);
    }
    node
}

/// Makes an image file as long as the disk, and a node of it that stands on nothing.
pub(super) async fn add_image(
    setup: &Setup,
    disk: &GuestDisk,
    name: &str,
    backing: Option<&str>,
) -> bool {
    if !make_image(setup, disk, name, backing) {
        return false;
    }
    let mut node = node_of(setup, name);
    node["backing"] = Value::Null;
    setup.demand("blockdev-add", node).await
}

/// As [`add_image`], but it stands on a file that no node has yet.
pub(super) async fn add_overlay(
    setup: &Setup,
    disk: &GuestDisk,
    name: &str,
    backing: &str,
) -> bool {
    if !make_image(setup, disk, name, Some(backing)) {
        return false;
    }
    let node = node_of(setup, name);
    setup.demand("blockdev-add", node).await
}

/// As [`add_image`], but it stands on a node.
pub(super) async fn add_node_on(
    setup: &Setup,
    disk: &GuestDisk,
    name: &str,
    backing: &str,
) -> bool {
    if !make_image(setup, disk, name, Some(backing)) {
        return false;
    }
    let mut node = node_of(setup, name);
    node["backing"] = json!(backing);
    setup.demand("blockdev-add", node).await
}

/// Makes a raw file as long as the disk, and a node of it.
pub(super) async fn add_raw(setup: &Setup, disk: &GuestDisk, name: &str) -> bool {
    let size = disk.model.borrow().size_bytes();
    setup.files.add(name, SparseBytes::device(size, 0));
    setup.demand("blockdev-add", raw_node_of(name)).await
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

/// Waits for the end of a job, which is cancelled now and then.
pub(super) async fn end_of_job(setup: &Setup, job: &str) -> End {
    if setup.draw(|rng| rng.chance(1, 6)) {
        pause(setup).await;
        // It may be over.
        let _ = setup.ask("job-cancel", json!({"id": job})).await;
    }
    end_of(setup, job).await
}

/// The kind of failure that the message of a command or a job tells of.
pub(super) fn kind_of(error: &str) -> FailureKind {
    match error.contains("No space left") {
        true => FailureKind::NoSpace,
        false => FailureKind::Request,
    }
}

/// Waits for the end of a job.
pub(super) async fn end_of(setup: &Setup, job: &str) -> End {
    judge(setup, job, &setup.heard.wait(OVER, job).await)
}

pub(super) fn judge(setup: &Setup, job: &str, event: &Value) -> End {
    let end = match (event["event"].as_str(), event["data"]["error"].as_str()) {
        (Some("BLOCK_JOB_CANCELLED"), _) => End::Cancelled,
        (_, None) => End::Done,
        (_, Some(error)) => {
            if !setup.faulty {
                let message = format!("job {job}: {error}");
                setup.fail(Failure::new(kind_of(error), message));
            }
            End::Failed
        }
    };
    setup.note(format!("job {job}: {end:?}"));
    end
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
        pause(setup).await;
        let _ = setup.ask("job-cancel", json!({"id": job})).await;
    }
    let names = [OVER[0], OVER[1], "BLOCK_JOB_READY"];
    let event = setup.heard.wait(&names, &job).await;
    if event["event"] == "BLOCK_JOB_READY" {
        pause(setup).await;
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

/// Has a command begin a backup, waits for its end, closes the target, and notes what that
/// must hold.
pub(super) async fn back_up(
    setup: &Setup,
    disk: &GuestDisk,
    (job, target): (&str, &str),
    command: &str,
    arguments: Value,
) -> End {
    let begun = disk.model.borrow_mut().begin_watch();
    let started = setup.demand(command, arguments).await;
    let moment = Rc::new(disk.model.borrow().clone());
    let end = match started {
        true => end_of_job(setup, job).await,
        false => End::Failed,
    };
    let arguments = json!({"node-name": target});
    // A target that the command has opened it closes too.
    if command != "drive-backup" && !setup.demand("blockdev-del", arguments).await {
        return End::Failed;
    }
    if end == End::Done {
        disk.kept.borrow_mut().push(ExpectedFile {
            file: target.to_owned(),
            stands_on: Vec::new(),
            model: moment,
            begun,
            what: "a backup",
        });
    }
    end
}

/// Ends the export, and makes it once more. Clients that were connected come back.
async fn export_anew(setup: &Setup, disk: &GuestDisk, top: &str) {
    let device = disk.device.replace(None);
    let connected = setup.network.is_some();
    if connected && setup.draw(|rng| rng.chance(1, 2)) {
        // In the middle of what they do.
        disk.hung_up_on.set(true);
    } else {
        disk.until(|disk| disk.running.get() == 0).await;
        if let Some(device) = device.filter(|_| connected && setup.draw(|rng| rng.chance(1, 2))) {
            // Others leave without a word.
            drop(device.close().await);
        }
    }
    disk.last_top.replace(Some(top.to_owned()));
    let mode = if connected { "hard" } else { "safe" };
    if !setup
        .demand("block-export-del", json!({"id": disk.name, "mode": mode}))
        .await
    {
        disk.give_up();
        return;
    }
    // Whatever they had asked for has ended, but they may have to hear of it.
    disk.until(|disk| disk.running.get() == 0).await;
    disk.hung_up_on.set(false);
    pause(setup).await;
    if setup.draw(|rng| rng.chance(1, 2)) {
        changes::hand_around(setup, top).await;
    }
    export(setup, disk, top).await;
}

/// Exports a node as a disk, to which clients connect.
pub(super) async fn export(setup: &Setup, disk: &GuestDisk, node: &str) {
    let arguments = json!({
        "type": "nbd",
        "id": disk.name,
        "node-name": node,
        "name": disk.name,
        "writable": true,
        "on-full": if setup.fills { "wait" } else { "fail" },
    });
    if !setup.demand("block-export-add", arguments).await {
        disk.give_up();
        return;
    }
    let device = match &setup.network {
        None => {
            let found = setup.exports.find(&disk.name);
            found.map(|export| export.device.clone())
        }
        Some(network) => sessions::connect(setup, network, &disk.name, true).await,
    };
    disk.device.replace(device);
    disk.changed.notify(usize::MAX);
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

/// Drops the nodes of a disk that nothing stands on any more.
pub(super) async fn drop_unused(setup: &Setup, disk: &GuestDisk) {
    let Some(top) = setup.top(disk) else {
        return;
    };
    loop {
        let chain = setup.nodes.chain(&top);
        let own = format!("{}n", disk.name);
        let names = setup.files.names();
        let unused = names.into_keys().find(|name| {
            name.starts_with(&own)
                && !chain.contains(name)
                && setup.nodes.contains(name)
                && !setup.nodes.is_used_by(name, |_| true)
        });
        let Some(unused) = unused else {
            return;
        };
        // What it stands on may change.
        disk.forget(&unused);
        let arguments = json!({"node-name": unused});
        if !setup.demand("blockdev-del", arguments).await {
            return;
        }
    }
}
