//! Nodes with names, as `--blockdev` makes them: one may stand on another.
//!
//! Nodes that are *live* ([`Nodes::live`]) can be changed while they are used: each user
//! holds a [`Link`] of its own, and what changes the graph drains the links that lead to
//! a node and sets them. There every node has a name, if need be one that was made up, as
//! in QEMU.
//!
//! Invariants:
//! - Nodes do not stand on each other in a circle: a new one knows only nodes that are there already, and a
//!   use that would close a circle, through whatever nodes, is refused (`access.rs`).
//! - A node is closed after those that stand on it. One with a name that somebody gave it
//!   is not closed by them: others may stand on it later.
//! - What a failed change has made is gone, and its names are free again.
//! - The graph changes in one turn after the other ([`Nodes::take_turn`]), and nodes are opened beside
//!   these (`opening.rs`).

mod access;
mod activity;
mod bitmaps;
mod borrowed;
mod cache_budget;
mod changes;
mod children;
mod describe;
mod descriptions;
mod filters;
mod graph_memo;
mod inventory;
mod jobs;
mod leading;
mod moments;
mod named;
mod names;
mod node_table;
mod opening;
mod owned;
mod rebase;
mod renew;
mod reopen;
mod servers;
mod shared;
mod shown;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod uses;
mod watch;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vellum::nodes::Link;
use vellum::qcow2::CacheBudget;
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_jobs::live::Moment;
use vellum_options::{OpenFlags, Options};
use vellum_storage::nodes::watch::WriteWatch;

use crate::file_node::UnlockedFile;
use crate::files::Files;
use crate::graph::{NodeKind, OpenContext, OpenedNode, Role};
use crate::open::Ancestry;

pub(crate) use access::ChildAccess;
pub use activity::inactive_child;
use bitmaps::NodeBitmaps;
pub use changes::DrainedUsers;
pub(crate) use children::child_number;
pub use descriptions::DescriptionMemo;
pub use inventory::{Inventory, NodeState, Wanted};
use node_table::NodeTable;
use opening::Openings;
pub use opening::{NameClaim, Turns};
pub use opening::{NewNode, Turn};
pub use reopen::may_change;
use shared::SharedNodes;
pub use shown::ShownBitmap;
pub use uses::{BETWEEN, Keeps, OVERLAY, Passes};
pub use uses::{Changes, RequiredAccess, User};
use uses::{Use, Uses};
use watch::Notices;
pub use watch::{NodeNotice, NoticeSink};

/// How a node came to be, to make it once more with some things changed.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    pub(crate) options: Options,
    pub(crate) role: Role,
    pub(crate) around: OpenContext,
}

#[derive(Debug)]
struct Node {
    opened: OpenedNode,
    /// The node that it was made with, which owns it: itself, if it was asked for.
    owner: String,
    /// The one device that all its users share.
    device: Option<Arc<dyn BlockDevice>>,
    /// What users see in its place while a job watches it.
    front: Option<Arc<dyn BlockDevice>>,
    origin: Option<Arc<Origin>>,
    bitmaps: NodeBitmaps,
    /// While it is opened anew: what it keeps of the moment at which it was made.
    moment: Option<Arc<Moment>>,
    /// What it said that it stands on when it was opened.
    backing_text: Option<String>,
    /// A job has put it in front of another one.
    is_filter: bool,
    /// It was opened by a job, which opens it again where that is begun anew.
    is_of_job: bool,
    /// It is not open: it could neither be opened anew nor as it was.
    is_lost: bool,
    /// The number that its next child gets, where children come and go and one has.
    next_child: Option<u64>,
}

#[derive(Debug, Default)]
struct NamedNode {
    nodes: NodeTable,
    openings: Openings,
    uses: Uses,
    graph: graph_memo::GraphMemo,
    /// Those that other images may stand on too.
    shared: SharedNodes,
    /// What is noted of writes, by the name of the node; some may be gone.
    watches: HashMap<String, Arc<WriteWatch>>,
    /// Where users of nodes were led.
    leads: leading::Leads,
    /// What a file of disks names.
    configured: BTreeSet<String>,
    next_name: u64,
    next_shown: u64,
}

/// Nodes by name; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Nodes {
    named: Arc<Mutex<NamedNode>>,
    live: bool,
    /// What nodes stand on instead of the host's files.
    files: Option<Arc<dyn Files>>,
    /// Backing files that several of them stand on, where these are shared.
    bases: Option<Arc<shared::SharedBases>>,
    notices: Notices,
    /// Servers that they stand on.
    servers: servers::Servers,
    /// What the caches of all images may take together.
    cache_budget: Option<Arc<CacheBudget>>,
    before_leading: leading::BeforeLeading,
    /// Held by whoever changes the graph.
    turns: Arc<futures_util::lock::Mutex<()>>,
}

/// A use of a live node.
#[derive(Debug, Clone)]
pub struct NodeUse {
    /// The number of the use, to end it by.
    pub id: u64,
    /// The node, whichever that is at the time.
    pub link: Arc<Link>,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// The refusal of a reference that leads nowhere.
pub fn unknown(name: &str) -> Error {
    invalid(format!(
        "Cannot find device='{name}' nor node-name='{name}'"
    ))
}

/// The same, where only nodes are looked for.
pub fn unknown_node(name: &str) -> Error {
    invalid(format!("Cannot find device='' nor node-name='{name}'"))
}

fn duplicate(name: &str) -> Error {
    invalid(format!("Duplicate nodes with node-name='{name}'"))
}

/// Names begin with a letter and hold letters, digits and `-._`.
fn is_well_formed(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic())
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

/// The mark of a name that was made up.
const MADE_UP: char = '#';

impl Node {
    /// The device that all users share; the file below is locked with the first.
    fn device(&mut self) -> Result<Arc<dyn BlockDevice>> {
        if let Some(device) = &self.device {
            return Ok(device.clone());
        }
        let device = self.opened.clone();
        let device = device.into_device_at_once(&OpenFlags::default())?;
        self.device = Some(device.clone());
        Ok(device)
    }
}

impl Nodes {
    /// No nodes.
    pub fn new() -> Self {
        Self::default()
    }

    /// No nodes; those that will be can be changed while they are used. That has its
    /// price: requests to a node below another one are counted.
    pub fn live() -> Self {
        Nodes {
            live: true,
            ..Self::default()
        }
    }

    /// As [`Nodes::live`], on files of the caller's own.
    pub fn live_on(files: Arc<dyn Files>) -> Self {
        Nodes {
            files: Some(files),
            ..Self::live()
        }
    }

    /// The files that nodes are opened on, where they are not those of the host.
    pub fn files(&self) -> Option<&Arc<dyn Files>> {
        self.files.as_ref()
    }

    /// Whether nodes can be changed while they are used.
    pub fn are_live(&self) -> bool {
        self.live
    }

    fn lock(&self) -> MutexGuard<'_, NamedNode> {
        self.named.lock()
    }

    /// A name for a node that was given none.
    pub fn make_up_name(&self) -> String {
        let mut named = self.lock();
        loop {
            named.next_name += 1;
            let name = format!("{MADE_UP}block{:03}", named.next_name);
            if !named.is_taken(&name, None) {
                return name;
            }
        }
    }

    /// Gives the node that was opened at a place a name. What is returned is for whoever stands on it.
    pub(crate) fn name(
        &self,
        place: &Ancestry,
        name: &str,
        node: OpenedNode,
        origin: Option<Origin>,
    ) -> Result<OpenedNode> {
        let owner = place.owner().unwrap_or(name);
        self.check_form(name)?;
        let mut named = self.lock();
        let root = place.opening_root();
        if named.nodes.is_there(name) || named.openings.keep(name, root) {
            return Err(duplicate(name));
        }
        let bitmaps = NodeBitmaps::of(&node);
        let opened = match self.live {
            true => node.recorded(&bitmaps.recorder),
            false => node,
        };
        let node = Node {
            opened: opened.clone(),
            owner: owner.to_owned(),
            device: None,
            front: None,
            origin: origin.map(Arc::new),
            bitmaps,
            moment: None,
            backing_text: opened.backing_text(),
            is_filter: false,
            is_of_job: false,
            is_lost: false,
            next_child: None,
        };
        match root {
            Some(_) => named.nodes.insert_hidden(name.to_owned(), node),
            None => named.nodes.insert(name.to_owned(), node),
        }
        Ok(opened)
    }

    /// Refuses a name that no node can have.
    fn check_form(&self, name: &str) -> Result<()> {
        let is_made_up = self.live && name.starts_with(MADE_UP);
        if is_made_up || is_well_formed(name) {
            return Ok(());
        }
        Err(invalid(format!("Invalid node-name: '{name}'")))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lock().nodes.is_empty()
    }

    /// Whether there is a node called `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.lock().nodes.contains_key(name)
    }

    /// The node called `name` as a device.
    ///
    /// # Errors
    /// If there is none, or its file is locked by somebody.
    pub fn device(&self, name: &str) -> Result<Arc<dyn BlockDevice>> {
        let mut named = self.lock();
        let node = named.nodes.get_mut(name);
        node.ok_or_else(|| unknown_node(name))?.device()
    }

    /// Has a node that nobody uses any more be as if nobody had: its files are not locked, and the next
    /// user asks for its size again.
    pub fn release_unused(&self, name: &str) {
        let mut named = self.lock();
        let is_used = named.uses.of(name).next().is_some();
        if let Some(node) = named.nodes.get_mut(name)
            && !is_used
            && matches!(node.opened.kind, NodeKind::Storage(_))
        {
            node.device = None;
            node.opened.files.iter().for_each(UnlockedFile::unlock);
        }
    }

    /// The node of a name, as it is.
    ///
    /// # Errors
    /// If no node has the name.
    pub fn known(&self, name: &str) -> Result<OpenedNode> {
        let named = self.lock();
        let node = named.nodes.get(name).map(|node| node.opened.clone());
        node.ok_or_else(|| unknown(name))
    }

    /// As [`Nodes::known`], for whoever is opened at a place.
    pub(crate) fn known_at(&self, place: &Ancestry, name: &str) -> Result<OpenedNode> {
        let named = self.lock();
        let node = named.nodes.seen_from(place, name);
        let node = node.map(|node| node.opened.clone());
        node.ok_or_else(|| unknown(name))
    }

    /// The node that one refers to that is opened at a place, for that one.
    pub(crate) fn referred(&self, place: &Ancestry, name: &str) -> Result<OpenedNode> {
        self.check_no_filter(name)?;
        let node = self.known_at(place, name)?;
        Ok(match self.live {
            true => node.borrowed(),
            false => node,
        })
    }

    /// The node that an image at `place` stands on, as a device.
    pub(crate) fn stand_on(
        &self,
        place: &Ancestry,
        name: &str,
        flags: &OpenFlags,
    ) -> Result<Arc<dyn BlockDevice>> {
        match &place.parent {
            Some(parent) if self.live => {
                self.known_at(place, name)?;
                if !place.reverts {
                    named::busy(name, self.lock().changed_by_job(name))?;
                }
                let user = User::Node(parent.clone());
                let wanted = RequiredAccess::reading("backing");
                Ok(self.join_at(place, user, name, wanted)?.link)
            }
            _ => self
                .referred(place, name)?
                .for_user(false)?
                .into_device_at_once(flags),
        }
    }

    /// Begins to use a live node.
    ///
    /// # Errors
    /// If there is no such node, its file is locked by somebody, or somebody else uses it
    /// in a way that does not go together with this one.
    pub fn join(&self, user: User, name: &str, wanted: RequiredAccess) -> Result<NodeUse> {
        self.join_at(&Ancestry::default(), user, name, wanted)
    }

    fn join_at(
        &self,
        place: &Ancestry,
        user: User,
        name: &str,
        wanted: RequiredAccess,
    ) -> Result<NodeUse> {
        self.check_no_filter(name)?;
        let mut named = self.lock();
        let node = named.nodes.seen_from_mut(place, name);
        let node = node.ok_or_else(|| unknown_node(name))?;
        node.check_access(&user, &wanted)?;
        let device = node.device()?;
        let link = Link::new(node.front.clone().unwrap_or(device));
        let new = Use {
            link: Some(link.clone()),
            ..Use::new(user, name, wanted, place.owner())
        };
        let id = named.add_use_at(place, new)?;
        Ok(NodeUse { id, link })
    }

    /// Notes that a node is used by the one at `place`, which it can be exchanged under only if
    /// that is `linked`.
    pub(crate) fn note(
        &self,
        place: &Ancestry,
        name: &str,
        role: &str,
        linked: bool,
    ) -> Result<()> {
        let mut named = self.lock();
        let node = named.nodes.get(name);
        let has_front = node.is_some_and(|node| node.front.is_some());
        if has_front && !linked && !place.reverts {
            // It would not see what stands in front.
            named.check_no_job(name)?;
        }
        let user = User::Node(place.parent.clone().unwrap_or_default());
        let wanted = RequiredAccess::reading(role);
        let new = Use::new(user, name, wanted, place.owner());
        named.add_use_at(place, new).map(drop)
    }

    /// The node to which a use leads now.
    pub fn used_by(&self, id: u64) -> Option<String> {
        let named = self.lock();
        named.uses.get(id).map(|one| one.node.clone())
    }

    /// What a user holds.
    pub fn link_of(&self, id: u64) -> Option<Arc<Link>> {
        self.lock().uses.get(id)?.link.clone()
    }

    /// Has the live node at `place`, a format with metadata, keep the file that it stands
    /// on to itself.
    ///
    /// # Errors
    /// If somebody else writes to the file, or keeps it to himself.
    pub(crate) async fn keep_file(&self, place: &Ancestry, writes: bool) -> Result<()> {
        let access = ChildAccess {
            changes: match writes {
                true => Changes::ALL,
                false => Changes::NONE,
            },
            ..ChildAccess::keeping(Changes::ALL)
        };
        self.require(place, "file", access).await
    }

    /// Ends a use.
    pub fn leave(&self, id: u64) {
        self.lock().uses.remove(id);
    }

    /// Whether a node has a name that others know too.
    pub(crate) fn is_kept(&self, name: &str) -> bool {
        self.live && !name.starts_with(MADE_UP)
    }
}

impl NamedNode {
    /// Whether no new node can have a name, or none but one that is opened with `root`.
    fn is_taken(&self, name: &str, root: Option<&str>) -> bool {
        self.nodes.is_there(name) || self.openings.keep(name, root) || self.openings.has_claim(name)
    }

    /// Names in an order in which each node comes before those that it stands on, and otherwise
    /// as they are.
    fn top_down(&self, names: Vec<String>) -> Vec<String> {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let ordered = self.ordered_top_down(&names).into_iter();
        ordered.map(str::to_owned).collect()
    }

    /// As [`NamedNode::top_down`].
    fn ordered_top_down<'n>(&self, names: &[&'n str]) -> Vec<&'n str> {
        let places: HashMap<&str, usize> = names.iter().copied().zip(0..).collect();
        let mut above = vec![0_usize; names.len()];
        for name in names {
            let below = self.uses.by(name).filter_map(|one| places.get(&*one.node));
            below.for_each(|&place| above[place] += 1);
        }
        let is_top = |place: &usize| above[*place] == 0;
        let mut tops: BTreeSet<usize> = (0..names.len()).filter(is_top).collect();
        let mut ordered = Vec::with_capacity(names.len());
        while let Some(top) = tops.pop_first() {
            ordered.push(names[top]);
            for one in self.uses.by(names[top]) {
                let Some(&place) = places.get(&*one.node) else {
                    continue;
                };
                above[place] -= 1;
                if above[place] == 0 {
                    tops.insert(place);
                }
            }
        }
        debug_assert_eq!(
            ordered.len(),
            names.len(),
            "nodes stand on each other in a circle"
        );
        ordered
    }
}

#[cfg(test)]
mod tests;
