//! What there is to say of nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use vellum::BlockDevice;

use super::{Node, Nodes, RequiredAccess, User};
use crate::CacheMode;
use crate::file_node::CommonOptions;
use crate::graph::{NodeKind, OpenedNode};

/// A node, as far as all nodes are alike.
#[derive(Debug, Clone)]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// The name of its driver.
    pub driver: &'static str,
    /// The name of its file, or of what else it shows.
    pub filename: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The node, where it is of a format.
    pub device: Option<Arc<dyn BlockDevice>>,
    /// Whether it is open for writing.
    pub writable: bool,
    /// Whether it is active; otherwise it is written to only once it is.
    pub active: bool,
    /// The node that it stands on by its backing file.
    pub backing: Option<String>,
    /// Bytes that it takes on its disk, where that is known.
    pub allocated_bytes: Option<u64>,
    /// The mode that it was opened with.
    pub cache: CacheMode,
    /// What becomes of writes of zeroes: `off`, `on`, `unmap`.
    pub detect_zeroes: String,
}

impl OpenedNode {
    /// The name of what it shows, and its size in bytes.
    pub(super) fn name_and_size(&self) -> (String, u64) {
        match &self.kind {
            NodeKind::Device(device) => (device.info().name, device.size_bytes()),
            // What cannot be asked has no size to tell.
            NodeKind::Storage(storage) => (
                storage.name().to_owned(),
                storage.len_bytes().unwrap_or_default(),
            ),
        }
    }
}

impl OpenedNode {
    fn allocated_bytes(&self) -> Option<u64> {
        let bytes = match &self.kind {
            NodeKind::Device(device) => device.allocated_bytes(),
            NodeKind::Storage(storage) => storage.allocated_bytes(),
        };
        bytes.ok().flatten()
    }
}

impl Node {
    fn cache(&self) -> CacheMode {
        let Some(origin) = &self.origin else {
            return CacheMode::default();
        };
        let flags = &origin.around.flags;
        let common = CommonOptions::take(&mut origin.options.clone(), flags);
        common.map_or(flags.cache, |common| common.child_flags(flags).cache)
    }

    fn detect_zeroes(&self) -> Option<&str> {
        self.origin.as_ref()?.options.get_text("detect-zeroes")
    }
}

impl Nodes {
    /// Who uses which node, and for what: the number of the use, the user, the node, and what is
    /// wanted of it, also by those who use it through the user.
    pub fn uses(&self) -> Vec<(u64, User, String, RequiredAccess)> {
        let named = self.lock();
        let uses = named.uses_with_reach().into_iter();
        uses.map(|one| (one.id, one.user, one.node, one.wanted))
            .collect()
    }

    /// The names of all nodes, each after those that it stands on.
    pub fn bottom_up(&self) -> Vec<String> {
        let named = self.lock();
        let mut names = named.top_down(named.nodes.keys().cloned().collect());
        names.reverse();
        names
    }

    /// The drivers of all nodes, by the names of these.
    pub(crate) fn drivers(&self) -> BTreeMap<String, &'static str> {
        let named = self.lock();
        let driver = |(name, node): (&String, &Node)| (name.clone(), node.opened.driver);
        named.nodes.iter().map(driver).collect()
    }

    /// All nodes, in the order of their names.
    pub fn list(&self) -> Vec<NodeInfo> {
        let mut infos: Vec<NodeInfo> = {
            let named = self.lock();
            let describe = |(name, node): (&String, &super::Node)| {
                let (filename, size_bytes) = node.opened.name_and_size();
                let device = match &node.opened.kind {
                    NodeKind::Device(device) => Some(device.clone()),
                    NodeKind::Storage(_) => None,
                };
                NodeInfo {
                    name: name.clone(),
                    driver: node.opened.driver,
                    filename,
                    size_bytes,
                    device,
                    writable: node.is_writable_when_active(),
                    active: !node.is_inactive(),
                    backing: None,
                    allocated_bytes: node.opened.allocated_bytes(),
                    cache: node.cache(),
                    detect_zeroes: node.detect_zeroes().unwrap_or("off").to_owned(),
                }
            };
            named.nodes.iter().map(describe).collect()
        };
        for info in &mut infos {
            info.backing = self.backing_of(&info.name);
        }
        infos
    }
}
