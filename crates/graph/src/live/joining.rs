//! Users of nodes: whoever is opened on one, an export or a job begins to use it here.

use std::sync::Arc;

use vellum::nodes::Link;
use vellum::{BlockDevice, Result};
use vellum_options::OpenFlags;

use crate::live::child_access::ChildAccess;
use crate::live::nodes::Nodes;
use crate::live::uses::{Changes, RequiredAccess, Use, User};
use crate::node::errors::{busy, unknown_node};
use crate::node::opened::{NodeKind, OpenedNode};
use crate::node::place::NodePlace;

/// A use of a live node.
#[derive(Debug, Clone)]
pub struct NodeUse {
    /// The number of the use, to end it by.
    pub id: u64,
    /// The node, whichever that is at the time.
    pub link: Arc<Link>,
}

impl Nodes {
    /// The node that one refers to that is opened at a place, for that one.
    pub(crate) fn referred(&self, place: &NodePlace, name: &str) -> Result<OpenedNode> {
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
        place: &NodePlace,
        name: &str,
        flags: &OpenFlags,
    ) -> Result<Arc<dyn BlockDevice>> {
        match &place.parent {
            Some(parent) if self.live => {
                self.known_at(place, name)?;
                if !place.reverts {
                    busy(name, self.lock().changed_by_job(name))?;
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
        self.join_at(&NodePlace::default(), user, name, wanted)
    }

    fn join_at(
        &self,
        place: &NodePlace,
        user: User,
        name: &str,
        wanted: RequiredAccess,
    ) -> Result<NodeUse> {
        self.check_no_filter(name)?;
        let mut state = self.lock();
        let node = state.nodes.seen_from_mut(place, name);
        let node = node.ok_or_else(|| unknown_node(name))?;
        node.check_access(&user, &wanted)?;
        let device = node.device()?;
        let link = Link::new(node.front.clone().unwrap_or(device));
        let new = Use {
            link: Some(link.clone()),
            ..Use::new(user, name, wanted, place.owner())
        };
        let id = state.add_use_at(place, new)?;
        Ok(NodeUse { id, link })
    }

    /// Notes that a node is used by the one at `place`, which it can be exchanged under only if
    /// that is `linked`.
    pub(crate) fn note(
        &self,
        place: &NodePlace,
        name: &str,
        role: &str,
        linked: bool,
    ) -> Result<()> {
        let mut state = self.lock();
        let node = state.nodes.get(name);
        let has_front = node.is_some_and(|node| node.front.is_some());
        if has_front && !linked && !place.reverts {
            // It would not see what stands in front.
            state.check_no_job(name)?;
        }
        let user = User::Node(place.parent.clone().unwrap_or_default());
        let wanted = RequiredAccess::reading(role);
        let new = Use::new(user, name, wanted, place.owner());
        state.add_use_at(place, new).map(drop)
    }

    /// Has the live node at `place`, a format with metadata, keep the file that it stands
    /// on to itself.
    ///
    /// # Errors
    /// If somebody else writes to the file, or keeps it to himself.
    pub(crate) async fn keep_file(&self, place: &NodePlace, writes: bool) -> Result<()> {
        let access = ChildAccess {
            changes: match writes {
                true => Changes::ALL,
                false => Changes::NONE,
            },
            ..ChildAccess::keeping(Changes::ALL)
        };
        self.require(place, "file", access).await
    }

    /// Has the live node at `place` want more of the one that is `role` to it. Takes a turn, where
    /// `place` says so.
    ///
    /// # Errors
    /// If that gets in the way of others.
    pub(crate) async fn require(
        &self,
        place: &NodePlace,
        role: &str,
        access: ChildAccess,
    ) -> Result<()> {
        let _turn = self.take_turn_at(place).await;
        let above = match &place.parent {
            Some(above) if self.live => above,
            _ => return Ok(()),
        };
        let mut state = self.lock();
        let Some(id) = state.uses.by_as(above, role).map(|one| one.id) else {
            return Ok(());
        };
        let want = |one: &mut Use| {
            one.wanted.changes = access.changes;
            one.wanted.keeps = access.keeps;
            one.passes = access.passes;
            one.rewrites = access.rewrites;
        };
        if !place.reverts {
            return state.change_use(id, want);
        }
        state.uses.get_mut(id).map(want);
        Ok(())
    }

    /// Whether a node can be exchanged under whoever stands on it behind a link.
    pub(crate) fn is_linkable(&self, name: &str, node: &OpenedNode) -> bool {
        self.is_kept(name) && matches!(node.kind, NodeKind::Device(_))
    }

    /// What the node at `place` stands on as `role`: behind a link if it is of a format and others
    /// know it too, so that it can be exchanged.
    pub(crate) fn linked(
        &self,
        place: &NodePlace,
        role: &str,
        node: OpenedNode,
    ) -> Result<OpenedNode> {
        let above = place.parent.as_deref().filter(|_| self.live);
        let mut state = self.lock();
        let Some(used) = above.and_then(|above| state.uses.by_as(above, role)) else {
            return Ok(node);
        };
        let (id, name) = (used.id, used.node.clone());
        let is_linkable = self.is_linkable(&name, &node);
        let Some(below) = state
            .nodes
            .seen_from_mut(place, &name)
            .filter(|_| is_linkable)
        else {
            return Ok(node);
        };
        let device = below.device()?;
        let link = Link::new(below.front.clone().unwrap_or(device));
        state.uses.go_through(id, link.clone());
        let kind = NodeKind::Device(link);
        Ok(OpenedNode { kind, ..node }.borrowed())
    }
}
