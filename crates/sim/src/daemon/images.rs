//! Images, and the nodes of them that a disk's chain is made of.

use std::rc::Rc;

use serde_json::{Value, json};
use vellum::qcow2::create::CreateOptions;

use super::files::{blank, is_raw};
use super::guest_disk::GuestDisk;
use super::scenario::GREEDY_SIZE_BYTES;
use super::setup::Setup;
use crate::scenario::ImageOptions;
use crate::space::full_bytes;
use crate::sparse_bytes::SparseBytes;

/// Layers of a chain at most.
pub(super) const MAX_LAYERS: usize = 5;

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
    let is_small = |disk: &Rc<GuestDisk>| disk.model.borrow().size_bytes() < GREEDY_SIZE_BYTES;
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
