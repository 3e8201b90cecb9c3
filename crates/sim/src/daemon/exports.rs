//! The export of a disk: what its clients connect to.

use serde_json::json;

use super::guest_disk::{GuestDisk, ServedFilter};
use super::setup::Setup;
use super::{changes, sessions};

/// Ends the export, and makes it once more. Clients that were connected come back.
pub(super) async fn export_anew(setup: &Setup, disk: &GuestDisk, top: &str) {
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
    ServedFilter::end(setup, disk).await;
    setup.pause().await;
    if setup.draw(|rng| rng.chance(1, 2)) {
        changes::hand_around(setup, top).await;
    }
    export(setup, disk, top).await;
}

/// Exports a node as a disk, to which clients connect.
pub(super) async fn export(setup: &Setup, disk: &GuestDisk, node: &str) {
    // Not every export that was there was ended by `export_anew`.
    ServedFilter::end(setup, disk).await;
    let filter = ServedFilter::begin(setup, disk, node).await;
    let served = filter
        .as_ref()
        .map_or(node, |filter| &filter.name)
        .to_owned();
    disk.served_through.replace(filter);
    let arguments = json!({
        "type": "nbd",
        "id": disk.name,
        "node-name": served,
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
