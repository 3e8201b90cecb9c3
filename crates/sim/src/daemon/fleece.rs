//! Fleecing: a backup that copies only what is about to be overwritten, whose target stands
//! on the disk. Whoever reads the target meanwhile sees one moment of the disk.

use std::rc::Rc;

use serde_json::json;
use vellum::BlockDevice;
use vellum_io::Buffer;

use super::guest_disk::GuestDisk;
use super::images::add_node_on;
use super::jobs::end_of;
use super::sessions;
use super::setup::Setup;
use crate::failure::{Failure, FailureKind};
use crate::model::{LogicalTime, Model};

const MOST_READS: u64 = 16;

/// Shows a moment of a disk for a while.
pub(super) async fn fleece(setup: &Setup, disk: &Rc<GuestDisk>, top: &str) {
    let target = disk.new_name("f");
    if !add_node_on(setup, disk, &target, top).await {
        return;
    }
    let job = disk.new_name("j");
    let begun = disk.model.borrow_mut().begin_watch();
    let arguments = json!({"job-id": job, "device": top, "target": target, "sync": "none"});
    if setup.demand("blockdev-backup", arguments).await {
        let moment = disk.model.borrow().clone();
        read_target(setup, disk, &target, moment, begun).await;
        // It may have failed.
        let _ = setup.ask("job-cancel", json!({"id": job})).await;
        end_of(setup, &job).await;
    }
    setup
        .demand("blockdev-del", json!({"node-name": target}))
        .await;
}

/// Exports the target to a client that reads it.
async fn read_target(
    setup: &Setup,
    disk: &GuestDisk,
    target: &str,
    mut moment: Model,
    begun: LogicalTime,
) {
    let arguments = json!({"type": "nbd", "id": target, "node-name": target, "name": target});
    if !setup.demand("block-export-add", arguments).await {
        return;
    }
    let device = match &setup.network {
        None => setup
            .exports
            .find(target)
            .map(|export| export.device.clone()),
        Some(network) => sessions::connect(setup, network, target, false).await,
    };
    if let Some(device) = device {
        for _ in 0..setup.draw(|rng| rng.below(MOST_READS)) {
            setup.pause().await;
            if setup.failure().is_some() {
                break;
            }
            if let Err(failure) = read(setup, disk, &*device, &mut moment, begun).await {
                setup.fail(failure.when("fleecing"));
            }
        }
    }
    setup
        .demand("block-export-del", json!({"id": target, "mode": "hard"}))
        .await;
}

async fn read(
    setup: &Setup,
    disk: &GuestDisk,
    device: &dyn BlockDevice,
    moment: &mut Model,
    begun: LogicalTime,
) -> Result<(), Failure> {
    let size = moment.size_bytes();
    let len = setup.draw(|rng| rng.between(1, 2 * disk.cluster_size_bytes.min(size / 2)));
    let offset = setup.draw(|rng| rng.below(size - len + 1));
    setup.note(format!("fleecing {offset}+{len}"));
    match device.read(offset, Buffer::zeroed(len as usize)).await {
        Ok(buffer) if !setup.faulty => Ok(moment.end_read(begun, offset, &buffer)?),
        // Where something could not be copied first there is no moment any more.
        Ok(_) => Ok(()),
        Err(_) if setup.faulty => Ok(()),
        Err(error) => Err(Failure::error(FailureKind::Request, "read", &error)),
    }
}
