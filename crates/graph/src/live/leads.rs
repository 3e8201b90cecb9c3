//! [`Leads`]: where users of nodes were led.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

/// Where users of a node were led.
#[derive(Debug, Clone, PartialEq)]
pub struct Step {
    pub(crate) to: String,
    /// How the node was described then: another one may get its name.
    pub(crate) was: Option<Value>,
}

impl Step {
    /// As a state file has it.
    fn of(saved: Value) -> Option<Step> {
        match saved {
            Value::String(to) => Some(Step { to, was: None }),
            Value::Object(mut members) => Some(Step {
                to: members.get("to")?.as_str()?.to_owned(),
                was: members.remove("was"),
            }),
            _ => None,
        }
    }

    fn describe(&self) -> Value {
        match &self.was {
            None => json!(self.to),
            Some(was) => json!({"to": self.to, "was": was}),
        }
    }
}

/// From which nodes users were led, and to which, in one step: where those are who would use a node now
/// if they had used it all the time. Also of nodes that had no users when they were led, and of nodes that
/// are gone and that a file of disks may bring back.
#[derive(Debug, Clone, Default)]
pub struct Leads(pub(crate) BTreeMap<String, Step>);

impl Leads {
    pub(crate) fn note(&mut self, from: &str, to: &str, was: Option<Value>) {
        self.0.remove(to);
        let to = to.to_owned();
        self.0.insert(from.to_owned(), Step { to, was });
    }

    /// Where users of a node are, if that is not there.
    pub(crate) fn of(&self, node: &str) -> Option<&str> {
        let next = |at: &str| self.0.get(at).map(|step| &*step.to);
        let steps = std::iter::successors(next(node), |at| next(at));
        steps.take(self.0.len()).last()
    }

    /// The nodes that these are about.
    pub(crate) fn nodes(&self) -> BTreeSet<String> {
        let steps = self.0.iter();
        steps
            .flat_map(|(from, step)| [from.clone(), step.to.clone()])
            .collect()
    }

    /// Forgets the steps that lead to a node that is gone, and on to no other one, and those to where such
    /// steps began, unless that `is_there`.
    pub(crate) fn forget(&mut self, gone: &str, is_there: &dyn Fn(&str) -> bool) {
        let mut pending = vec![gone.to_owned()];
        while let Some(gone) = pending.pop() {
            if self.0.contains_key(&gone) {
                continue;
            }
            let here = self.0.iter().filter(|(_, step)| step.to == gone);
            let here: Vec<String> = here.map(|(from, _)| from.clone()).collect();
            for from in here {
                self.0.remove(&from);
                if !is_there(&from) {
                    pending.push(from);
                }
            }
        }
    }

    /// Takes the step from a node out, whose name means another one from now on: who was led there and on
    /// stays where that led to.
    pub(crate) fn take(&mut self, node: &str) -> Option<Step> {
        let taken = self.0.remove(node)?;
        for step in self.0.values_mut().filter(|step| step.to == node) {
            step.to.clone_from(&taken.to);
        }
        self.0.retain(|from, step| *from != step.to);
        Some(taken)
    }

    /// Takes a note back.
    pub(crate) fn take_back(&mut self, from: &str, to: &str) {
        self.0.retain(|one, step| one != from || step.to != to);
    }

    /// As a state file has them, and `shown` beside them: where users of nodes were seen. The steps of a map have
    /// no order, so none of them takes another one back.
    pub(crate) fn restore(saved: Map<String, Value>, shown: BTreeMap<String, String>) -> Leads {
        let saved = saved.into_iter();
        let steps = saved.filter_map(|(from, step)| Some((from, Step::of(step)?)));
        let mut leads = Leads(steps.collect());
        for (from, to) in shown {
            let leads_back = to == from || leads.of(&to) == Some(&*from);
            if !leads_back {
                leads.0.entry(from).or_insert(Step { to, was: None });
            }
        }
        leads
    }

    /// For a state file.
    pub fn describe(&self) -> Value {
        let steps = self.0.iter();
        let steps = steps.map(|(from, step)| (from.clone(), step.describe()));
        Value::Object(steps.collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(leads: &mut Leads, from: &str, to: &str) {
        leads.note(from, to, None);
    }

    #[test]
    fn users_are_where_they_were_led_last() {
        let mut leads = Leads::default();
        assert_eq!(leads.of("disk"), None);
        note(&mut leads, "disk", "over1");
        note(&mut leads, "over1", "over2");
        assert_eq!(leads.of("disk"), Some("over2"));
        assert_eq!(leads.of("over1"), Some("over2"));
        // A stream has made the one between superfluous, and the disk may come back.
        leads.forget("over1", &|_| false);
        leads.forget("disk", &|_| false);
        assert_eq!(leads.of("disk"), Some("over2"));
        // They were led back.
        note(&mut leads, "over2", "disk");
        assert_eq!((leads.of("disk"), leads.of("over2")), (None, Some("disk")));
        note(&mut leads, "disk", "over3");
        leads.forget("over3", &|_| true);
        assert_eq!(leads.of("disk"), None);
    }

    #[test]
    fn steps_to_where_nobody_is_any_more_are_forgotten() {
        let mut leads = Leads::default();
        note(&mut leads, "disk", "over1");
        note(&mut leads, "over1", "over2");
        leads.forget("over1", &|_| false);
        leads.forget("over2", &|name| name == "disk");
        assert!(leads.nodes().is_empty());
    }

    #[test]
    fn a_name_that_another_node_gets_leads_nobody_to_it() {
        let mut leads = Leads::default();
        note(&mut leads, "disk", "over1");
        note(&mut leads, "over1", "over2");
        leads.forget("over1", &|_| false);
        // Another node is called so from now on, and may go again.
        assert_eq!(
            leads.take("over1").map(|step| step.to).as_deref(),
            Some("over2")
        );
        assert_eq!((leads.of("disk"), leads.of("over1")), (Some("over2"), None));
        leads.forget("over1", &|_| true);
        assert_eq!(leads.of("disk"), Some("over2"));
        // Users go there in the end, and on.
        note(&mut leads, "over2", "over1");
        note(&mut leads, "over1", "over3");
        assert_eq!(leads.of("disk"), Some("over3"));
        // Who was led back where they were is not led anywhere.
        note(&mut leads, "over3", "disk");
        leads.take("over3");
        assert_eq!(leads.of("disk"), None);
    }

    #[test]
    fn users_below_limits_are_told_by_their_disk() {
        let mut leads = Leads::default();
        note(&mut leads, "disk", "over");
        note(&mut leads, "over", "disk-image");
        assert_eq!(leads.of("disk"), Some("disk-image"));
        leads.take_back("over", "other");
        assert_eq!(leads.of("disk"), Some("disk-image"));
        leads.take_back("over", "disk-image");
        assert_eq!(leads.of("disk"), Some("over"));
    }

    fn members(value: Value) -> Map<String, Value> {
        match value {
            Value::Object(members) => members,
            other => panic!("{other}"),
        }
    }

    #[test]
    fn a_state_file_has_the_steps_in_the_order_of_names() {
        for names in [["vm1", "monday", "tuesday"], ["s10", "s8", "s9"]] {
            let mut leads = Leads::default();
            let was = json!({"driver": "qcow2", "file": "x"});
            leads.note(names[0], names[1], Some(was.clone()));
            note(&mut leads, names[1], names[2]);
            let saved = members(leads.describe());
            let shown = BTreeMap::from([(names[0].to_owned(), names[2].to_owned())]);
            let again = Leads::restore(saved, shown);
            assert_eq!(again.of(names[0]), Some(names[2]));
            assert_eq!(again.of(names[1]), Some(names[2]));
            assert_eq!(again.0[names[0]].was, Some(was));
        }
        let saved = members(json!({"over": "disk", "wrong": 3}));
        // As an export showed it before users were led back.
        let shown = BTreeMap::from([("disk".to_owned(), "over".to_owned())]);
        let leads = Leads::restore(saved, shown.clone());
        assert_eq!((leads.of("disk"), leads.of("over")), (None, Some("disk")));
        // A state file of a version that did not note the steps.
        let leads = Leads::restore(Map::new(), shown);
        assert_eq!(leads.of("disk"), Some("over"));
    }
}
