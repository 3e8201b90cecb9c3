//! Plans, played with a daemon that is only a table: whatever the parts, a plan leads from those in
//! force to those that are wanted, and where a request fails, back.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::FutureExt;
use proptest::prelude::*;
use serde_json::{Map, Value, json};

use crate::qmp::Failure;

use super::apply::{Followed, all_limits, follow};
use super::parts::{Part, PartKey, PartKind, Parts};
use super::place::Place;
use super::plan::{Request, Step, plan};

fn part(kind: PartKind, name: &str, arguments: Value, needs: Vec<PartKey>) -> Part {
    let Value::Object(arguments) = arguments else {
        panic!("{arguments} are no arguments");
    };
    Part {
        key: PartKey::new(kind, name),
        arguments,
        needs: BTreeSet::from_iter(needs),
        place: Place { line: 1, column: 1 },
    }
}

/// A disk as it is drawn: how its image is called, one of the disks before it as its backing file,
/// its limits, whether it discards, and its exports.
type Drawn = (u8, Option<usize>, Option<u8>, bool, Vec<(u8, bool)>);

fn parts(groups: &[Option<u64>], server: Option<u8>, disks: &[Option<Drawn>]) -> Parts {
    let mut parts = Parts::default();
    for (at, limit) in groups.iter().enumerate() {
        if let Some(limit) = limit {
            let id = format!("t{at}");
            let limits =
                json!({"qom-type": "throttle-group", "id": id, "limits": {"iops-total": limit}});
            parts.put(part(PartKind::Throttle, &id, limits, Vec::new()));
        }
    }
    if let Some(port) = server {
        parts.put(part(
            PartKind::Server,
            "",
            json!({"addr": port}),
            Vec::new(),
        ));
    }
    for (at, disk) in disks.iter().enumerate() {
        let Some((image, below, group, discard, exports)) = disk else {
            continue;
        };
        let name = format!("d{at}");
        let mut needs = Vec::new();
        let file = json!({"driver": "file", "filename": format!("i{image}")});
        let mut node = json!({"driver": "qcow2", "node-name": name, "file": file});
        if *discard {
            node["discard"] = json!("unmap");
        }
        if let Some(below) = below.filter(|below| *below < at && disks[*below].is_some()) {
            node["backing"] = json!(format!("d{below}"));
            needs.push(PartKey::new(PartKind::Disk, format!("d{below}")));
        }
        if let Some(group) =
            group.filter(|group| groups.get(usize::from(*group)).is_some_and(Option::is_some))
        {
            let group = format!("t{group}");
            node["node-name"] = json!(format!("{name}-image"));
            node = json!({
                "driver": "throttle", "node-name": name, "throttle-group": group, "file": node,
            });
            needs.push(PartKey::new(PartKind::Throttle, group));
        }
        parts.put(part(PartKind::Disk, &name, node, needs));
        for (export, (kind, writable)) in exports.iter().enumerate() {
            let mut needs = vec![PartKey::new(PartKind::Disk, &*name)];
            let kind = match (kind, server) {
                (0, Some(_)) => {
                    needs.push(PartKey::server());
                    "nbd"
                }
                _ => "vhost-user-blk",
            };
            let id = format!("{name}-{export}");
            let export = json!({
                "type": kind, "id": id, "node-name": name, "writable": writable,
            });
            parts.put(part(PartKind::Export, &id, export, needs));
        }
    }
    parts
}

fn any_parts() -> impl Strategy<Value = Parts> {
    let exports = prop::collection::vec((0..2_u8, any::<bool>()), 0..3);
    let disk = (
        0..3_u8,
        prop::option::weighted(0.4, 0..4_usize),
        prop::option::weighted(0.5, 0..2_u8),
        any::<bool>(),
        exports,
    );
    let groups = prop::collection::vec(prop::option::weighted(0.8, 1..4_u64), 2);
    let disks = prop::collection::vec(prop::option::weighted(0.8, disk), 5);
    let server = prop::option::weighted(0.8, 1..3_u8);
    (groups, server, disks).prop_map(|(groups, server, disks)| parts(&groups, server, &disks))
}

/// A daemon: what was made, by its name.
#[derive(Debug, Default, Clone)]
struct Table {
    made: BTreeMap<PartKey, Map<String, Value>>,
    /// The requests so far.
    count: usize,
}

impl Table {
    fn of(parts: &Parts) -> Table {
        let made = parts.in_order().into_iter();
        Table {
            made: made
                .map(|part| (part.key.clone(), part.arguments.clone()))
                .collect(),
            count: 0,
        }
    }

    fn needs(arguments: &Map<String, Value>, kind: PartKind) -> Vec<PartKey> {
        let text = |key: &str| arguments.get(key).and_then(Value::as_str);
        let below = arguments.get("file").and_then(Value::as_object);
        let below = below
            .and_then(|file| file.get("backing"))
            .and_then(Value::as_str);
        match kind {
            PartKind::Disk => {
                let group = text("throttle-group").map(|id| PartKey::new(PartKind::Throttle, id));
                let below = text("backing").or(below);
                let below = below.map(|name| PartKey::new(PartKind::Disk, name));
                group.into_iter().chain(below).collect()
            }
            PartKind::Export => {
                let disk = text("node-name").map(|name| PartKey::new(PartKind::Disk, name));
                let server = (text("type") == Some("nbd")).then(PartKey::server);
                disk.into_iter().chain(server).collect()
            }
            _ => Vec::new(),
        }
    }

    fn add(&mut self, key: PartKey, arguments: Map<String, Value>) {
        for below in Table::needs(&arguments, key.kind) {
            assert!(
                self.made.contains_key(&below),
                "{key} is made before {below}"
            );
        }
        assert!(!self.made.contains_key(&key), "{key} is made twice");
        self.made.insert(key, arguments);
    }

    fn remove(&mut self, key: &PartKey) {
        for (above, arguments) in &self.made {
            let needs = Table::needs(arguments, above.kind);
            assert!(!needs.contains(key), "{key} goes before {above}");
        }
        assert!(self.made.remove(key).is_some(), "{key} goes twice");
    }

    /// Does what is asked for, as the daemon would.
    fn carry_out(&mut self, request: &Request) {
        match request {
            Request::Make(part) => self.add(part.key.clone(), part.arguments.clone()),
            Request::Remove(key) => self.remove(key),
            Request::Change(part) if part.key.kind == PartKind::Disk => {
                let node = part.arguments.clone();
                let old = self.made.insert(part.key.clone(), node.clone());
                assert_eq!(old.expect("it is there")["driver"], node["driver"]);
                assert_eq!(node["node-name"], part.key.name);
            }
            Request::Change(part) => {
                assert_eq!(part.key.kind, PartKind::Throttle);
                let group = self.made.get_mut(&part.key);
                let limits = &mut group.expect("it is there")["limits"];
                // All are said; those that are not 0, or 1 as lengths are, can be compared.
                let all = all_limits(part);
                assert_eq!(all.len(), 19);
                *limits = json!({"iops-total": all["iops-total"]});
            }
        }
    }
}

/// Plays a plan; the requests with the numbers `failing` fail.
fn play(
    table: &mut Table,
    in_force: &mut Parts,
    wanted: &Parts,
    failing: &BTreeSet<usize>,
) -> Followed {
    let steps = plan(in_force, wanted);
    let send = async |request: &Request| {
        let number = table.count;
        table.count += 1;
        if failing.contains(&number) {
            return Err(Failure::new("as the test wants it"));
        }
        table.carry_out(request);
        Ok(())
    };
    let followed = follow(in_force, steps, send, || false);
    followed.now_or_never().expect("nothing waits")
}

fn made(parts: &Parts) -> BTreeMap<PartKey, Map<String, Value>> {
    Table::of(parts).made
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn a_plan_leads_to_what_is_wanted(old in any_parts(), new in any_parts()) {
        let (mut table, mut in_force) = (Table::of(&old), old.clone());
        let followed = play(&mut table, &mut in_force, &new, &BTreeSet::new());
        prop_assert!(followed.failures.is_empty());
        prop_assert_eq!(&table.made, &made(&new));
        prop_assert_eq!(&made(&in_force), &made(&new));
        prop_assert!(plan(&in_force, &new).is_empty());
    }

    #[test]
    fn what_is_the_same_is_in_no_step(old in any_parts(), new in any_parts()) {
        let steps = plan(&old, &new);
        let goes = |key: &PartKey| {
            let mut removals = steps.iter().filter(|step| step.request.key() == key);
            removals.any(|step| step.request.command().ends_with("-del") || step.request.command().ends_with("-stop"))
        };
        for step in &steps {
            let (Some(was), Some(part)) = (old.get(step.request.key()), new.get(step.request.key())) else {
                continue;
            };
            let is_moved = part.needs.iter().chain(&was.needs).any(goes);
            prop_assert!(!was.is_like(part) || is_moved, "{}", step.request.key());
        }
    }

    #[test]
    fn what_fails_is_as_it_was(
        old in any_parts(),
        new in any_parts(),
        failing in 0..12_usize,
    ) {
        let (mut table, mut in_force) = (Table::of(&old), old.clone());
        let failing = BTreeSet::from([failing]);
        let followed = play(&mut table, &mut in_force, &new, &failing);
        prop_assert_eq!(&table.made, &made(&in_force), "what is noted is what there is");
        prop_assert!(followed.failures.len() <= 1, "an undoing that succeeds is not told");
        // Each change is there whole, or not at all.
        let steps = plan(&old, &new);
        for step in &steps {
            let keys: BTreeSet<&PartKey> = steps
                .iter()
                .filter(|other| other.change == step.change)
                .map(|other| other.request.key())
                .collect();
            let is = |parts: &Parts| {
                keys.iter().all(|key| {
                    table.made.get(*key) == parts.get(key).map(|part| &part.arguments)
                })
            };
            prop_assert!(is(&old) || is(&new), "{}", step.request.key());
        }
        for (step, _) in &followed.failures {
            let was = old.get(step.request.key()).map(|part| &part.arguments);
            prop_assert_eq!(table.made.get(step.request.key()), was, "{}", step.request.key());
        }
        // With the cause gone, the next try gets there.
        play(&mut table, &mut in_force, &new, &BTreeSet::new());
        prop_assert_eq!(&table.made, &made(&new));
    }
}

fn commands(old: &Parts, new: &Parts) -> Vec<&'static str> {
    let steps: Vec<Step> = plan(old, new);
    steps.iter().map(|step| step.request.command()).collect()
}

fn one(image: u8, group: Option<u8>, discard: bool, writable: bool, limit: u64) -> Parts {
    let disk = (image, None, group, discard, vec![(0, writable)]);
    parts(&[Some(limit), Some(1)], Some(1), &[Some(disk)])
}

#[test]
fn the_smallest_set_is_found() {
    let was = one(0, Some(0), false, true, 5);
    let cases: [(Parts, &[&str]); 6] = [
        (one(0, Some(0), false, true, 5), &[]),
        (one(0, Some(0), false, true, 6), &["qom-set"]),
        (one(0, Some(1), false, true, 5), &["blockdev-reopen"]),
        (one(0, Some(0), true, true, 5), &["blockdev-reopen"]),
        (
            one(0, Some(0), false, false, 5),
            &["block-export-del", "block-export-add"],
        ),
        (
            one(1, Some(0), false, true, 5),
            &[
                "block-export-del",
                "blockdev-del",
                "blockdev-add",
                "block-export-add",
            ],
        ),
    ];
    for (wanted, expected) in cases {
        assert_eq!(commands(&was, &wanted), expected);
    }
    let all = commands(&Parts::default(), &was);
    assert_eq!(
        all,
        [
            "object-add",
            "object-add",
            "nbd-server-start",
            "blockdev-add",
            "block-export-add"
        ]
    );
}

#[test]
fn a_disk_that_cannot_be_made_leaves_the_others_alone() {
    let disk = |image| Some((image, None, None, false, vec![(1, true)]));
    let new = parts(&[], None, &[disk(0), disk(1), disk(2)]);
    let (mut table, mut in_force) = (Table::default(), Parts::default());
    // Three disks, then their exports: that of the second is not tried.
    let followed = play(&mut table, &mut in_force, &new, &BTreeSet::from([1]));
    assert_eq!(followed.failures.len(), 1);
    assert_eq!(followed.carried_out, 4);
    assert!(
        in_force
            .get(&PartKey::new(PartKind::Export, "d2-0"))
            .is_some()
    );
    assert!(
        in_force
            .get(&PartKey::new(PartKind::Export, "d1-0"))
            .is_none()
    );
}
