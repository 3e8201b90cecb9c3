//! Nodes that are opened anew under their users: several at one moment, all or none.
//!
//! A node that another one stands on without a link (a file below a format, whatever is below a
//! filter) cannot be exchanged under it: so that one is opened anew too. So is a filter between two
//! of them: what is above is closed through it, while its own requests are held up.
//!
//! Invariants:
//! - Users are held up from the top down, and what a node has is durable before those of the node
//!   below it are: while it is written there it may still be read there.
//! - A file is the same one afterwards, whatever its name leads to, and its locks are never given
//!   up in between: it stays open until the new one has its own.
//! - A filter that keeps what was there goes on with its moment, and a log goes on where it was.
//! - Where the new nodes cannot be opened the old ones are opened again; no user has run meanwhile. A node
//!   for which that fails too keeps its place over those below it: an image that is opened later without
//!   what it stands on would show, and write, zeroes in its place.
//! - What exports show of bitmaps follows before users go on (`shown.rs`).
//! - Where clients have nodes stand on others, that is noted before users go on (`leading.rs`), or the old
//!   nodes are opened again.

use std::sync::Arc;

use tracing::trace;
use vellum::Result;
use vellum::nodes::absent;
use vellum_storage::file::FileStorage;
use vellum_storage::mutants::{self, Mutant};

use crate::node::driver::DriverFacts;
use crate::open::context::OpenContext;

pub(crate) use crate::change::reopen_changes::{HeldNodes, ReopenChanges, ReopenedNode, refers_to};
use crate::live::nodes::Nodes;
use crate::live::uses::User;
use crate::node::errors::{invalid, unknown_node};
use crate::node::opened::{NodeKind, OpenedNode};
use crate::node::origin::Origin;
use crate::open::node::open_node;

impl Nodes {
    /// Holds up the users of some nodes and of those that have to be opened anew with them; all
    /// that they have written is durable. With `keeps_children` what nodes stand on stays open though it was
    /// opened with them.
    pub(crate) async fn hold_for_reopen(
        &self,
        names: &[String],
        keeps_children: bool,
    ) -> Result<HeldNodes> {
        let names = {
            let mut state = self.lock();
            let names = match keeps_children {
                true => state.standing_directly(names),
                false => {
                    let between = state.with_filters_between(names);
                    state.standing_directly(&state.with_own_children(&between))
                }
            };
            state.check_reopenable(&names, None)?;
            state.stop_sharing(&names);
            names
        };
        let inside: Vec<User> = names.iter().cloned().map(User::Node).collect();
        let mut held = Vec::with_capacity(names.len());
        for name in &names {
            held.push(self.hold_but(name, &inside).await?);
            if !mutants::is(Mutant::ReopenUnflushed) {
                self.flush_node(name).await?;
            }
        }
        Ok(HeldNodes(held))
    }

    /// Closes nodes whose users are held up, does `between`, opens them anew with their changes, and does `go_on`.
    /// After a failure they are as they were.
    pub(crate) async fn reopen_held(
        &self,
        held: &HeldNodes,
        changes: &[(String, ReopenChanges)],
        between: impl AsyncFnOnce() -> Result<()>,
        go_on: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut reopened = self.plan(held, changes)?;
        let shown = self.shown_with(held.nodes());
        let mut kept = Vec::new();
        let mut closed = Vec::new();
        let mut result = Ok(());
        for one in &reopened {
            match self.let_go(&one.name, held).await {
                Ok(files) => kept.extend(files),
                Err(error) => {
                    result = Err(error);
                    break;
                }
            }
            closed.push(one.name.clone());
        }
        for one in &mut reopened {
            one.old.place.kept.clone_from(&kept);
            one.new.place.kept.clone_from(&kept);
        }
        reopened.retain(|one| closed.contains(&one.name));
        // Each after those that it stands on.
        reopened.reverse();
        if result.is_ok() {
            result = between().await;
        }
        if result.is_ok() {
            result = self.open_all_anew(&reopened, held, go_on).await;
        }
        if result.is_err() {
            result = self.revert(&reopened, held).await.and(result);
        }
        self.show_anew(shown).await;
        self.forget_old_files();
        result
    }

    /// Opens nodes as they were; those too that do not stand on one that is gone for good.
    async fn revert(&self, reopened: &[ReopenedNode], held: &HeldNodes) -> Result<()> {
        let mut result = Ok(());
        for one in reopened {
            let mut old = one.old.clone();
            old.place.reverts = true;
            let opened = self.open_anew(&one.name, old, held).await;
            if opened.is_err() {
                self.lock().note_lost(&one.name, &one.below);
            }
            result = result.and(opened);
        }
        result
    }

    /// How each node was opened, and how it is to be.
    fn plan(
        &self,
        held: &HeldNodes,
        changes: &[(String, ReopenChanges)],
    ) -> Result<Vec<ReopenedNode>> {
        let state = self.lock();
        for (name, _) in changes.iter().filter(|(_, change)| change.shows()) {
            state.check_not_shared(name, None)?;
        }
        let mut reopened: Vec<ReopenedNode> = Vec::new();
        let none = ReopenChanges::default();
        for name in held.nodes() {
            let node = state.nodes.get(&name).ok_or_else(|| unknown_node(&name))?;
            let origin = node.origin.clone();
            let origin =
                origin.ok_or_else(|| invalid(format!("Node '{name}' cannot be opened anew")))?;
            let change = changes.iter().find(|(changed, _)| *changed == name);
            let change = change.map_or(&none, |(_, change)| change);
            let mut new = state.origin_now(&name, &origin, change);
            let was_inactive = new.flags.inactive;
            if let Some(flags) = state.inherited(&name, &reopened) {
                new.flags = flags;
            }
            new.flags.inactive = match change.active {
                Some(active) => !active,
                None => was_inactive,
            };
            reopened.push(ReopenedNode {
                old: state.origin_now(&name, &origin, &none),
                below: state.uses.by(&name).cloned().collect(),
                name,
                new,
            });
        }
        Ok(reopened)
    }

    /// Opens nodes, each after those that it will stand on, and does `go_on`. After a failure none is open.
    async fn open_all_anew(
        &self,
        reopened: &[ReopenedNode],
        held: &HeldNodes,
        go_on: impl AsyncFnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut pending: Vec<&ReopenedNode> = reopened.iter().collect();
        let mut opened: Vec<&str> = Vec::new();
        let mut result = Ok(());
        while !pending.is_empty() && result.is_ok() {
            let is_next = |one: &&ReopenedNode| {
                let below = |other: &&ReopenedNode| {
                    other.name != one.name && refers_to(&one.new.options, &other.name)
                };
                !pending.iter().any(below)
            };
            // There are no circles: those who ask have looked.
            let next = pending.remove(pending.iter().position(is_next).unwrap_or_default());
            result = self.open_anew(&next.name, next.new.clone(), held).await;
            if result.is_ok() {
                opened.push(&next.name);
            }
        }
        if result.is_ok() {
            result = go_on().await;
        }
        if result.is_err() {
            for name in opened.into_iter().rev() {
                // Nothing was written to it.
                let _ = self.let_go(name, held).await;
            }
        }
        result
    }

    /// Makes durable what has been written to some nodes, before they are held up for something: those
    /// that are not there, or cannot be, are told of by that.
    pub async fn flush_all(&self, names: &[String]) {
        for name in names {
            let _ = self.flush_node(name).await;
        }
    }

    /// Makes durable what has been written to a node, as it is.
    async fn flush_node(&self, name: &str) -> Result<()> {
        if self.lock().is_lost(name) {
            // Its users were told; what they had flushed was durable before.
            return Ok(());
        }
        match self.open_kind(name)? {
            NodeKind::Device(device) if device.info().read_only => Ok(()),
            NodeKind::Device(device) => device.flush().await,
            NodeKind::Storage(storage) if storage.capabilities().read_only => Ok(()),
            NodeKind::Storage(storage) => storage.flush().await,
        }
    }

    /// What a node is, as its users have it.
    fn open_kind(&self, name: &str) -> Result<NodeKind> {
        let state = self.lock();
        let node = state.nodes.get(name).ok_or_else(|| unknown_node(name))?;
        Ok(match &node.device {
            Some(device) => NodeKind::Device(device.clone()),
            None => node.opened.kind.clone(),
        })
    }

    /// Closes a node; its files, which stay open and locked as long as somebody has them.
    async fn let_go(&self, name: &str, held: &HeldNodes) -> Result<Vec<Arc<FileStorage>>> {
        // What cannot be made durable stays as it is, with its users: a close that fails
        // half way would not leave them what they can use.
        if !mutants::is(Mutant::ReopenUnflushed) {
            self.flush_node(name).await?;
        }
        let kind = self.open_kind(name)?;
        let away = match &kind {
            NodeKind::Device(device) => absent(&**device),
            NodeKind::Storage(storage) => {
                let storage = storage.clone();
                let opened = OpenedNode {
                    driver: DriverFacts::named("file"),
                    kind: NodeKind::Storage(storage),
                    filtered: None,
                    files: Vec::new(),
                    writable: false,
                };
                absent(&*opened.into_device_at_once(&vellum_options::OpenFlags::default())?)
            }
        };
        let moment = self.moment_of(name, &kind).await;
        match &kind {
            // A close makes all durable, too.
            _ if mutants::is(Mutant::ReopenUnflushed) => {}
            NodeKind::Device(device) => device.close().await?,
            NodeKind::Storage(storage) => storage.close().await?,
        }
        drop(kind);
        if let Some(users) = held.users_of(name) {
            users.set(&away);
        }
        trace!(name: "node_let_go", node = name);
        let mut state = self.lock();
        let files = state.files_of(name);
        state.forget_below(name);
        if let Some(node) = state.nodes.get_mut(name) {
            node.device = None;
            if !node.is_lost {
                node.moment = moment;
            }
            node.opened = OpenedNode::device(node.opened.driver, away);
        }
        Ok(files)
    }

    async fn open_anew(&self, name: &str, origin: Origin, held: &HeldNodes) -> Result<()> {
        let (flags, policy) = (origin.flags.clone(), origin.policy.clone());
        let around = OpenContext::among(self, origin.place.clone(), flags, policy);
        let opened = open_node(origin.options.clone(), origin.role, &around).await;
        let mut state = self.lock();
        let opened = match opened {
            Ok(opened) => opened,
            Err(error) => {
                trace!(name: "node_reopen_failed", node = name, error = %error);
                state.forget_below(name);
                return Err(error);
            }
        };
        let Some(node) = state.nodes.get_mut(name) else {
            return Err(unknown_node(name));
        };
        trace!(name: "node_reopened", node = name);
        node.opened = opened.recorded(&node.bitmaps.recorder);
        node.device = None;
        node.moment = None;
        node.is_lost = false;
        node.front = None;
        let mut origin = origin;
        origin.place.kept.clear();
        origin.place.reverts = false;
        node.origin = Some(Arc::new(origin));
        let users = held.users_of(name).filter(|users| !users.links.is_empty());
        let Some(users) = users else {
            return Ok(());
        };
        let device = node.device()?;
        drop(state);
        users.set(&device);
        Ok(())
    }

    /// Lets the files go that nodes had before they were opened anew.
    fn forget_old_files(&self) {
        let mut state = self.lock();
        let files = state.nodes.values_mut();
        files
            .flat_map(|node| &mut node.opened.files)
            .for_each(|file| file.forget_old());
    }
}
