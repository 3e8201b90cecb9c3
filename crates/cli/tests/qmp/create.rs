//! `blockdev-create`.

use std::path::PathBuf;

use serde_json::{Value, json};

use super::place::{Daemon, NAME, Place, same, with};

use super::place::Step::{self, Ask, Wait};

/// A node over the file `name`, called `f`.
fn file(name: &str) -> Step {
    let options = json!({"driver": "file", "node-name": "f", "filename": name});
    Ask("blockdev-add", options)
}

fn create(options: Value) -> Step {
    Ask(
        "blockdev-create",
        json!({"job-id": "j", "options": options}),
    )
}

/// Options of a qcow2 image in the node `f`, and more.
fn qcow2(more: Value) -> Value {
    with(
        json!({"driver": "qcow2", "file": "f", "size": 67_108_864}),
        more,
    )
}

/// The same of a qcow image.
fn qcow(more: Value) -> Value {
    with(
        json!({"driver": "qcow", "file": "f", "size": 67_108_864}),
        more,
    )
}

/// What creations say that never become a job.
#[test]
fn wrong_options_are_refused_alike() {
    let plain = json!({"driver": "file", "filename": "n", "size": 1_048_576});
    let with = |key: &str, value: Value| {
        let mut options = plain.clone();
        options[key] = value;
        options
    };
    let wrong = [
        json!({}),
        json!({"driver": "raw"}),
        json!({"driver": "throttle"}),
        json!({"driver": "nosuch"}),
        json!({"driver": "file", "filename": "n"}),
        json!({"driver": "qcow2", "size": 512}),
        json!({"driver": "luks", "file": "f"}),
        with("size", json!("1M")),
        with("preallocation", json!("foo")),
        with("nosuch", json!(1)),
        qcow2(json!({"file": 3})),
        qcow2(json!({"file": {"filename": "b"}})),
        qcow2(json!({"version": "v5"})),
        qcow2(json!({"compression-type": "x"})),
        qcow2(json!({"backing-fmt": "nosuch"})),
        qcow2(json!({"encrypt": {"format": "aes"}})),
        qcow2(json!({"encrypt": {"key-secret": "s"}})),
        qcow2(json!({"encrypt": {"format": "luks", "cipher-alg": "no"}})),
        qcow(json!({"encrypt": {"format": "aes"}})),
        qcow(json!({"encrypt": {"format": "qcow", "cipher-alg": "aes-128"}})),
    ];
    let mut script: Vec<Step> = wrong.into_iter().map(create).collect();
    script.extend([
        Ask("blockdev-create", json!({"options": plain.clone()})),
        Ask("blockdev-create", json!({"job-id": "j"})),
        Ask(
            "blockdev-create",
            json!({"job-id": "1 2", "options": plain}),
        ),
        Ask("query-jobs", json!({})),
    ]);
    same(&[], &script);
}

/// Plays creations to their ends; with an image that is open in between.
#[test]
fn creations_end_alike() {
    let wrong = [
        json!({"driver": "file", "filename": "/nosuch/n", "size": 1_048_576}),
        json!({"driver": "file", "filename": "n", "size": 512, "preallocation": "metadata"}),
        qcow2(json!({"size": 67_108_865})),
        qcow2(json!({"file": "nosuch"})),
        qcow2(json!({"size": u64::MAX - 1023})),
        qcow2(json!({"size": 1_u64 << 63})),
        qcow2(json!({"size": (1_u64 << 63) - 512})),
        qcow2(json!({"size": (1_u64 << 63) - (1 << 30)})),
        qcow2(json!({"size": 1_u64 << 48, "cluster-size": 512})),
        qcow2(json!({"file": {"driver": "file", "filename": "nosuch"}})),
        qcow2(json!({"cluster-size": 1234})),
        qcow2(json!({"refcount-bits": 7})),
        qcow2(json!({"version": "v2", "lazy-refcounts": true})),
        qcow2(json!({"version": "v2", "compression-type": "zstd"})),
        qcow2(json!({"backing-fmt": "raw"})),
        qcow2(json!({"data-file-raw": true})),
        qcow2(json!({"data-file": "nosuch"})),
        qcow2(json!({"extended-l2": true, "cluster-size": 4096})),
        qcow2(json!({"encrypt": {"format": "luks"}})),
        qcow2(json!({"encrypt": {"format": "qcow", "key-secret": "no"}})),
        qcow(json!({"encrypt": {"format": "qcow"}})),
        qcow(json!({"encrypt": {"format": "luks", "key-secret": "s"}})),
        qcow(json!({"encrypt": {"format": "qcow", "key-secret": "no"}})),
        json!({"driver": "luks", "file": "f", "size": 512}),
        json!({"driver": "luks", "size": 512, "key-secret": "s"}),
        json!({"driver": "luks", "header": "f", "size": 512}),
        json!({"driver": "luks", "header": "f", "size": 512, "key-secret": "s", "preallocation": "full"}),
        json!({"driver": "luks", "header": "no", "size": 512, "key-secret": "s"}),
        json!({"driver": "luks", "file": "f", "size": 512, "key-secret": "s", "cipher-alg": "3des"}),
    ];
    let secret = json!({"qom-type": "secret", "id": "s", "data": "x"});
    // No state is waited for twice: every creation has an id of its own.
    let ids: Vec<String> = (0..wrong.len()).map(|at| format!("j{at}")).collect();
    let mut script = vec![file("o"), Ask("object-add", secret)];
    for (id, options) in ids.iter().zip(wrong) {
        // Leaked, for a step that names it: the test is short.
        let id: &'static str = id.clone().leak();
        script.extend([
            Ask("blockdev-create", json!({"job-id": id, "options": options})),
            Wait(id, "concluded"),
            Ask("query-jobs", json!({})),
            Ask("query-block-jobs", json!({})),
            Ask("job-dismiss", json!({"id": id})),
        ]);
    }
    script.extend([
        create(qcow2(json!({"backing-file": "b", "backing-fmt": "qcow2"}))),
        Wait("j", "concluded"),
        Ask("query-jobs", json!({})),
        create(qcow2(json!({}))),
        Ask("job-dismiss", json!({"id": "j"})),
        Ask("job-dismiss", json!({"id": "j"})),
        Ask(
            "blockdev-add",
            json!({"driver": "qcow2", "node-name": "q", "file": "f", "backing": null}),
        ),
        Ask(
            "blockdev-create",
            json!({"job-id": "k", "options": qcow2(json!({}))}),
        ),
        Wait("k", "concluded"),
        Ask("query-jobs", json!({})),
    ]);
    same(&[], &script);
}

/// The whole way that managers go: a file, a node on it, an image in that, the image as a node.
fn provision(daemon: &mut Daemon) {
    let job = |daemon: &mut Daemon, id: &str, options: Value| {
        daemon.must("blockdev-create", json!({"job-id": id, "options": options}));
        daemon.wait(id, "concluded");
        let jobs = daemon.must("query-jobs", json!({}));
        assert_eq!(jobs[0].get("error"), None, "{jobs}");
        daemon.must("job-dismiss", json!({"id": id}));
    };
    let secret = json!({"qom-type": "secret", "id": "s", "data": "x"});
    daemon.must("object-add", secret);
    let files = [
        ("plain", 0),
        ("data", 0),
        ("outside", 0),
        ("luks", 0),
        ("qcow", 0),
        ("header", 0),
        ("payload", 0),
        ("raw", 1000),
    ];
    for (name, size) in files {
        let options = json!({"driver": "file", "filename": format!("new-{name}"), "size": size});
        job(daemon, &format!("file-{name}"), options);
        let options =
            json!({"driver": "file", "node-name": name, "filename": format!("new-{name}")});
        daemon.must("blockdev-add", options);
    }
    let size = 10 << 20;
    job(
        daemon,
        "plain",
        json!({"driver": "qcow2", "file": "plain", "size": size, "cluster-size": 4096,
               "backing-file": "b", "backing-fmt": "qcow2", "refcount-bits": 1}),
    );
    job(
        daemon,
        "outside",
        json!({"driver": "qcow2", "file": "outside", "size": size, "data-file": "data",
               "data-file-raw": true, "preallocation": "metadata"}),
    );
    job(
        daemon,
        "luks",
        json!({"driver": "luks", "file": "luks", "size": size, "key-secret": "s", "iter-time": 10}),
    );
    job(
        daemon,
        "qcow",
        json!({"driver": "qcow", "file": "qcow", "size": size,
               "encrypt": {"format": "qcow", "key-secret": "s"}}),
    );
    let encrypted = json!({"driver": "qcow", "node-name": "old", "file": "qcow",
                           "encrypt": {"format": "aes", "key-secret": "s"}});
    daemon.must("blockdev-add", encrypted);
    job(
        daemon,
        "apart",
        json!({"driver": "luks", "header": "header", "file": "payload", "size": size,
               "key-secret": "s", "iter-time": 10}),
    );
    let image = json!({"driver": "qcow2", "node-name": "image", "file": "plain"});
    daemon.must("blockdev-add", image);
    let nodes = daemon.must("query-named-block-nodes", json!({}));
    let nodes = nodes.as_array().expect("nodes");
    let image = nodes.iter().find(|node| node["node-name"] == "image");
    assert_eq!(image.expect("a node")["image"]["virtual-size"], size);
    let old = nodes.iter().find(|node| node["node-name"] == "old");
    let old = old.expect("a node");
    assert!(old["encrypted"] == true && old["image"]["encrypted"] == true);
}

#[test]
fn new_images_are_those_of_the_real_daemon() {
    let info = |real: bool| {
        let place = Place::new();
        let program = match real {
            true => PathBuf::from(NAME),
            false => place.path(NAME),
        };
        let mut daemon = place.start(&program, "");
        provision(&mut daemon);
        daemon.end();
        let length = std::fs::metadata(place.path("new-raw")).expect("a file");
        assert_eq!(length.len(), 1000);
        let length = |name: &str| std::fs::metadata(place.path(name)).expect("a file").len();
        assert_eq!(
            (length("new-header"), length("new-payload")),
            (2_068_480, 10 << 20)
        );
        let volume = "driver=luks,key-secret=s,file.filename=new-payload,header.driver=file,header.filename=new-header";
        let secret = [
            "-r",
            "--object",
            "secret,id=s,data=x",
            "--image-opts",
            volume,
        ];
        place.must("qemu-io", &[&secret[..], &["-c", "read 0 64k"]].concat());
        for name in ["new-plain", "new-outside"] {
            place.img(&["check", name]);
        }
        ["new-plain", "new-outside", "new-luks", "new-qcow"].map(|name| {
            let told = place.img(&["info", "--output=json", name]);
            let mut told: Value = serde_json::from_str(&told).expect("JSON");
            // Where bytes lie, and what salts and keys are, is no one's concern.
            for key in ["actual-size", "children", "full-backing-filename"] {
                told.as_object_mut().expect("an object").remove(key);
            }
            if name == "new-luks" {
                told["format-specific"] = json!(null);
            }
            told
        })
    };
    let (ours, theirs) = (info(false), info(true));
    for (ours, theirs) in ours.iter().zip(&theirs) {
        assert_eq!(ours, theirs);
    }
}

#[test]
fn commands_of_block_jobs_know_no_others() {
    let mut script = vec![
        Ask(
            "blockdev-create",
            json!({"job-id": "j", "options": {"driver": "file", "filename": "f", "size": 0}}),
        ),
        Wait("j", "concluded"),
    ];
    for id in ["j", "none"] {
        for (command, key) in [
            ("block-job-cancel", "device"),
            ("block-job-complete", "device"),
            ("block-job-pause", "device"),
            ("block-job-resume", "device"),
            ("block-job-finalize", "id"),
            ("block-job-dismiss", "id"),
            ("job-dismiss", "id"),
        ] {
            script.push(Ask(command, json!({key: id})));
        }
        let speed = json!({"device": id, "speed": 1});
        script.push(Ask("block-job-set-speed", speed));
        let change = json!({"id": id, "type": "mirror", "copy-mode": "background"});
        script.push(Ask("block-job-change", change));
    }
    same(&[], &script);
}

/// A node in which an image was made, and that nobody uses, keeps nobody from its file.
#[test]
fn no_file_stays_locked_behind_a_creation() {
    let file = |name, filename| {
        let options = json!({"driver": "file", "node-name": name, "filename": filename});
        Ask("blockdev-add", options)
    };
    let created = |id, options: Value| {
        [
            Ask("blockdev-create", json!({"job-id": id, "options": options})),
            Wait(id, "concluded"),
            Ask("query-jobs", json!({})),
            Ask("job-dismiss", json!({"id": id})),
        ]
    };
    let made = |size_bytes: u64, filename| json!({"driver": "file", "filename": filename, "size": size_bytes});
    let image = |name, file: Value| json!({"driver": name, "node-name": name, "file": file});
    let mut script = Vec::new();
    script.extend(created("f1", made(0, "disk.vmdk")));
    script.extend(created("f2", made(1 << 20, "disk-flat.vmdk")));
    script.extend([file("d", "disk.vmdk"), file("e", "disk-flat.vmdk")]);
    let options = json!({"driver": "vmdk", "size": 1 << 20, "subformat": "monolithicFlat",
        "file": "d", "extents": ["e"]});
    script.extend(created("j", options.clone()));
    // It opens the extent by its name.
    let other = json!({"driver": "file", "filename": "disk.vmdk"});
    script.extend([
        Ask("blockdev-add", image("vmdk", other)),
        Ask("blockdev-del", json!({"node-name": "vmdk"})),
    ]);
    // Nor if that failed.
    let mut wrong = options;
    wrong["subformat"] = json!("monolithicSparse");
    script.extend(created("w", wrong));
    let extent = json!({"driver": "file", "filename": "disk-flat.vmdk"});
    script.push(Ask("blockdev-add", image("raw", extent)));
    same(&[], &script);
}
