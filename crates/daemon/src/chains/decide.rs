//! What is to be done with a chain: pure, of what nodes are at one moment.

use serde_json::{Map, Value, json};
use vellum_graph::live::{Inventory, NodeState};

use crate::qmp::{Arguments, Failure};

use super::look::Look;

/// Why chains are left alone.
const SEVERAL: &str = "Several disks stand on the disk's own image: no chain is that disk's alone";
const SHOWN: &str =
    "An export shows a lower image of the chain: images above it do not know what is written there";
const OTHERS: &str = "The disk's own image, or one over it, has other users: overlays are not committed into it, and \
     without 'max-layers' nothing else can be done";

/// What a chain may be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Policy {
    /// So many images in all.
    pub(super) max_layers: Option<u64>,
    /// So much in overlays of the disk's image, in bytes.
    pub(super) max_overlay_bytes: Option<u64>,
    /// Most bytes a second of its jobs.
    pub(super) speed: Option<u64>,
    /// The node of the disk's own image, where that of the disk is a filter: overlays are put between
    /// the two. It may be gone.
    pub(super) image: Option<String>,
}

impl Policy {
    pub(super) fn take(arguments: &mut Arguments) -> Result<Policy, Failure> {
        let max_layers = arguments.size("max-layers")?;
        if max_layers == Some(0) {
            return Err(Failure::new(
                "'max-layers' is at least 1: the disk's own image",
            ));
        }
        Ok(Policy {
            max_layers,
            max_overlay_bytes: arguments.size("max-overlay-bytes")?,
            speed: arguments.size("speed")?,
            image: arguments.text("image-node")?,
        })
    }

    pub(super) fn bounds(&self) -> bool {
        self.max_layers.is_some() || self.max_overlay_bytes.is_some()
    }

    pub(super) fn describe(&self, name: &str) -> Map<String, Value> {
        let members = [
            ("max-layers", self.max_layers),
            ("max-overlay-bytes", self.max_overlay_bytes),
            ("speed", self.speed),
        ];
        let said = members
            .into_iter()
            .filter_map(|(key, value)| Some((key.to_owned(), json!(value?))));
        let image = self.image.iter();
        let image = image.map(|image| ("image-node".to_owned(), json!(image)));
        let name = ("node-name".to_owned(), json!(name));
        std::iter::once(name).chain(image).chain(said).collect()
    }
}

/// Overlays that nobody needs any more once a job has succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Leaving {
    /// From the top down.
    pub(super) nodes: Vec<String>,
    /// The topmost image when the job began.
    pub(super) top: String,
    /// What they were committed into.
    pub(super) base: String,
    /// This daemon has begun the job, and no other one before it.
    pub(super) is_ours: bool,
}

impl Leaving {
    /// For a state file.
    pub(super) fn describe(&self, name: &str) -> Value {
        json!({"node-name": name, "nodes": self.nodes, "top": self.top, "base": self.base})
    }

    pub(super) fn of(saved: &Map<String, Value>) -> Option<Leaving> {
        let text = |key: &str| Some(saved.get(key)?.as_str()?.to_owned());
        let nodes = saved.get("nodes")?.as_array()?.iter();
        Some(Leaving {
            nodes: nodes
                .filter_map(|node| Some(node.as_str()?.to_owned()))
                .collect(),
            top: text("top")?,
            base: text("base")?,
            is_ours: false,
        })
    }
}

/// An image of a chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Layer {
    pub(super) name: String,
    /// Of overlays only.
    pub(super) allocated_bytes: u64,
    /// Nobody uses it but the layer above, or the disk's users if there is none.
    pub(super) is_own: bool,
}

/// A chain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Chain {
    /// From the top down.
    pub(super) layers: Vec<Layer>,
    /// The place of the image whose policy it is.
    pub(super) at: usize,
    /// The topmost filter right above that image, below the overlays: limits, say, which users are to
    /// have again.
    pub(super) filter: Option<String>,
    pub(super) is_busy: bool,
}

/// The next step that keeps a chain short.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Act {
    /// What lies from `top` to above `base` goes into that.
    Commit { top: String, base: String },
    /// The topmost layer takes in what lies above `base`; all, if there is none.
    Stream { base: Option<String> },
}

impl Chain {
    /// What a commit leaves behind.
    pub(super) fn left_by(&self, act: &Act) -> Option<Leaving> {
        let Act::Commit { top, base } = act else {
            return None;
        };
        let names = self.layers[..self.at].iter().map(|layer| &layer.name);
        Some(Leaving {
            nodes: names.skip_while(|name| *name != top).cloned().collect(),
            top: self.layers.first()?.name.clone(),
            base: base.clone(),
            is_ours: true,
        })
    }

    pub(super) fn overlay_bytes(&self) -> u64 {
        let overlays = self.layers[..self.at].iter();
        overlays.map(|layer| layer.allocated_bytes).sum()
    }

    /// What brings the chain to what it may be, if it is beyond.
    ///
    /// # Errors
    /// Why nothing can.
    pub(super) fn act(&self, policy: &Policy) -> Result<Option<Act>, &'static str> {
        let count = self.layers.len() as u64;
        let (layers, at) = (&self.layers, self.at);
        let beyond_layers = policy.max_layers.filter(|most| count > *most);
        let fits = |bytes: u64| policy.max_overlay_bytes.is_none_or(|most| bytes <= most);
        if beyond_layers.is_none() && fits(self.overlay_bytes()) {
            return Ok(None);
        }
        if at > 0 && layers[1..=at].iter().all(|layer| layer.is_own) {
            // Users need not change over where the layers between do.
            let kept = count - at as u64 + 1;
            let is_enough = policy.max_layers.is_none_or(|most| kept <= most)
                && fits(layers[0].allocated_bytes);
            let top = if at > 1 && is_enough { 1 } else { 0 };
            let base = self.filter.as_ref().unwrap_or(&layers[at].name);
            return Ok(Some(Act::Commit {
                top: layers[top].name.clone(),
                base: base.clone(),
            }));
        }
        // What others use is not written to, so the disk gets what it needs of it.
        let base = count - beyond_layers.ok_or(OTHERS)?.max(1) + 1;
        Ok(Some(Act::Stream {
            base: layers.get(base as usize).map(|layer| layer.name.clone()),
        }))
    }
}

/// The uppermost image that a node shows.
pub(super) fn first_image<'a>(nodes: &'a Inventory, name: &str) -> Option<&'a NodeState> {
    nodes.layers(nodes.get(name)).find(|node| !node.is_filter)
}

/// The chain that a disk's own image is in, if the disk is there: `image`, unless that is gone (what stands
/// on it has taken in all of it), then the first one that its node shows.
///
/// # Errors
/// Why it is left alone.
pub(super) fn chain_of(
    look: &Look,
    name: &str,
    image: Option<&String>,
) -> Option<Result<Chain, &'static str>> {
    let nodes = &look.nodes;
    let mut shown = nodes.layers(nodes.get(name));
    let own = match shown.find(|node| Some(&node.name) == image) {
        Some(own) => own,
        None => first_image(nodes, name)?,
    };
    let Some(top) = look.only_top(&own.name) else {
        return Some(Err(SEVERAL));
    };
    let all: Vec<&NodeState> = nodes.layers(nodes.node(top)).collect();
    // Users on a lower layer write what those above it do not know: nothing here is as it seems.
    if all.iter().skip(1).any(|node| look.is_exported(&node.name)) {
        return Some(Err(SHOWN));
    }
    Some(Ok(chain(look, &all, &own.name)?))
}

/// The chain of these nodes, from the top down.
fn chain(look: &Look, all: &[&NodeState], own: &str) -> Option<Chain> {
    let above_own = all.iter().take_while(|node| node.name != own);
    let above_own: Vec<&NodeState> = above_own.copied().collect();
    let filters = above_own.iter().rev().take_while(|node| node.is_filter);
    // One at the very top has no overlays above it.
    let is_first = |node: &NodeState| all.first().is_some_and(|top| top.name == node.name);
    let filter = filters.last().filter(|node| !is_first(node));
    let images = all.iter().filter(|node| !node.is_filter);
    let images: Vec<&NodeState> = images.copied().collect();
    let at = images.iter().position(|node| node.name == own)?;
    let layers = images.iter().enumerate().map(|(place, node)| {
        let file = look.nodes.child(node, "file").filter(|_| place < at);
        Layer {
            name: node.name.clone(),
            allocated_bytes: file
                .and_then(NodeState::asked_allocated_bytes)
                .unwrap_or_default(),
            is_own: look.is_own(node),
        }
    });
    Some(Chain {
        layers: layers.collect(),
        at,
        filter: filter.map(|node| node.name.clone()),
        is_busy: all.iter().any(|node| !node.jobs.is_empty()),
    })
}

#[cfg(test)]
impl Chain {
    /// Layers, of which those in capitals are used by others too; `at` is the disk's.
    pub(super) fn of_test(names: &str, at: usize) -> Chain {
        let layer = |name: char| Layer {
            name: name.to_string(),
            allocated_bytes: 10,
            is_own: name.is_ascii_lowercase(),
        };
        Chain {
            layers: names.chars().map(layer).collect(),
            at,
            filter: None,
            is_busy: false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(names: &str, at: usize) -> Chain {
        Chain::of_test(names, at)
    }

    fn layers(most: u64) -> Policy {
        Policy {
            max_layers: Some(most),
            ..Policy::default()
        }
    }

    type Decided = Result<Option<Act>, &'static str>;

    fn commit(top: &str, base: &str) -> Decided {
        Ok(Some(Act::Commit {
            top: top.to_owned(),
            base: base.to_owned(),
        }))
    }

    fn stream(base: Option<&str>) -> Decided {
        let base = base.map(str::to_owned);
        Ok(Some(Act::Stream { base }))
    }

    #[test]
    fn overlays_are_committed_into_the_disks_own_image_and_no_further() {
        assert_eq!(chain("badG", 2).act(&layers(4)), Ok(None));
        assert_eq!(chain("badG", 2).act(&layers(3)), commit("a", "d"));
        assert_eq!(chain("badG", 2).act(&layers(2)), commit("b", "d"));
        assert_eq!(chain("bdG", 1).act(&layers(2)), commit("b", "d"));
    }

    #[test]
    fn limits_between_overlays_and_the_image_are_gone_back_to() {
        let limited = Chain {
            filter: Some("limits".to_owned()),
            ..chain("badG", 2)
        };
        assert_eq!(limited.act(&layers(3)), commit("a", "limits"));
        assert_eq!(limited.act(&layers(2)), commit("b", "limits"));
    }

    #[test]
    fn overlays_that_are_committed_are_left_behind() {
        let chain = chain("cbadG", 3);
        let left = |top: &str| {
            let act = commit(top, "d").ok().flatten().expect("an act");
            chain.left_by(&act).expect("some").nodes
        };
        assert_eq!(
            (left("c"), left("b")),
            (
                ["c", "b", "a"].map(str::to_owned).to_vec(),
                ["b", "a"].map(str::to_owned).to_vec()
            )
        );
        assert_eq!(chain.left_by(&Act::Stream { base: None }), None);
    }

    #[test]
    fn what_others_use_is_streamed_from() {
        assert_eq!(chain("dEFG", 0).act(&layers(3)), stream(Some("F")));
        assert_eq!(chain("dEFG", 0).act(&layers(2)), stream(Some("G")));
        assert_eq!(chain("dEFG", 0).act(&layers(1)), stream(None));
        assert_eq!(chain("dEFG", 0).act(&layers(4)), Ok(None));
        // Its own image is another disk's base by now.
        assert_eq!(chain("bDG", 1).act(&layers(2)), stream(Some("G")));
        assert_eq!(chain("bADG", 2).act(&layers(3)), stream(Some("D")));
    }

    #[test]
    fn overlays_have_so_many_bytes() {
        let policy = Policy {
            max_overlay_bytes: Some(15),
            ..Policy::default()
        };
        assert_eq!(chain("bdG", 1).act(&policy), Ok(None));
        assert_eq!(chain("cbdG", 2).act(&policy), commit("b", "d"));
        let less = Policy {
            max_overlay_bytes: Some(5),
            ..Policy::default()
        };
        assert_eq!(chain("cbdG", 2).act(&less), commit("c", "d"));
        // Nothing may be written to the image, and no number of layers says what to take in.
        assert_eq!(chain("bDG", 1).act(&less), Err(OTHERS));
        assert_eq!(chain("bDG", 1).act(&policy), Ok(None));
    }
}
