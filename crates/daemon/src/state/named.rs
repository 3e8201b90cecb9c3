//! Overlays that a configuration names by now as the images of its disks: what a state file says of such
//! an overlay counts for the disk, which shows the same and was made already.
//!
//! Invariants:
//! - The disk as it is open now shows every image that the overlay showed, the same files in the same
//!   order, and no other one above. Otherwise the state stays as it is, which is then refused where a disk
//!   would show what it did before.
//! - Of nodes below the overlay nobody else is a user: what is left out is shown by the disk alone.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;

use serde_json::{Map, Value};
use vellum_graph::Nodes;
use vellum_options::filename;

use crate::config::{PartKind, Parts};
use crate::daemon::Daemon;

use super::described::{members, references_of};
use super::saved::{SavedState, text};

/// The only format whose overlays are looked at, and what is above nothing but a file.
const FORMAT: &str = "qcow2";

/// What a node stands on.
const ROLES: [&str; 10] = [
    "backing",
    "children",
    "data-file",
    "file",
    "image",
    "log",
    "raw",
    "target",
    "test",
    "header",
];

/// An image: its format, and the device and inode of its file.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Image {
    format: String,
    file: (u64, u64),
}

impl Image {
    fn at(format: &str, path: &str) -> Option<Image> {
        let file = std::fs::metadata(filename::local_path(path).ok()?).ok()?;
        file.is_file().then(|| Image {
            format: format.to_owned(),
            file: (file.dev(), file.ino()),
        })
    }

    /// That of a node as a state file describes it.
    fn of(node: &Map<String, Value>) -> Option<Image> {
        let file = node.get("file")?;
        let is_file = file.get("driver").is_none_or(|driver| driver == "file");
        let is_plain = is_file && file.get("node-name").is_none();
        let path = file.get("filename")?.as_str().filter(|_| is_plain)?;
        Image::at(node.get("driver")?.as_str()?, path)
    }
}

/// A disk of a configuration, as it is open.
struct OpenDisk<'a> {
    name: &'a str,
    description: Map<String, Value>,
    /// What it shows, from the top down.
    images: Vec<Image>,
}

impl OpenDisk<'_> {
    fn of<'a>(nodes: &Nodes, name: &'a str) -> Option<OpenDisk<'a>> {
        let image = |node: &String| {
            let info = nodes.device(node).ok()?.info();
            Image::at(info.format, &info.name)
        };
        let images = nodes.chain(name).iter().map(image).collect();
        let mut described = nodes.descriptions(None).into_iter();
        Some(OpenDisk {
            name,
            description: members(described.find(|(node, _)| node == name)?.1),
            images: Option::from_iter::<Vec<Option<Image>>>(images)?,
        })
    }
}

impl SavedState {
    fn node(&self, name: &str) -> Option<&Map<String, Value>> {
        let mut nodes = self.nodes.iter();
        nodes.find(|node| node.get("node-name").and_then(Value::as_str) == Some(name))
    }

    /// The overlay that a disk is by now, and those below it, to the node that the disk was.
    fn named_chain(&self, disk: &OpenDisk<'_>, wanted: &Parts) -> Option<Vec<String>> {
        let was = self.node(disk.name)?;
        let top = disk.images.first().filter(|top| top.format == FORMAT)?;
        let name = |node| text(node, "node-name").ok();
        let is_own = |name: &String| self.is_own(PartKind::Disk, name, wanted);
        let mut overlays = self.nodes.iter().filter_map(|node| {
            let name = name(node).filter(is_own)?;
            (Image::of(node).as_ref() == Some(top)).then_some(name)
        });
        let mut chain = vec![overlays.next().filter(|_| overlays.next().is_none())?];
        while chain.last().is_some_and(|last| last != disk.name) {
            let below = text(self.node(chain.last()?)?, "backing").ok()?;
            if chain.contains(&below) || !(below == disk.name || is_own(&below)) {
                return None;
            }
            chain.push(below);
        }
        let images = chain.iter().map(|name| Image::of(self.node(name)?));
        let images: Vec<Image> = images.collect::<Option<_>>()?;
        let is_whole = match was.get("backing") {
            // Its header says what is below.
            None => disk.images.starts_with(&images),
            Some(Value::Null) => disk.images == images,
            Some(_) => false,
        };
        (is_whole && self.is_used_by_top_only(&chain)).then_some(chain)
    }

    /// Whether nobody but the nodes of a chain has to do with those below its top, and no job with any.
    fn is_used_by_top_only(&self, chain: &[String]) -> bool {
        let (top, below) = (&chain[0], &chain[1..]);
        let is_below = |name: &str| below.iter().any(|one| one == name);
        let names_one = |members: &Map<String, Value>, with_top: bool| {
            let mut named = BTreeSet::new();
            references_of(members, &mut named);
            named
                .into_iter()
                .any(|name| is_below(name) || with_top && name == top)
        };
        let others = self.nodes.iter();
        let mut others = others.filter(|node| {
            let name = node.get("node-name").and_then(Value::as_str);
            !name.is_some_and(|name| name == top || is_below(name))
        });
        let mut policies = self.chains.iter().chain(&self.chains_left);
        let is_of_chain = |policy: &Map<String, Value>| {
            let name = policy.get("node-name").and_then(Value::as_str);
            // The disk may well have one.
            let mut overlays = chain[..chain.len() - 1].iter();
            name.is_some_and(|name| overlays.any(|one| one == name))
        };
        !others.any(|node| names_one(node, false))
            && !self.exports.iter().any(|export| is_below(&export.node))
            && !self.jobs.iter().any(|job| names_one(&job.arguments, true))
            && !policies.any(is_of_chain)
    }

    /// Says of a disk what is said of the first node of a chain, and nothing of the others.
    fn take_over(&mut self, disk: &OpenDisk<'_>, chain: &[String]) {
        let (top, name) = (&chain[0], Value::from(disk.name));
        let is_one = |value: &Value| {
            value
                .as_str()
                .is_some_and(|it| chain.iter().any(|one| one == it))
        };
        self.nodes
            .retain(|node| !node.get("node-name").is_some_and(is_one));
        for node in &mut self.nodes {
            rename(node, top, &name);
        }
        self.nodes.push(disk.description.clone());
        for export in self.exports.iter_mut().filter(|export| export.node == *top) {
            disk.name.clone_into(&mut export.node);
        }
        let led = std::mem::take(&mut self.led);
        for (from, mut step) in led {
            let to = match &mut step {
                Value::Object(members) => members.get_mut("to"),
                text => Some(text),
            };
            if let Some(to) = to.filter(|to| is_one(to)) {
                *to = name.clone();
            }
            match chain.iter().position(|one| *one == from) {
                // Whom it tells of is at the disk.
                Some(place) if place > 0 => {}
                Some(_) => {
                    if let Some(was) = step.get_mut("was") {
                        *was = Value::Object(disk.description.clone());
                    }
                    self.led.insert(disk.name.to_owned(), step);
                }
                None => drop(self.led.insert(from, step)),
            }
        }
    }
}

/// Has a node refer to another one by another name.
fn rename(node: &mut Map<String, Value>, from: &str, to: &Value) {
    for (key, value) in node {
        let is_number = key.parse::<u64>().is_ok();
        let is_role = is_number || ROLES.contains(&key.as_str());
        match value {
            Value::String(text) if is_role && text == from => *value = to.clone(),
            Value::Object(below) if is_role => rename(below, from, to),
            Value::Array(items) if is_role => {
                for item in items {
                    match item {
                        Value::String(text) if text == from => *item = to.clone(),
                        Value::Object(below) => rename(below, from, to),
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
}

impl Daemon {
    /// What a state file says, where the disks of a configuration, which are open, are overlays that clients
    /// had put over them before.
    pub fn with_named_overlays(&self, saved: &SavedState, wanted: &Parts) -> SavedState {
        let mut saved = saved.clone();
        let disks = wanted.keys().filter(|key| key.kind == PartKind::Disk);
        for key in disks {
            let was_there = saved.was_of_config(key);
            let disk = OpenDisk::of(&self.nodes, &key.name).filter(|_| was_there);
            if let Some(disk) = disk
                && let Some(chain) = saved.named_chain(&disk, wanted)
            {
                saved.take_over(&disk, &chain);
            }
        }
        saved
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    /// Overlays that a client has put over a disk, one over the other.
    const NAMES: [&str; 5] = ["disk", "over1", "over2", "over3", "over4"];

    fn described(folder: &Path, name: &str, backing: Option<&str>) -> Value {
        let path = folder.join(name);
        let mut file = json!({"driver": "file", "filename": path.to_str()});
        if backing.is_some() {
            // As that of a snapshot.
            file = json!({"filename": path.to_str()});
        }
        let mut node = json!({"driver": "qcow2", "node-name": name, "file": file});
        if let Some(backing) = backing {
            node["backing"] = json!(backing);
        }
        node
    }

    /// What a state file says of a disk and so many overlays, each of which users were led to.
    fn saved(folder: &Path, overlays: usize) -> Value {
        let names = &NAMES[..=overlays];
        let mut nodes = vec![described(folder, "disk", None)];
        let mut led = json!({});
        for pair in names.windows(2) {
            nodes.push(described(folder, pair[1], Some(pair[0])));
            led[pair[0]] = json!({"to": pair[1], "was": nodes[nodes.len() - 2].clone()});
        }
        json!({
            "nodes": nodes, "led": led, "config": {"disk 'disk'": "disk", "export 'e'": "disk"},
            "exports": [{"options": {"id": "e"}, "node": names[overlays]}],
        })
    }

    /// The disk as it is when the file of disks names one of the images.
    fn open(folder: &Path, images: &[&str]) -> OpenDisk<'static> {
        let mut description = described(folder, images[0], None);
        description["node-name"] = json!("disk");
        let image = |name: &&str| Image::at(FORMAT, folder.join(name).to_str()?);
        OpenDisk {
            name: "disk",
            description: members(description),
            images: images.iter().map(image).collect::<Option<_>>().unwrap(),
        }
    }

    fn folder() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in NAMES.iter().chain(&["base", "other"]) {
            std::fs::write(folder.path().join(name), name).unwrap();
        }
        folder
    }

    fn chain_of(state: &Value, disk: &OpenDisk<'_>) -> Option<Vec<String>> {
        let state = SavedState::of(state.clone()).unwrap();
        state.named_chain(disk, &Parts::default())
    }

    /// From the image of a number down to the disk's own, and what that stands on.
    fn images(named: usize, base: &[&'static str]) -> Vec<&'static str> {
        let down = NAMES[..=named].iter().rev();
        down.chain(base).copied().collect()
    }

    /// Whichever overlay the file names: users see what they have seen, with the same images below.
    #[test]
    fn users_see_the_same_whichever_overlay_is_named() {
        let folder = folder();
        let folder = folder.path();
        for overlays in 1..NAMES.len() {
            for named in 1..=overlays {
                for base in [&[][..], &["base"]] {
                    let disk = open(folder, &images(named, base));
                    let mut state = SavedState::of(saved(folder, overlays)).unwrap();
                    let chain = state.named_chain(&disk, &Parts::default()).unwrap();
                    assert_eq!(chain, images(named, &[]));
                    state.take_over(&disk, &chain);
                    let is_named = named == overlays;
                    let user = if is_named { "disk" } else { NAMES[overlays] };
                    assert_eq!(state.exports[0].node, user);
                    // From there down to the disk, and the images that it shows.
                    let mut node = user;
                    let mut seen = Vec::new();
                    while node != "disk" {
                        seen.push(node);
                        node = state.node(node).unwrap()["backing"].as_str().unwrap();
                    }
                    let above = NAMES[named + 1..=overlays].iter().rev();
                    assert!(seen.iter().eq(above), "{overlays} {named}: {seen:?}");
                    assert_eq!(state.node("disk"), Some(&disk.description));
                    assert_eq!(state.nodes.len(), 1 + overlays - named);
                    // So do those who come later.
                    let mut at = "disk";
                    while let Some(step) = state.led.get(at) {
                        at = step["to"].as_str().unwrap();
                    }
                    assert_eq!(at, user);
                    assert_eq!(state.led.len(), overlays - named);
                }
            }
        }
    }

    #[test]
    fn what_is_no_such_overlay_is_left_alone() {
        let folder = folder();
        let folder = folder.path();
        let state = saved(folder, 2);
        for images in [
            // Another image, or not all that was below, or something between.
            &["disk"][..],
            &["other", "disk"],
            &["over2", "disk"],
            &["over2"],
            &["over2", "other", "over1", "disk"],
            &["over1"],
        ] {
            assert_eq!(chain_of(&state, &open(folder, images)), None, "{images:?}");
        }
        let whole = open(folder, &["over2", "over1", "disk"]);
        assert!(chain_of(&state, &whole).is_some());
        // Somebody else has to do with what would be left out.
        let changed = |change: &dyn Fn(&mut Value)| {
            let mut state = state.clone();
            change(&mut state);
            chain_of(&state, &whole)
        };
        let push = |list: &'static str, value: Value| {
            move |state: &mut Value| match state[list].as_array_mut() {
                Some(items) => items.push(value.clone()),
                None => state[list] = json!([value]),
            }
        };
        let limits = |below: &str| json!({"driver": "throttle", "node-name": "l", "file": below});
        let job = |node: &str| json!({"command": "block-commit", "arguments": {"job-id": "j", "device": node}});
        for change in [
            push("nodes", limits("over1")),
            push("nodes", limits("disk")),
            push("nodes", described(folder, "over3", Some("disk"))),
            push("nodes", described(folder, "over2", Some("over1"))),
            push("exports", json!({"options": {"id": "x"}, "node": "over1"})),
            push("exports", json!({"options": {"id": "x"}, "node": "disk"})),
            push("jobs", job("over2")),
            push("chains", json!({"node-name": "over2"})),
        ] {
            assert_eq!(changed(&change), None);
        }
        let mut named = state.clone();
        named["config"]["disk 'over1'"] = json!("over1");
        assert_eq!(chain_of(&named, &whole), None);
        let mut other = state.clone();
        other["nodes"][0]["backing"] = json!("base");
        assert_eq!(chain_of(&other, &whole), None);
        let mut alone = state.clone();
        alone["nodes"][0]["backing"] = Value::Null;
        assert!(chain_of(&alone, &whole).is_some());
        let longer = open(folder, &["over2", "over1", "disk", "base"]);
        assert_eq!(chain_of(&alone, &longer), None);
        // Those above are not in the way.
        assert!(changed(&push("nodes", limits("over2"))).is_some());
        assert!(changed(&push("chains", json!({"node-name": "disk"}))).is_some());
    }

    #[test]
    fn what_stands_on_an_overlay_stands_on_the_disk() {
        let folder = folder();
        let folder = folder.path();
        let mut state = saved(folder, 1);
        let more = [
            json!({"driver": "throttle", "node-name": "l", "file": "over1", "throttle-group": "over1"}),
            json!({"driver": "quorum", "node-name": "q", "children": {"0": "over1", "1": {"file": "over1"}}}),
        ];
        state["nodes"].as_array_mut().unwrap().extend(more);
        let disk = open(folder, &["over1", "disk"]);
        let mut state = SavedState::of(state).unwrap();
        let chain = state.named_chain(&disk, &Parts::default()).unwrap();
        state.take_over(&disk, &chain);
        let limits = Value::Object(state.node("l").unwrap().clone());
        let expected = json!({"driver": "throttle", "node-name": "l", "file": "disk", "throttle-group": "over1"});
        assert_eq!(limits, expected);
        let quorum = &state.node("q").unwrap()["children"];
        assert_eq!(*quorum, json!({"0": "disk", "1": {"file": "disk"}}));
    }
}
