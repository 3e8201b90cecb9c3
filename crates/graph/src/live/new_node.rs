//! Nodes that are opened beside everything else: commands, jobs and other openings go on meanwhile,
//! however long a server takes to answer, or a key to be found out.
//!
//! Whoever changes the graph does so in a *turn* ([`Nodes::take_turn`]), one after the other. An opening
//! has no turn but for moments: when it takes what it refers to, and when its nodes are shown.
//!
//! Invariants:
//! - Nobody finds a node before it is shown ([`NewNode::show`]), with all that was opened with it, but
//!   those that are opened with it. Its names are taken from the beginning.
//! - What an opening refers to is noted as a use in a turn. Whoever would open that anew meanwhile, under
//!   those that hold it without a link, is refused.
//! - What is not shown is gone, and its names are free again.

use std::collections::BTreeSet;
use std::sync::Arc;

use vellum::{BlockDevice, Result};
use vellum_options::Options;

use crate::live::nodes::Nodes;
use crate::live::openings::PendingNode;
use crate::node::errors::{duplicate, unknown_node};
use crate::node::place::NodePlace;

/// Reserves the name of a node while its children are opened.
///
/// Invariant: a node records its uses of others under a name that no other node has. Otherwise they would
/// belong to the other node, and be handed over to it when the opening fails.
#[derive(Debug)]
#[must_use = "the name is free again when this is dropped"]
pub struct NameClaim {
    nodes: Nodes,
    name: String,
}

impl Drop for NameClaim {
    fn drop(&mut self) {
        self.nodes.lock().openings.claims.remove(&self.name);
    }
}

/// A node that is open, and that nobody finds yet. It is gone with this, unless it is shown.
#[derive(Debug)]
#[must_use = "nobody finds it before it is shown"]
pub struct NewNode {
    nodes: Nodes,
    name: String,
    is_over: bool,
}

impl NewNode {
    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The node as a device.
    ///
    /// # Errors
    /// If its file is locked by somebody.
    pub fn device(&self) -> Result<Arc<dyn BlockDevice>> {
        let mut state = self.nodes.lock();
        let node = state.nodes.hidden_mut(&self.name);
        node.ok_or_else(|| unknown_node(&self.name))?.device()
    }

    /// Has everybody find it, and what was opened with it. The graph changes by that: somebody must have
    /// a turn.
    pub fn show(mut self) {
        self.is_over = true;
        let mut state = self.nodes.lock();
        state.nodes.show(&self.name);
        if let Some(opening) = state.openings.by_root.remove(&self.name) {
            state.shared.add(opening.shared);
        }
        drop(state);
        self.nodes.note_opened(&self.name);
    }

    /// Closes it: nobody has used it.
    ///
    /// # Errors
    /// If it is not closed cleanly; it is gone all the same.
    pub async fn discard(mut self) -> Result<()> {
        self.is_over = true;
        let closed = self.nodes.close_owned(&self.name).await;
        self.nodes.lock().openings.by_root.remove(&self.name);
        closed
    }
}

impl Drop for NewNode {
    fn drop(&mut self) {
        if !self.is_over {
            self.nodes.abandon(&self.name);
        }
    }
}

/// The names that options of a node give, to it and to what is below.
fn names_in(options: &Options) -> BTreeSet<String> {
    let is_name = |key: &str| key == "node-name" || key.ends_with(".node-name");
    let names = options.keys().filter(|key| is_name(key));
    names
        .filter_map(|key| options.get_text(key))
        .map(str::to_owned)
        .collect()
}

impl Nodes {
    /// Reserves the name of a node that is opened at a place. See [`NameClaim`].
    pub(crate) fn claim_name(&self, place: &NodePlace, name: &str) -> Result<NameClaim> {
        self.check_form(name)?;
        let mut state = self.lock();
        let is_taken = state.is_taken(name, place.opening_root());
        if is_taken || !state.openings.claims.insert(name.to_owned()) {
            return Err(duplicate(name));
        }
        Ok(NameClaim {
            nodes: self.clone(),
            name: name.to_owned(),
        })
    }

    /// Keeps the names of a node that is about to be opened.
    pub(crate) fn begin_opening(&self, name: &str, options: &Options) -> Result<NewNode> {
        let names = names_in(options);
        let mut state = self.lock();
        if state.is_taken(name, None) {
            return Err(duplicate(name));
        }
        if let Some(kept) = names.iter().find(|name| state.openings.keep(name, None)) {
            return Err(duplicate(kept));
        }
        let opening = PendingNode {
            names,
            ..PendingNode::default()
        };
        state.openings.by_root.insert(name.to_owned(), opening);
        Ok(NewNode {
            nodes: self.clone(),
            name: name.to_owned(),
            is_over: false,
        })
    }

    /// Forgets what was being opened.
    fn abandon(&self, root: &str) {
        let mut state = self.lock();
        let mut kinds = state.take_closed(root, self.live);
        state.openings.by_root.remove(root);
        state.openings.abandoned.append(&mut kinds);
        drop(state);
        self.give_up_servers_of(root);
    }
}
