//! [`NodeState`]: all nodes at one moment, for whoever draws or counts them on another thread.
//!
//! Invariants:
//! - The list is locked once, and no file is asked anything meanwhile.
//! - Nothing here waits for a request, or makes one wait.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_storage::nodes::watch::WriteWatch;

use super::names::Naming;
use super::{NamedNode, Nodes, Use, User};
use crate::graph::NodeKind;

/// What a node is to a job that writes to it alone.
const TARGET: &str = "target";

/// A node with what it stands on.
#[derive(Debug)]
pub(crate) struct NodeState {
    pub(crate) name: String,
    pub(crate) driver: &'static str,
    /// What QMP calls its file; empty unless it was asked for.
    pub(crate) filename: String,
    pub(crate) size_bytes: u64,
    pub(crate) read_only: bool,
    /// Bytes that it takes on its disk, where that is known.
    pub(crate) allocated_bytes: Option<u64>,
    /// The nodes that it stands on, by what they are to it.
    pub(crate) children: Vec<(String, String)>,
    /// It shows what one of its children does.
    pub(crate) is_filter: bool,
    /// Another node stands on it, or it belongs to a job: it is what one puts somewhere else, and nobody
    /// uses it beside.
    pub(crate) is_below: bool,
    /// Jobs that work with it.
    pub(crate) jobs: Vec<String>,
    /// The node, where it is of a format.
    pub(crate) device: Option<Arc<dyn BlockDevice>>,
    /// The path of its file, where it is one of the host's.
    pub(crate) path: Option<String>,
    /// What is noted of writes, where it is of none.
    pub(crate) watch: Option<Arc<WriteWatch>>,
}

impl NodeState {
    /// The child that is `role` to it.
    pub(crate) fn child(&self, role: &str) -> Option<&str> {
        let mut children = self.children.iter();
        let found = children.find(|(known, _)| known == role);
        found.map(|(_, name)| name.as_str())
    }

    /// The node that it shows where it has nothing of its own; all of it, for a filter.
    pub(crate) fn shown_below(&self) -> Option<&str> {
        // An image below a verifying filter is named beside what it is compared with.
        let of_filter = || {
            ["image", "file", "raw"]
                .iter()
                .find_map(|role| self.child(role))
        };
        match self.is_filter {
            true => of_filter(),
            false => self.child("backing"),
        }
    }
}

/// What is wanted of nodes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Of this one, and those that it stands on, only.
    pub(crate) of: Option<&'a str>,
    /// The names of files.
    pub(crate) filenames: bool,
    /// Sizes, and what is taken of disks, for which files are asked.
    pub(crate) sizes: bool,
}

impl NamedNode {
    /// Whether jobs write to a node, and nobody uses it beside.
    fn is_only_target(&self, name: &str) -> bool {
        let mut uses = self.uses.of(name).peekable();
        let is_target = |one: &Use| one.user.is_job() && one.wanted.role == TARGET;
        uses.peek().is_some() && uses.all(is_target)
    }
}

impl Nodes {
    /// The paths of the host's files that nodes are; none of them is asked anything.
    pub(crate) fn file_paths(&self) -> Vec<String> {
        let named = self.lock();
        let path = |node: &super::Node| match &node.opened.kind {
            NodeKind::Storage(storage) if node.opened.driver == "file" => {
                Some(storage.name().to_owned())
            }
            _ => None,
        };
        named.nodes.values().filter_map(path).collect()
    }

    /// Nodes, as far as they are wanted.
    pub(crate) fn inventory(&self, wanted: Wanted<'_>) -> Vec<NodeState> {
        let mut states = Vec::new();
        let mut kinds = Vec::new();
        {
            let named = self.lock();
            let names = match wanted.of {
                Some(name) => named.with_below(name),
                None => named.nodes.keys().cloned().collect(),
            };
            let mut filenames = match wanted.filenames {
                true => named.names_of(names.clone(), Naming::AsTheyStand),
                false => Default::default(),
            };
            for name in &names {
                let Some(node) = named.nodes.get(name) else {
                    continue;
                };
                let is_only_target = named.is_only_target(name);
                let users = named.uses.of(name).map(|one| &one.user);
                let jobs = users.clone().filter_map(|user| match user {
                    User::Job { id, .. } => Some(id.clone()),
                    User::Node(_) | User::Export(_) => None,
                });
                let children = named.uses.by(name);
                let children = children.map(|one| (one.wanted.role.clone(), one.node.clone()));
                kinds.push(node.opened.kind.clone());
                states.push(NodeState {
                    name: name.clone(),
                    driver: node.opened.driver,
                    filename: filenames
                        .remove(name)
                        .map(|name| name.text())
                        .unwrap_or_default(),
                    size_bytes: 0,
                    read_only: !node.is_writable_when_active(),
                    allocated_bytes: None,
                    children: children.collect(),
                    is_filter: node.is_filter_driver(),
                    is_below: node.is_filter
                        || is_only_target
                        || users.clone().any(|user| matches!(user, User::Node(_))),
                    jobs: jobs.collect(),
                    device: None,
                    path: None,
                    watch: named.watches.get(name).cloned(),
                });
            }
        }
        for (state, kind) in states.iter_mut().zip(kinds) {
            match kind {
                NodeKind::Device(device) => {
                    state.size_bytes = device.size_bytes();
                    // Of an image its files say it.
                    if wanted.sizes && state.child("file").is_none() {
                        state.allocated_bytes = device.allocated_bytes().ok().flatten();
                    }
                    state.device = Some(device);
                }
                NodeKind::Storage(storage) if wanted.sizes => {
                    // What cannot be asked has no size to tell.
                    state.size_bytes = storage.len_bytes().unwrap_or_default();
                    state.allocated_bytes = storage.allocated_bytes().ok().flatten();
                    if matches!(state.driver, "file" | "host_device") {
                        state.path = Some(storage.name().to_owned());
                    }
                }
                NodeKind::Storage(_) => {}
            }
            state.jobs.sort_unstable();
            state.jobs.dedup();
        }
        states
    }
}
