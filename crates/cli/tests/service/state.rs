//! `--state`: a daemon that is killed comes back with what it had acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use serde_json::{Value, json};

use crate::place::{Place, Service, VELLUM};
use vellum_testing::{Qmp, until};

pub const WORDS: [&str; 8] = [
    "--chardev",
    "socket,id=m,path=qmp.sock,server=on,wait=off",
    "--monitor",
    "m",
    "--nbd-server",
    "addr.type=unix,addr.path=nbd.sock",
    "--state",
    "state",
];

pub fn start(place: &Place) -> (Service, Qmp) {
    let service = place.serve(&WORDS);
    let client = place.monitor();
    (service, client)
}

pub fn again(place: &Place, service: Service) -> (Service, Qmp) {
    service.kill();
    start(place)
}

pub fn node(name: &str, file: &str) -> Value {
    json!({"driver": "qcow2", "node-name": name, "file": {"driver": "file", "filename": file}})
}

pub fn export(id: &str, node: &str) -> Value {
    json!({"type": "nbd", "id": id, "node-name": node, "name": id, "writable": true})
}

pub fn snapshot(node: &str, overlay: &str) -> Value {
    json!({
        "node-name": node, "snapshot-file": overlay, "snapshot-node-name": overlay,
        "format": "qcow2",
    })
}

/// The nodes that exports show.
pub fn shown(client: &mut Qmp) -> BTreeMap<String, String> {
    let exports = client.must("query-block-exports", json!({}));
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    let exports = exports.as_array().expect("a list").iter();
    exports
        .map(|one| (text(&one["id"]), text(&one["node-name"])))
        .collect()
}

#[test]
fn what_clients_made_comes_back() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    let group = json!({"qom-type": "throttle-group", "id": "t", "limits": {"iops-total": 1000}});
    client.must("object-add", group);
    client.must("object-add", json!({"qom-type": "iothread", "id": "io"}));
    client.must(
        "object-add",
        json!({"qom-type": "secret", "id": "s", "data": "geheimnis"}),
    );
    client.must("blockdev-add", node("a", "a"));
    let limited = json!({
        "driver": "throttle", "node-name": "slow", "throttle-group": "t", "file": node("b", "b"),
    });
    client.must("blockdev-add", limited);
    client.must("block-export-add", export("a", "a"));
    let mut slow = export("slow", "slow");
    slow["iothread"] = json!("io");
    client.must("block-export-add", slow);
    let limits = json!({"path": "/objects/t", "property": "limits", "value": {"iops-total": 900}});
    client.must("qom-set", limits);
    // Overlays at the top, and below limits.
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    client.must("blockdev-snapshot-sync", snapshot("b", "below"));
    place.io("a", &["write -P 5 0 64k", "flush"]);
    place.io("slow", &["write -P 6 0 64k", "flush"]);
    let before = shown(&mut client);
    assert_eq!(before["a"], "over");
    let text = place.text("state");
    assert!(!text.contains("geheimnis"));
    let mode = std::fs::metadata(place.path("state"))
        .expect("it is there")
        .mode();
    assert_eq!(mode & 0o777, 0o600);

    let (service, mut client) = again(&place, service);
    assert_eq!(shown(&mut client), before);
    place.io("a", &["read -P 5 0 64k", "write -P 7 64k 64k", "flush"]);
    place.io("slow", &["read -P 6 0 64k"]);
    let limits = json!({"path": "/objects/t", "property": "limits"});
    assert_eq!(client.must("qom-get", limits)["iops-total"], 900);
    let chain = place.must(VELLUM, "info -U --backing-chain below");
    assert!(
        chain.contains("image: b\n") || chain.contains("/b\n"),
        "{chain}"
    );

    // What is taken away stays away; an orderly end keeps the rest.
    client.must("block-export-del", json!({"id": "slow"}));
    client.must("blockdev-del", json!({"node-name": "slow"}));
    service.end();
    let (service, mut client) = start(&place);
    assert_eq!(
        shown(&mut client),
        BTreeMap::from([("a".to_owned(), "over".to_owned())])
    );
    place.io("a", &["read -P 7 64k 64k"]);
    service.end();
}

#[test]
fn jobs_begin_anew_and_users_stay_where_they_were_led() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("a", "a"));
    client.must("blockdev-add", node("b", "b"));
    client.must("block-export-add", export("a", "a"));
    place.io("a", &["write -P 3 0 1M", "flush"]);
    let mirror = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full"});
    client.must("blockdev-mirror", mirror);
    client.take_event("BLOCK_JOB_READY");

    let (service, mut client) = again(&place, service);
    assert_eq!(client.names("query-jobs", "id"), ["j"]);
    wait_ready(&mut client);
    place.io("a", &["write -P 4 0 64k"]);
    client.must("job-complete", json!({"id": "j"}));
    client.take_event("BLOCK_JOB_COMPLETED");
    // The client knows: so does the file.
    place.io("a", &["write -P 8 128k 64k", "flush"]);

    let (service, mut client) = again(&place, service);
    assert_eq!(client.names("query-jobs", "id"), [""; 0]);
    assert_eq!(shown(&mut client)["a"], "b");
    place.io(
        "a",
        &["read -P 4 0 64k", "read -P 3 64k 64k", "read -P 8 128k 64k"],
    );

    // A target that is gone is an event, whenever somebody comes to hear it.
    client.must("blockdev-add", node("c", "c"));
    let backup = json!({"job-id": "k", "device": "b", "target": "c", "sync": "full",
        "speed": 1, "auto-finalize": false});
    client.must("blockdev-backup", backup);
    service.kill();
    place.remove("c");
    let (service, mut client) = start(&place);
    let told = client.take_event("BLOCK_JOB_COMPLETED");
    assert_eq!(told["data"]["device"], "k");
    assert!(
        told["data"]["error"].as_str().expect("why").contains("'c'"),
        "{told}"
    );
    assert!(
        service.log().contains("the job 'k' cannot be begun anew"),
        "{}",
        service.log()
    );
    place.io("a", &["read -P 4 0 64k"]);
    service.end();
}

#[test]
fn an_export_that_was_given_no_name_keeps_that_of_its_first_node() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("a", "a"));
    let nameless = json!({"type": "nbd", "id": "e", "node-name": "a", "writable": true});
    client.must("block-export-add", nameless);
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    let mut service = service;
    for byte in [1, 2] {
        place.io("a", &[&format!("write -P {byte} 0 64k"), "flush"]);
        (service, _) = again(&place, service);
        place.io("a", &[&format!("read -P {byte} 0 64k")]);
    }
    service.end();
}

fn wait_ready(client: &mut Qmp) {
    until("a job that is ready", || {
        client.must("query-jobs", json!({}))[0]["status"] == "ready"
    });
}

/// The target has a name of its own, and no format that the client has said.
#[test]
fn a_mirror_to_a_file_begins_anew_and_ends() {
    for (sync, is_shown) in [("full", false), ("none", false), ("full", true)] {
        let place = Place::new();
        let (service, mut client) = start(&place);
        client.must("blockdev-add", node("a", "a"));
        client.must("block-export-add", export("a", "a"));
        place.io("a", &["write -P 3 0 1M", "flush"]);
        let mirror =
            json!({"job-id": "j", "device": "a", "target": "t", "node-name": "t", "sync": sync});
        client.must("drive-mirror", mirror);
        client.take_event("BLOCK_JOB_READY");
        if is_shown {
            let target = json!({"type": "nbd", "id": "t", "node-name": "t"});
            client.must("block-export-add", target);
        }

        let (service, mut client) = again(&place, service);
        assert_eq!(client.names("query-jobs", "id"), ["j"], "{}", service.log());
        wait_ready(&mut client);
        place.io("a", &["write -P 4 0 64k"]);
        client.must("job-complete", json!({"id": "j"}));
        let told = client.take_event("BLOCK_JOB_COMPLETED");
        assert_eq!(told["data"].get("error"), None, "{told}");
        assert_eq!(shown(&mut client)["a"], "t");
        place.io("a", &["write -P 8 128k 64k", "flush"]);

        let (service, mut client) = again(&place, service);
        assert_eq!(client.names("query-jobs", "id"), [""; 0]);
        assert_eq!(shown(&mut client)["a"], "t");
        let reads = ["read -P 4 0 64k", "read -P 3 64k 64k", "read -P 8 128k 64k"];
        place.io("a", &reads);
        service.end();
    }
}

#[test]
fn a_quorum_comes_back_with_the_children_that_it_has() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("b", "b"));
    client.must("blockdev-add", node("c", "c"));
    let quorum = json!({
        "driver": "quorum", "node-name": "q", "vote-threshold": 1, "children": [node("x", "a"), "b"],
    });
    client.must("blockdev-add", quorum);
    client.must("block-export-add", export("q", "q"));
    let change = |what: Value| {
        let mut all = json!({"parent": "q"});
        all["child"] = what["child"].clone();
        all["node"] = what["node"].clone();
        all.as_object_mut()
            .expect("members")
            .retain(|_, value| !value.is_null());
        all
    };
    client.must("x-blockdev-change", change(json!({"node": "c"})));
    client.must("x-blockdev-change", change(json!({"child": "children.0"})));
    place.io("q", &["write -P 5 0 64k", "flush"]);
    let (service, mut client) = again(&place, service);
    client.must("x-blockdev-change", change(json!({"child": "children.0"})));
    client.must("blockdev-del", json!({"node-name": "b"}));
    place.io("q", &["read -P 5 0 64k"]);
    service.end();
    // The children that were left have it, and nobody else.
    for (file, byte) in [("a", 0), ("b", 5), ("c", 5)] {
        let read = format!("read -P {byte} 0 64k");
        let said = place.must(VELLUM, &["io", "-r", "-c", &read, file]);
        assert!(!said.contains("failed"), "{file}: {said}");
    }
}

#[test]
fn a_damaged_file_is_left_alone() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("a", "a"));
    service.end();
    let whole = place.text("state");
    let refused = |text: &str, why: &str| {
        place.write("state", text);
        let mut words = vec!["daemon"];
        words.extend(WORDS);
        let output = place.run(VELLUM, &words);
        let said = output.err;
        assert_eq!(output.code, Some(1), "{said}");
        assert!(said.contains(why), "{said}");
        assert_eq!(place.text("state"), text);
    };
    refused(
        &whole.replace("qcow2", "qcow3"),
        "the state file 'state' is damaged",
    );
    refused(
        &whole[..whole.len() / 2],
        "the state file 'state' is damaged",
    );
    refused("", "the state file 'state' is damaged");
    // Two daemons do not share one.
    place.write("state", &whole);
    let (service, _client) = start(&place);
    let other = [
        "daemon",
        "--chardev",
        "null,id=m",
        "--monitor",
        "m",
        "--state",
        "state",
    ];
    let output = place.run(VELLUM, &other);
    let said = output.err;
    assert!(
        said.contains("another daemon keeps the state file 'state'"),
        "{said}"
    );
    service.end();
    // So is one of which something cannot be had.
    std::fs::rename(place.path("a"), place.path("elsewhere")).expect("it is there");
    refused(&whole, "state: cannot bring the node 'a' back");
    std::fs::rename(place.path("elsewhere"), place.path("a")).expect("it is there");
    place.write("state", &whole);
    let (service, mut client) = start(&place);
    assert_eq!(
        client.must("query-named-block-nodes", json!({}))[0]["node-name"],
        "a"
    );
    service.end();
}

pub const CONFIG: &str = "[daemon]\nmonitors = ['qmp.sock']\nnbd = { path = 'nbd.sock' }\n\
    [[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow2'\n\
    [[disk.export]]\ntype = 'nbd'\nid = 'a'\nname = 'a'\nwritable = true\n";

#[test]
fn a_configuration_counts_for_what_it_names() {
    let place = Place::new();
    let more = "[[disk]]\nname = 'd'\nimage = 'd'\nformat = 'qcow2'\n";
    place.write("disks.toml", &(CONFIG.to_owned() + more));
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    client.must("blockdev-add", node("b", "b"));
    client.must("block-export-add", export("b", "b"));
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    place.io("a", &["write -P 5 0 64k", "flush"]);
    service.kill();

    // A disk has gone from the file, and an export is another one.
    place.write(
        "disks.toml",
        CONFIG.replace("writable", "description = 'x'\nwritable"),
    );
    let service = place.serve(&words);
    let mut client = place.monitor();
    let all = shown(&mut client);
    let expected = [("a", "over"), ("b", "b")].map(|(id, node)| (id.to_owned(), node.to_owned()));
    assert_eq!(all, BTreeMap::from(expected));
    place.io("a", &["read -P 5 0 64k"]);
    let nodes = client.names("query-named-block-nodes", "node-name");
    let named: Vec<&String> = nodes.iter().filter(|name| !name.starts_with('#')).collect();
    assert_eq!(named, ["a", "b", "over"]);
    service.reload();
    place.io("a", &["read -P 5 0 64k"]);
    service.end();
}

/// What a start says that must not be.
pub fn refused(place: &Place, words: &[&str]) -> String {
    let output = place.run(VELLUM, &[&["daemon"], words].concat());
    assert!((output.code != Some(0)), "{output:?}");
    output.err
}

#[test]
fn an_overlay_comes_back_over_the_image_that_it_was_made_over_or_not_at_all() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    service.kill();
    place.write("disks.toml", CONFIG.replace("image = 'a'", "image = 'b'"));
    let said = refused(&place, &words);
    assert!(
        said.contains("an overlay stands on 'a', which is another image"),
        "{said}"
    );
    place.write("disks.toml", CONFIG);
    let service = place.serve(&words);
    let mut client = place.monitor();
    assert_eq!(shown(&mut client)["a"], "over");
    service.end();
    // An export of the command line would show its node again, whatever lies over it by now.
    let export = ["--state", "state", "--export", "nbd,id=e,node-name=a"];
    let said = refused(&place, &export);
    assert!(
        said.contains("--export and --state do not go together"),
        "{said}"
    );
}

#[test]
fn a_disk_that_is_served_is_written_to_whatever_stands_on_it() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    place.io("a", &["write -P 5 0 64k"]);
    client.must("block-commit", json!({"job-id": "c", "device": "over"}));
    client.take_event("BLOCK_JOB_READY");
    client.must("job-complete", json!({"id": "c"}));
    client.take_event("BLOCK_JOB_COMPLETED");
    assert_eq!(shown(&mut client)["a"], "a");
    service.kill();
    let service = place.serve(&words);
    place.io("a", &["read -P 5 0 64k", "write -P 6 0 64k", "flush"]);
    service.end();
}

#[test]
fn a_disk_that_users_were_led_from_is_not_made_anew() {
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let service = place.serve("--config disks.toml");
    let mut client = place.monitor();
    client.must("blockdev-add", node("b", "b"));
    let mirror = json!({"job-id": "m", "device": "a", "target": "b", "sync": "full"});
    client.must("blockdev-mirror", mirror);
    client.take_event("BLOCK_JOB_READY");
    client.must("job-complete", json!({"id": "m"}));
    client.take_event("BLOCK_JOB_COMPLETED");
    place.io("a", &["write -P 7 0 64k", "flush"]);
    let throttled = CONFIG.replace("[[disk.export]]", "throttle = 't'\n[[disk.export]]")
        + "[throttle.t]\niops-total = 100000\n";
    place.write("disks.toml", &throttled);
    let said = service.reload();
    assert!(said.contains("clients have led its users to 'b'"), "{said}");
    place.io("a", &["read -P 7 0 64k"]);
    assert_eq!(shown(&mut client)["a"], "b");
    service.end();
}

/// What was acknowledged, as the test has it.
#[derive(Debug, Clone, Default)]
struct Model {
    /// The image of each node, by its name.
    nodes: BTreeMap<String, String>,
    /// The node of each export.
    exports: BTreeMap<String, String>,
    iops: u64,
    count: usize,
    /// Nodes over which an overlay was put: they are only read.
    only_read: BTreeSet<String>,
}

impl PartialEq for Model {
    fn eq(&self, other: &Model) -> bool {
        let told = |model: &Model| (model.nodes.clone(), model.exports.clone(), model.iops);
        told(self) == told(other)
    }
}

impl Model {
    /// Something to ask for, and what there is then.
    fn draw(&self, random: &mut fastrand::Rng) -> (&'static str, Value, Model) {
        let mut next = self.clone();
        next.count += 1;
        let name = format!("n{}", next.count);
        let free: Vec<&String> = self
            .nodes
            .keys()
            .filter(|node| !self.exports.values().any(|shown| shown == *node))
            .filter(|node| !self.nodes.values().any(|below| below == *node))
            .collect();
        let writable: Vec<&&String> = free
            .iter()
            .filter(|node| !self.only_read.contains(**node))
            .collect();
        match random.u8(..6) {
            0 | 1 if writable.is_empty() => {
                next.nodes.insert(name.clone(), String::new());
                ("blockdev-add", node(&name, &name), next)
            }
            0 | 1 => {
                let shown = writable[random.usize(..writable.len())].to_string();
                next.exports.insert(name.clone(), shown.clone());
                ("block-export-add", export(&name, &shown), next)
            }
            2 if !self.exports.is_empty() => {
                let at = random.usize(..self.exports.len());
                let id = self.exports.keys().nth(at).expect("as many").clone();
                next.exports.remove(&id);
                ("block-export-del", json!({"id": id, "mode": "hard"}), next)
            }
            3 if !free.is_empty() => {
                let gone = free[random.usize(..free.len())].clone();
                next.nodes.remove(&gone);
                ("blockdev-del", json!({"node-name": gone}), next)
            }
            4 if !self.exports.is_empty() => {
                let at = random.usize(..self.exports.len());
                let below = self.exports.values().nth(at).expect("as many").clone();
                next.nodes.insert(name.clone(), below.clone());
                next.only_read.insert(below.clone());
                for shown in next.exports.values_mut().filter(|shown| **shown == below) {
                    shown.clone_from(&name);
                }
                ("blockdev-snapshot-sync", snapshot(&below, &name), next)
            }
            _ => {
                next.iops = random.u64(1..1_000_000);
                let value = json!({"iops-total": next.iops});
                let set = json!({"path": "/objects/t", "property": "limits", "value": value});
                ("qom-set", set, next)
            }
        }
    }

    /// What a daemon has.
    fn of(client: &mut Qmp, count: usize) -> Model {
        let mut nodes = BTreeMap::new();
        for one in client
            .must("query-named-block-nodes", json!({}))
            .as_array()
            .expect("a list")
        {
            let name = one["node-name"].as_str().expect("a name");
            if !name.starts_with('#') {
                let below = one["image"]["backing-image"]["filename"].as_str();
                nodes.insert(name.to_owned(), below.unwrap_or_default().to_owned());
            }
        }
        let limits = json!({"path": "/objects/t", "property": "limits"});
        Model {
            only_read: BTreeSet::new(),
            nodes,
            exports: shown(client),
            iops: client.must("qom-get", limits)["iops-total"]
                .as_u64()
                .expect("a number"),
            count,
        }
    }
}

#[test]
fn whenever_it_is_killed_what_was_acknowledged_is_there() {
    const SEED: u64 = 21;
    let place = Place::new();
    // One image for each node that may be made, each under the node's name.
    place.must(VELLUM, "create -q -f qcow2 n0 1M");
    for at in 1..400 {
        std::fs::copy(place.path("n0"), place.path(&format!("n{at}"))).expect("a copy");
    }
    let mut random = fastrand::Rng::with_seed(SEED);
    let (mut service, mut client) = start(&place);
    client.must(
        "object-add",
        json!({"qom-type": "throttle-group", "id": "t"}),
    );
    let mut model = Model::default();
    let mut lost = 0;
    for round in 0..25 {
        for _ in 0..random.usize(1..10) {
            let (command, arguments, next) = model.draw(&mut random);
            client.must(command, arguments);
            model = next;
        }
        // The last one may be done or not, and is not answered.
        let (command, arguments, next) = model.draw(&mut random);
        client.send(command, arguments);
        std::thread::sleep(Duration::from_micros(random.u64(..6000)));
        (service, client) = again(&place, service);
        let count = next.count;
        let found = Model::of(&mut client, count);
        assert!(
            found == model || found == next,
            "round {round}, seed {SEED}: {found:?}\nis not {model:?}\nnor {next:?}"
        );
        let is_lost = found == model;
        lost += usize::from(is_lost);
        model = if is_lost { model } else { next };
        model.count = count;
    }
    println!("{lost} of 25 last requests were lost");
    service.end();
}
