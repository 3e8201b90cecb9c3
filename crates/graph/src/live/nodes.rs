//! [`Nodes`]: the graph, as everybody holds it, with what needs no more than a look at one node.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use futures_util::lock::OwnedMutexGuard;
use parking_lot::{Mutex, MutexGuard};
use vellum::nodes::Link;
use vellum::qcow2::CacheBudget;
use vellum::{BlockDevice, Result};

use crate::files::Files;
use crate::live::bases::SharedBases;
use crate::live::known_servers::Servers;
use crate::live::notices::{NodeNotice, Notices};
use crate::live::state::GraphState;
use crate::node::errors::{MADE_UP, invalid, is_well_formed, unknown, unknown_node};
use crate::node::opened::OpenedNode;
use crate::node::place::{NodePlace, Turns};

/// Nodes by name; clones share them.
#[derive(Debug, Clone, Default)]
pub struct Nodes {
    named: Arc<Mutex<GraphState>>,
    pub(crate) live: bool,
    /// What nodes stand on instead of the host's files.
    pub(crate) files: Option<Arc<dyn Files>>,
    /// Backing files that several of them stand on, where these are shared.
    pub(crate) bases: Option<Arc<SharedBases>>,
    pub(crate) notices: Notices,
    /// Servers that they stand on.
    pub(crate) servers: Servers,
    /// What the caches of all images may take together.
    cache_budget: Option<Arc<CacheBudget>>,
    pub(crate) before_leading: BeforeLeading,
    /// Held by whoever changes the graph.
    turns: Arc<futures_util::lock::Mutex<()>>,
}

pub(crate) type Note = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

type Notes = dyn Fn(&Nodes, Option<(&str, &str)>) -> Note + Send + Sync;

/// Notes it, while users are held up; if that fails they stay.
#[derive(Clone, Default)]
pub(crate) struct BeforeLeading(pub(crate) Arc<OnceLock<Box<Notes>>>);

impl BeforeLeading {
    /// What is to be waited for, if anybody wants to know. `led`: the node whose users are held up, and
    /// the one that they are led to; none where nodes that they use have changed.
    pub(crate) fn note(&self, nodes: &Nodes, led: Option<(&str, &str)>) -> Option<Note> {
        self.0.get().map(|notes| notes(nodes, led))
    }
}

impl fmt::Debug for BeforeLeading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BeforeLeading({})", self.0.get().is_some())
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

    /// No nodes; those that will be cannot be changed while they are used, and share the backing
    /// files that nobody has named.
    pub fn sharing() -> Self {
        Nodes {
            bases: Some(Arc::default()),
            ..Self::default()
        }
    }

    /// Has the caches of all images that are opened from now on take no more than so many
    /// bytes together.
    #[must_use]
    pub fn with_cache_budget(mut self, total_bytes: u64) -> Self {
        self.cache_budget = Some(CacheBudget::new(total_bytes));
        self
    }

    /// What the caches of all images may take together, if that is bounded.
    pub fn cache_budget(&self) -> Option<&Arc<CacheBudget>> {
        self.cache_budget.as_ref()
    }

    /// Whether the graph is still there, for tests.
    #[cfg(test)]
    pub(crate) fn downgrade(&self) -> std::sync::Weak<Mutex<GraphState>> {
        Arc::downgrade(&self.named)
    }

    /// The files that nodes are opened on, where they are not those of the host.
    pub fn files(&self) -> Option<&Arc<dyn Files>> {
        self.files.as_ref()
    }

    /// Whether nodes can be changed while they are used.
    pub fn are_live(&self) -> bool {
        self.live
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, GraphState> {
        self.named.lock()
    }

    /// A name for a node that was given none.
    pub fn make_up_name(&self) -> String {
        let mut state = self.lock();
        loop {
            state.next_name += 1;
            let name = format!("{MADE_UP}block{:03}", state.next_name);
            if !state.is_taken(&name, None) {
                return name;
            }
        }
    }

    /// Refuses a name that no node can have.
    pub(crate) fn check_form(&self, name: &str) -> Result<()> {
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
        let mut state = self.lock();
        let node = state.nodes.get_mut(name);
        node.ok_or_else(|| unknown_node(name))?.device()
    }

    /// The node of a name, as it is.
    ///
    /// # Errors
    /// If no node has the name.
    pub fn known(&self, name: &str) -> Result<OpenedNode> {
        let state = self.lock();
        let node = state.nodes.get(name).map(|node| node.opened.clone());
        node.ok_or_else(|| unknown(name))
    }

    /// As [`Nodes::known`], for whoever is opened at a place.
    pub(crate) fn known_at(&self, place: &NodePlace, name: &str) -> Result<OpenedNode> {
        let state = self.lock();
        let node = state.nodes.seen_from(place, name);
        let node = node.map(|node| node.opened.clone());
        node.ok_or_else(|| unknown(name))
    }

    /// The node to which a use leads now.
    pub fn used_by(&self, id: u64) -> Option<String> {
        let state = self.lock();
        state.uses.get(id).map(|one| one.node.clone())
    }

    /// What a user holds.
    pub fn link_of(&self, id: u64) -> Option<Arc<Link>> {
        self.lock().uses.get(id)?.link.clone()
    }

    /// Ends a use.
    pub fn leave(&self, id: u64) {
        self.lock().uses.remove(id);
    }

    /// Whether a node has a name that others know too.
    pub(crate) fn is_kept(&self, name: &str) -> bool {
        self.live && !name.starts_with(MADE_UP)
    }

    /// Has `sink` hear of what happens to these nodes from now on. The first sink stays.
    pub fn on_notice(&self, sink: impl Fn(NodeNotice) + Send + Sync + 'static) {
        let _ = self.notices.0.set(Box::new(sink));
    }

    pub(crate) fn notices(&self) -> &Notices {
        &self.notices
    }
}

/// Nobody else changes the graph as long as it is there.
pub type Turn = OwnedMutexGuard<()>;

impl Nodes {
    /// Waits until nobody changes the graph; nobody does before what is returned is dropped.
    pub async fn take_turn(&self) -> Turn {
        self.turns.clone().lock_owned().await
    }

    /// Waits for a turn, unless whoever opens something has one.
    pub async fn take_turn_as(&self, turns: Turns) -> Option<Turn> {
        match turns {
            Turns::Own => Some(self.take_turn().await),
            Turns::Held => None,
        }
    }

    /// Waits for a turn, where what is opened at a place takes turns of its own. To be held for moments.
    pub(crate) async fn take_turn_at(&self, place: &NodePlace) -> Option<Turn> {
        self.take_turn_as(place.opening?).await
    }

    /// Whether every node that is opened at a place has a name, if need be one that is made up.
    pub(crate) fn names_all(&self, place: &NodePlace) -> bool {
        self.live && place.owner().is_some() && !place.reopens
    }

    /// As [`Nodes::take_turn`], if nobody changes the graph.
    pub fn try_take_turn(&self) -> Option<Turn> {
        self.turns.clone().try_lock_owned()
    }
}
