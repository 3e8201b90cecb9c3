//! Changes of a disk's bitmaps beside its requests. A bitmap calls dirty what has changed
//! while it recorded, also after a crash; a second one is made of it now and then.

use std::rc::Rc;

use serde_json::json;

use super::guest_disk::{BitmapPair, GuestDisk};
use super::setup::Setup;
use crate::scenario::BitmapChange;

/// Adds a bitmap to what a disk's clients use, or changes the one that is there.
pub(super) async fn change(setup: &Setup, disk: &Rc<GuestDisk>, top: &str) {
    let pair = disk.bitmaps.borrow().clone();
    match pair.filter(|pair| pair.node == top) {
        None => add(setup, disk, top).await,
        Some(pair) => change_one(setup, disk, &pair).await,
    }
}

async fn add(setup: &Setup, disk: &Rc<GuestDisk>, top: &str) {
    disk.bitmaps.replace(None);
    let pair = BitmapPair {
        node: top.to_owned(),
        first: disk.new_name("m"),
        second: disk.new_name("m"),
    };
    let begun = disk.model.borrow_mut().begin_watch();
    let mut new = json!({"node": top, "name": pair.first, "persistent": true});
    if setup.draw(|rng| rng.chance(1, 2)) {
        new["granularity"] = json!(setup.draw(|rng| 512_u64 << rng.below(8)));
    }
    if setup.demand("block-dirty-bitmap-add", new).await {
        disk.model.borrow_mut().begin_recording(begun);
        disk.bitmaps.replace(Some(pair));
    }
}

async fn change_one(setup: &Setup, disk: &Rc<GuestDisk>, pair: &BitmapPair) {
    use BitmapChange::{Clear, Disable, Enable, Second};
    let change = *setup.draw(|rng| rng.pick(&[Clear, Clear, Disable, Enable, Second, Second]));
    let has_second = disk.model.borrow().has_second_bitmap();
    let first = json!({"node": pair.node, "name": pair.first});
    let second = json!({"node": pair.node, "name": pair.second});
    disk.model.borrow_mut().begin_bitmap_change(change);
    let changed = match change {
        Clear => setup.demand("block-dirty-bitmap-clear", first).await,
        Disable => setup.demand("block-dirty-bitmap-disable", first).await,
        Enable => setup.demand("block-dirty-bitmap-enable", first).await,
        Second if has_second => setup.demand("block-dirty-bitmap-remove", second).await,
        Second => merge(setup, pair).await,
    };
    match changed {
        true => disk.model.borrow_mut().end_bitmap_change(),
        // Nobody knows how far it came.
        false => drop(disk.bitmaps.replace(None)),
    }
}

/// Makes the second bitmap of the first one.
async fn merge(setup: &Setup, pair: &BitmapPair) -> bool {
    let (node, name) = (&pair.node, &pair.second);
    let new = json!({"node": node, "name": name, "persistent": true, "disabled": true});
    let merged = json!({"node": node, "target": name, "bitmaps": [pair.first]});
    if setup.draw(|rng| rng.chance(1, 2)) {
        let actions = json!([
            {"type": "block-dirty-bitmap-add", "data": new},
            {"type": "block-dirty-bitmap-merge", "data": merged},
        ]);
        return setup
            .demand("transaction", json!({"actions": actions}))
            .await;
    }
    setup.demand("block-dirty-bitmap-add", new).await
        && setup.demand("block-dirty-bitmap-merge", merged).await
}
