//! Layers of a chain, as commands name them: by a node or by the name of a file.

use std::path::PathBuf;

use vellum::BlockDevice;
use vellum_graph::live::Nodes;
use vellum_graph::node::backing_name;
use vellum_options::filename;

use crate::qmp::{Arguments, Failure};

use super::jobs::{not_in_chain, place_in};
use super::request::request;

request! {
    /// The range of a `block-commit`.
    #[derive(Debug)]
    pub(super) CommitRange {
        top_node: Option<String> = |a| a.text("top-node"),
        top: Option<String> = |a| a.text("top"),
        base_node: Option<String> = |a| a.text("base-node"),
        base: Option<String> = |a| a.text("base"),
    }
}

impl CommitRange {
    /// The places of the top and of the base in a chain.
    pub(super) fn find(self, nodes: &Nodes, chain: &[String]) -> Result<(usize, usize), Failure> {
        let both =
            |key: &str| Failure::new(format!("'{key}-node' and '{key}' are mutually exclusive"));
        let top_at = match (&self.top_node, &self.top) {
            (Some(_), Some(_)) => return Err(both("top")),
            (Some(node), None) => place_in(nodes, chain, node)?,
            (None, Some(name)) if is_called(nodes, &chain[0], name) => 0,
            (None, Some(name)) => place_below(nodes, chain, 0, name)
                .ok_or_else(|| Failure::new(format!("Top image file {name} not found")))?,
            (None, None) => 0,
        };
        let base_at = match (&self.base_node, &self.base) {
            (Some(_), Some(_)) => return Err(both("base")),
            (Some(node), None) => place_in(nodes, chain, node)?,
            (None, Some(name)) => need_below(nodes, chain, top_at, name)?,
            (None, None) => chain.len() - 1,
        };
        match base_at.cmp(&top_at) {
            std::cmp::Ordering::Greater
                if shown(nodes, chain, top_at) == shown(nodes, chain, base_at) =>
            {
                let text = "Invalid files for merge: top and base are the same";
                Err(Failure::new(text))
            }
            std::cmp::Ordering::Greater => Ok((top_at, base_at)),
            std::cmp::Ordering::Equal => Err(Failure::new("cannot commit an image into itself")),
            std::cmp::Ordering::Less => Err(not_in_chain(&chain[base_at])),
        }
    }
}

/// The base of a `block-stream`, which stays.
#[derive(Debug)]
pub(super) struct StreamBase {
    base: Option<String>,
    base_node: Option<String>,
    bottom: Option<String>,
}

impl StreamBase {
    pub(super) fn take(arguments: &mut Arguments) -> Result<StreamBase, Failure> {
        let taken = StreamBase {
            base: arguments.text("base")?,
            base_node: arguments.text("base-node")?,
            bottom: arguments.text("bottom")?,
        };
        let named = [
            ("base", &taken.base),
            ("bottom", &taken.bottom),
            ("base-node", &taken.base_node),
        ];
        let mut named = named.iter().filter(|(_, name)| name.is_some());
        // In QEMU's order of the two names.
        match (named.next(), named.next()) {
            (Some((one, _)), Some((other, _))) => Err(Failure::new(format!(
                "'{one}' and '{other}' cannot be specified at the same time"
            ))),
            _ => Ok(taken),
        }
    }

    /// Its place in a chain; the length of that where there is none.
    pub(super) fn find(self, nodes: &Nodes, chain: &[String]) -> Result<usize, Failure> {
        if let Some(name) = &self.base {
            return need_below(nodes, chain, 0, name);
        }
        if let Some(node) = &self.bottom {
            if nodes.is_filter(node) {
                return Err(Failure::new(format!(
                    "Node '{node}' is a filter, use a non-filter node as 'bottom'"
                )));
            }
            let at = place_in(nodes, chain, node).map_err(|_| {
                let image = &chain[0];
                Failure::new(format!(
                    "Node '{node}' is not in a chain starting from '{image}'"
                ))
            })?;
            return Ok(at + 1);
        }
        let Some(node) = &self.base_node else {
            return Ok(chain.len());
        };
        let image = &chain[0];
        let refused = || {
            let text = format!("Node '{node}' is not a backing image of '{image}'");
            Failure::new(text)
        };
        match place_in(nodes, chain, node) {
            Ok(0) => Err(refused()),
            Err(_) if nodes.contains(node) => Err(refused()),
            found => found,
        }
    }
}

fn need_below(nodes: &Nodes, chain: &[String], from: usize, name: &str) -> Result<usize, Failure> {
    let found = place_below(nodes, chain, from, name);
    found.ok_or_else(|| Failure::new(format!("Can't find '{name}' in the backing chain")))
}

fn is_called(nodes: &Nodes, node: &str, name: &str) -> bool {
    nodes.filenames().get(node).is_some_and(|own| own == name)
}

/// The place of the image that the one at a place shows, whatever filters are between.
fn shown(nodes: &Nodes, chain: &[String], at: usize) -> usize {
    let mut places = at..chain.len();
    let found = places.find(|&at| !nodes.is_filter(&chain[at]));
    found.unwrap_or(at)
}

/// The place of the layer below one that is called so: by its node's file, or by the words of the
/// image above it. A path is taken from that image's folder. Filters are passed by.
fn place_below(nodes: &Nodes, chain: &[String], from: usize, name: &str) -> Option<usize> {
    let filenames = nodes.filenames();
    let is_layer = |at: &usize| !nodes.is_filter(&chain[*at]);
    let mut above = &chain[from];
    for at in (from + 1..chain.len()).filter(is_layer) {
        let own = filenames.get(&chain[at]).map(String::as_str);
        if own == Some(name) || nodes.backing_text(above).as_deref() == Some(name) {
            return Some(at);
        }
        let file = nodes.child_of(above, "file");
        let file = file.as_ref().and_then(|file| filenames.get(file));
        if let (Some(file), Some(own)) = (file, own)
            && is_path_of(file, name, own)
        {
            return Some(at);
        }
        above = &chain[at];
    }
    None
}

/// Whether a name in the header of the image `above` is a path of the file `own`.
fn is_path_of(above: &str, name: &str, own: &str) -> bool {
    if name.starts_with("json:") || filename::protocol(name).is_some() {
        return false;
    }
    let whole = filename::resolve(above, name).ok();
    let whole = whole.and_then(|whole| real(&whole));
    whole.is_some() && whole == real(own)
}

/// Whether an image says in its header that it stands on a node's file.
pub(super) fn stands_by_header_on(
    nodes: &Nodes,
    image: &dyn BlockDevice,
    node: &str,
) -> Result<bool, Failure> {
    let Some(name) = backing_name::named(image).name else {
        return Ok(false);
    };
    let own = nodes.as_backing(node)?.name;
    Ok(name == own || is_path_of(&image.info().name, &name, &own))
}

fn real(path: &str) -> Option<PathBuf> {
    std::fs::canonicalize(path).ok()
}
