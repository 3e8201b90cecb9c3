//! Images that stand on one backing file which nobody has named: they share its node, and what
//! happens to one of them does not show in the other.

use std::rc::Rc;

use serde_json::json;
use vellum::{Buffer, RequestFlags};

use super::guest_disk::GuestDisk;
use super::images::{add_image, add_overlay};
use super::jobs::end_of_job;
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};

/// Makes two images over a backup, changes one of them, and removes both.
pub(super) async fn clones(setup: &Setup, disk: &Rc<GuestDisk>) {
    let Some(base) = complete_backup(disk) else {
        return;
    };
    let (one, other) = (disk.new_name("c"), disk.new_name("c"));
    if !add_overlay(setup, disk, &one, &base).await {
        return;
    }
    if !add_overlay(setup, disk, &other, &base).await {
        remove(setup, [&one]).await;
        return;
    }
    let below = |name: &str| setup.nodes.backing_of(name);
    if below(&one) != below(&other) {
        let message = format!("{one} and {other} do not share {base}");
        setup.fail(Failure::new(FailureKind::Request, message));
    }
    let shown = content(setup, &other).await;
    let over = change(setup, disk, &one).await;
    let changed = || over.iter().chain([&one]);
    same(setup, &other, shown.as_ref()).await;
    if setup.draw(|rng| rng.chance(1, 2)) {
        // The other one gets what they have in common.
        remove(setup, changed()).await;
        setup.pause().await;
        same(setup, &other, shown.as_ref()).await;
        remove(setup, [&other]).await;
    } else {
        remove(setup, [&other]).await;
        remove(setup, changed()).await;
    }
}

/// The file of a backup that nobody changes any more.
fn complete_backup(disk: &GuestDisk) -> Option<String> {
    let kept = disk.kept.borrow();
    let mut backups = kept.iter().rev().filter(|kept| kept.what == "a backup");
    backups.next().map(|kept| kept.file.clone())
}

/// Changes an image: what it holds, and what it stands on or what stands on it. Gives the name of
/// the latter.
async fn change(setup: &Setup, disk: &Rc<GuestDisk>, name: &str) -> Option<String> {
    let device = setup.nodes.device(name).ok()?;
    let blocks = device.size_bytes() / 4096;
    for _ in 0..setup.draw(|rng| rng.between(1, 6)) {
        let at = setup.draw(|rng| rng.below(blocks)) * 4096;
        let data = Buffer::copy_of(&[0xcc; 4096]);
        // The disk below may fail.
        let _ = device.write(at, data, RequestFlags::default()).await;
    }
    drop(device);
    match setup.draw(|rng| rng.below(3)) {
        0 => {
            let job = disk.new_name("j");
            let arguments = json!({"job-id": job, "device": name});
            if setup.demand("block-stream", arguments).await {
                end_of_job(setup, &job).await;
            }
            None
        }
        1 => {
            let over = disk.new_name("c");
            if !add_image(setup, disk, &over, Some(name)).await {
                return None;
            }
            let arguments = json!({"node": name, "overlay": over});
            setup.demand("blockdev-snapshot", arguments).await;
            Some(over)
        }
        _ => None,
    }
}

async fn content(setup: &Setup, name: &str) -> Option<Buffer> {
    let device = setup.nodes.device(name).ok()?;
    let whole = Buffer::zeroed(device.size_bytes() as usize);
    // The disk below may fail.
    device.read(0, whole).await.ok()
}

async fn same(setup: &Setup, name: &str, before: Option<&Buffer>) {
    let now = content(setup, name).await;
    if let (Some(before), Some(now)) = (before, now)
        && before[..] != now[..]
    {
        let message = format!("{name} shows what was done to another image");
        setup.fail(Failure::new(FailureKind::Request, message));
    }
}

async fn remove<'a>(setup: &Setup, names: impl IntoIterator<Item = &'a String>) {
    for name in names {
        if setup.nodes.contains(name) {
            let arguments = json!({"node-name": name});
            setup.demand("blockdev-del", arguments).await;
        }
    }
}
