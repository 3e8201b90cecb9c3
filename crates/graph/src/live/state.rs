//! [`GraphState`]: the nodes and who uses them, behind the lock of [`Nodes`](super::nodes::Nodes).

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use vellum::Result;
use vellum_storage::nodes::watch::WriteWatch;

use crate::live::bases::SharedNodes;
use crate::live::leads::Leads;
use crate::live::node_table::NodeTable;
use crate::live::openings::Openings;
use crate::live::positions::GraphMemo;
use crate::live::uses::Uses;
use crate::node::errors::invalid;

#[derive(Debug, Default)]
pub(crate) struct GraphState {
    pub(crate) nodes: NodeTable,
    pub(crate) openings: Openings,
    pub(crate) uses: Uses,
    pub(crate) graph: GraphMemo,
    /// Those that other images may stand on too.
    pub(crate) shared: SharedNodes,
    /// What is noted of writes, by the name of the node; some may be gone.
    pub(crate) watches: HashMap<String, Arc<WriteWatch>>,
    /// Where users of nodes were led.
    pub(crate) leads: Leads,
    /// What a file of disks names.
    pub(crate) configured: BTreeSet<String>,
    pub(crate) next_name: u64,
    pub(crate) next_shown: u64,
}

impl GraphState {
    /// Whether no new node can have a name, or none but one that is opened with `root`.
    pub(crate) fn is_taken(&self, name: &str, root: Option<&str>) -> bool {
        self.nodes.is_there(name) || self.openings.keep(name, root) || self.openings.has_claim(name)
    }

    /// Names in an order in which each node comes before those that it stands on, also by way of others, and
    /// otherwise as they are.
    pub(crate) fn top_down(&self, names: Vec<String>) -> Vec<String> {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let ordered = self.ordered_top_down(&names).into_iter();
        ordered.map(str::to_owned).collect()
    }

    /// As [`GraphState::top_down`].
    pub(crate) fn ordered_top_down<'n>(&'n self, names: &[&'n str]) -> Vec<&'n str> {
        let wanted = names.len();
        let mut names = names.to_vec();
        let mut places: HashMap<&str, usize> = names.iter().copied().zip(0..).collect();
        let mut at = 0;
        while let Some(name) = names.get(at).copied() {
            for one in self.uses.by(name) {
                if !places.contains_key(&*one.node) {
                    places.insert(&one.node, names.len());
                    names.push(&one.node);
                }
            }
            at += 1;
        }
        let mut above = vec![0_usize; names.len()];
        for name in &names {
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
        ordered.retain(|name| places[name] < wanted);
        ordered
    }

    /// A node and all that it owns.
    pub(crate) fn owned(&self, owner: &str) -> impl Iterator<Item = &str> {
        self.nodes.of_owner(owner)
    }

    /// Refuses nodes that are being opened, among those that stand on others.
    pub(crate) fn check_all_shown(&self, names: &[String]) -> Result<()> {
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
