//! Series of backups: the first one is full, and each of the others holds what has changed
//! since the one before, as a bitmap of the disk tells.

use std::rc::Rc;

use serde_json::json;

use super::guest_disk::{BackupSeries, GuestDisk};
use super::images::{add_image, add_overlay};
use super::jobs::{End, back_up};
use super::setup::Setup;

const MAX_BACKUPS: u32 = 4;

/// Makes the next backup of a disk.
pub(super) async fn go_on(setup: &Setup, disk: &Rc<GuestDisk>, top: &str) {
    let series = disk.series.borrow().clone();
    let series = series.filter(|series| series.node == top);
    match series {
        Some(series) if series.backups < MAX_BACKUPS => next(setup, disk, series).await,
        Some(series) => {
            disk.series.replace(None);
            let arguments = json!({"node": top, "name": series.bitmap});
            setup.demand("block-dirty-bitmap-remove", arguments).await;
        }
        None => first(setup, disk, top).await,
    }
}

async fn first(setup: &Setup, disk: &Rc<GuestDisk>, top: &str) {
    disk.series.replace(None);
    let (target, bitmap) = (disk.new_name("b"), disk.new_name("m"));
    if !add_image(setup, disk, &target, None).await {
        return;
    }
    let job = disk.new_name("j");
    let mut new = json!({"node": top, "name": bitmap, "persistent": true});
    if setup.draw(|rng| rng.chance(1, 2)) {
        new["granularity"] = json!(setup.draw(|rng| 512_u64 << rng.below(8)));
    }
    let copied = json!({"job-id": job, "device": top, "target": target, "sync": "full"});
    let actions = json!([
        {"type": "block-dirty-bitmap-add", "data": new},
        {"type": "blockdev-backup", "data": copied},
    ]);
    let arguments = json!({"actions": actions});
    match back_up(setup, disk, (&job, &target), "transaction", arguments).await {
        End::Done => drop(disk.series.replace(Some(BackupSeries {
            node: top.to_owned(),
            bitmap,
            last: target,
            backups: 1,
        }))),
        End::Cancelled | End::Failed => {
            // It may not be there.
            let arguments = json!({"node": top, "name": bitmap});
            let _ = setup.ask("block-dirty-bitmap-remove", arguments).await;
        }
    }
}

async fn next(setup: &Setup, disk: &Rc<GuestDisk>, series: BackupSeries) {
    let target = disk.new_name("b");
    if !add_overlay(setup, disk, &target, &series.last).await {
        return;
    }
    let job = disk.new_name("j");
    let (sync, mode) = *setup.draw(|rng| {
        rng.pick(&[
            ("incremental", "on-success"),
            ("incremental", "on-success"),
            ("bitmap", "on-success"),
            ("bitmap", "always"),
            ("bitmap", "never"),
        ])
    });
    let arguments = json!({
        "job-id": job,
        "device": series.node,
        "target": target,
        "sync": sync,
        "bitmap": series.bitmap,
        "bitmap-mode": mode,
    });
    let end = back_up(setup, disk, (&job, &target), "blockdev-backup", arguments).await;
    let next = BackupSeries {
        last: target,
        backups: series.backups + 1,
        ..series.clone()
    };
    disk.series.replace(match (end, mode) {
        // The bitmap tells what is not in there.
        (End::Done, "on-success" | "always") | (End::Cancelled, "always") => Some(next),
        // Nobody knows what has come of the target, and the bitmap knows only what has not.
        (End::Failed, "always") => None,
        _ => Some(series),
    });
}
