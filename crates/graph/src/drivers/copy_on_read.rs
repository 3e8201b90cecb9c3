//! `copy-on-read`: what is read from below is kept.

use std::sync::Arc;

use vellum::nodes::CopyOnRead;
use vellum::{BlockDevice, Result};
use vellum_options::Options;

use crate::live::child_access::ChildAccess;
use crate::live::uses::Changes;
use crate::node::driver::{DriverFacts, NamingKind};
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::open::context::OpenContext;
use crate::open::node::{child, exchangeable_child};

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&["bottom"]],
    is_reopened: false,
    follows_size: true,
    ..DriverFacts::filter("copy-on-read").with_naming(NamingKind::Filter, &[&["bottom"]], &["file"])
};

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    let bottom = options.take_text("bottom")?;
    let file = match bottom {
        None => exchangeable_child(&mut options, "file", Role::Protocol, &around).await?,
        // How deep that lies is found out once.
        Some(_) => child(&mut options, "file", Role::Protocol, &around).await?,
    };
    refuse_unknown(&options, "copy-on-read")?;
    if !file.writable {
        // What is read is written, so somebody must be allowed to.
        return Err(invalid("Block node is read-only"));
    }
    let writes = ChildAccess {
        changes: Changes::CONTENT,
        rewrites: true,
        ..ChildAccess::keeping(Changes::NONE)
    };
    let nodes = &around.nodes;
    nodes.require(&around.place, "file", writes).await?;
    let device = file.into_device(&around.flags).await?;
    let layers = match bottom {
        None => None,
        Some(name) => Some(depth_of(&device, &name, &around).await?),
    };
    Ok(OpenedNode::device(FACTS, CopyOnRead::new(device, layers)))
}

/// How many layers below `device` the node called `name` stands.
async fn depth_of(device: &Arc<dyn BlockDevice>, name: &str, around: &OpenContext) -> Result<u32> {
    let Ok(node) = around.nodes.known_at(&around.place, name) else {
        return Err(invalid(format!("Bottom node '{name}' not found")));
    };
    let bottom = node.into_device(&around.flags).await?;
    let mut at = Some(device.clone());
    let mut depth = 0;
    while let Some(layer) = at {
        let layer = layer.stands_for().unwrap_or(layer);
        if Arc::ptr_eq(&layer, &bottom) {
            return Ok(depth);
        }
        at = layer.backing();
        depth += 1;
    }
    Err(invalid(format!(
        "Node '{name}' is not in the chain of the node to copy to"
    )))
}
