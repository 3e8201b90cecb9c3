//! Notes of where users of nodes are led, before they go on there.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value};

use crate::live::leads::{Leads, Step};
use crate::live::nodes::{Nodes, Note};
use crate::live::state::GraphState;
use crate::node::errors::MADE_UP;

impl GraphState {
    /// Notes that users of a node use another one from now on.
    pub(crate) fn note_led(&mut self, from: &str, to: &str) {
        let was = self.whole_description(from, None);
        self.leads.note(from, to, was);
    }
}

impl Nodes {
    /// Whether a node has no name but one that was made up, and that another one has at the next start.
    pub fn is_made_up(&self, node: &str) -> bool {
        node.starts_with(MADE_UP)
    }

    /// Where the users of a node were led, if they are not there any more.
    pub fn led_to(&self, node: &str) -> Option<String> {
        self.lock().leads.of(node).map(str::to_owned)
    }

    /// From which nodes users were led, and to which.
    pub fn leads(&self) -> Leads {
        self.lock().leads.clone()
    }

    /// As [`Nodes::leads`] will be once the users of a node use another one.
    pub fn leads_with(&self, from: &str, to: &str) -> Leads {
        let state = self.lock();
        let mut leads = state.leads.clone();
        leads.note(from, to, state.whole_description(from, None));
        leads
    }

    /// Takes the step out that users of a node were led: whoever uses it from now on uses it.
    pub fn take_step(&self, node: &str) -> Option<Step> {
        self.lock().leads.take(node)
    }

    /// Puts it back.
    pub fn put_step(&self, node: &str, step: Step) {
        self.lock().leads.0.insert(node.to_owned(), step);
    }

    /// Notes the nodes that a file of disks names: where users of these were led is known also while they
    /// are gone.
    pub fn note_configured(&self, names: BTreeSet<String>) {
        self.lock().configured = names;
    }

    /// How a node was described from which users were led, if that is known.
    pub fn described_before(&self, node: &str) -> Option<Value> {
        self.lock().leads.0.get(node)?.was.clone()
    }

    /// Notes where users were led before the program was started again: in which steps, and where they
    /// were seen. Nodes that are `lost` may come back.
    pub fn restore_leads(
        &self,
        saved: Map<String, Value>,
        shown: BTreeMap<String, String>,
        lost: &BTreeSet<String>,
    ) {
        let mut leads = Leads::restore(saved, shown);
        let mut state = self.lock();
        let is_there = |name: &str| state.nodes.contains_key(name) || lost.contains(name);
        for node in leads.nodes() {
            if !is_there(&node) {
                leads.forget(&node, &is_there);
            }
        }
        state.leads = leads;
    }

    /// An overlay was put over a node for a job that writes to it: nobody is to use it instead.
    pub(crate) fn forget_led(&self, from: &str, to: &str) {
        self.lock().leads.take_back(from, to);
    }

    /// Has `notes` called, with a node and the one that its users are led to, while these are held
    /// up: they go on when what it returns is done, and stay if that fails. The first call decides.
    pub fn before_leading(
        &self,
        notes: impl Fn(&Nodes, &str, &str) -> Note + Send + Sync + 'static,
    ) {
        self.before_going_on(move |nodes, led| match led {
            Some((from, to)) => notes(nodes, from, to),
            None => Box::pin(async { Ok(()) }),
        });
    }

    /// As [`Nodes::before_leading`], and without nodes where those that users are held up on stand on
    /// other ones, or show other bytes of these: what they write is elsewhere when they go on.
    pub fn before_going_on(
        &self,
        notes: impl Fn(&Nodes, Option<(&str, &str)>) -> Note + Send + Sync + 'static,
    ) {
        let _ = self.before_leading.0.set(Box::new(notes));
    }
}
