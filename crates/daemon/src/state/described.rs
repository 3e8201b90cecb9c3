//! Nodes as a state file describes them: what they name, and what they stand on. No node is opened here.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

/// Members whose texts name no other node.
const NO_REFERENCES: [&str; 4] = ["driver", "node-name", "filename", "throttle-group"];

/// The nodes that texts within a value name.
fn references<'a>(value: &'a Value, found: &mut BTreeSet<&'a str>) {
    match value {
        Value::String(text) => drop(found.insert(text)),
        Value::Array(items) => items.iter().for_each(|item| references(item, found)),
        Value::Object(members) => references_of(members, found),
        _ => {}
    }
}

pub(super) fn references_of<'a>(members: &'a Map<String, Value>, found: &mut BTreeSet<&'a str>) {
    for (key, value) in members {
        if !NO_REFERENCES.contains(&key.as_str()) {
            references(value, found);
        }
    }
}

/// The node that another one shows by its `file`, if it has a name.
pub(super) fn below(node: &Map<String, Value>) -> Option<&str> {
    let file = node.get("file")?;
    file.as_str()
        .or_else(|| file.get("node-name").and_then(Value::as_str))
}

/// More stand on each other in no graph that anybody has made.
const MAX_FILTERS: usize = 64;

/// A node among some others that one stands on.
pub(super) fn stands_on<'a>(
    node: &'a Map<String, Value>,
    others: &BTreeSet<String>,
) -> Option<&'a str> {
    let mut named = BTreeSet::new();
    references_of(node, &mut named);
    let own = node.get("node-name").and_then(Value::as_str);
    let mut named = named.into_iter().filter(|name| Some(*name) != own);
    named.find(|name| others.contains(*name))
}

/// What is said of a node that is not brought back for want of another one.
pub(super) fn cannot_stand(name: &str, gone: &str) -> String {
    format!("cannot bring the node '{name}' back: it stands on '{gone}', which is not there")
}

/// Where the bytes of an image are, whatever the options of its opening.
pub(super) fn place(node: &Map<String, Value>) -> Vec<&Value> {
    const PLACES: [&str; 8] = [
        "driver", "filename", "path", "server", "export", "url", "image", "pool",
    ];
    let file = node.get("file").unwrap_or(&Value::Null);
    let own = PLACES.iter().filter_map(|key| node.get(*key));
    own.chain(PLACES.iter().filter_map(|key| file.get(*key)))
        .collect()
}

/// Nodes, each after those that it names: what users are led to may stand behind them in the file.
pub(super) fn bottom_up(nodes: &[Map<String, Value>]) -> Vec<&Map<String, Value>> {
    let name = |node: &'_ Map<String, Value>| {
        let name = node.get("node-name").and_then(Value::as_str);
        name.unwrap_or_default().to_owned()
    };
    let mut left: BTreeSet<String> = nodes.iter().map(name).collect();
    let mut pending: Vec<&Map<String, Value>> = nodes.iter().collect();
    let mut ordered = Vec::with_capacity(nodes.len());
    while !pending.is_empty() {
        let count = ordered.len();
        let mut later = Vec::new();
        for node in pending {
            let mut named = BTreeSet::new();
            references_of(node, &mut named);
            let own = name(node);
            match named
                .iter()
                .any(|other| *other != own && left.contains(*other))
            {
                true => later.push(node),
                false => {
                    left.remove(&own);
                    ordered.push(node);
                }
            }
        }
        if ordered.len() == count {
            // A circle, which opening them will tell.
            ordered.append(&mut later);
        }
        pending = later;
    }
    ordered
}

/// The node whose bytes a node shows: it, or what is below its limits.
pub(super) fn image_below<'a>(
    node: &'a Map<String, Value>,
    find: impl Fn(&str) -> Option<&'a Map<String, Value>>,
) -> &'a Map<String, Value> {
    let next = |node: &&'a Map<String, Value>| {
        let is_filter = node.get("driver").and_then(Value::as_str) == Some("throttle");
        match node.get("file").filter(|_| is_filter)? {
            Value::String(name) => find(name),
            Value::Object(described) => Some(described),
            _ => None,
        }
    };
    // Nothing stands on itself.
    let steps = std::iter::successors(Some(node), next);
    steps.take(MAX_FILTERS).last().unwrap_or(node)
}

/// Whether two nodes show the same image, as far as their descriptions tell.
pub(in super::super) fn shows_the_same(
    one: &Map<String, Value>,
    other: &Map<String, Value>,
) -> bool {
    let places = [one, other].map(|node| place(image_below(node, |_| None)));
    let file = |places: &[&Value]| {
        let path = places.last()?.as_str()?;
        std::fs::canonicalize(path).ok()
    };
    let [one, other] = &places;
    one == other || file(one).is_some_and(|path| Some(path) == file(other))
}

/// The members of an object.
pub(super) fn members(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(members) => members,
        _ => Map::new(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nodes_come_after_those_that_they_name() {
        let nodes = [
            json!({"node-name": "limits", "file": "over", "throttle-group": "base"}),
            json!({"node-name": "sum", "children": {"0": "limits", "1": {"file": "base"}}}),
            json!({"node-name": "over", "backing": "base", "file": {"filename": "limits"}}),
            json!({"node-name": "base", "file": {"driver": "file", "filename": "sum"}}),
            json!({"node-name": "one", "file": "other"}),
            json!({"node-name": "other", "file": "one"}),
        ];
        let nodes: Vec<_> = nodes.into_iter().map(members).collect();
        let ordered = bottom_up(&nodes);
        let names: Vec<&str> = ordered
            .iter()
            .filter_map(|node| node["node-name"].as_str())
            .collect();
        assert_eq!(names, ["base", "over", "limits", "sum", "one", "other"]);
    }

    #[test]
    fn a_disk_is_the_same_with_and_without_limits() {
        let at = |name: &str, filename: &str| json!({"driver": "qcow2", "node-name": name, "file": {"driver": "file", "filename": filename}});
        let on = |below: &str| json!({"driver": "throttle", "node-name": "d", "file": below});
        let mut inside = on("");
        inside["file"] = at("d-image", "d");
        let nodes = [
            at("d-image", "d"),
            at("o", "o"),
            on("d-image"),
            on("o"),
            at("d", "d"),
            inside,
        ];
        let nodes = nodes.map(members);
        let [image, overlay, limited, over, plain, inside] = &nodes;
        let find = |name: &str| match name {
            "d-image" => Some(image),
            "o" => Some(overlay),
            _ => None,
        };
        let place_of = |node| place(image_below(node, find));
        assert_eq!(place_of(plain), place_of(limited));
        assert_eq!(place_of(plain), place_of(inside));
        assert_ne!(place_of(plain), place_of(over));
    }
}
