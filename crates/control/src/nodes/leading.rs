//! Users of a node that are led to another one: [`BeforeLeading`], who wants to know of it before, and
//! [`Leads`], where they are now.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use serde_json::{Value, json};
use vellum::Result;

use super::{MADE_UP, Nodes};

type Note = Pin<Box<dyn Future<Output = Result<()>> + Send>>;
type Notes = dyn Fn(&Nodes, &str, &str) -> Note + Send + Sync;

/// Notes it, while users are held up; if that fails they stay.
#[derive(Clone, Default)]
pub(super) struct BeforeLeading(Arc<OnceLock<Box<Notes>>>);

impl BeforeLeading {
    /// What is to be waited for, if anybody wants to know.
    pub(super) fn note(&self, nodes: &Nodes, from: &str, to: &str) -> Option<Note> {
        self.0.get().map(|notes| notes(nodes, from, to))
    }
}

impl fmt::Debug for BeforeLeading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BeforeLeading({})", self.0.get().is_some())
    }
}

/// From which nodes users were led, and to which, in one step: where those are who would use a node now
/// if they had used it all the time. Also of nodes that had no users when they were led.
#[derive(Debug, Clone, Default)]
pub(crate) struct Leads(BTreeMap<String, String>);

impl Leads {
    pub(crate) fn note(&mut self, from: &str, to: &str) {
        self.0.remove(to);
        self.0.insert(from.to_owned(), to.to_owned());
    }

    /// Where users of a node are, if that is not there.
    fn of(&self, node: &str) -> Option<&str> {
        let steps = std::iter::successors(self.0.get(node), |at| self.0.get(*at));
        steps.take(self.0.len()).last().map(String::as_str)
    }

    /// The nodes that these are about.
    fn nodes(&self) -> BTreeSet<String> {
        let steps = self.0.iter();
        steps
            .flat_map(|(from, to)| [from.clone(), to.clone()])
            .collect()
    }

    /// Forgets a node that is gone.
    pub(super) fn forget(&mut self, node: &str) {
        match self.0.remove(node) {
            Some(on) => {
                let here = self.0.values_mut().filter(|to| *to == node);
                here.for_each(|to| to.clone_from(&on));
            }
            None => self.0.retain(|_, to| to != node),
        }
    }

    /// Takes a note back.
    fn take_back(&mut self, from: &str, to: &str) {
        self.0.retain(|one, other| one != from || other != to);
    }

    /// As a state file has them, and `shown` beside them: where users of nodes were seen. The steps of a map have
    /// no order, so none of them takes another one back.
    fn restore(saved: BTreeMap<String, String>, shown: BTreeMap<String, String>) -> Leads {
        let mut leads = Leads(saved);
        for (from, to) in shown {
            let leads_back = to == from || leads.of(&to) == Some(&*from);
            if !leads_back {
                leads.0.entry(from).or_insert(to);
            }
        }
        leads
    }

    /// For a state file.
    pub(crate) fn describe(&self) -> Value {
        json!(self.0)
    }
}

impl Nodes {
    /// Whether a node has no name but one that was made up, and that another one has at the next start.
    pub(crate) fn is_made_up(&self, node: &str) -> bool {
        node.starts_with(MADE_UP)
    }

    /// Where the users of a node were led, if they are not there any more.
    pub(crate) fn led_to(&self, node: &str) -> Option<String> {
        self.lock().leads.of(node).map(str::to_owned)
    }

    /// From which nodes users were led, and to which.
    pub(crate) fn leads(&self) -> Leads {
        self.lock().leads.clone()
    }

    /// Notes where users were led before the program was started again: in which steps, and where they
    /// were seen. Nodes that are `lost` may come back.
    pub(crate) fn restore_leads(
        &self,
        saved: BTreeMap<String, String>,
        shown: BTreeMap<String, String>,
        lost: &BTreeSet<String>,
    ) {
        let mut leads = Leads::restore(saved, shown);
        let mut named = self.lock();
        for node in leads.nodes() {
            if !named.nodes.contains_key(&node) && !lost.contains(&node) {
                leads.forget(&node);
            }
        }
        named.leads = leads;
    }

    /// An overlay was put over a node for a job that writes to it: nobody is to use it instead.
    pub(super) fn forget_led(&self, from: &str, to: &str) {
        self.lock().leads.take_back(from, to);
    }

    /// Has `notes` called, with a node and the one that its users are led to, while these are held
    /// up: they go on when what it returns is done, and stay if that fails. The first call decides.
    pub fn before_leading(
        &self,
        notes: impl Fn(&Nodes, &str, &str) -> Note + Send + Sync + 'static,
    ) {
        let _ = self.before_leading.0.set(Box::new(notes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_are_where_they_were_led_last() {
        let mut leads = Leads::default();
        assert_eq!(leads.of("disk"), None);
        leads.note("disk", "over1");
        leads.note("over1", "over2");
        assert_eq!(leads.of("disk"), Some("over2"));
        assert_eq!(leads.of("over1"), Some("over2"));
        // A stream has made the one between superfluous.
        leads.forget("over1");
        assert_eq!(leads.of("disk"), Some("over2"));
        // They were led back.
        leads.note("over2", "disk");
        assert_eq!((leads.of("disk"), leads.of("over2")), (None, Some("disk")));
        leads.note("disk", "over3");
        leads.forget("over3");
        assert_eq!(leads.of("disk"), None);
    }

    #[test]
    fn users_below_limits_are_told_by_their_disk() {
        let mut leads = Leads::default();
        leads.note("disk", "over");
        leads.note("over", "disk-image");
        assert_eq!(leads.of("disk"), Some("disk-image"));
        leads.take_back("over", "other");
        assert_eq!(leads.of("disk"), Some("disk-image"));
        leads.take_back("over", "disk-image");
        assert_eq!(leads.of("disk"), Some("over"));
    }

    #[test]
    fn a_state_file_has_the_steps_in_the_order_of_names() {
        for names in [["vm1", "monday", "tuesday"], ["s10", "s8", "s9"]] {
            let mut leads = Leads::default();
            leads.note(names[0], names[1]);
            leads.note(names[1], names[2]);
            let saved = serde_json::from_value(leads.describe()).expect("steps");
            let shown = BTreeMap::from([(names[0].to_owned(), names[2].to_owned())]);
            let again = Leads::restore(saved, shown);
            assert_eq!(again.of(names[0]), Some(names[2]));
            assert_eq!(again.of(names[1]), Some(names[2]));
        }
        let text = str::to_owned;
        let saved = BTreeMap::from([(text("over"), text("disk"))]);
        // As an export showed it before users were led back.
        let shown = BTreeMap::from([(text("disk"), text("over"))]);
        let leads = Leads::restore(saved, shown.clone());
        assert_eq!((leads.of("disk"), leads.of("over")), (None, Some("disk")));
        // A state file of a version that did not note the steps.
        let leads = Leads::restore(BTreeMap::new(), shown);
        assert_eq!(leads.of("disk"), Some("over"));
    }
}
