//! What `query-named-block-nodes` tells of images, beside what the real daemon tells: of a format's own,
//! snapshots, bitmaps, encryption, and whether they are dirty.

use std::path::Path;

use serde_json::{Value, json};

use super::place::{Daemon, NAME, Place};

/// A password that is derived in no time.
const SECRET: &str = "secret,id=s,data=x";
const FAST_LUKS: &str = "key-secret=s,iter-time=10";

/// Formats of other programs, with options of an image.
const FOREIGN: [(&str, &str); 10] = [
    ("vmdk", "subformat=monolithicSparse"),
    ("vmdk", "subformat=twoGbMaxExtentFlat"),
    ("vmdk", "subformat=streamOptimized"),
    ("vpc", "subformat=dynamic"),
    ("vhdx", "subformat=dynamic"),
    ("vdi", "static=off"),
    ("qcow", "encryption=off"),
    ("qed", "cluster_size=64k"),
    ("parallels", "cluster_size=1M"),
    ("luks", FAST_LUKS),
];

fn make(place: &Place) {
    place.img("snapshot -c first b");
    place.img("snapshot -c second b");
    place.img("bitmap --add b on");
    place.img("bitmap --add --disable -g 128k b off");
    place.img("create -q -f qcow2 -o compat=0.10 old 1M");
    place.img(
        "create -q -f qcow2 -o lazy_refcounts=on,refcount_bits=64,compression_type=zstd lazy 1M",
    );
    place.img("create -q -f qcow2 -o data_file=data,data_file_raw=on,extended_l2=on apart 1M");
    let luks = "encrypt.format=luks,encrypt.key-secret=s,encrypt.iter-time=10";
    place.img(&format!(
        "create -q -f qcow2 --object {SECRET} -o {luks} locked 1M"
    ));
    for (number, (format, options)) in FOREIGN.iter().enumerate() {
        let object = if *format == "luks" {
            format!("--object {SECRET}")
        } else {
            String::new()
        };
        place.img(&format!(
            "create -q -f {format} {object} -o {options} {format}{number} 1M"
        ));
    }
}

/// All nodes, by their names or what they are called otherwise.
fn described(place: &Place, program: &Path) -> Vec<(String, Value)> {
    let mut daemon = place.start(program, &["--object", SECRET]);
    let mut add = |name: &str, driver: &str, more: Value| {
        let mut node = json!({"driver": driver, "node-name": name, "read-only": true,
                              "file": {"driver": "file", "filename": name}});
        let node = node.as_object_mut().expect("an object");
        node.extend(more.as_object().expect("an object").clone());
        daemon.must("blockdev-add", Value::Object(node.clone()));
    };
    for name in ["t", "old", "lazy", "apart"] {
        add(name, "qcow2", json!({}));
    }
    let key = json!({"encrypt": {"format": "luks", "key-secret": "s"}});
    add("locked", "qcow2", key);
    for (number, (format, _)) in FOREIGN.iter().enumerate() {
        let key = if *format == "luks" {
            json!({"key-secret": "s"})
        } else {
            json!({})
        };
        add(&format!("{format}{number}"), format, key);
    }
    daemon.must(
        "blockdev-add",
        json!({"driver": "raw", "node-name": "over", "file": "luks9", "read-only": true}),
    );
    let answer = daemon.must("query-named-block-nodes", json!({}));
    let nodes = answer.as_array().expect("a list").iter();
    let mut all: Vec<_> = nodes
        .map(|node| {
            let mut image = node["image"].clone();
            forget_sizes(&mut image);
            let name = node["node-name"]
                .as_str()
                .filter(|name| !name.starts_with('#'));
            let name = name.or(image["filename"].as_str()).expect("a name");
            (format!("{name} {}", node["drv"]), image)
        })
        .collect();
    all.sort_by(|(one, _), (other, _)| one.cmp(other));
    daemon.end();
    all
}

/// Files take what the file system gives them.
fn forget_sizes(image: &mut Value) {
    let Some(members) = image.as_object_mut() else {
        return;
    };
    members.remove("actual-size");
    members.values_mut().for_each(forget_sizes);
}

#[test]
fn images_are_described_alike() {
    let place = Place::new();
    make(&place);
    let ours = described(&place, &place.path(NAME));
    let theirs = described(&place, NAME.as_ref());
    for (our, their) in ours.iter().zip(&theirs) {
        assert_eq!(our, their);
    }
    assert_eq!(ours.len(), theirs.len());
    let is_told = |name: &str| {
        let (_, image) = ours
            .iter()
            .find(|(found, _)| found.starts_with(name))
            .expect(name);
        image["format-specific"]["data"].is_object()
    };
    assert!(["old", "locked", "vmdk0", "luks9"].into_iter().all(is_told));
}

/// A passphrase that is added, or taken away, while the image is in use is seen.
#[test]
fn key_slots_are_those_of_now() {
    for is_real in [false, true] {
        let place = Place::new();
        make(&place);
        let program = if is_real {
            NAME.into()
        } else {
            place.path(NAME)
        };
        let mut daemon = place.start(&program, &["--object", SECRET]);
        let other = json!({"qom-type": "secret", "id": "other", "data": "y"});
        daemon.must("object-add", other);
        let options = json!({"driver": "qcow2", "node-name": "n",
                             "encrypt": {"format": "luks", "key-secret": "s"},
                             "file": {"driver": "file", "filename": "locked"}});
        daemon.must("blockdev-add", options);
        assert!(!is_second_slot_active(&mut daemon));
        let keys = json!({"state": "active", "new-secret": "other", "iter-time": 10});
        amend(&mut daemon, "in", keys);
        assert!(is_second_slot_active(&mut daemon));
        amend(
            &mut daemon,
            "out",
            json!({"state": "inactive", "old-secret": "other"}),
        );
        assert!(!is_second_slot_active(&mut daemon));
        daemon.end();
    }
}

fn is_second_slot_active(daemon: &mut Daemon) -> bool {
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let mut nodes = nodes.as_array().expect("a list").iter();
    let node = nodes
        .find(|node| node["node-name"] == "n")
        .expect("the node");
    let encrypt = &node["image"]["format-specific"]["data"]["encrypt"];
    encrypt["slots"][1]["active"].as_bool().expect("a slot")
}

fn amend(daemon: &mut Daemon, job: &str, mut keys: Value) {
    keys["format"] = json!("luks");
    let options = json!({"driver": "qcow2", "encrypt": keys});
    daemon.must(
        "x-blockdev-amend",
        json!({"job-id": job, "node-name": "n", "options": options}),
    );
    daemon.wait(job, "concluded");
    daemon.must("job-dismiss", json!({"id": job}));
}
