//! What the files of open nodes are called, as these stand on each other now, and the order in
//! which nodes were made.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap, HashSet};

use serde_json::{Value, json};
use vellum::Result;
use vellum::qcow2::BackingName;
use vellum_options::Options;

use crate::live::node::Node;
use crate::live::nodes::Nodes;
use crate::live::state::GraphState;
use crate::node::display::{Name, name_of_node};
use crate::node::errors::unknown_node;
use crate::node::opened::NodeKind;

/// What names are for.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Naming {
    /// Each node has that of what it is.
    AsTheyStand,
    /// What copies on reads, or has faults injected, has the name of the image below: nothing opens it
    /// for an overlay, or not as it is.
    ForHeaders,
}

impl Nodes {
    /// The names of files, by those of the nodes. A node that stands on others than its file name
    /// would open is called `json:{...}`.
    pub fn filenames(&self) -> BTreeMap<String, String> {
        let state = self.lock();
        let nodes: Vec<&str> = state.nodes.keys().map(String::as_str).collect();
        let names = state.names_of(&nodes, Naming::AsTheyStand);
        let text = |(node, name): (&str, Name<'_>)| (node.to_owned(), name.text());
        names.into_iter().map(text).collect()
    }

    /// What the header of an image calls a node that it stands on, so that the same is opened
    /// again. Not what copies on reads: nothing opens that for an overlay.
    ///
    /// # Errors
    /// If no node has the name, or its files are locked by another process.
    pub fn as_backing(&self, name: &str) -> Result<BackingName> {
        let (shown, found) = {
            let state = self.lock();
            let shown = state.below_copies(name);
            if !state.nodes.contains_key(shown) {
                return Err(unknown_node(shown));
            }
            let names = state.names_of(&state.with_below(shown), Naming::ForHeaders);
            (shown.to_owned(), names.get(shown).map(Name::text))
        };
        let info = self.device(&shown)?.info();
        let (name, format) = (found.unwrap_or(info.name), info.format);
        Ok(BackingName {
            name,
            format: Some(format.to_owned()),
        })
    }

    /// What a node of a format says that it stands on, if that is what it does stand on.
    pub fn backing_text(&self, name: &str) -> Option<String> {
        let state = self.lock();
        let below = state.uses.by_as(name, "backing")?;
        let node = state.nodes.get(name)?;
        let text = node.opened.backing_text();
        text.filter(|text| node.stands_by_header(Some(text), &below.node))
    }
}

impl GraphState {
    fn children<'a>(&'a self, name: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        let below = self.uses.by(name);
        below.map(|one| (&*one.wanted.role, &*one.node))
    }

    /// The names of all nodes in the order in which QEMU makes them: a file before the image in it, and
    /// what an image names after it.
    pub(crate) fn in_order_of_making(&self) -> Vec<&str> {
        let mut order = Vec::with_capacity(self.nodes.len());
        let mut known = HashSet::new();
        for root in self.nodes.roots() {
            self.made_with(root, root, &mut known, &mut order);
        }
        let others = self.nodes.keys().map(String::as_str);
        order.extend(others.filter(|name| !known.contains(name)));
        order
    }

    /// Adds a node of `owner`'s and those that were made with it.
    fn made_with<'a>(
        &'a self,
        name: &'a str,
        owner: &str,
        known: &mut HashSet<&'a str>,
        order: &mut Vec<&'a str>,
    ) {
        let is_own = self.nodes.get(name).is_some_and(|node| node.owner == owner);
        if !is_own || !known.insert(name) {
            return;
        }
        let (later, before): (Vec<_>, Vec<_>) = self
            .children(name)
            .partition(|(role, _)| *role == "backing");
        for (_, child) in before {
            self.made_with(child, owner, known, order);
        }
        order.push(name);
        for (_, child) in later {
            self.made_with(child, owner, known, order);
        }
    }

    /// The names of nodes and of all that these stand on, who are among them.
    pub(crate) fn names_of<'a>(
        &'a self,
        nodes: &[&'a str],
        naming: Naming,
    ) -> HashMap<&'a str, Name<'a>> {
        let mut names = HashMap::with_capacity(nodes.len());
        for node in self.ordered_top_down(nodes).into_iter().rev() {
            let below = match naming {
                Naming::AsTheyStand => node,
                Naming::ForHeaders => self.below_copies(node),
            };
            let found = match below == node {
                true => self.name_of(node, &names),
                false => names.get(below).cloned(),
            };
            if let Some(found) = found {
                names.insert(node, found);
            }
        }
        names
    }

    /// What a node stands on by way of filters that an overlay is not to name, or itself: those that copy
    /// on reads; and `blkdebug` over an image, which its name would open as a file.
    fn below_copies<'a>(&'a self, name: &'a str) -> &'a str {
        let mut name = name;
        while let Some(node) = self.nodes.get(name) {
            let role = match node.opened.driver.name {
                "copy-on-read" => "file",
                "blkdebug" => "image",
                _ => break,
            };
            let Some(below) = self.uses.by_as(name, role) else {
                break;
            };
            let is_image = |node: &Node| matches!(node.opened.kind, NodeKind::Device(_));
            if role == "image" && !self.nodes.get(&below.node).is_some_and(is_image) {
                break;
            }
            name = &below.node;
        }
        name
    }

    /// A node and all that it stands on.
    pub(crate) fn with_below<'a>(&'a self, name: &'a str) -> Vec<&'a str> {
        let mut names = vec![name];
        let mut known = HashSet::from([name]);
        let mut at = 0;
        while let Some(above) = names.get(at) {
            let below = self.uses.by(above).map(|one| one.node.as_str());
            names.extend(below.filter(|node| known.insert(*node)));
            at += 1;
        }
        names
    }

    /// The filter of a job in front of a node, if it has a name.
    fn filter_of(&self, name: &str) -> Option<&Node> {
        let mut nodes = self.owned(name).filter_map(|name| self.nodes.get(name));
        nodes.find(|node| node.is_filter)
    }

    fn name_of<'a>(
        &'a self,
        name: &'a str,
        known: &HashMap<&'a str, Name<'a>>,
    ) -> Option<Name<'a>> {
        let node = self.nodes.get(name)?;
        let options = match &node.origin {
            Some(origin) => Cow::Borrowed(&origin.options),
            None => Cow::Owned(Options::default()),
        };
        let child = |role: &str| {
            let (_, child) = self.children(name).find(|(key, _)| *key == role)?;
            known.get(child).cloned()
        };
        name_of_node(
            node.opened.driver,
            options,
            child,
            self.other_backing(name, node, known),
        )
    }

    /// What a node shows where it has nothing, if that is not what its header names.
    fn other_backing(
        &self,
        name: &str,
        node: &Node,
        known: &HashMap<&str, Name<'_>>,
    ) -> Option<Value> {
        let text = node.opened.backing_text();
        let Some((_, backing)) = self.children(name).find(|(role, _)| *role == "backing") else {
            return text.map(|_| Value::Null);
        };
        let by_header = node.stands_by_header(text.as_deref(), backing);
        let filter = self.filter_of(backing);
        let backing = known.get(backing)?;
        if let Some(filter) = filter {
            return Some(json!({"driver": filter.opened.driver.name, "backing": backing.json()}));
        }
        let same = by_header || (text.is_some() && text == Some(backing.text()));
        (!same).then(|| backing.json())
    }
}
