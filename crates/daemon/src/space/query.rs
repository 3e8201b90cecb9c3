//! `x-vellum-query-space`: where the space of a disk goes.

use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde_json::{Value, json};
use vellum::qcow2::AsQcow2;
use vellum::qcow2::survey::{Survey, SurveyOptions, survey};
use vellum::{BlockDevice, Storage};
use vellum_graph::live::{Inventory, NodeState, Wanted};
use vellum_io::lane;

use crate::daemon::Daemon;
use crate::qmp::Outcome;

use super::surveys::SpaceSurvey;

/// So long is the mapping of a disk gone through, and then its tables.
const WALK_LIMIT: Duration = Duration::from_secs(2);
const TABLES_LIMIT: Duration = Duration::from_secs(8);
/// So many extents are looked at before others on the lane have their turn.
const EXTENTS_A_TURN: u32 = 32;

/// What the parts of a disk are.
#[derive(Debug, Default, PartialEq, Eq)]
struct Walked {
    /// Bytes that were looked at, from the first on.
    walked_bytes: u64,
    /// Data of the disk's own image.
    own_bytes: u64,
    /// Data that images below supply.
    pub(super) base_bytes: u64,
    /// What an image says is zeroes.
    zero_bytes: u64,
}

/// Tells where the space of a node goes.
pub(crate) async fn query(daemon: Rc<Daemon>, name: String) -> Outcome {
    let device = daemon.nodes.device(&name)?;
    let wanted = Wanted {
        of: Some(&name),
        sizes: true,
        ..Wanted::default()
    };
    let nodes = daemon.nodes.inventory(wanted);
    let walked = walk(&device, WALK_LIMIT).await?;
    let size_bytes = device.size_bytes();
    let mut space = json!({
        "node-name": name,
        "size-bytes": size_bytes,
        "own-bytes": walked.own_bytes,
        "base-bytes": walked.base_bytes,
        "zero-bytes": walked.zero_bytes,
        "walked-bytes": walked.walked_bytes,
        "complete": walked.walked_bytes >= size_bytes,
    });
    add_files(&mut space, &nodes, &name);
    if let Some(image) = image_of(&nodes, &name)
        && let Some(found) = tables(image).await
    {
        add_tables(&mut space, &found);
    }
    let found = SpaceSurvey::of(&space);
    daemon
        .surveys
        .note(&name, found, |known| daemon.nodes.contains(known));
    Ok(space)
}

/// Goes through what a disk shows, as long as the limit lasts.
async fn walk(device: &Arc<dyn BlockDevice>, limit: Duration) -> vellum::Result<Walked> {
    let mut walked = Walked::default();
    let end = device.size_bytes();
    let begun = lane::now();
    let mut extents = 0_u32;
    while walked.walked_bytes < end {
        let left = end - walked.walked_bytes;
        let status = device.block_status(walked.walked_bytes, left, u32::MAX);
        let extent = status.await?;
        let len_bytes = extent.len_bytes.clamp(1, left);
        walked.walked_bytes += len_bytes;
        match (extent.kind.is_data(), extent.depth) {
            (true, 0) => walked.own_bytes += len_bytes,
            (true, _) => walked.base_bytes += len_bytes,
            (false, _) if extent.kind.is_present() => walked.zero_bytes += len_bytes,
            (false, _) => {}
        }
        extents += 1;
        if extents.is_multiple_of(EXTENTS_A_TURN) {
            lane::yield_now().await;
            if lane::now().saturating_duration_since(begun) > limit {
                break;
            }
        }
    }
    Ok(walked)
}

/// The topmost image of a disk: what is below its filters.
fn layer_of<'a>(nodes: &'a Inventory, name: &str) -> Option<&'a NodeState> {
    let mut layers = nodes.layers(nodes.get(name));
    layers.find(|layer| !layer.is_filter)
}

/// What the files of a disk's topmost image are, and what they take.
fn add_files(space: &mut Value, nodes: &Inventory, name: &str) {
    let Some(layer) = layer_of(nodes, name) else {
        return;
    };
    let roles = ["file", "data-file"].map(|role| nodes.child(layer, role));
    let mut files: Vec<&NodeState> = roles.into_iter().flatten().collect();
    if files.is_empty() {
        files.push(layer);
    }
    space["file-bytes"] = json!(files.iter().map(|file| file.size_bytes).sum::<u64>());
    let allocated: Option<u64> = files.iter().map(|file| file.allocated_bytes).sum();
    if let Some(bytes) = allocated {
        space["allocated-bytes"] = json!(bytes);
    }
    let watches = files.iter().filter_map(|file| file.watch.as_ref());
    let discarded: Vec<u64> = watches.map(|watch| watch.discarded().1).collect();
    if !discarded.is_empty() {
        space["discarded-bytes"] = json!(discarded.iter().sum::<u64>());
    }
}

/// The file of a disk's topmost image, if it is qcow2.
fn image_of(nodes: &Inventory, name: &str) -> Option<Arc<dyn Storage>> {
    let device = layer_of(nodes, name)?.device()?;
    device.as_qcow2()?;
    device.storage()
}

/// What the tables of an image say, unless there are too many of them for a look.
pub(super) async fn tables(file: Arc<dyn Storage>) -> Option<Survey> {
    let options = SurveyOptions::default().cells(1);
    // It only reads, so it may be dropped anywhere; a guest that writes meanwhile may confuse it.
    let surveyed = pin!(survey(file, &options));
    match select(surveyed, pin!(lane::sleep(TABLES_LIMIT))).await {
        Either::Left((found, _)) => found.ok(),
        Either::Right(_) => None,
    }
}

fn add_tables(space: &mut Value, found: &Survey) {
    let used_bytes: u64 = found.host.iter().map(|cell| cell.used_bytes()).sum();
    space["metadata-bytes"] = json!(found.metadata.total());
    space["snapshot-bytes"] = json!(found.held_by_snapshots_bytes());
    space["leaked-bytes"] = json!(found.counted_bytes.saturating_sub(used_bytes));
}

#[cfg(test)]
mod tests {
    use vellum::gate::DenyAll;
    use vellum::qcow2::create::{CreateOptions, create};
    use vellum::qcow2::{Backing, OpenOptions, Qcow2};
    use vellum::{Buffer, Raw, RawOptions, RequestFlags, ZeroRequest};
    use vellum_storage::MemStorage;

    use super::*;

    const CLUSTER: u64 = 65536;

    #[test]
    fn the_parts_of_a_disk_are_told_apart() {
        lane::block_on(async {
            let base = vec![7; 4 * CLUSTER as usize];
            let base = Arc::new(MemStorage::with_bytes(base));
            let base = Raw::open(base, RawOptions::default()).expect("a device");
            let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
            let options = CreateOptions::default().size_bytes(8 * CLUSTER);
            create(file.clone(), None, &options)
                .await
                .expect("an image");
            let options = OpenOptions::default().backing(Backing::Given(base));
            let image = Qcow2::open(file, Arc::new(DenyAll), options);
            let image = image.await.expect("an image");
            let write = image.write(0, Buffer::zeroed(CLUSTER as usize), RequestFlags::default());
            write.await.expect("a write");
            let zero = image.write_zeroes(CLUSTER, CLUSTER, ZeroRequest::default());
            zero.await.expect("zeroes");
            let device: Arc<dyn BlockDevice> = image;
            let walked = walk(&device, WALK_LIMIT).await.expect("a walk");
            let expected = Walked {
                walked_bytes: 8 * CLUSTER,
                own_bytes: CLUSTER,
                base_bytes: 2 * CLUSTER,
                zero_bytes: CLUSTER,
            };
            assert_eq!(walked, expected);
        });
    }
}
