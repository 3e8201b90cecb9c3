//! Space of disks that are used: where it goes, warnings before a file system is full, and chains that
//! are kept short.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};

use crate::place::{Place, Service, VELLUM};
use vellum_testing::{Qmp, until};

const DAEMON: &str = "[daemon]\nmonitors = ['qmp.sock']\nnbd = { path = 'nbd.sock' }\n";

/// A disk `a` over the image `golden`, with an export.
fn disk(more: &str) -> String {
    format!(
        "[[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow2'\n{more}\n\
         [[disk.export]]\ntype = 'nbd'\nname = 'a'\nwritable = true\n"
    )
}

/// A place where `a` stands on `golden`, which has something of its own.
fn place() -> Place {
    let place = Place::new();
    place.must(VELLUM, "create -q -f qcow2 golden 8M");
    place.must(VELLUM, "io -c 'write -q -P 9 4M 1M' golden");
    let words = [
        "create", "-q", "-f", "qcow2", "-b", "golden", "-F", "qcow2", "a",
    ];
    place.must(VELLUM, &words);
    place
}

fn snapshot(client: &mut Qmp, of: &str, to: &str) {
    let arguments = json!({"node-name": of, "snapshot-file": to, "snapshot-node-name": to});
    client.must("blockdev-snapshot-sync", arguments);
}

fn chains(client: &mut Qmp) -> Value {
    client.must("x-vellum-query-chain-policies", json!({}))
}

/// Waits until the chain of the disk `a` has so many layers, and no job does anything with it.
fn wait_for_layers(client: &mut Qmp, layers: u64) {
    until("the chain is as long as it may be", || {
        let chain = chains(client);
        chain[0]["layers"] == layers && client.must("query-jobs", json!({})) == json!([])
    });
}

/// Writes without an end, a sector after the other, each flushed; how many were.
struct Writer {
    over: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<u64>,
}

impl Writer {
    fn begin(place: &Place) -> Writer {
        let over = Arc::new(AtomicBool::new(false));
        let (until, folder) = (over.clone(), place.root().to_owned());
        let thread = std::thread::spawn(move || {
            let mut flushed = 0;
            while !until.load(Ordering::SeqCst) && flushed < 2000 {
                let write = format!("write -q -P {} {}k 1k", flushed % 250 + 1, flushed);
                let uri = "nbd+unix:///a?socket=nbd.sock";
                let words = ["io", "-f", "raw", "-c", &write, "-c", "flush", uri];
                let done = Command::new(VELLUM)
                    .current_dir(&folder)
                    .args(words)
                    .output();
                match done.expect("the program runs").status.success() {
                    true => flushed += 1,
                    // The daemon was killed.
                    false => break,
                }
            }
            flushed
        });
        Writer { over, thread }
    }

    fn end(self) -> u64 {
        self.over.store(true, Ordering::SeqCst);
        self.thread.join().expect("it wrote")
    }
}

/// Looks whether an export has what a writer has flushed.
fn check_written(place: &Place, flushed: u64) {
    assert!(flushed > 0);
    for at in 0..flushed {
        place.io("a", &[&format!("read -q -P {} {at}k 1k", at % 250 + 1)]);
    }
}

fn serve(place: &Place) -> (Service, Qmp) {
    let service = place.serve("--config disks.toml --state state.json");
    let client = place.monitor();
    (service, client)
}

#[test]
fn overlays_are_committed_under_a_writer_and_the_golden_image_is_left_alone() {
    let place = place();
    place.write(
        "disks.toml",
        format!("{DAEMON}{}", disk("chain = { max-layers = 2 }")),
    );
    let golden = place.read("golden");
    let (service, mut client) = serve(&place);
    let writer = Writer::begin(&place);
    for (of, to) in [("a", "over1"), ("over1", "over2"), ("over2", "over3")] {
        snapshot(&mut client, of, to);
    }
    wait_for_layers(&mut client, 2);
    let flushed = writer.end();
    check_written(&place, flushed);
    place.io("a", &["read -q -P 9 4M 1M"]);
    service.end();
    assert_eq!(place.read("golden"), golden);
    place.img("check -q a");
    // What the file names has all of it.
    let read = format!("read -P {} {}k 1k", (flushed - 1) % 250 + 1, flushed - 1);
    let said = place.must("qemu-io", &["-r", "-c", &read, "a"]);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn overlays_of_a_disk_with_limits_are_committed_too_also_after_a_kill() {
    let place = place();
    let limits = "[throttle.slow]\niops-total = 100000\n";
    let file = |policy: &str| {
        let disk = disk(&format!("throttle = 'slow'\n{policy}"));
        place.write("disks.toml", format!("{DAEMON}{limits}{disk}"));
    };
    file("chain = { max-layers = 3 }");
    let golden = place.read("golden");
    let (service, mut client) = serve(&place);
    place.io("a", &["write -q -P 77 6M 1M", "flush"]);
    snapshot(&mut client, "a", "over1");
    place.io("a", &["write -q -P 78 5M 1M", "flush"]);
    assert_eq!(chains(&mut client)[0]["layers"], 3);
    service.kill();
    drop(client);
    file("chain = { max-layers = 2 }");
    let (service, mut client) = serve(&place);
    wait_for_layers(&mut client, 2);
    let patterns = [
        "read -q -P 77 6M 1M",
        "read -q -P 78 5M 1M",
        "read -q -P 9 4M 1M",
    ];
    place.io("a", &patterns);
    let nodes = client.must("query-named-block-nodes", json!({}));
    let is_there = |name: &str| {
        let mut all = nodes.as_array().expect("nodes").iter();
        all.any(|node| node["node-name"] == name)
    };
    assert!(is_there("a-image"), "{nodes}");
    assert!(!is_there("over1"), "{nodes}");
    service.end();
    assert_eq!(place.read("golden"), golden);
    place.img("check -q a");
    let said = place.must("qemu-io", &["-r", "-c", "read -P 78 5M 1M", "a"]);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn a_chain_that_is_committed_comes_back_after_a_kill() {
    for round in 0..3 {
        let place = place();
        let policy = "chain = { max-layers = 2, speed = '256k' }";
        place.write("disks.toml", format!("{DAEMON}{}", disk(policy)));
        let (service, mut client) = serve(&place);
        place.io("a", &["write -q -P 77 6M 1M", "flush"]);
        snapshot(&mut client, "a", "over1");
        place.io("a", &["write -q -P 78 5M 1M", "flush"]);
        let writer = Writer::begin(&place);
        until("a job", || chains(&mut client)[0]["job"] == "chain-a");
        std::thread::sleep(std::time::Duration::from_millis(300 * round));
        service.kill();
        let flushed = writer.end();
        drop(client);
        let (service, mut client) = serve(&place);
        check_written(&place, flushed);
        place.io(
            "a",
            &[
                "read -q -P 77 6M 1M",
                "read -q -P 78 5M 1M",
                "read -q -P 9 4M 1M",
            ],
        );
        place.write(
            "disks.toml",
            format!("{DAEMON}{}", disk("chain = { max-layers = 2 }")),
        );
        let job = client.must("query-jobs", json!({}));
        if job != json!([]) {
            client.must(
                "block-job-set-speed",
                json!({"device": "chain-a", "speed": 0}),
            );
        }
        wait_for_layers(&mut client, 2);
        check_written(&place, flushed);
        place.io(
            "a",
            &[
                "read -q -P 77 6M 1M",
                "read -q -P 78 5M 1M",
                "read -q -P 9 4M 1M",
            ],
        );
        service.end();
        place.img("check -q a");
    }
}

#[test]
fn a_policy_of_a_client_is_streamed_and_comes_back() {
    let place = place();
    place.write("disks.toml", format!("{DAEMON}{}", disk("")));
    let (service, mut client) = serve(&place);
    client.must(
        "x-vellum-set-chain-policy",
        json!({"node-name": "a", "max-layers": 2}),
    );
    assert_eq!(chains(&mut client)[0]["layers"], 2);
    service.kill();
    drop(client);
    let (service, mut client) = serve(&place);
    assert_eq!(chains(&mut client)[0]["max-layers"], 2);
    client.must(
        "x-vellum-set-chain-policy",
        json!({"node-name": "a", "max-layers": 1}),
    );
    wait_for_layers(&mut client, 1);
    place.io("a", &["read -q -P 9 4M 1M"]);
    client.must("x-vellum-set-chain-policy", json!({"node-name": "a"}));
    assert_eq!(chains(&mut client), json!([]));
    service.end();
    place.img("check -q a");
}

#[test]
fn overlays_that_take_too_much_are_committed() {
    let place = place();
    let policy = "chain = { max-overlay-bytes = '1M' }";
    place.write("disks.toml", format!("{DAEMON}{}", disk(policy)));
    let (service, mut client) = serve(&place);
    place.io("a", &["write -q -P 77 6M 1M", "flush"]);
    snapshot(&mut client, "a", "over1");
    place.io("a", &["write -q -P 78 0 64k", "flush"]);
    // Twice as long as it takes to look.
    std::thread::sleep(std::time::Duration::from_secs(4));
    let told = chains(&mut client)[0].take();
    assert_eq!(told["layers"], 3, "it is short enough: {told}");
    assert!(told["error"].is_null(), "{told}");
    // It grows without a word of any client of the monitor.
    place.io("a", &["write -q -P 79 2M 2M", "flush"]);
    wait_for_layers(&mut client, 2);
    assert_eq!(chains(&mut client)[0]["overlay-bytes"], 0);
    let patterns = [
        "read -q -P 77 6M 1M",
        "read -q -P 78 0 64k",
        "read -q -P 79 2M 2M",
        "read -q -P 9 4M 1M",
    ];
    place.io("a", &patterns);
    service.end();
    place.img("check -q a");
    place.must("qemu-io", &["-r", "-c", "read -P 79 2M 2M", "a"]);
}

#[test]
fn a_policy_that_goes_while_its_job_runs_leaves_nothing_behind() {
    for other in [
        json!({"node-name": "a"}),
        json!({"node-name": "a", "max-layers": 9}),
    ] {
        let place = place();
        let policy = "chain = { max-layers = 2, speed = '1M' }";
        place.write("disks.toml", format!("{DAEMON}{}", disk(policy)));
        let (service, mut client) = serve(&place);
        snapshot(&mut client, "a", "over1");
        place.io("a", &["write -q -P 78 5M 2M", "flush"]);
        until("a job", || chains(&mut client)[0]["job"] == "chain-a");
        client.must("x-vellum-set-chain-policy", other);
        until("the end of its job", || {
            client.must("query-jobs", json!({})) == json!([])
        });
        until("the end of what it has left behind", || {
            let nodes = client.must("query-named-block-nodes", json!({}));
            let mut all = nodes.as_array().expect("nodes").iter();
            all.all(|node| node["node-name"] != "over1")
        });
        place.io("a", &["read -q -P 78 5M 2M", "read -q -P 9 4M 1M"]);
        service.end();
        place.img("check -q a");
    }
}

#[test]
fn it_is_told_why_overlays_are_not_committed() {
    let place = place();
    let policy = "chain = { max-overlay-bytes = '1M' }";
    place.write("disks.toml", format!("{DAEMON}{}", disk(policy)));
    let (service, mut client) = serve(&place);
    snapshot(&mut client, "a", "over1");
    // Another disk over the same image.
    let words = ["create", "-q", "-f", "qcow2", "-b", "a", "-F", "qcow2", "x"];
    place.must(VELLUM, &words);
    let other = json!({"driver": "qcow2", "node-name": "x", "backing": "a",
        "file": {"driver": "file", "filename": "x"}});
    client.must("blockdev-add", other);
    place.io("a", &["write -q -P 77 0 2M", "flush"]);
    let told = chains(&mut client)[0].take();
    let why = told["error"].as_str().unwrap_or_default();
    assert!(why.contains("Several disks stand on"), "{told}");
    client.must("blockdev-del", json!({"node-name": "x"}));
    wait_for_layers(&mut client, 2);
    let told = chains(&mut client)[0].take();
    assert!(told["error"].is_null(), "{told}");
    place.io("a", &["read -q -P 77 0 2M"]);
    service.end();
    place.img("check -q a");
}

#[test]
fn mistakes_in_policies_are_told() {
    let place = place();
    for (more, why) in [
        ("chain = { max-layers = 0 }", "from 1 on"),
        ("chain = { speed = '1M' }", "bounded by"),
        (
            "chain = { max-overlay-bytes = 'much' }",
            "a number of bytes",
        ),
        ("on-full = 'stop'", "wait"),
    ] {
        place.write("disks.toml", format!("{DAEMON}{}", disk(more)));
        let output = place.run(VELLUM, "daemon --config disks.toml --check");
        let said = output.err;
        assert!(
            (output.code != Some(0)) && said.contains(why),
            "{more}: {said}"
        );
    }
    let good = "on-full = 'wait'\nchain = { max-layers = 3, max-overlay-bytes = '1G' }";
    place.write("disks.toml", format!("{DAEMON}{}", disk(good)));
    let said = place.must(VELLUM, "daemon --config disks.toml --check");
    assert!(
        said.contains("x-vellum-set-chain-policy") && said.contains("\"on-full\":\"wait\""),
        "{said}"
    );
}

/// A small file system in a folder.
struct Small(PathBuf);

impl Drop for Small {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

#[test]
fn a_file_system_that_fills_is_warned_of() {
    let place = Place::new();
    let small = Small(place.path("small"));
    std::fs::create_dir(&small.0).expect("a folder");
    place.must("mount", "-t tmpfs -o size=8M none small");
    place.must(VELLUM, "create -q -f qcow2 small/a 64M");
    let head = "[daemon]\nmonitors = ['qmp.sock']\nspace-warning = ['50%', '90%']\n";
    let disk = "[[disk]]\nname = 'a'\nimage = 'small/a'\nformat = 'qcow2'\n";
    place.write("disks.toml", format!("{head}{disk}"));
    let service = place.serve("--config disks.toml --log text");
    let mut client = place.monitor();
    std::fs::write(small.0.join("x"), vec![1; 5 << 20]).expect("room");
    let warning = client.take_event("X_VELLUM_SPACE_WARNING")["data"].take();
    assert_eq!(warning["threshold-percent"], 50, "{warning}");
    std::fs::write(small.0.join("y"), vec![1; (5 << 19) + (1 << 18)]).expect("room");
    let warning = client.take_event("X_VELLUM_SPACE_WARNING")["data"].take();
    assert_eq!(warning["threshold-percent"], 90, "{warning}");
    std::fs::remove_file(small.0.join("x")).expect("a file");
    std::fs::remove_file(small.0.join("y")).expect("a file");
    let warning = client.take_event("X_VELLUM_SPACE_WARNING")["data"].take();
    assert!(warning["threshold-percent"].is_null(), "{warning}");
    assert!(service.log().contains("space_warning"));
    service.end();
}

#[test]
fn where_the_space_of_a_disk_goes_is_told_while_it_is_used() {
    let place = place();
    place.img("snapshot -c s a");
    place.write(
        "disks.toml",
        format!(
            "{DAEMON}metrics = ['unix:ctl.sock']\n{}",
            disk("discard = 'unmap'")
        ),
    );
    let service = place.serve("--config disks.toml");
    let mut client = place.monitor();
    place.io(
        "a",
        &[
            "write -q -P 1 0 2M",
            "discard -q 1M 1M",
            "write -q -z 3M 512k",
            "flush",
        ],
    );
    let space = client.must("x-vellum-query-space", json!({"node-name": "a"}));
    assert_eq!(
        (&space["own-bytes"], &space["base-bytes"]),
        (&json!(1 << 20), &json!(1 << 20)),
        "{space}"
    );
    assert_eq!(space["complete"], true);
    assert!(
        space["discarded-bytes"].as_u64().expect("a number") >= 1 << 20,
        "{space}"
    );
    assert!(
        space["snapshot-bytes"].as_u64().expect("a number") > 0,
        "{space}"
    );
    assert!(
        space["allocated-bytes"].as_u64() <= space["file-bytes"].as_u64(),
        "{space}"
    );
    let said = place.must(VELLUM, "ctl -c unix:ctl.sock space a");
    assert!(said.contains("data that images below supply"), "{said}");
    place.must(VELLUM, "ctl -c unix:ctl.sock space");
    place.must(
        VELLUM,
        "ctl -c unix:ctl.sock chain a --max-layers 3 --speed 1M",
    );
    let said = place.must(VELLUM, "ctl -c unix:ctl.sock chains");
    assert!(said.contains("1 MiB"), "{said}");
    service.end();
}
