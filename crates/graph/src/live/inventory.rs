//! [`Inventory`]: all nodes at one moment, for whoever draws, lists or counts them.
//!
//! A node has a number there, its place in the order of names, and knows by number those that it stands
//! on: whoever goes through a thousand of them looks for none by its name.
//!
//! Invariants:
//! - The list is locked once, and no file is asked anything meanwhile.
//! - Nothing here waits for a request, or makes one wait.

use std::ops::Deref;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_options::CacheMode;
use vellum_storage::nodes::watch::WriteWatch;

use crate::live::node::Node;
use crate::live::nodes::Nodes;
use crate::live::positions::Position;
use crate::live::state::GraphState;
use crate::node::opened::NodeKind;
use crate::node::origin::Origin;

/// Where an image has what is not in its backing file, and a filter what it shows.
const HOLDERS: [&str; 4] = ["data-file", "file", "raw", "image"];

/// A node with what it stands on.
#[derive(Debug)]
pub struct NodeState {
    /// Where it stands, which [`NodeState`] leads to.
    position: Arc<Position>,
    /// What QMP calls its file, where that was asked for and it has such a name.
    pub filename: Option<Arc<str>>,
    /// Zero unless it was asked for, but of a format.
    pub size_bytes: u64,
    /// Writes to it are refused.
    pub read_only: bool,
    /// Otherwise it is written to only once it is active.
    pub is_active: bool,
    /// Bytes that it takes on its disk, where that is known.
    pub allocated_bytes: Option<u64>,
    /// Otherwise it has no bitmaps.
    pub may_have_bitmaps: bool,
    kind: NodeKind,
    origin: Option<Arc<Origin>>,
    /// What is noted of writes, where it is of no format.
    pub watch: Option<Arc<WriteWatch>>,
}

impl Deref for NodeState {
    type Target = Position;

    fn deref(&self) -> &Position {
        &self.position
    }
}

impl NodeState {
    /// The node, where it is of a format.
    pub fn device(&self) -> Option<&Arc<dyn BlockDevice>> {
        match &self.kind {
            NodeKind::Device(device) => Some(device),
            NodeKind::Storage(_) => None,
        }
    }

    /// The path of its file, where it is one of the host's.
    pub fn path(&self) -> Option<&str> {
        match &self.kind {
            NodeKind::Storage(storage) if matches!(self.driver, "file" | "host_device") => {
                Some(storage.name())
            }
            _ => None,
        }
    }

    /// The name of its file, or of what else it shows.
    pub fn shown_name(&self) -> String {
        match &self.filename {
            Some(filename) => filename.to_string(),
            None => self.kind.shown_name(),
        }
    }

    /// The mode that it was opened with.
    pub fn cache(&self) -> CacheMode {
        let origin = self.origin.as_deref();
        origin.map_or_else(CacheMode::default, Origin::cache)
    }

    /// What becomes of writes of zeroes: `off`, `on`, `unmap`.
    pub fn detect_zeroes(&self) -> &str {
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
    pub fn asked_allocated_bytes(&self) -> Option<u64> {
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
pub struct Wanted<'a> {
    /// Of this one, and those that it stands on, only.
    pub of: Option<&'a str>,
    /// The names of files.
    pub filenames: bool,
    /// Sizes, and what is taken of disks, for which files are asked.
    pub sizes: bool,
    /// The order in which QEMU makes them, where all are wanted.
    pub making: bool,
}

/// See the module's head.
#[derive(Debug)]
pub struct Inventory {
    /// In the order of their names.
    states: Vec<NodeState>,
    /// Their numbers in the order in which QEMU makes them, where that was wanted.
    making: Arc<[usize]>,
}

impl Inventory {
    /// How many there are.
    pub fn count(&self) -> usize {
        self.states.len()
    }

    /// All of them, in the order of their names; each has the number of its place.
    pub fn iter(&self) -> impl Iterator<Item = &NodeState> + Clone {
        self.states.iter()
    }

    /// Their numbers in the order in which QEMU makes them, if that was wanted.
    pub fn in_order_of_making(&self) -> &[usize] {
        &self.making
    }

    /// The number of a node.
    pub fn number(&self, name: &str) -> Option<usize> {
        let found = self
            .states
            .binary_search_by(|state| state.name.as_str().cmp(name));
        found.ok()
    }

    /// The node of a name.
    pub fn get(&self, name: &str) -> Option<&NodeState> {
        self.node(self.number(name)?)
    }

    /// The node of a number.
    pub fn node(&self, number: usize) -> Option<&NodeState> {
        self.states.get(number)
    }

    /// The child that is `role` to a node.
    pub fn child(&self, node: &NodeState, role: &str) -> Option<&NodeState> {
        self.node(node.number_of_child(role)?)
    }

    /// By the numbers of nodes: how many children nodes have that are this one, in all.
    pub fn counts_of_parents(&self) -> Vec<usize> {
        let mut counts = vec![0; self.count()];
        let children = self.states.iter().flat_map(|state| &state.children);
        children.for_each(|(_, child)| counts[*child] += 1);
        counts
    }

    /// The numbers of a node and of what it shows below, from the top down.
    pub fn numbers_of_layers(&self, top: usize) -> impl Iterator<Item = usize> {
        let below = |number: &usize| self.number_below(self.node(*number)?);
        // As in `layers`.
        std::iter::successors(Some(top), below).take(self.count())
    }

    /// The number of a node's backing file.
    pub fn backing(&self, node: &NodeState) -> Option<usize> {
        node.number_of_child("backing")
    }

    /// The number of the node that has what another one shows, but for what is in its backing file: an
    /// image's data file, or its file; what a filter, also one of a job, shows.
    pub fn holder(&self, node: &NodeState) -> Option<usize> {
        let of_roles = || HOLDERS.iter().find_map(|role| node.number_of_child(role));
        node.behind.or_else(of_roles)
    }

    /// The number of the node that one shows where it has nothing of its own; all of it, for a filter.
    pub fn number_below(&self, node: &NodeState) -> Option<usize> {
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
    pub fn shown_below(&self, node: &NodeState) -> Option<&NodeState> {
        self.node(self.number_below(node)?)
    }

    /// A node, and what it shows below, from the top down.
    pub fn layers<'a>(&'a self, top: Option<&'a NodeState>) -> impl Iterator<Item = &'a NodeState> {
        let below = |node: &&'a NodeState| self.shown_below(node);
        // What changes while it is looked at makes no circle that would have an end.
        std::iter::successors(top, below).take(self.count())
    }

    /// Bytes that a node takes on its disk: an image, what its files take.
    pub fn allocated_bytes(&self, node: &NodeState) -> Option<u64> {
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

impl GraphState {
    /// A node as it is noted, at its place in the graph; its file is asked nothing.
    fn state(&self, position: Arc<Position>, node: &Node) -> NodeState {
        let kind = node.opened.kind.clone();
        NodeState {
            filename: None,
            size_bytes: match &kind {
                NodeKind::Device(device) => device.size_bytes(),
                NodeKind::Storage(_) => 0,
            },
            read_only: !node.is_writable_when_active(),
            is_active: !node.is_inactive(),
            allocated_bytes: None,
            may_have_bitmaps: node.may_have_bitmaps(),
            kind,
            origin: node.origin.clone(),
            watch: self.watches.get(&position.name).cloned(),
            position,
        }
    }

    fn inventory(&mut self, wanted: Wanted<'_>) -> Inventory {
        match wanted.of {
            None => self.inventory_of_all(wanted),
            Some(name) => {
                let mut names = self.with_below(name);
                names.retain(|name| self.nodes.contains_key(*name));
                names.sort_unstable();
                let positions = self.positions(&names);
                let filenames = match wanted.filenames {
                    true => self.filenames_of(&names),
                    false => Arc::default(),
                };
                let nodes = names.iter().filter_map(|name| self.nodes.get(*name));
                Inventory {
                    states: self.states(&positions, nodes, &filenames),
                    making: Arc::default(),
                }
            }
        }
    }

    fn inventory_of_all(&mut self, wanted: Wanted<'_>) -> Inventory {
        let mut graph = self.graph.take(self.changes());
        let filenames = match wanted.filenames {
            true => graph.filenames(self),
            false => Arc::default(),
        };
        let making = match wanted.making {
            true => graph.making(self),
            false => Arc::default(),
        };
        let states = self.states(graph.positions(self), self.nodes.values(), &filenames);
        self.graph = graph;
        Inventory { states, making }
    }

    /// States of nodes that have these places and, if there are any, these names of files.
    fn states<'a>(
        &self,
        positions: &[Arc<Position>],
        nodes: impl Iterator<Item = &'a Node>,
        filenames: &[Option<Arc<str>>],
    ) -> Vec<NodeState> {
        let nodes = positions.iter().cloned().zip(nodes);
        let states = nodes.map(|(position, node)| self.state(position, node));
        let mut states: Vec<NodeState> = states.collect();
        for (state, filename) in states.iter_mut().zip(filenames) {
            state.filename.clone_from(filename);
        }
        states
    }

    /// A number that becomes another one whenever nodes, or who uses them, may have changed.
    fn changes(&self) -> u64 {
        self.nodes.changes() + self.uses.changes()
    }
}

impl Nodes {
    /// A number that becomes another one whenever nodes, or who uses them, may have changed.
    pub fn changes(&self) -> u64 {
        self.lock().changes()
    }

    /// The paths of the host's files that nodes are; none of them is asked anything.
    pub fn file_paths(&self) -> Vec<String> {
        let state = self.lock();
        let path = |node: &Node| match &node.opened.kind {
            NodeKind::Storage(storage) if node.opened.driver.name == "file" => {
                Some(storage.name().to_owned())
            }
            _ => None,
        };
        state.nodes.values().filter_map(path).collect()
    }

    /// Nodes, as far as they are wanted.
    pub fn inventory(&self, wanted: Wanted<'_>) -> Inventory {
        let mut inventory = self.lock().inventory(wanted);
        if wanted.sizes {
            inventory.states.iter_mut().for_each(NodeState::measure);
        }
        inventory
    }
}
