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

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use futures_util::lock::OwnedMutexGuard;
use vellum::{BlockDevice, Result};
use vellum_options::{OpenFlags, Options};

use super::shared::BaseKey;
use super::{NamedNode, Nodes, duplicate, invalid, unknown_node};
use crate::gate::FilePolicy;
use crate::graph::{self, NodeKind, OpenContext, Role};
use crate::open::Ancestry;

/// Nobody else changes the graph as long as it is there.
pub type Turn = OwnedMutexGuard<()>;

/// In whose turn an opening takes what it refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Turns {
    /// In turns of its own: it is opened beside everything else.
    Own,
    /// In that of whoever asks for it, who changes the graph.
    Held,
}

impl Turns {
    /// Waits for a turn, unless there is one.
    pub async fn take(self, nodes: &Nodes) -> Option<Turn> {
        match self {
            Turns::Own => Some(nodes.take_turn().await),
            Turns::Held => None,
        }
    }
}

/// What is being opened, by the node that was asked for.
#[derive(Debug, Default)]
pub(super) struct Openings {
    by_root: BTreeMap<String, Opening>,
    /// The names of nodes of which the children are being opened, see [`NameClaim`].
    claims: BTreeSet<String>,
    /// What was opened for some that were given up.
    abandoned: Vec<NodeKind>,
}

#[derive(Debug, Default)]
struct Opening {
    /// The names that its options give.
    names: BTreeSet<String>,
    /// Backing files that others may stand on too, once they are shown.
    shared: BTreeMap<BaseKey, String>,
}

impl Openings {
    /// Whether a name is kept for a node that is being opened, for another root than this one.
    pub(super) fn keep(&self, name: &str, root: Option<&str>) -> bool {
        let mut others = self
            .by_root
            .iter()
            .filter(|(other, _)| root != Some(*other));
        others.any(|(_, opening)| opening.names.contains(name))
    }

    /// Whether a node of this name is being opened, with whichever root.
    pub(super) fn has_claim(&self, name: &str) -> bool {
        self.claims.contains(name)
    }

    /// The backing files that are opened with a root, and may be shared.
    pub(super) fn shared_of(&mut self, root: &str) -> Option<&mut BTreeMap<BaseKey, String>> {
        self.by_root
            .get_mut(root)
            .map(|opening| &mut opening.shared)
    }

    pub(super) fn all_shared(&mut self) -> impl Iterator<Item = &mut BTreeMap<BaseKey, String>> {
        self.by_root.values_mut().map(|opening| &mut opening.shared)
    }
}

impl NamedNode {
    /// Refuses nodes that are being opened, among those that stand on others.
    pub(super) fn check_all_shown(&self, names: &[String]) -> Result<()> {
        for name in names.iter().filter(|name| !self.nodes.contains_key(*name)) {
            if let Some(one) = self.uses.by(name).next() {
                let root = one.owner.as_ref().unwrap_or(name);
                return Err(invalid(format!(
                    "Node '{}' is busy: '{root}', which refers to it, is being opened",
                    one.node
                )));
            }
        }
        Ok(())
    }
}

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
        let mut named = self.nodes.lock();
        let node = named.nodes.hidden_mut(&self.name);
        node.ok_or_else(|| unknown_node(&self.name))?.device()
    }

    /// Has everybody find it, and what was opened with it. The graph changes by that: somebody must have
    /// a turn.
    pub fn show(mut self) {
        self.is_over = true;
        let mut named = self.nodes.lock();
        named.nodes.show(&self.name);
        if let Some(opening) = named.openings.by_root.remove(&self.name) {
            named.shared.add(opening.shared);
        }
        drop(named);
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
    /// Opens a node and gives it the name that its `node-name` says. Takes a turn in the end.
    ///
    /// # Errors
    /// In QEMU's words, as far as it has some.
    pub async fn add(&self, options: Options) -> Result<()> {
        let new = self.open_new(options, Turns::Own).await?;
        let _turn = self.take_turn().await;
        new.show();
        Ok(())
    }

    /// Opens a node as [`Nodes::add`] does, which nobody finds before it is shown: beside all that is done
    /// with others, or in the turn of whoever asks.
    ///
    /// # Errors
    /// As [`Nodes::add`].
    pub async fn open_new(&self, options: Options, turns: Turns) -> Result<NewNode> {
        self.open_named(options, (turns, false)).await
    }

    /// As [`Nodes::open_new`], as a state file says that the node was when another process ended.
    ///
    /// # Errors
    /// As [`Nodes::add`].
    pub async fn open_restored(&self, options: Options) -> Result<NewNode> {
        self.open_named(options, (Turns::Own, true)).await
    }

    async fn open_named(&self, options: Options, how: (Turns, bool)) -> Result<NewNode> {
        let Some(driver) = options.get_text("driver").map(str::to_owned) else {
            return Err(invalid("Parameter 'driver' is missing"));
        };
        let Some(name) = options.get_text("node-name").map(str::to_owned) else {
            return Err(invalid("'node-name' must be specified for the root node"));
        };
        self.check_new_name(&name)?;
        crate::drivers::find(&driver).map_err(|_| {
            invalid(format!(
                "Parameter 'driver' does not accept value '{driver}'"
            ))
        })?;
        self.open_root(&name, options, how).await
    }

    /// As [`Nodes::open_new`], a node that a command needs for itself. Without a name it is given one, and
    /// without a driver it is an image of a format that its content tells.
    ///
    /// # Errors
    /// As [`Nodes::add`].
    pub async fn open_unlisted(&self, mut options: Options, turns: Turns) -> Result<NewNode> {
        let name = match options.get_text("node-name").map(str::to_owned) {
            Some(name) => {
                self.check_new_name(&name)?;
                name
            }
            None => self.make_up_name(),
        };
        options.set_text("node-name", &*name);
        self.open_root(&name, options, (turns, false)).await
    }

    /// Waits until nobody changes the graph; nobody does before what is returned is dropped.
    pub async fn take_turn(&self) -> Turn {
        self.turns.clone().lock_owned().await
    }

    /// As [`Nodes::take_turn`], if nobody changes the graph.
    pub fn try_take_turn(&self) -> Option<Turn> {
        self.turns.clone().try_lock_owned()
    }

    /// Reserves the name of a node that is opened at a place. See [`NameClaim`].
    pub(crate) fn claim_name(&self, place: &Ancestry, name: &str) -> Result<NameClaim> {
        self.check_form(name)?;
        let mut named = self.lock();
        let is_taken = named.is_taken(name, place.opening_root());
        if is_taken || !named.openings.claims.insert(name.to_owned()) {
            return Err(duplicate(name));
        }
        Ok(NameClaim {
            nodes: self.clone(),
            name: name.to_owned(),
        })
    }

    /// Keeps the names of a node that is about to be opened.
    fn begin_opening(&self, name: &str, options: &Options) -> Result<NewNode> {
        let names = names_in(options);
        let mut named = self.lock();
        if named.is_taken(name, None) {
            return Err(duplicate(name));
        }
        if let Some(kept) = names.iter().find(|name| named.openings.keep(name, None)) {
            return Err(duplicate(kept));
        }
        let opening = Opening {
            names,
            ..Opening::default()
        };
        named.openings.by_root.insert(name.to_owned(), opening);
        Ok(NewNode {
            nodes: self.clone(),
            name: name.to_owned(),
            is_over: false,
        })
    }

    /// Opens a node under its name, beside everything else, or in the turn of whoever asks.
    async fn open_root(
        &self,
        name: &str,
        options: Options,
        (turns, restored): (Turns, bool),
    ) -> Result<NewNode> {
        let new = self.begin_opening(name, &options)?;
        let mut place = Ancestry::opening(self.clone(), name, turns);
        place.restored = restored;
        let around = OpenContext {
            flags: OpenFlags {
                writable: true,
                ..OpenFlags::default()
            },
            policy: FilePolicy::Any,
            place,
        };
        // It names itself, as does every node below it that wants to.
        match graph::open(options, Role::Image, &around).await {
            Ok(_) => Ok(new),
            Err(error) => {
                // Nothing of it was ever used; the first failure is the one to tell.
                let _ = new.discard().await;
                Err(error)
            }
        }
    }

    /// Forgets what was being opened.
    fn abandon(&self, root: &str) {
        let mut named = self.lock();
        let mut kinds = named.take_closed(root, self.live);
        named.openings.by_root.remove(root);
        named.openings.abandoned.append(&mut kinds);
        drop(named);
        self.give_up_servers_of(root);
    }

    /// Closes what was opened for nodes that were given up.
    pub async fn close_abandoned(&self) {
        let abandoned = std::mem::take(&mut self.lock().openings.abandoned);
        for kind in abandoned {
            // Nobody is told: the node was never there.
            let _ = kind.close().await;
        }
    }
}
