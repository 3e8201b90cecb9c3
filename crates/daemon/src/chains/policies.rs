//! [`ChainPolicies`]: the policies of disks, and how it stands with them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Map, Value, json};
use vellum_io::lane;

use super::decide::{Act, Chain, Leaving, Policy};

/// How soon something is tried again that has not helped, and how late.
const FIRST_PAUSE: Duration = Duration::from_secs(10);
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

#[derive(Debug, Default)]
pub(super) struct Kept {
    pub(super) policy: Policy,
    /// The layers for which a job was begun last, when it may be tried again, and after how long then.
    pub(super) tried: Option<(Vec<String>, Instant, Duration)>,
    pub(super) leaving: Option<Leaving>,
    pub(super) error: Option<String>,
}

impl Kept {
    /// Why nothing can be done with the chain of a disk, or what the last attempt has met.
    pub(super) fn shown_error(&self, chain: Result<Option<Chain>, &'static str>) -> Option<&str> {
        let hindrance = match chain {
            // The policy's own commit: what it has left is about to be closed, and looks until then like an
            // image over a lower one that an export shows.
            _ if self.leaving.is_some() => None,
            Err(why) => Some(why),
            Ok(chain) => chain.and_then(|chain| chain.act(&self.policy).err()),
        };
        hindrance.or(self.error.as_deref())
    }
}

/// The policies, by the nodes that they are of.
#[derive(Debug, Default)]
pub(crate) struct ChainPolicies {
    pub(super) kept: RefCell<BTreeMap<String, Kept>>,
    pub(super) runs: Cell<bool>,
    /// How often policies were set, or told what was left.
    pub(super) changes: Cell<u64>,
}

impl ChainPolicies {
    /// Those of some disks, as they are set again.
    pub(crate) fn describe(&self, of: impl Fn(&str) -> bool) -> Value {
        let kept = self.kept.borrow();
        let kept = kept.iter();
        kept.filter(|(name, kept)| kept.policy.bounds() && of(name))
            .map(|(name, kept)| Value::Object(kept.policy.describe(name)))
            .collect()
    }

    /// What jobs leave behind, for a state file.
    pub(crate) fn describe_left(&self) -> Value {
        let kept = self.kept.borrow();
        let left = kept
            .iter()
            .filter_map(|(name, kept)| Some(kept.leaving.as_ref()?.describe(name)));
        left.collect()
    }

    /// Takes in what a daemon before this one has noted of a job.
    pub(crate) fn take_left(&self, saved: &Map<String, Value>) {
        let name = saved.get("node-name").and_then(Value::as_str);
        if let Some(kept) = self.kept.borrow_mut().get_mut(name.unwrap_or_default()) {
            kept.leaving = Leaving::of(saved);
        }
        self.note_change();
    }

    /// Sets the policy of a disk in the place of another one.
    pub(super) fn replace(&self, name: String, policy: Policy) {
        let mut all = self.kept.borrow_mut();
        let kept = all.entry(name).or_default();
        let leaving = kept.leaving.take();
        *kept = Kept {
            policy,
            leaving,
            ..Kept::default()
        };
        drop(all);
        self.note_change();
    }

    /// Forgets a policy that was only there for its job.
    pub(super) fn forget_unbounded(&self, name: &str) {
        let mut all = self.kept.borrow_mut();
        if all.get(name).is_some_and(|kept| !kept.policy.bounds()) {
            all.remove(name);
        }
    }

    fn note_change(&self) {
        self.changes.set(self.changes.get() + 1);
    }

    pub(super) fn has_left(&self, name: &str) -> bool {
        let mut kept = self.kept.borrow_mut();
        let left = kept.get_mut(name).and_then(|kept| kept.leaving.as_mut());
        left.map(|left| left.is_ours = false).is_some()
    }

    pub(super) fn forget_left(&self, name: &str) {
        if let Some(kept) = self.kept.borrow_mut().get_mut(name) {
            kept.leaving = None;
        }
    }

    /// The node of a disk's own image, where that is another one.
    pub(super) fn image(&self, name: &str) -> Option<String> {
        self.kept.borrow().get(name)?.policy.image.clone()
    }

    /// Whether a disk has one.
    pub(crate) fn contains(&self, name: &str) -> bool {
        let kept = self.kept.borrow();
        kept.get(name).is_some_and(|kept| kept.policy.bounds())
    }
}

pub(super) fn job_of(name: &str) -> String {
    format!("chain-{name}")
}

/// Whether a chain has to be looked at again though nothing that is `Seen` has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Change,
    Interval,
}

impl ChainPolicies {
    /// What a chain waits for of which nothing is asked now.
    pub(super) fn wait_for(&self, name: &str, chain: &Chain) -> Next {
        let kept = self.kept.borrow();
        let Some(kept) = kept.get(name) else {
            return Next::Change;
        };
        // Files grow without a word.
        let may_grow = kept.policy.max_overlay_bytes.is_some() && chain.at > 0;
        match may_grow || kept.tried.is_some() {
            true => Next::Interval,
            false => Next::Change,
        }
    }

    /// The command that is to be carried out for a chain now, if one is.
    pub(super) fn next(
        &self,
        name: &str,
        chain: &Chain,
    ) -> Option<(&'static str, Map<String, Value>)> {
        let mut kept = self.kept.borrow_mut();
        let kept = kept.get_mut(name)?;
        let Ok(Some(act)) = chain.act(&kept.policy) else {
            kept.tried = None;
            kept.error = None;
            return None;
        };
        let layers: Vec<String> = chain
            .layers
            .iter()
            .map(|layer| layer.name.clone())
            .collect();
        let now = lane::now();
        let pause = match &kept.tried {
            Some((tried, until, _)) if *tried == layers && now < *until => return None,
            Some((tried, _, pause)) if *tried == layers => (*pause * 2).min(LONGEST_PAUSE),
            _ => FIRST_PAUSE,
        };
        let top = layers.first()?.clone();
        kept.tried = Some((layers, now + pause, pause));
        kept.leaving = chain.left_by(&act);
        let (command, layers) = match act {
            Act::Commit { top, base } => {
                ("block-commit", vec![("top-node", top), ("base-node", base)])
            }
            Act::Stream { base } => {
                let base = base.map(|base| ("base-node", base));
                ("block-stream", base.into_iter().collect())
            }
        };
        let texts = [("device", top), ("job-id", job_of(name))].into_iter();
        let texts = texts.chain(layers);
        let mut arguments: Map<String, Value> = texts
            .map(|(key, text)| (key.to_owned(), json!(text)))
            .collect();
        // Whether it has succeeded is looked at before it goes.
        arguments.insert("auto-dismiss".to_owned(), json!(false));
        if let Some(speed) = kept.policy.speed {
            arguments.insert("speed".to_owned(), json!(speed));
        }
        Some((command, arguments))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policies(max_layers: u64) -> ChainPolicies {
        let policies = ChainPolicies::default();
        let kept = Kept {
            policy: Policy {
                max_layers: Some(max_layers),
                ..Policy::default()
            },
            ..Kept::default()
        };
        policies.kept.borrow_mut().insert("d".to_owned(), kept);
        policies
    }

    #[test]
    fn what_the_policy_has_left_behind_itself_is_no_error() {
        let policies = policies(1);
        let mut all = policies.kept.borrow_mut();
        let kept = all.get_mut("d").expect("a policy");
        assert_eq!(kept.shown_error(Err("shown")), Some("shown"));
        kept.leaving = Chain::of_test("bdG", 1).left_by(&Act::Commit {
            top: "b".to_owned(),
            base: "d".to_owned(),
        });
        assert!(kept.leaving.is_some());
        assert_eq!(kept.shown_error(Err("shown")), None);
        kept.error = Some("failed".to_owned());
        assert_eq!(kept.shown_error(Err("shown")), Some("failed"));
    }

    #[test]
    fn what_does_not_help_is_tried_later_and_later() {
        let (policies, chain) = (policies(2), Chain::of_test("bdG", 1));
        let (command, arguments) = policies.next("d", &chain).expect("it is beyond");
        assert_eq!(command, "block-commit");
        let expected = json!({"device": "b", "top-node": "b", "base-node": "d",
            "job-id": "chain-d", "auto-dismiss": false});
        assert_eq!(Value::Object(arguments), expected);
        assert_eq!(policies.next("d", &chain), None);
        let other = Chain::of_test("cdG", 1);
        assert!(policies.next("d", &other).is_some());
    }
}
