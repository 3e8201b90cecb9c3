//! `--state`: what cannot be brought back, and what leads to the file.

use serde_json::json;

use crate::place::{Place, VELLUM};
use crate::state::{CONFIG, again, export, node, refused, shown, snapshot, start};
use vellum_testing::{Qmp, until};

fn hide(place: &Place, name: &str, other: &str) {
    std::fs::rename(place.path(name), place.path(other)).expect("it is there");
}

/// With `on-error = "report"` the others are served; nobody is shown a disk without what was written to
/// an overlay that is missing, and nothing of the state is lost, whoever writes it meanwhile.
#[test]
fn what_is_missing_is_kept_and_comes_back_with_a_reload() {
    let place = Place::new();
    let report = CONFIG.replace("[daemon]\n", "[daemon]\non-error = 'report'\n");
    let more = "[[disk]]\nname = 'd'\nimage = 'd'\nformat = 'qcow2'\n\
        [[disk.export]]\ntype = 'nbd'\nid = 'd'\nname = 'd'\nwritable = true\n";
    place.write("disks.toml", &(report.clone() + more));
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    client.must("blockdev-add", node("b", "b"));
    client.must("block-export-add", export("b", "b"));
    client.must("blockdev-add", node("c", "c"));
    client.must("block-export-add", export("c", "c"));
    place.io("a", &["write -P 5 0 64k", "flush"]);
    place.io("b", &["write -P 6 0 64k", "flush"]);
    service.kill();
    hide(&place, "over", "over.away");
    hide(&place, "b", "b.away");

    // A new export of the disk, too, would lack what was written.
    let another = "[[disk.export]]\ntype = 'nbd'\nid = 'new'\nname = 'new'\n";
    let wanted = report + another + more;
    place.write("disks.toml", &wanted);
    let begin = || {
        let service = place.start(&words);
        let told = service.wait_told("READY=1");
        assert!(told.contains("not as wanted"), "{told}");
        let client = place.monitor();
        (service, client)
    };
    let (service, mut client) = begin();
    assert_eq!(client.exports(), ["c", "d"]);
    for part in [
        "the node 'over'",
        "the node 'b'",
        "export 'a'",
        "export 'new'",
    ] {
        assert!(service.log().contains(part), "{part}: {}", service.log());
    }
    // Others are changed, which writes the state; a reload brings nothing that is missing.
    client.must("blockdev-snapshot-sync", snapshot("c", "c-over"));
    service.reload();
    assert_eq!(client.exports(), ["c", "d"]);
    let (service, mut client) = {
        service.kill();
        begin()
    };
    assert_eq!(client.exports(), ["c", "d"]);
    assert_eq!(shown(&mut client)["c"], "c-over");
    hide(&place, "b.away", "b");
    service.reload();
    assert_eq!(client.exports(), ["b", "c", "d"]);
    place.io("b", &["read -P 6 0 64k"]);
    hide(&place, "over.away", "over");
    let told = service.reload();
    assert!(!told.contains("not as wanted"), "{told} {}", service.log());
    assert_eq!(client.exports(), ["a", "b", "c", "d", "new"]);
    assert_eq!(shown(&mut client)["a"], "over");
    place.io("a", &["read -P 5 0 64k", "write -P 8 64k 64k", "flush"]);
    let uri = "nbd+unix:///new?socket=nbd.sock";
    let said = place.must(
        VELLUM,
        &["io", "-r", "-f", "raw", "-c", "read -P 5 0 64k", uri],
    );
    assert!(!said.contains("failed"), "{said}");
    service.kill();
    let service = place.serve(&words);
    place.io("a", &["read -P 5 0 64k", "read -P 8 64k 64k"]);
    place.io("b", &["read -P 6 0 64k"]);
    service.end();
}

/// The file, with limits above its disk.
fn throttled() -> String {
    CONFIG.replace("[[disk.export]]", "throttle = 't'\n[[disk.export]]")
        + "[throttle.t]\niops-total = 100000\n"
}

/// Overlays over `a`, below limits of the file, and over `b`; and filters that stand on them, with exports.
fn add_filters_over_overlays(client: &mut Qmp) {
    client.must("blockdev-snapshot-sync", snapshot("a-image", "over"));
    let copying = json!({"driver": "copy-on-read", "node-name": "copying", "file": "a"});
    client.must("blockdev-add", copying);
    let mut reader = export("reader", "copying");
    reader["writable"] = json!(false);
    client.must("block-export-add", reader);
    let limited = json!({
        "driver": "throttle", "node-name": "slow", "throttle-group": "t", "file": node("b", "b"),
    });
    client.must("blockdev-add", limited);
    client.must("block-export-add", export("slow", "slow"));
    client.must("blockdev-snapshot-sync", snapshot("b", "b-over"));
    let policy = json!({"node-name": "slow", "max-layers": 9});
    client.must("x-vellum-set-chain-policy", policy);
}

/// As above, where limits of the file, filters of a client on these, and a filter of a client alone stand on
/// what is missing; a policy for such a disk's chain is kept, too.
#[test]
fn filters_above_what_is_missing_are_kept_and_come_back() {
    let place = Place::new();
    let config = throttled().replace("[daemon]\n", "[daemon]\non-error = 'report'\n")
        + "[[disk]]\nname = 'd'\nimage = 'd'\nformat = 'qcow2'\n\
           [[disk.export]]\ntype = 'nbd'\nid = 'd'\nname = 'd'\nwritable = true\n";
    place.write("disks.toml", &config);
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    add_filters_over_overlays(&mut client);
    place.io("a", &["write -P 5 0 64k", "flush"]);
    place.io("slow", &["write -P 6 0 64k", "flush"]);
    let before = shown(&mut client);
    service.kill();
    hide(&place, "over", "over.away");
    hide(&place, "b-over", "b-over.away");

    let service = place.serve(&words);
    let mut client = place.monitor();
    assert_eq!(client.exports(), ["d"], "{}", service.log());
    for part in ["'over'", "'a'", "'copying'", "'b-over'", "'slow'"] {
        let told = format!("the node {part} back");
        assert!(service.log().contains(&told), "{told}: {}", service.log());
    }
    // Nobody else is to show it; others are changed, which writes the state.
    let why = client.refused("block-export-add", export("new", "a"));
    assert!(why.contains("the state file has"), "{why}");
    client.must("blockdev-add", node("c", "c"));
    client.must("block-export-add", export("c", "c"));
    let told = service.reload();
    assert!(told.contains("not as wanted"), "{told}");
    assert_eq!(client.exports(), ["c", "d"]);
    service.kill();
    let service = place.serve(&words);
    let mut client = place.monitor();
    assert_eq!(client.exports(), ["c", "d"], "{}", service.log());

    hide(&place, "b-over.away", "b-over");
    service.reload();
    assert_eq!(client.exports(), ["c", "d", "slow"], "{}", service.log());
    place.io("slow", &["read -P 6 0 64k", "write -P 7 64k 64k", "flush"]);
    let policies = client.must("x-vellum-query-chain-policies", json!({}));
    assert_eq!(policies[0]["max-layers"], 9, "{policies}");
    hide(&place, "over.away", "over");
    let told = service.reload();
    assert!(!told.contains("not as wanted"), "{told} {}", service.log());
    let reader = "nbd+unix:///reader?socket=nbd.sock";
    let said = place.must(
        VELLUM,
        &["io", "-r", "-f", "raw", "-c", "read -P 5 0 64k", reader],
    );
    assert!(!said.contains("failed"), "{said}");
    place.io("a", &["read -P 5 0 64k", "write -P 8 64k 64k", "flush"]);
    let service = {
        service.kill();
        place.serve(&words)
    };
    let mut client = place.monitor();
    place.io("a", &["read -P 5 0 64k", "read -P 8 64k 64k"]);
    place.io("slow", &["read -P 6 0 64k", "read -P 7 64k 64k"]);
    let mut after = shown(&mut client);
    after.remove("c");
    assert_eq!(after, before);
    service.end();
}

/// Limits stand on what jobs have led them to, also where that does not stand on the disk's own image any more.
#[test]
fn limits_follow_a_disk_that_has_left_its_image() {
    for streams in [true, false] {
        let place = Place::new();
        place.write("disks.toml", throttled());
        let words = ["--config", "disks.toml", "--state", "state"];
        let service = place.serve(&words);
        let mut client = place.monitor();
        client.must("blockdev-snapshot-sync", snapshot("a-image", "over"));
        if streams {
            client.must("block-stream", json!({"job-id": "j", "device": "over"}));
        } else {
            client.must("blockdev-add", node("b", "b"));
            let mirror = json!({"job-id": "j", "device": "over", "target": "b", "sync": "full"});
            client.must("blockdev-mirror", mirror);
            client.take_event("BLOCK_JOB_READY");
            client.must("job-complete", json!({"id": "j"}));
        }
        client.take_event("BLOCK_JOB_COMPLETED");
        place.io("a", &["write -P 5 0 64k", "flush"]);
        service.kill();
        let service = place.serve(&words);
        place.io("a", &["read -P 5 0 64k", "write -P 6 64k 64k", "flush"]);
        service.end();
        // Another image would be another disk.
        place.write(
            "disks.toml",
            throttled().replace("image = 'a'", "image = 'c'"),
        );
        let why = refused(&place, &words);
        assert!(why.contains("have it described"), "{why}");
        place.write("disks.toml", throttled());
        let service = place.serve(&words);
        place.io("a", &["read -P 5 0 64k", "read -P 6 64k 64k"]);
        service.end();
    }
}

/// Limits wait for their disk and for the overlay between the two, which come back one after the other.
#[test]
fn a_filter_waits_for_all_that_it_stood_on() {
    let place = Place::new();
    let config = throttled().replace("[daemon]\n", "[daemon]\non-error = 'report'\n");
    place.write("disks.toml", &config);
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    client.must("blockdev-snapshot-sync", snapshot("a-image", "over"));
    place.io("a", &["write -P 5 0 64k", "flush"]);
    service.kill();
    hide(&place, "over", "over.away");
    hide(&place, "a", "a.away");
    let service = place.serve(&words);
    let mut client = place.monitor();
    assert_eq!(client.exports(), [""; 0], "{}", service.log());
    hide(&place, "a.away", "a");
    service.reload();
    assert_eq!(client.exports(), [""; 0], "{}", service.log());
    client.must("blockdev-add", node("b", "b"));
    service.kill();
    let service = place.serve(&words);
    let mut client = place.monitor();
    assert_eq!(client.exports(), [""; 0], "{}", service.log());
    hide(&place, "over.away", "over");
    let told = service.reload();
    assert!(!told.contains("not as wanted"), "{told} {}", service.log());
    place.io("a", &["read -P 5 0 64k"]);
    service.end();
}

/// The disk of the file is missing, and with it what stands on it.
#[test]
fn an_overlay_waits_for_the_disk_below_it() {
    let place = Place::new();
    place.write(
        "disks.toml",
        CONFIG.replace("[daemon]\n", "[daemon]\non-error = 'report'\n"),
    );
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    client.must("blockdev-snapshot-sync", snapshot("a", "over"));
    place.io("a", &["write -P 5 0 64k", "flush"]);
    service.kill();
    hide(&place, "a", "a.away");
    let service = place.serve(&words);
    let mut client = place.monitor();
    assert_eq!(client.exports(), [""; 0]);
    client.must("blockdev-add", node("b", "b"));
    service.kill();
    let service = place.serve(&words);
    let mut client = place.monitor();
    // Another image in its place is not what the overlay stands on.
    place.write("disks.toml", CONFIG.replace("image = 'a'", "image = 'c'"));
    service.reload();
    assert_eq!(client.exports(), [""; 0], "{}", service.log());
    // Nor is it after another start.
    service.kill();
    let why = refused(&place, &words);
    assert!(why.contains("another image than it was"), "{why}");
    hide(&place, "over", "over.away");
    place.write(
        "disks.toml",
        CONFIG
            .replace("[daemon]\n", "[daemon]\non-error = 'report'\n")
            .replace("image = 'a'", "image = 'c'"),
    );
    let why = refused(&place, &words);
    assert!(why.contains("another image than it was"), "{why}");
    hide(&place, "a.away", "a");
    place.write(
        "disks.toml",
        CONFIG.replace("[daemon]\n", "[daemon]\non-error = 'report'\n"),
    );
    let service = place.serve(&words);
    let mut client = place.monitor();
    assert_eq!(client.exports(), [""; 0], "{}", service.log());
    // It is not made anew below what is lost.
    place.write("disks.toml", CONFIG.replace("image = 'a'", "image = 'c'"));
    let told = service.reload();
    assert!(told.contains("not as wanted"), "{told}");
    hide(&place, "over.away", "over");
    place.write("disks.toml", CONFIG);
    service.reload();
    assert_eq!(client.exports(), ["a"], "{}", service.log());
    assert_eq!(shown(&mut client)["a"], "over");
    place.io("a", &["read -P 5 0 64k"]);
    service.end();
}

#[test]
fn jobs_come_back_as_they_were_told_to_go_on() {
    let place = Place::new();
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("a", "a"));
    client.must("blockdev-add", node("b", "b"));
    client.must("block-export-add", export("a", "a"));
    place.io("a", &["write -P 3 0 1M", "flush"]);
    let mirror = json!({"job-id": "j", "device": "a", "target": "b", "sync": "full", "speed": 1});
    client.must("blockdev-mirror", mirror);
    client.must("block-job-set-speed", json!({"device": "j", "speed": 2}));
    client.must("job-pause", json!({"id": "j"}));
    let told = |client: &mut Qmp| {
        let job = client.must("query-block-jobs", json!({}))[0].clone();
        (job["speed"].clone(), job["paused"].clone())
    };
    let (service, mut client) = again(&place, service);
    assert_eq!(told(&mut client), (json!(2), json!(true)));
    client.must("block-job-set-speed", json!({"device": "j", "speed": 0}));
    let (service, mut client) = again(&place, service);
    assert_eq!(told(&mut client), (json!(0), json!(true)));
    client.must("block-job-resume", json!({"device": "j"}));
    client.take_event("BLOCK_JOB_READY");
    let (service, mut client) = again(&place, service);
    until("the job goes on", || {
        client.must("query-block-jobs", json!({}))[0]["ready"] == true
    });
    service.end();
}

/// A lock that is held by this test keeps the start waiting, whose first step was long before.
#[test]
fn a_reload_during_the_start_is_done_after_it() {
    use rustix::fs::{FlockOperation, flock};
    let place = Place::new();
    place.write("disks.toml", CONFIG);
    let lock = std::fs::File::create(place.path("state.lock")).expect("a file");
    flock(&lock, FlockOperation::LockExclusive).expect("nobody has it");
    let service = place.start(&["--config", "disks.toml", "--state", "state"]);
    let folder = format!("/proc/{}/fd", service.running.id());
    until("the lock", || {
        let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut paths = files.filter_map(|file| std::fs::read_link(file.path()).ok());
        paths.any(|path| path.ends_with("state.lock"))
    });
    let more = "[[disk.export]]\ntype = 'nbd'\nid = 'more'\nname = 'more'\n";
    place.write("disks.toml", &(CONFIG.to_owned() + more));
    service.signal("-HUP");
    drop(lock);
    service.wait_told("READY=1");
    service.wait_told("RELOADING=1");
    service.wait_told("READY=1");
    let mut client = place.monitor();
    assert_eq!(client.exports(), ["a", "more"]);
    service.end();
}

/// Whichever name a daemon was given, there is one file, and one lock of it.
#[test]
fn a_state_file_is_one_whatever_leads_to_it() {
    let place = Place::new();
    std::fs::create_dir(place.path("kept")).expect("a folder");
    std::os::unix::fs::symlink("kept/state", place.path("state")).expect("a link");
    let (service, mut client) = start(&place);
    client.must("blockdev-add", node("a", "a"));
    let (service, mut client) = again(&place, service);
    assert!(
        client
            .names("query-named-block-nodes", "node-name")
            .contains(&"a".to_owned())
    );
    let is_link = |name: &str| {
        let found = std::fs::symlink_metadata(place.path(name)).expect("it is there");
        found.is_symlink()
    };
    assert!(is_link("state") && !is_link("kept/state"));
    let other = refused(&place, &["--state", "kept/state"]);
    assert!(other.contains("another daemon keeps"), "{other}");
    service.end();
    std::fs::hard_link(place.path("kept/state"), place.path("twin")).expect("a link");
    for name in ["twin", "state"] {
        let twin = refused(&place, &["--state", name]);
        assert!(twin.contains("hard links"), "{twin}");
    }
    place.must("mkfifo", "pipe");
    for (option, name) in [
        ("--state", "pipe"),
        ("--state", "/dev/zero"),
        ("--config", "pipe"),
        ("--config", "/dev/zero"),
    ] {
        let why = refused(&place, &[option, name]);
        assert!(why.contains("no regular file"), "{option} {name}: {why}");
    }
}

#[test]
fn an_overlay_under_a_throttle_is_shown_again_or_nothing_is() {
    let place = Place::new();
    let throttled = throttled();
    place.write("disks.toml", &throttled);
    let words = ["--config", "disks.toml", "--state", "state"];
    let service = place.serve(&words);
    let mut client = place.monitor();
    client.must("blockdev-snapshot-sync", snapshot("a-image", "over"));
    place.io("a", &["write -P 5 0 64k", "flush"]);
    service.kill();
    for byte in [5, 6] {
        let service = place.serve(&words);
        let (read, write) = (
            format!("read -P {byte} 0 64k"),
            format!("write -P {} 0 64k", byte + 1),
        );
        place.io("a", &[&read, &write, "flush"]);
        service.reload();
        place.io("a", &[&format!("read -P {} 0 64k", byte + 1)]);
        let mut client = place.monitor();
        let limits = json!({"path": "/objects/t", "property": "limits"});
        assert_eq!(client.must("qom-get", limits)["iops-total"], 100_000);
        service.kill();
    }
    // Another image is not what the overlay stands on.
    place.write(
        "disks.toml",
        throttled.replace("image = 'a'", "image = 'b'"),
    );
    let said = refused(&place, &words);
    assert!(said.contains("another image than it was"), "{said}");
    place.write("disks.toml", &throttled);
    std::fs::rename(place.path("over"), place.path("away")).expect("it is there");
    let said = refused(&place, &words);
    assert!(said.contains("'over'"), "{said}");
    place.must(
        "qemu-io",
        &["-r", "-f", "qcow2", "-c", "read -P 7 0 64k", "away"],
    );
}
