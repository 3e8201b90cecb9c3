//! Jobs beside a guest, on files that keep only what was flushed: what the guest was told is
//! durable is, and whatever becomes of a job, nodes and users are left as they should be.

mod cycles;
mod left;

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use event_listener::Event;
use serde_json::{Value, json};
use vellum::BlockDevice;
use vellum_graph::live::ShownBitmap;
use vellum_graph::testing::World;
use vellum_io::lane::{block_on, yield_now};
use vellum_io::{Buffer, spawn};
use vellum_storage::nodes::debug::HasDebugger;

use crate::qmp::Arguments;

use super::*;

/// What has happened.
#[derive(Default)]
struct Told {
    events: RefCell<Vec<Value>>,
    changed: Event,
}

impl Listener for Told {
    fn hear(&self, event: &Value) {
        self.events.borrow_mut().push(event.clone());
        self.changed.notify(usize::MAX);
    }
}

impl Told {
    /// Waits for an event of one of these names.
    async fn wait(&self, names: &[&str]) -> Value {
        loop {
            let changed = self.changed.listen();
            let is_it = |event: &&Value| names.iter().any(|name| event["event"] == *name);
            let found = self.events.borrow().iter().find(is_it).cloned();
            if let Some(event) = found {
                return event;
            }
            changed.await;
        }
    }
}

/// A daemon with a chain `top` on `mid` on `base`, each of which holds something, and an
/// image `copy` of the same size.
struct Place {
    world: Rc<World>,
    daemon: Rc<Daemon>,
    told: Rc<Told>,
}

impl Place {
    async fn new() -> Place {
        let world = World::new();
        let daemon = Daemon::new(world.nodes.clone(), ServerEnvironment::without_sockets());
        let told = Rc::<Told>::default();
        daemon.events.join(told.clone());
        let place = Place {
            world,
            daemon,
            told,
        };
        for name in ["base", "mid", "top", "copy"] {
            place.world.add(name, "qcow2").await;
        }
        let joined = place.world.join("base");
        for (at, overlay) in [(1, Some("mid")), (2, Some("top")), (3, None)] {
            for sector in 0..40 {
                let byte = (at * 50 + sector) as u8;
                place.world.put(&joined, at * 60 + sector, byte).await;
            }
            if let Some(overlay) = overlay {
                let node = place.world.nodes.used_by(joined.id).unwrap();
                let names = json!({"node": node, "overlay": overlay});
                place.must("blockdev-snapshot", names).await;
            }
        }
        place.world.nodes.leave(joined.id);
        place
    }

    async fn ask(&self, command: &str, arguments: Value) -> Result<Value, String> {
        let Value::Object(members) = arguments else {
            panic!("{arguments} are no arguments");
        };
        let outcome = carry_out(&self.daemon, command, Arguments::new(members));
        outcome.await.map_err(|failure| failure.text)
    }

    async fn must(&self, command: &str, arguments: Value) -> Value {
        let answer = self.ask(command, arguments.clone()).await;
        answer.unwrap_or_else(|why| panic!("{command} {arguments}: {why}"))
    }

    /// Nothing is left of any job, and all nodes can go.
    async fn check_end(&self, chain: &[&str]) {
        assert_eq!(self.must("query-jobs", json!({})).await, json!([]));
        for name in ["top", "mid", "base", "copy"] {
            assert!(!self.world.is_watched(name), "{name}");
        }
        assert_eq!(self.world.nodes.chain(chain[0]), chain);
        for name in ["top", "mid", "base", "copy"] {
            let name = json!({"node-name": name});
            self.must("blockdev-del", name).await;
        }
    }
}

/// A job: how it is asked for, and on what the guest's disk consists once it is complete.
struct Kind {
    command: &'static str,
    arguments: Value,
    chain: &'static [&'static str],
    /// The node that it writes to.
    target: &'static str,
}

fn kinds() -> [Kind; 5] {
    let kind = |command, arguments, chain, target| Kind {
        command,
        arguments,
        chain,
        target,
    };
    let commit = "block-commit";
    let below = json!({"device": "top", "top-node": "mid", "base-node": "base"});
    let backup = json!({"device": "top", "target": "copy", "sync": "full"});
    let stream = json!({"device": "top", "base-node": "base"});
    let all: &[&str] = &["top", "mid", "base"];
    [
        kind(commit, json!({"device": "top"}), &["base"], "base"),
        kind(commit, below, &["top", "base"], "base"),
        kind("block-stream", stream, &["top", "base"], "top"),
        kind("block-stream", json!({"device": "top"}), &["top"], "top"),
        kind("blockdev-backup", backup, all, "copy"),
    ]
}

const ENDED: [&str; 2] = ["BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"];

#[test]
fn what_is_flushed_is_durable_beside_every_job() {
    for kind in kinds() {
        block_on(async {
            let place = Place::new().await;
            let mut arguments = kind.arguments;
            arguments["job-id"] = json!("j");
            let job = async {
                place.must(kind.command, arguments).await;
                let next = ["BLOCK_JOB_READY", "BLOCK_JOB_COMPLETED"];
                if place.told.wait(&next).await["event"] == "BLOCK_JOB_READY" {
                    place.must("job-complete", json!({"id": "j"})).await;
                }
                let ended = place.told.wait(&ENDED).await;
                assert_eq!(ended["event"], "BLOCK_JOB_COMPLETED");
                assert_eq!(ended["data"].get("error"), None, "{ended}");
            };
            place.world.change("top", job).await;
            place.check_end(kind.chain).await;
        });
    }
}

#[test]
fn a_job_that_is_given_up_leaves_everything_as_it_was() {
    for kind in kinds() {
        for turns in [0, 300] {
            block_on(async {
                let place = Place::new().await;
                let mut arguments = kind.arguments.clone();
                arguments["job-id"] = json!("j");
                arguments["speed"] = json!(1);
                arguments["auto-finalize"] = json!(false);
                let job = async {
                    place.must(kind.command, arguments).await;
                    for _ in 0..turns {
                        yield_now().await;
                    }
                    place.must("job-cancel", json!({"id": "j"})).await;
                    let ended = place.told.wait(&ENDED).await;
                    assert_eq!(ended["event"], "BLOCK_JOB_CANCELLED");
                };
                place.world.change("top", job).await;
                place.check_end(&["top", "mid", "base"]).await;
            });
        }
    }
}

#[test]
fn a_job_that_fails_leaves_everything_as_it_was() {
    for kind in kinds() {
        block_on(async {
            let place = Place::new().await;
            let mut arguments = kind.arguments;
            arguments["job-id"] = json!("j");
            let file = place.world.file(kind.target);
            let job = async {
                file.0.fails_writes.store(true, Ordering::SeqCst);
                place.must(kind.command, arguments).await;
                let ended = place.told.wait(&ENDED).await;
                assert_eq!(ended["event"], "BLOCK_JOB_COMPLETED");
                let why = &ended["data"]["error"];
                assert_eq!(why, "Input/output error", "{ended}");
                file.0.fails_writes.store(false, Ordering::SeqCst);
            };
            match kind.target {
                // The guest's own writes fail too.
                "top" => job.await,
                _ => place.world.change("top", job).await,
            }
            place.check_end(&["top", "mid", "base"]).await;
        });
    }
}

#[test]
fn the_end_makes_all_durable_whatever_jobs_run() {
    for kind in kinds() {
        block_on(async {
            let place = Place::new().await;
            let mut arguments = kind.arguments;
            arguments["job-id"] = json!("j");
            arguments["speed"] = json!(1);
            place.must(kind.command, arguments).await;
            let joined = place.world.join("top");
            for sector in 0..30 {
                place.world.put(&joined, sector * 3, 200).await;
            }
            place.world.nodes.leave(joined.id);
            place.daemon.shut_down().await.unwrap();
            let chain = ["top", "mid", "base"].map(str::to_owned);
            place.world.check_left(&chain).await;
        });
    }
}

/// A read that has found that something lies below the image is on its way there when all
/// has been brought up.
#[test]
fn a_late_read_sees_what_was_below_when_a_stream_ends() {
    block_on(async {
        let place = Place::new().await;
        let world = &place.world;
        world.add_suspendable("late").await;
        let joined = world.join("top");
        let names = json!({"node": "top", "overlay": "late"});
        place.must("blockdev-snapshot", names).await;
        let device = world.nodes.device("late").unwrap();
        let debugger = device.storage().unwrap().debugger().unwrap();
        drop(device);
        // Its beginning waits for reads, and its end is not to come before this one.
        let stream = json!({"job-id": "j", "device": "late", "speed": 1});
        place.must("block-stream", stream).await;
        debugger.set_breakpoint(vellum_storage::Event::ReadBackingAio, "read");
        let link = joined.link.clone();
        // What `base` holds.
        let read = spawn(async move { link.read(70 * 512, Buffer::zeroed(512)).await });
        debugger.wait_suspended("read").await;
        let speed = json!({"device": "j", "speed": 0});
        place.must("block-job-set-speed", speed).await;
        for _ in 0..2000 {
            yield_now().await;
        }
        debugger.remove_breakpoints("read");
        debugger.resume("read");
        let bytes = read.await.unwrap();
        assert!(bytes.iter().all(|&byte| byte == 60), "{:?}", &bytes[..8]);
        let ended = place.told.wait(&ENDED).await;
        assert_eq!(ended["data"].get("error"), None, "{ended}");
        assert_eq!(world.nodes.chain("late"), ["late"]);
        world.nodes.leave(joined.id);
    });
}

#[test]
fn what_a_job_watches_is_not_written_past_it() {
    block_on(async {
        let place = Place::new().await;
        let backup = json!({"job-id": "b", "device": "base", "target": "copy", "sync": "none"});
        place.must("blockdev-backup", backup).await;
        let refused = "Node 'base' is busy: block device is in use by block job: backup";
        for top in ["top", "mid"] {
            let commit = json!({"job-id": "c", "device": "top", "top-node": top});
            let answer = place.ask("block-commit", commit).await;
            assert_eq!(answer.unwrap_err(), refused);
        }
        place.must("job-cancel", json!({"id": "b"})).await;
        place.told.wait(&ENDED).await;
        place.check_end(&["top", "mid", "base"]).await;
    });
}

/// A paused job that is cancelled is resumed first, as in QEMU.
#[test]
fn a_job_that_is_cancelled_tells_of_no_failure_that_held_it_up() {
    block_on(async {
        let place = Place::new().await;
        let file = place.world.file("copy");
        file.0.fails_writes.store(true, Ordering::SeqCst);
        let backup = json!({"job-id": "j", "device": "top", "target": "copy", "sync": "full",
            "on-target-error": "stop", "auto-dismiss": false});
        place.must("blockdev-backup", backup).await;
        place.told.wait(&["BLOCK_JOB_ERROR"]).await;
        let status = async || {
            let jobs = place.must("query-block-jobs", json!({})).await;
            jobs[0]["io-status"].clone()
        };
        assert_eq!(status().await, "failed");
        file.0.fails_writes.store(false, Ordering::SeqCst);
        place.must("job-cancel", json!({"id": "j"})).await;
        place.told.wait(&ENDED).await;
        assert_eq!(status().await, "ok");
        while place.ask("job-dismiss", json!({"id": "j"})).await.is_err() {
            yield_now().await;
        }
        place.check_end(&["top", "mid", "base"]).await;
    });
}

/// Users stay with an overlay of which a client was told that it is not there.
#[test]
fn an_overlay_that_is_not_taken_back_is_told() {
    block_on(async {
        let place = Place::new().await;
        let nodes = &place.world.nodes;
        let bitmap = json!({"node": "top", "name": "b"});
        place.must("block-dirty-bitmap-add", bitmap).await;
        let joined = place.world.join("top");
        let (node, found, _) = nodes.find_bitmap("top", "b").await.unwrap().unwrap();
        let view = found.view().await.unwrap();
        nodes.show_bitmap(ShownBitmap {
            node,
            name: "b".to_owned(),
            from: "top".to_owned(),
            view: view.clone(),
        });
        nodes.before_leading(|_, from, _| {
            let is_back = from == "copy";
            Box::pin(async move {
                let full = || vellum::Error::new(vellum::ErrorKind::NoSpace, "note", "full");
                is_back.then(full).map_or(Ok(()), Err)
            })
        });
        let snapshot = json!({"node": "top", "overlay": "copy"});
        let actions =
            json!([{"type": "blockdev-snapshot", "data": snapshot}, {"type": "abort", "data": {}}]);
        assert_eq!(view.status(0, 512), (false, 512));
        let refused = place.ask("transaction", json!({"actions": actions})).await;
        assert_eq!(
            refused.unwrap_err(),
            "Transaction aborted using Abort action; the snapshot of 'top' could not be taken back, its \
             users are on 'copy': full"
        );
        assert_eq!(nodes.used_by(joined.id).as_deref(), Some("copy"));
        assert_eq!(view.status(0, 512), (true, 512));
        nodes.leave(joined.id);
    });
}

/// Lists that are written straight as text have their members where QEMU has them.
#[test]
fn long_answers_are_in_the_order_of_qemu() {
    block_on(async {
        let place = Place::new().await;
        let bitmap = json!({"node": "top", "name": "b"});
        place.must("block-dirty-bitmap-add", bitmap).await;
        for (command, arguments) in [
            ("query-named-block-nodes", json!({})),
            ("query-named-block-nodes", json!({"flat": true})),
            ("query-blockstats", json!({})),
            ("query-blockstats", json!({"query-nodes": true})),
        ] {
            let Value::Object(members) = arguments.clone() else {
                panic!("{arguments} are no arguments");
            };
            let written = commands::write_out(&place.daemon, command, Arguments::new(members));
            let written = written.await.expect(command);
            let value = place.must(command, arguments).await;
            assert_eq!(vellum_options::json::compact(&value), written, "{command}");
            check_order(&value);
        }
        let bitmap = json!({"node": "top", "name": "b"});
        place.must("block-dirty-bitmap-remove", bitmap).await;
        place.check_end(&["top", "mid", "base"]).await;
    });
}

/// Checks that members are in the order of their buckets, the last one first.
fn check_order(value: &Value) {
    match value {
        Value::Array(items) => items.iter().for_each(check_order),
        Value::Object(members) => {
            let buckets = members.keys().map(|key| vellum_options::json::bucket(key));
            let buckets: Vec<u32> = buckets.collect();
            assert!(buckets.iter().rev().is_sorted(), "{members:?}");
            members.values().for_each(check_order);
        }
        _ => {}
    }
}
