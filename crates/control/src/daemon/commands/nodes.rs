//! Commands that make, change and describe nodes.

use std::rc::Rc;
use vellum::qcow2::AsQcow2;

use crate::nodes::{Changes, NodeInfo, RequiredAccess, User};
use crate::qmp::{Arguments, Failure, Outcome};
use serde_json::{Value, json};
use vellum_io::lane;

use super::{Daemon, bitmaps, done, no_device};

pub(super) async fn add(daemon: Rc<Daemon>, arguments: Arguments) -> Outcome {
    let parts = daemon.parts.lock().await;
    let added = parts.nodes.add(arguments.into_options()?);
    match daemon.stop.or_give_up(added).await {
        Some(added) => added?,
        None => return Err(Failure::new("The program ends before the node was opened")),
    }
    done()
}

pub(super) async fn del(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let name = arguments.need_text("node-name")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    parts.nodes.remove(&name).await?;
    done()
}

/// Makes a node, or every one, active or inactive.
pub(super) async fn set_active(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let name = arguments.text("node-name")?;
    let active = arguments.need_switch("active")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    let affected = nodes.affected_by_activity(name.as_deref(), active)?;
    if !active && parts.exports.need_active(nodes, &affected) {
        return Err(Failure::new(
            "Failed to inactivate node: Operation not permitted",
        ));
    }
    nodes.set_activity(&affected, active).await?;
    done()
}

pub(super) async fn resize(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    let device = arguments.text("device")?;
    let node = arguments.text("node-name")?;
    let size = arguments.need_number("size")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let name = match (device, node) {
        (Some(device), None) => {
            return Err(no_device(&device));
        }
        (_, node) => node.unwrap_or_default(),
    };
    let device = parts.nodes.device(&name)?;
    let Ok(size_bytes) = u64::try_from(size) else {
        return Err(Failure::new("Parameter 'size' expects a >0 size"));
    };
    parts.nodes.check_free(&name)?;
    if device.info().read_only && !parts.nodes.is_inactive(&name) {
        return Err(Failure::new("Block node is read-only"));
    }
    let resizing = RequiredAccess {
        role: "root".to_owned(),
        changes: Changes::SIZE,
        keeps: Changes::NONE,
    };
    // QEMU has a device of its own for it, which has no name.
    let joined = parts
        .nodes
        .join(User::Export(String::new()), &name, resizing)?;
    let resized = device.truncate(size_bytes).await;
    parts.nodes.leave(joined.id);
    parts.exports.update_sizes().await;
    resized?;
    done()
}

pub(super) async fn query(daemon: Rc<Daemon>, mut arguments: Arguments) -> Outcome {
    // Without it QEMU tells of every image of the chain below each node once more.
    arguments.switch("flat")?;
    arguments.finish()?;
    let parts = daemon.parts.lock().await;
    let nodes = parts.nodes.list();
    let mut described = Vec::with_capacity(nodes.len());
    for node in &nodes {
        let mut description = describe(node, &nodes);
        if let Ok(Some(watch)) = parts.nodes.write_watch(&node.name) {
            description["write_threshold"] = json!(watch.threshold_bytes());
        }
        let bitmaps = bitmaps::describe(&daemon, &parts.nodes, node).await?;
        if !bitmaps.is_empty() {
            description["dirty-bitmaps"] = json!(bitmaps);
        }
        described.push(description);
        lane::yield_now().await;
    }
    Ok(Value::Array(described))
}

fn describe(node: &NodeInfo, nodes: &[NodeInfo]) -> Value {
    let mut image = json!({
        "filename": node.filename,
        "format": node.driver,
        "virtual-size": node.size_bytes,
        "dirty-flag": false,
    });
    let mut description = json!({
        "node-name": node.name,
        "drv": node.driver,
        "ro": !node.writable,
        "file": node.filename,
        "backing_file_depth": 0,
        "detect_zeroes": "off",
        "active": node.active,
        "encrypted": false,
        "write_threshold": 0,
        "cache": {"writeback": true, "direct": false, "no-flush": false},
    });
    for key in ["iops", "iops_rd", "iops_wr", "bps", "bps_rd", "bps_wr"] {
        description[key] = json!(0);
    }
    if let Some(device) = &node.device {
        if let Some(cluster_size_bytes) = device.info().cluster_size_bytes {
            image["cluster-size"] = json!(cluster_size_bytes);
        }
        if let Ok(Some(bytes)) = device.allocated_bytes() {
            image["actual-size"] = json!(bytes);
        }
        if let Some(qcow2) = device.as_qcow2() {
            let header = qcow2.header();
            description["encrypted"] = json!(header.crypt_method != Default::default());
            if let Some(name) = header.backing_file_text() {
                image["backing-filename"] = json!(name);
            }
            if let Some(format) = header.backing_format() {
                image["backing-filename-format"] = json!(format);
            }
        }
    }
    let below = nodes
        .iter()
        .find(|other| Some(&other.name) == node.backing.as_ref());
    if let Some(below) = below {
        description["backing_file"] = json!(below.filename);
    }
    description["image"] = image;
    description
}
