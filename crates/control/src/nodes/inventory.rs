//! [`Inventory`]: all nodes at one moment, for whoever draws, lists or counts them.
//!
//! A node has a number there, its place in the order of names, and knows by number those that it stands
//! on: whoever goes through a thousand of them looks for none by its name.
//!
//! Invariants:
//! - The list is locked once, and no file is asked anything meanwhile.
//! - Nothing here waits for a request, or makes one wait.

use std::collections::HashMap;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_storage::nodes::watch::WriteWatch;

use super::names::Naming;
use super::{NamedNode, Node, Nodes, Origin, Use, User};
use crate::CacheMode;
use crate::graph::NodeKind;

/// What a node is to a job that writes to it alone.
const TARGET: &str = "target";

/// Where an image has what is not in its backing file, and a filter what it shows.
const HOLDERS: [&str; 4] = ["data-file", "file", "raw", "image"];

/// A node with what it stands on.
#[derive(Debug)]
pub(crate) struct NodeState {
    pub(crate) name: String,
    pub(crate) driver: &'static str,
    /// What QMP calls its file, where that was asked for and it has such a name.
    pub(crate) filename: Option<String>,
    /// Zero unless it was asked for, but of a format.
    pub(crate) size_bytes: u64,
    pub(crate) read_only: bool,
    /// Otherwise it is written to only once it is active.
    pub(crate) is_active: bool,
    /// Bytes that it takes on its disk, where that is known.
    pub(crate) allocated_bytes: Option<u64>,
    /// The numbers of nodes that it stands on, by what they are to it.
    children: Vec<(String, usize)>,
    /// Of the filter of a job, the number of the node that it is in front of.
    behind: Option<usize>,
    /// It shows what one of its children does.
    pub(crate) is_filter: bool,
    /// Otherwise it has no bitmaps.
    pub(crate) may_have_bitmaps: bool,
    /// Another node stands on it, or it belongs to a job: it is what one puts somewhere else, and nobody
    /// uses it beside.
    pub(crate) is_below: bool,
    /// Jobs that work with it.
    pub(crate) jobs: Vec<String>,
    kind: NodeKind,
    origin: Option<Arc<Origin>>,
    /// What is noted of writes, where it is of no format.
    pub(crate) watch: Option<Arc<WriteWatch>>,
}

impl NodeState {
    /// The node, where it is of a format.
    pub(crate) fn device(&self) -> Option<&Arc<dyn BlockDevice>> {
        match &self.kind {
            NodeKind::Device(device) => Some(device),
            NodeKind::Storage(_) => None,
        }
    }

    /// The path of its file, where it is one of the host's.
    pub(crate) fn path(&self) -> Option<&str> {
        match &self.kind {
            NodeKind::Storage(storage) if matches!(self.driver, "file" | "host_device") => {
                Some(storage.name())
            }
            _ => None,
        }
    }

    /// The name of its file, or of what else it shows.
    pub(crate) fn shown_name(&self) -> String {
        let filename = self.filename.clone();
        filename.unwrap_or_else(|| self.kind.shown_name())
    }

    /// The mode that it was opened with.
    pub(crate) fn cache(&self) -> CacheMode {
        let origin = self.origin.as_deref();
        origin.map_or_else(CacheMode::default, Origin::cache)
    }

    /// What becomes of writes of zeroes: `off`, `on`, `unmap`.
    pub(crate) fn detect_zeroes(&self) -> &str {
        let options = self.origin.as_ref().map(|origin| &origin.options);
        let said = options.and_then(|options| options.get_text("detect-zeroes"));
        said.unwrap_or("off")
    }

    fn number_of_child(&self, role: &str) -> Option<usize> {
        let mut children = self.children.iter();
        let found = children.find(|(known, _)| known == role);
        found.map(|(_, number)| *number)
    }

    /// Asks the node what it takes on its disk.
    pub(crate) fn asked_allocated_bytes(&self) -> Option<u64> {
        let asked = match &self.kind {
            NodeKind::Device(device) => device.allocated_bytes(),
            NodeKind::Storage(storage) => storage.allocated_bytes(),
        };
        asked.ok().flatten()
    }

    /// Asks the node how long it is and, unless its files say that, what it takes.
    fn measure(&mut self) {
        if let NodeKind::Storage(storage) = &self.kind {
            // What cannot be asked has no size to tell.
            self.size_bytes = storage.len_bytes().unwrap_or_default();
        } else if self.number_of_child("file").is_some() {
            return;
        }
        self.allocated_bytes = self.asked_allocated_bytes();
    }
}

/// What is wanted of nodes.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wanted<'a> {
    /// Of this one, and those that it stands on, only.
    pub(crate) of: Option<&'a str>,
    /// The names of files.
    pub(crate) filenames: bool,
    /// Sizes, and what is taken of disks, for which files are asked.
    pub(crate) sizes: bool,
    /// The order in which QEMU makes them.
    pub(crate) making: bool,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct Inventory {
    /// In the order of their names.
    states: Vec<NodeState>,
    /// Their numbers in the order in which QEMU makes them, where that was wanted.
    making: Vec<usize>,
}

impl Inventory {
    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.states.len()
    }

    /// All of them, in the order of their names; each has the number of its place.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &NodeState> + Clone {
        self.states.iter()
    }

    /// Their numbers in the order in which QEMU makes them, if that was wanted.
    pub(crate) fn in_order_of_making(&self) -> &[usize] {
        &self.making
    }

    /// The number of a node.
    pub(crate) fn number(&self, name: &str) -> Option<usize> {
        let found = self
            .states
            .binary_search_by(|state| state.name.as_str().cmp(name));
        found.ok()
    }

    /// The node of a name.
    pub(crate) fn get(&self, name: &str) -> Option<&NodeState> {
        self.node(self.number(name)?)
    }

    /// The node of a number.
    pub(crate) fn node(&self, number: usize) -> Option<&NodeState> {
        self.states.get(number)
    }

    /// The child that is `role` to a node.
    pub(crate) fn child(&self, node: &NodeState, role: &str) -> Option<&NodeState> {
        self.node(node.number_of_child(role)?)
    }

    /// By the numbers of nodes: how many children nodes have that are this one, in all.
    pub(crate) fn counts_of_parents(&self) -> Vec<usize> {
        let mut counts = vec![0; self.len()];
        let children = self.states.iter().flat_map(|state| &state.children);
        children.for_each(|(_, child)| counts[*child] += 1);
        counts
    }

    /// The numbers of a node and of what it shows below, from the top down.
    pub(crate) fn numbers_of_layers(&self, top: usize) -> impl Iterator<Item = usize> {
        let below = |number: &usize| self.number_below(self.node(*number)?);
        // As in `layers`.
        std::iter::successors(Some(top), below).take(self.len())
    }

    /// The number of a node's backing file.
    pub(crate) fn backing(&self, node: &NodeState) -> Option<usize> {
        node.number_of_child("backing")
    }

    /// The number of the node that has what another one shows, but for what is in its backing file: an
    /// image's data file, or its file; what a filter, also one of a job, shows.
    pub(crate) fn holder(&self, node: &NodeState) -> Option<usize> {
        let of_roles = || HOLDERS.iter().find_map(|role| node.number_of_child(role));
        node.behind.or_else(of_roles)
    }

    /// The number of the node that one shows where it has nothing of its own; all of it, for a filter.
    pub(crate) fn number_below(&self, node: &NodeState) -> Option<usize> {
        let mut below = node.children.iter().filter(|(role, _)| match &**role {
            "backing" => true,
            "file" | "image" | "raw" => node.is_filter,
            _ => false,
        });
        // An image below a verifying filter is named beside what it is compared with.
        let image = below.clone().find(|(role, _)| role == "image");
        image.or_else(|| below.next()).map(|(_, number)| *number)
    }

    /// The node that another one shows.
    pub(crate) fn shown_below(&self, node: &NodeState) -> Option<&NodeState> {
        self.node(self.number_below(node)?)
    }

    /// A node, and what it shows below, from the top down.
    pub(crate) fn layers<'a>(
        &'a self,
        top: Option<&'a NodeState>,
    ) -> impl Iterator<Item = &'a NodeState> {
        let below = |node: &&'a NodeState| self.shown_below(node);
        // What changes while it is looked at makes no circle that would have an end.
        std::iter::successors(top, below).take(self.len())
    }

    /// Bytes that a node takes on its disk: an image, what its files take.
    pub(crate) fn allocated_bytes(&self, node: &NodeState) -> Option<u64> {
        let files = ["file", "data-file"].map(|role| self.child(node, role));
        let mut files = files.into_iter().flatten().peekable();
        match files.peek() {
            None => node.allocated_bytes,
            Some(_) => files
                .map(|file| file.allocated_bytes.or_else(|| self.allocated_bytes(file)))
                .sum(),
        }
    }
}

impl NamedNode {
    /// Whether jobs write to a node, and nobody uses it beside.
    fn is_only_target(&self, name: &str) -> bool {
        let mut uses = self.uses.of(name).peekable();
        let is_target = |one: &Use| one.user.is_job() && one.wanted.role == TARGET;
        uses.peek().is_some() && uses.all(is_target)
    }

    /// A node as it is noted; its file is asked nothing.
    fn state(&self, name: &str, node: &Node, numbers: &HashMap<&str, usize>) -> NodeState {
        let users = self.uses.of(name).map(|one| &one.user);
        let jobs = users.clone().filter_map(|user| match user {
            User::Job { id, .. } => Some(id.clone()),
            User::Node(_) | User::Export(_) => None,
        });
        let mut jobs: Vec<String> = jobs.collect();
        jobs.sort_unstable();
        jobs.dedup();
        let number = |name: &str| numbers.get(name).copied();
        let child = |one: &Use| Some((one.wanted.role.clone(), number(&one.node)?));
        let kind = node.opened.kind.clone();
        NodeState {
            name: name.to_owned(),
            driver: node.opened.driver,
            filename: None,
            size_bytes: match &kind {
                NodeKind::Device(device) => device.size_bytes(),
                NodeKind::Storage(_) => 0,
            },
            read_only: !node.is_writable_when_active(),
            is_active: !node.is_inactive(),
            allocated_bytes: None,
            children: self.uses.by(name).filter_map(child).collect(),
            behind: node.is_filter.then(|| number(&node.owner)).flatten(),
            is_filter: node.is_filter_driver(),
            may_have_bitmaps: node.may_have_bitmaps(),
            is_below: node.is_filter
                || self.is_only_target(name)
                || users.clone().any(|user| matches!(user, User::Node(_))),
            jobs,
            kind,
            origin: node.origin.clone(),
            watch: self.watches.get(name).cloned(),
        }
    }

    fn inventory(&self, wanted: Wanted<'_>) -> Inventory {
        let mut nodes: Vec<(&str, &Node)> = match wanted.of {
            Some(name) => {
                let names = self.with_below(name).into_iter();
                names
                    .filter_map(|name| Some((name, self.nodes.get(name)?)))
                    .collect()
            }
            None => {
                let all = self.nodes.iter();
                all.map(|(name, node)| (name.as_str(), node)).collect()
            }
        };
        nodes.sort_unstable_by_key(|(name, _)| *name);
        let names: Vec<&str> = nodes.iter().map(|(name, _)| *name).collect();
        let numbers: HashMap<&str, usize> = names.iter().copied().zip(0..).collect();
        let nodes = nodes.into_iter();
        let states = nodes.map(|(name, node)| self.state(name, node, &numbers));
        let mut states: Vec<NodeState> = states.collect();
        if wanted.filenames {
            let mut filenames = self.names_of(&names, Naming::AsTheyStand);
            for (state, name) in states.iter_mut().zip(&names) {
                state.filename = filenames.remove(name).map(|name| name.text());
            }
        }
        let making = match wanted.making {
            true => self.in_order_of_making(),
            false => Vec::new(),
        };
        let making = making.into_iter();
        Inventory {
            states,
            making: making
                .filter_map(|name| numbers.get(name).copied())
                .collect(),
        }
    }
}

impl Nodes {
    /// A number that becomes another one whenever nodes, or who uses them, may have changed.
    pub(crate) fn changes(&self) -> u64 {
        let named = self.lock();
        named.nodes.changes() + named.uses.changes()
    }

    /// The paths of the host's files that nodes are; none of them is asked anything.
    pub(crate) fn file_paths(&self) -> Vec<String> {
        let named = self.lock();
        let path = |node: &Node| match &node.opened.kind {
            NodeKind::Storage(storage) if node.opened.driver == "file" => {
                Some(storage.name().to_owned())
            }
            _ => None,
        };
        named.nodes.values().filter_map(path).collect()
    }

    /// Nodes, as far as they are wanted.
    pub(crate) fn inventory(&self, wanted: Wanted<'_>) -> Inventory {
        let mut inventory = self.lock().inventory(wanted);
        if wanted.sizes {
            inventory.states.iter_mut().for_each(NodeState::measure);
        }
        inventory
    }
}
