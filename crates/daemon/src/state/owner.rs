//! Who owns what there is: the configuration, or clients.
//!
//! - What the configuration names is the configuration's: disks, exports, limits, secrets, the NBD server, chain
//!   policies. Clients use it, and may change it or take it away, but nothing of that is recorded: the next start makes
//!   it as the file says, and a reload makes what is missing.
//! - All else is of clients, and recorded. Where both use a name, it is the configuration's from the next start on.
//! - Where users of a disk are is of clients, whoever owns the disk: an overlay that they put over it, or the target of
//!   a mirror. The graph, the nodes that exports show and the steps that led there are recorded whole for that, and no
//!   start or reload takes users back: it refuses what would.

use std::sync::Arc;

use serde_json::{Map, Value};
use vellum_graph::Nodes;

use crate::config::{PartKey, PartKind, Parts};

use super::described::{below, shows_the_same};
use super::saved::SavedState;

/// The parts that a configuration has made, by the texts of their keys, and the nodes that they were to have.
#[derive(Debug, Default)]
pub(super) struct OfConfig {
    made: Map<String, Value>,
    /// The same as text.
    pub(super) text: Arc<str>,
}

impl OfConfig {
    pub(super) fn new(parts: &Parts) -> OfConfig {
        let made = parts.in_order().into_iter().map(|part| {
            let node = part.arguments.get("node-name").cloned();
            (part.key.to_string(), node.unwrap_or_default())
        });
        let made: Map<String, Value> = made.collect();
        let text = Value::Object(made.clone()).to_string().into();
        OfConfig { made, text }
    }

    pub(super) fn has(&self, kind: PartKind, name: &str) -> bool {
        let key = PartKey::new(kind, name).to_string();
        self.made.contains_key(&key)
    }
}

impl SavedState {
    /// Whether the configuration had made a part.
    pub(super) fn was_of_config(&self, key: &PartKey) -> bool {
        self.config.contains_key(&key.to_string())
    }

    /// Whether a part is of clients: no configuration had made it, and `wanted` does not name it.
    pub(super) fn is_own(&self, kind: PartKind, name: &str, wanted: &Parts) -> bool {
        let key = PartKey::new(kind, name);
        !self.was_of_config(&key) && wanted.get(&key).is_none()
    }

    /// Why a node cannot come back under its name: a configuration has given that to a disk with another
    /// image, which whoever used the node would be shown.
    pub(super) fn name_is_taken(
        &self,
        node: &Map<String, Value>,
        wanted: &Parts,
        nodes: &Nodes,
    ) -> Option<String> {
        let name = node.get("node-name")?.as_str()?;
        let key = PartKey::new(PartKind::Disk, name);
        if wanted.get(&key).is_none() || self.was_of_config(&key) {
            return None;
        }
        let leads_here = |step: &Value| step.get("to").unwrap_or(step).as_str() == Some(name);
        let stands_here = |above: &Map<String, Value>| below(above) == Some(name);
        let is_used = self.led.values().any(leads_here)
            || self.exports.iter().any(|export| export.node == name)
            || self.nodes.iter().any(stands_here);
        let mut now = nodes.descriptions(None).into_iter();
        let (_, now) = now.find(|(one, _)| is_used && one == name)?;
        let is_same = shows_the_same(node, now.as_object()?);
        (!is_same).then(|| {
            format!(
                "'{name}' is another disk than the node that clients have made under that name and that is \
                 in use: call the disk otherwise, or move the state file away"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use crate::config::{Part, Place};

    use super::*;

    fn parts(names: &[&str]) -> Parts {
        let mut parts = Parts::default();
        for name in names {
            parts.put(Part {
                key: PartKey::new(PartKind::Disk, *name),
                arguments: Map::from_iter([("node-name".to_owned(), json!(name))]),
                needs: BTreeSet::new(),
                place: Place { line: 1, column: 1 },
            });
        }
        parts
    }

    #[test]
    fn what_the_configuration_has_made_or_names_is_not_of_clients() {
        let made = OfConfig::new(&parts(&["was"]));
        assert!(made.has(PartKind::Disk, "was") && !made.has(PartKind::Chain, "was"));
        let config: Value = serde_json::from_str(&made.text).expect("JSON");
        let saved = SavedState::of(json!({"config": config})).expect("a state");
        let wanted = parts(&["is"]);
        let of_clients = |name: &str| saved.is_own(PartKind::Disk, name, &wanted);
        assert_eq!(["was", "is", "other"].map(of_clients), [false, false, true]);
    }
}
