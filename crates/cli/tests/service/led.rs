//! Disks whose users a client has led to another node, and what reloads and starts make of them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::place::{Place, Service, VELLUM};
use vellum_testing::Qmp;

const DAEMON: &str = "[daemon]\nmonitors = ['qmp.sock']\nnbd = { path = 'nbd.sock' }\n";
const LIMITS: &str = "[throttle.t]\niops-total = 100000\n";

/// A disk `a`, with more members, and exports: its own, and others by their names.
fn disk(more: &str, exports: &[&str]) -> String {
    let export = |id: &&str| {
        let writable = !id.starts_with("ro");
        format!(
            "[[disk.export]]\ntype = 'nbd'\nid = '{id}'\nname = '{id}'\nwritable = {writable}\n"
        )
    };
    let exports: String = exports.iter().map(export).collect();
    format!(
        "{DAEMON}{LIMITS}[[disk]]\nname = 'a'\nimage = 'a'\nformat = 'qcow2'\n{more}\n{exports}"
    )
}

fn place(more: &str, exports: &[&str]) -> Place {
    let place = Place::new();
    place.must(VELLUM, "create -q -f qcow2 a 8M");
    place.must(VELLUM, "io -c 'write -q -P 1 0 1M' a");
    place.write("disks.toml", disk(more, exports));
    place
}

fn serve(place: &Place) -> (Service, Qmp) {
    let service = place.serve("--config disks.toml --state state");
    let client = place.monitor();
    (service, client)
}

fn snapshot(client: &mut Qmp, of: &str, to: &str) {
    let arguments = json!({"node-name": of, "snapshot-file": to, "snapshot-node-name": to});
    client.must("blockdev-snapshot-sync", arguments);
}

/// The nodes that exports show, by the names of these.
fn shown(client: &mut Qmp) -> BTreeMap<String, String> {
    let exports = client.must("query-block-exports", json!({}));
    let exports = exports.as_array().expect("exports").clone();
    let text = |value: &Value| value.as_str().expect("a text").to_owned();
    exports
        .iter()
        .map(|one| (text(&one["id"]), text(&one["node-name"])))
        .collect()
}

/// Whatever the order of their names.
#[test]
fn users_are_where_several_snapshots_have_led_them_after_a_start() {
    for [first, second, third] in [["s9", "s10", "s11"], ["tuesday", "monday", "friday"]] {
        let place = place("", &["rw"]);
        let (service, mut client) = serve(&place);
        let names = ["a", first, second, third];
        for (index, step) in names.windows(2).enumerate() {
            snapshot(&mut client, step[0], step[1]);
            let write = format!("write -q -P {} {}k 64k", index + 2, 64 * index);
            place.io("rw", &[&write, "flush"]);
        }
        drop(client);
        service.kill();
        let (service, mut client) = serve(&place);
        assert!(shown(&mut client).values().all(|node| node == third));
        place.io(
            "rw",
            &[
                "read -q -P 2 0 64k",
                "read -q -P 3 64k 64k",
                "read -q -P 4 128k 64k",
            ],
        );
        drop(client);
        service.kill();
    }
}

#[test]
fn a_new_node_with_the_name_of_an_overlay_that_is_gone_gets_nobodys_users() {
    let place = place("", &["rw"]);
    place.must(VELLUM, "create -q -f qcow2 new 8M");
    let (service, mut client) = serve(&place);
    snapshot(&mut client, "a", "over");
    snapshot(&mut client, "over", "above");
    place.io("rw", &["write -q -P 2 0 64k", "flush"]);
    client.must("block-stream", json!({"job-id": "j", "device": "above"}));
    client.take_event("BLOCK_JOB_COMPLETED");
    client.must("blockdev-del", json!({"node-name": "over"}));
    let new = json!({"driver": "qcow2", "node-name": "over",
                     "file": {"driver": "file", "filename": "new"}});
    client.must("blockdev-add", new);
    drop(client);
    service.kill();
    let (service, mut client) = serve(&place);
    assert_eq!(shown(&mut client)["rw"], "above");
    place.io("rw", &["read -q -P 2 0 64k"]);
    drop(client);
    service.kill();
}

/// A disk may get a snapshot each night, for years.
#[test]
fn where_users_of_overlays_were_that_are_gone_is_not_kept() {
    let place = place("", &["rw"]);
    let (service, mut client) = serve(&place);
    let led = || {
        let text = place.text("state");
        let body = text.lines().nth(1).expect("a second line");
        let state: Value = serde_json::from_str(body).expect("JSON");
        let led = state["led"].as_object().expect("members").iter();
        let step = |(from, step): (&String, &Value)| {
            let to = step.get("to").unwrap_or(step);
            (from.clone(), to.as_str().expect("a name").to_owned())
        };
        led.map(step).collect::<Vec<_>>()
    };
    for night in ["monday", "tuesday"] {
        snapshot(&mut client, "a", night);
        client.must("block-commit", json!({"job-id": "c", "device": night}));
        client.take_event("BLOCK_JOB_READY");
        client.must("job-complete", json!({"id": "c"}));
        client.take_event("BLOCK_JOB_COMPLETED");
        client.must("blockdev-del", json!({"node-name": night}));
    }
    assert_eq!(led(), []);
    // Nor are those between.
    snapshot(&mut client, "a", "between");
    snapshot(&mut client, "between", "top");
    place.io("rw", &["write -q -P 2 0 64k", "flush"]);
    client.must("block-stream", json!({"job-id": "s", "device": "top"}));
    client.take_event("BLOCK_JOB_COMPLETED");
    client.must("blockdev-del", json!({"node-name": "between"}));
    assert_eq!(led(), [("a".to_owned(), "top".to_owned())]);
    drop(client);
    service.kill();
    place.write("disks.toml", disk("", &["rw", "later"]));
    let (service, mut client) = serve(&place);
    assert!(shown(&mut client).values().all(|node| node == "top"));
    place.io("later", &["read -q -P 2 0 64k"]);
    service.end();
}

#[test]
fn a_disk_of_the_file_with_the_name_of_an_overlay_in_use_is_refused() {
    let place = place("", &["rw"]);
    place.must(VELLUM, "create -q -f qcow2 other 8M");
    let (service, mut client) = serve(&place);
    snapshot(&mut client, "a", "over");
    drop(client);
    service.kill();
    let other = "[[disk]]\nname = 'over'\nimage = 'other'\nformat = 'qcow2'\n";
    place.write("disks.toml", format!("{}{other}", disk("", &["rw"])));
    let words = ["daemon", "--config", "disks.toml", "--state", "state"];
    let refused = place.run(VELLUM, &words);
    assert!((refused.code != Some(0)));
    let said = refused.err;
    assert!(said.contains("'over' is another disk"), "{said}");
    // Called otherwise it is one more disk.
    let renamed = other.replace("'over'", "'more'");
    place.write("disks.toml", format!("{}{renamed}", disk("", &["rw"])));
    let (service, mut client) = serve(&place);
    assert_eq!(shown(&mut client)["rw"], "over");
    drop(client);
    service.kill();
}

/// Nobody but the file of disks has said anything of them.
#[test]
fn limits_come_and_go_while_the_daemon_is_away() {
    let place = place("", &["rw"]);
    let limited = "throttle = 't'";
    for (round, more) in [limited, "", limited, ""].into_iter().enumerate() {
        place.write("disks.toml", disk(more, &["rw"]));
        let (service, client) = serve(&place);
        place.io(
            "rw",
            &[&format!("write -q -P {} 0 64k", round + 1), "flush"],
        );
        drop(client);
        service.kill();
    }
    place.must(VELLUM, "io -c 'read -q -P 4 0 64k' a");
}

#[test]
fn an_export_that_comes_later_shows_the_overlay_too() {
    let place = place("", &[]);
    let (service, mut client) = serve(&place);
    // Nobody uses the disk yet whose users are led.
    snapshot(&mut client, "a", "over");
    let own =
        json!({"type": "nbd", "id": "own", "node-name": "over", "name": "own", "writable": true});
    client.must("block-export-add", own);
    place.io("own", &["write -q -P 2 0 64k", "flush"]);
    place.write("disks.toml", disk("", &["ro"]));
    service.reload();
    let uri = "nbd+unix:///ro?socket=nbd.sock";
    let said = place.must(
        VELLUM,
        &["io", "-r", "-f", "raw", "-c", "read -q -P 2 0 64k", uri],
    );
    assert!(!said.contains("failed"), "{said}");
    drop(client);
    service.kill();
    place.write("disks.toml", disk("", &["ro", "rw"]));
    let (service, mut client) = serve(&place);
    assert!(shown(&mut client).values().all(|node| node == "over"));
    place.io(
        "rw",
        &["read -q -P 2 0 64k", "write -q -P 3 64k 64k", "flush"],
    );
    place.io("own", &["read -q -P 3 64k 64k"]);
    service.end();
    // What the overlay stands on was not written to.
    let said = place.must(VELLUM, "io -r -c 'read -q -P 1 0 1M' a");
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn an_export_that_is_away_while_a_snapshot_is_taken_shows_it_when_it_is_back() {
    let place = place("", &["a"]);
    let (service, mut client) = serve(&place);
    client.must("block-export-del", json!({"id": "a", "mode": "hard"}));
    while !shown(&mut client).is_empty() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    snapshot(&mut client, "a", "over");
    service.reload();
    place.io("a", &["read -q -P 1 0 1M", "write -q -P 2 0 64k", "flush"]);
    assert_eq!(shown(&mut client)["a"], "over");
    service.end();
}

#[test]
fn a_daemon_starts_again_after_a_commit_below_limits() {
    for base in [None, Some("a-image"), Some("a")] {
        let place = place("throttle = 't'", &["a"]);
        let (service, mut client) = serve(&place);
        snapshot(&mut client, "a", "over");
        place.io("a", &["write -q -P 2 0 64k", "flush"]);
        let mut commit = json!({"job-id": "c", "device": "over"});
        if let Some(base) = base {
            commit["base-node"] = json!(base);
        }
        client.must("block-commit", commit);
        client.take_event("BLOCK_JOB_READY");
        client.must("job-complete", json!({"id": "c"}));
        client.take_event("BLOCK_JOB_COMPLETED");
        place.io("a", &["write -q -P 3 64k 64k", "flush"]);
        let before = shown(&mut client);
        assert_eq!(before["a"], base.unwrap_or("a-image"));
        drop(client);
        match base {
            None => service.end(),
            Some(_) => service.kill(),
        }
        let (service, mut client) = serve(&place);
        assert_eq!(shown(&mut client), before);
        place.io(
            "a",
            &[
                "read -q -P 2 0 64k",
                "read -q -P 3 64k 64k",
                "write -q -P 4 0 64k",
            ],
        );
        service.end();
        place.img("check -q a");
    }
}

#[test]
fn what_a_reload_refuses_hangs_up_on_nobody() {
    let place = place("", &["a"]);
    let (service, mut client) = serve(&place);
    snapshot(&mut client, "a", "over");
    for more in ["throttle = 't'", "read-only = true\nthrottle = 't'"] {
        place.write("disks.toml", disk(more, &["a"]));
        let said = service.reload();
        assert!(
            said.contains("clients have led its users to 'over'"),
            "{said}"
        );
        assert_eq!(client.events_of("BLOCK_EXPORT_DELETED"), 0);
    }
    service.end();
}

#[test]
fn an_image_that_is_not_there_takes_no_disk_away() {
    let place = place("", &["a"]);
    let (service, mut client) = serve(&place);
    let other = disk("", &["a"]).replace("image = 'a'", "image = 'mistyped'");
    place.write("disks.toml", &other);
    for _ in 0..2 {
        let said = service.reload();
        assert!(said.contains("mistyped"), "{said}");
        place.io("a", &["read -q -P 1 0 1M"]);
        assert_eq!(client.events_of("BLOCK_EXPORT_DELETED"), 0);
    }
    service.end();
}

fn mirror(client: &mut Qmp, place: &Place) {
    place.must(VELLUM, "create -q -f qcow2 target 8M");
    let file = json!({"driver": "file", "filename": "target"});
    let target = json!({"driver": "qcow2", "node-name": "target", "file": file});
    client.must("blockdev-add", target);
    let mirror = json!({"job-id": "m", "device": "a", "target": "target", "sync": "full"});
    client.must("blockdev-mirror", mirror);
    client.take_event("BLOCK_JOB_READY");
    client.must("job-complete", json!({"id": "m"}));
    client.take_event("BLOCK_JOB_COMPLETED");
}

/// Serves a disk whose users a mirror has led to its target, where they have written since.
fn serve_mirrored(place: &Place) -> (Service, Qmp) {
    let (service, mut client) = serve(place);
    mirror(&mut client, place);
    place.io("rw", &["write -q -P 2 0 64k", "flush"]);
    (service, client)
}

/// Expects that they find that after another start.
fn expect_target_after_start(place: &Place) {
    let (service, mut client) = serve(place);
    let shown = shown(&mut client);
    assert_eq!(shown["rw"], "target");
    assert!(shown.values().all(|node| node == "target"));
    place.io("rw", &["read -q -P 2 0 64k"]);
    service.end();
}

/// It stands on nothing that was away, so users go on with it.
#[test]
fn users_stay_where_a_mirror_has_led_them_while_the_image_before_is_away() {
    let place = place("", &[]);
    let reporting =
        |exports: &[&str]| disk("", exports).replace("[daemon]", "[daemon]\non-error = 'report'");
    place.write("disks.toml", reporting(&["rw"]));
    let (service, client) = serve_mirrored(&place);
    drop(client);
    service.kill();
    let rename = |from: &str, to: &str| {
        std::fs::rename(place.path(from), place.path(to)).expect("renamed");
    };
    rename("a", "away");
    let (service, client) = serve(&place);
    rename("away", "a");
    service.reload();
    place.io("rw", &["read -q -P 2 0 64k"]);
    drop(client);
    service.kill();
    expect_target_after_start(&place);
}

/// Its name is another one's at the next start.
#[test]
fn users_are_not_led_to_a_node_without_a_name_of_its_own() {
    let place = place("", &[]);
    let over = [
        "create", "-q", "-f", "qcow2", "-b", "a", "-F", "qcow2", "top",
    ];
    place.must(VELLUM, &over);
    let file = disk("", &["rw"]).replace("image = 'a'", "image = 'top'");
    place.write("disks.toml", &file);
    let (service, mut client) = serve(&place);
    place.io("rw", &["write -q -P 2 0 64k", "flush"]);
    let commit = json!({"job-id": "c", "device": "a"});
    let said = client.refused("block-commit", commit);
    assert!(said.contains("no name of its own"), "{said}");
    let mirror =
        json!({"job-id": "m", "device": "a", "target": "copy", "sync": "full", "format": "qcow2"});
    client.must("drive-mirror", mirror);
    client.take_event("BLOCK_JOB_READY");
    client.must("job-complete", json!({"id": "m"}));
    let over = client.take_event("BLOCK_JOB_COMPLETED");
    let why = over["data"]["error"].as_str().unwrap_or_default();
    assert!(why.contains("no name of its own"), "{over}");
    place.io(
        "rw",
        &["read -q -P 2 0 64k", "write -q -P 3 0 64k", "flush"],
    );
    drop(client);
    service.kill();
    let (service, mut client) = serve(&place);
    assert_eq!(shown(&mut client)["rw"], "a");
    place.io("rw", &["read -q -P 3 0 64k"]);
    service.end();
}

/// As one does when a mirror is complete: the file still names the disk.
#[test]
fn users_stay_where_a_mirror_has_led_them_when_the_node_before_is_removed() {
    let place = place("", &["rw"]);
    let (service, mut client) = serve_mirrored(&place);
    client.must("blockdev-del", json!({"node-name": "a"}));
    place.write("disks.toml", disk("", &["rw", "later"]));
    service.reload();
    assert!(shown(&mut client).values().all(|node| node == "target"));
    place.io("later", &["read -q -P 2 0 64k"]);
    drop(client);
    service.kill();
    expect_target_after_start(&place);
}

#[test]
fn a_disk_of_another_image_shows_that_whatever_its_name_was_before() {
    let place = place("", &["rw"]);
    place.must(VELLUM, "create -q -f qcow2 b 8M");
    let (service, mut client) = serve(&place);
    mirror(&mut client, &place);
    client.must("blockdev-del", json!({"node-name": "a"}));
    place.write("disks.toml", DAEMON);
    service.reload();
    assert!(shown(&mut client).is_empty());
    let other = |exports: &[&str]| disk("", exports).replace("image = 'a'", "image = 'b'");
    // It may go again, too.
    for file in [other(&[]), DAEMON.to_owned(), other(&["rw"])] {
        place.write("disks.toml", &file);
        let said = service.reload();
        assert!(!said.contains("clients have led"), "{said}");
    }
    assert_eq!(shown(&mut client)["rw"], "a");
    place.io("rw", &["read -q -P 0 0 64k"]);
    drop(client);
    service.kill();
    let (service, mut client) = serve(&place);
    assert_eq!(shown(&mut client)["rw"], "a");
    service.end();
}

#[test]
fn a_disk_that_the_file_lacks_for_a_start_comes_back_as_what_it_was() {
    let place = place("", &["rw"]);
    let (service, client) = serve_mirrored(&place);
    drop(client);
    service.kill();
    place.write("disks.toml", DAEMON);
    let (service, client) = serve(&place);
    drop(client);
    service.kill();
    place.write("disks.toml", disk("", &["rw"]));
    expect_target_after_start(&place);
}

/// The file of disks names what a client has put over its disk: that is the disk from then on.
#[test]
fn an_overlay_that_the_file_names_by_now_is_the_disk() {
    for (overlays, named) in [(1, 1), (2, 1), (2, 2), (3, 2)] {
        let place = place("", &["rw"]);
        let (service, mut client) = serve(&place);
        let names = ["a", "over1", "over2", "over3"];
        for at in 1..=overlays {
            snapshot(&mut client, names[at - 1], names[at]);
            let write = format!("write -q -P {} {}k 64k", at + 1, 64 * at);
            place.io("rw", &[&write, "flush"]);
        }
        drop(client);
        service.kill();
        let text = disk("", &["rw"]);
        let image = format!("image = '{}'", names[named]);
        place.write("disks.toml", text.replace("image = 'a'", &image));
        let expected = if named == overlays {
            "a"
        } else {
            names[overlays]
        };
        for round in 0..3 {
            let (service, mut client) = serve(&place);
            assert_eq!(shown(&mut client)["rw"], expected);
            place.io("rw", &["read -q -P 1 0 64k"]);
            for at in 1..=overlays {
                let read = format!("read -q -P {} {}k 64k", at + 1, 64 * at);
                place.io("rw", &[&read]);
            }
            if round > 0 {
                place.io("rw", &["read -q -P 9 1M 64k"]);
            }
            place.io("rw", &["write -q -P 9 1M 64k", "flush"]);
            drop(client);
            service.kill();
        }
        // What is above is where it was, and nothing was written below.
        let top = ["io", "-r", "-c", "read -q -P 9 1M 64k", names[overlays]];
        place.must(VELLUM, &top);
        place.must(VELLUM, "io -r -c 'read -q -P 1 0 1M' a");
    }
}

/// An older image of the chain is none of them: users would lack what they have written.
#[test]
fn an_older_overlay_that_the_file_names_does_not_hide_what_is_above() {
    let place = place("", &["rw"]);
    let (service, mut client) = serve(&place);
    snapshot(&mut client, "a", "over1");
    place.io("rw", &["write -q -P 2 0 64k", "flush"]);
    drop(client);
    service.kill();
    // Another image with the name of the overlay.
    place.must("mv", "over1 kept");
    place.must(VELLUM, "create -q -f qcow2 over1 8M");
    place.write(
        "disks.toml",
        disk("", &["rw"]).replace("image = 'a'", "image = 'over1'"),
    );
    let refused = place.run(VELLUM, "daemon --config disks.toml --state state");
    assert!((refused.code != Some(0)));
    place.must("mv", "kept over1");
    let (service, mut client) = serve(&place);
    assert_eq!(shown(&mut client)["rw"], "a");
    place.io("rw", &["read -q -P 2 0 64k"]);
    drop(client);
    service.end();
}
