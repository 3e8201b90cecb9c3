//! Nodes whose server takes its time: whoever asks for one waits, and nobody else does.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use vellum_testing::Qmp;

use crate::place::{Daemon, Place};
use crate::stalled::{SOON, Target, until};

/// A server that takes connections and says nothing.
struct Silent(Receiver<UnixStream>);

impl Silent {
    fn listen(place: &Place) -> Silent {
        let listener = UnixListener::bind(place.path("quiet")).expect("a free path");
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                if sender.send(stream).is_err() {
                    return;
                }
            }
        });
        Silent(receiver)
    }

    /// Waits for a client.
    fn client(&self) -> UnixStream {
        let client = self.0.recv_timeout(Duration::from_secs(20));
        client.expect("somebody connects")
    }
}

fn node(place: &Place, name: &str, socket: &str) -> Value {
    let server = json!({"type": "unix", "path": place.path(socket)});
    json!({"driver": "nbd", "node-name": name, "server": server})
}

/// A daemon of two monitors with a disk, that keeps a state file.
fn start(place: &Place) -> (Daemon, Qmp) {
    place.img("create -q -f qcow2 disk 1M");
    let daemon = place.ours(
        "--chardev socket,id=s,path=qmp,server=on,wait=off --monitor s \
             --blockdev qcow2,node-name=disk,file.driver=file,file.filename=disk \
             --nbd-server addr.type=unix,addr.path=sock --state state",
    );
    (daemon, Qmp::connect(place.path("qmp")))
}

/// The names of the nodes that the state file has.
fn kept(place: &Place) -> Vec<String> {
    let text = place.text("state");
    let content = text.lines().last().expect("a line");
    let content: Value = serde_json::from_str(content).expect("JSON");
    let nodes = content["nodes"].as_array().expect("a list").iter();
    let names = nodes.filter_map(|node| node["node-name"].as_str().map(str::to_owned));
    let mut names: Vec<String> = names.collect();
    names.sort_unstable();
    names
}

fn refusal(answer: &Value) -> &str {
    answer["error"]["desc"].as_str().unwrap_or_default()
}

/// Has one monitor do what it likes, which takes no time.
fn use_beside(daemon: &mut Daemon, place: &Place) {
    let begun = Instant::now();
    daemon.must("query-block", json!({}));
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let mut nodes = nodes.as_array().expect("a list").iter();
    assert!(nodes.all(|node| node["node-name"] != "slow"));
    let more = json!({"driver": "null-co", "node-name": "more"});
    daemon.must("blockdev-add", more);
    assert_eq!(kept(place), ["disk", "more"]);
    let export = json!({"type": "nbd", "id": "e", "node-name": "more"});
    daemon.must("block-export-add", export);
    daemon.must("block-export-del", json!({"id": "e"}));
    daemon.event("BLOCK_EXPORT_DELETED");
    daemon.must("blockdev-del", json!({"node-name": "more"}));
    assert_eq!(kept(place), ["disk"]);
    assert!(begun.elapsed() < SOON, "others wait: {:?}", begun.elapsed());
}

/// Waits for a daemon that was told to end when that `begun`.
fn assert_ends_soon(daemon: Daemon, begun: Instant) {
    daemon.wait_for_exit();
    let took = begun.elapsed();
    assert!(took < SOON, "the end takes {took:?}");
}

/// Ends a daemon, which does not wait for what one of its clients waits for.
fn end_soon(mut daemon: Daemon, other: &mut Qmp) {
    let begun = Instant::now();
    daemon.say("{\"execute\": \"quit\"}");
    let refused = other.answer();
    assert!(
        refusal(&refused).starts_with("The program ends"),
        "{refused}"
    );
    daemon.answer();
    assert_ends_soon(daemon, begun);
}

#[test]
fn a_silent_server_keeps_nobody_waiting_but_who_asked_for_it() {
    let place = Place::new();
    let silent = Silent::listen(&place);
    let (mut daemon, mut other) = start(&place);
    other.send("blockdev-add", node(&place, "slow", "quiet"));
    let client = silent.client();
    use_beside(&mut daemon, &place);
    // Nobody finds it, and nobody else gets its name.
    let gone = daemon.ask("blockdev-del", json!({"node-name": "slow"}));
    assert!(refusal(&gone).contains("Failed to find node"), "{gone}");
    let null = json!({"driver": "null-co", "node-name": "slow"});
    let taken = daemon.ask("blockdev-add", null.clone());
    assert_eq!(refusal(&taken), "Duplicate nodes with node-name='slow'");
    drop(client);
    let failed = other.answer();
    assert!(failed.get("error").is_some(), "{failed}");
    daemon.must("blockdev-add", null);
    assert_eq!(kept(&place), ["disk", "slow"]);
    other.send("blockdev-add", node(&place, "again", "quiet"));
    let _client = silent.client();
    end_soon(daemon, &mut other);
    assert_eq!(kept(&place), ["disk", "slow"]);
}

/// Who comes after a client that has hung up while it waited is served, and what that one wanted is given
/// up.
#[test]
fn nobody_waits_for_what_a_client_that_hung_up_waited_for() {
    let place = Place::new();
    let silent = Silent::listen(&place);
    let (mut daemon, mut asker) = start(&place);
    let begun = Instant::now();
    let mut clients = Vec::new();
    for name in ["slow", "slower"] {
        asker.send("blockdev-add", node(&place, name, "quiet"));
        clients.push(silent.client());
        drop(asker);
        asker = Qmp::connect(place.path("qmp"));
    }
    let took = begun.elapsed();
    assert!(took < 2 * SOON, "the next clients wait for {took:?}");
    for (client, name) in clients.into_iter().zip(["slow", "slower"]) {
        let null = json!({"driver": "null-co", "node-name": name});
        until("the name is free", || {
            daemon
                .ask("blockdev-add", null.clone())
                .get("error")
                .is_none()
        });
        let wait = Some(Duration::from_secs(5));
        client.set_read_timeout(wait).expect("a socket");
        (&client).read_to_end(&mut Vec::new()).expect("it hangs up");
    }
    assert_eq!(kept(&place), ["disk", "slow", "slower"]);
    drop(asker);
    daemon.end();
}

/// Who sends no more may wait for its answers, however long they take.
#[test]
fn a_client_that_only_asks_no_more_gets_its_answers() {
    let place = Place::new();
    let target = Target::start(&place);
    let (daemon, mut asker) = start(&place);
    target.signal("-STOP");
    asker.send("blockdev-add", node(&place, "slow", "theirs"));
    asker.end_asking();
    // Longer than what a client that has gone has asked for goes on.
    std::thread::sleep(Duration::from_secs(7));
    target.signal("-CONT");
    let added = asker.answer();
    assert!(added.get("return").is_some(), "{added}");
    assert_eq!(kept(&place), ["disk", "slow"]);
    drop(asker);
    daemon.end();
    target.0.end();
}

/// Of two who want the same name the first one gets it, however long that takes.
#[test]
fn a_node_is_there_when_its_server_answers() {
    let place = Place::new();
    let target = Target::start(&place);
    let (mut daemon, mut other) = start(&place);
    target.signal("-STOP");
    other.send("blockdev-add", node(&place, "slow", "theirs"));
    std::thread::sleep(Duration::from_millis(300));
    let taken = daemon.ask("blockdev-add", node(&place, "slow", "theirs"));
    assert_eq!(refusal(&taken), "Duplicate nodes with node-name='slow'");
    use_beside(&mut daemon, &place);
    target.signal("-CONT");
    let added = other.answer();
    assert!(added.get("return").is_some(), "{added}");
    assert_eq!(kept(&place), ["disk", "slow"]);
    daemon.must("blockdev-del", json!({"node-name": "slow"}));
    daemon.end();
    target.0.end();
}

/// What a node refers to that is being opened is in use, and is free again if that fails.
#[test]
fn what_is_referred_to_stays_as_it_is_meanwhile() {
    let place = Place::new();
    let silent = Silent::listen(&place);
    let (mut daemon, mut other) = start(&place);
    let mut target = node(&place, "t", "quiet");
    target["read-only"] = json!(false);
    let filter = json!({
        "driver": "copy-before-write", "node-name": "slow", "file": "disk", "target": target,
    });
    other.send("blockdev-add", filter);
    let client = silent.client();
    use_beside(&mut daemon, &place);
    for (command, arguments) in [
        ("blockdev-del", json!({"node-name": "disk"})),
        (
            "blockdev-set-active",
            json!({"node-name": "disk", "active": false}),
        ),
        (
            "blockdev-snapshot-sync",
            json!({
                "node-name": "disk", "snapshot-file": "over", "snapshot-node-name": "over",
            }),
        ),
    ] {
        let refused = daemon.ask(command, arguments);
        assert!(refused.get("error").is_some(), "{command}: {refused}");
    }
    let taken = daemon.ask(
        "blockdev-add",
        json!({"driver": "null-co", "node-name": "t"}),
    );
    assert_eq!(refusal(&taken), "Duplicate nodes with node-name='t'");
    drop(client);
    let failed = other.answer();
    assert!(failed.get("error").is_some(), "{failed}");
    daemon.must("blockdev-del", json!({"node-name": "disk"}));
    daemon.must(
        "blockdev-add",
        json!({"driver": "null-co", "node-name": "t"}),
    );
    daemon.end();
}

/// Other commands than `blockdev-add` open something, too.
#[test]
fn so_it_is_with_targets_and_overlays() {
    let quiet = "nbd+unix:///?socket=quiet";
    let job = json!({
        "job-id": "j", "device": "disk", "target": quiet, "mode": "existing", "format": "raw",
        "sync": "full",
    });
    let overlay = json!({
        "node-name": "disk", "snapshot-file": quiet, "snapshot-node-name": "slow",
        "mode": "existing", "format": "qcow2",
    });
    let action = json!({"type": "blockdev-snapshot-sync", "data": overlay.clone()});
    for (command, arguments) in [
        ("drive-mirror", job.clone()),
        ("drive-backup", job),
        ("blockdev-snapshot-sync", overlay),
        ("transaction", json!({"actions": [action]})),
    ] {
        let place = Place::new();
        let silent = Silent::listen(&place);
        let (mut daemon, mut other) = start(&place);
        other.send(command, arguments);
        let _client = silent.client();
        use_beside(&mut daemon, &place);
        end_soon(daemon, &mut other);
    }
}

/// Its header would name what is not there any more, or be of another size.
#[test]
fn an_overlay_of_what_has_changed_meanwhile_is_refused() {
    let place = Place::new();
    let target = Target::start(&place);
    let (mut daemon, mut other) = start(&place);
    target.signal("-STOP");
    let overlay = json!({
        "node-name": "disk", "snapshot-file": "nbd+unix:///?socket=theirs",
        "snapshot-node-name": "slow", "format": "qcow2",
    });
    other.send("blockdev-snapshot-sync", overlay);
    std::thread::sleep(Duration::from_millis(300));
    daemon.must(
        "block_resize",
        json!({"node-name": "disk", "size": 2 << 20}),
    );
    target.signal("-CONT");
    let refused = other.answer();
    assert!(refusal(&refused).contains("has changed"), "{refused}");
    assert_eq!(kept(&place), ["disk"]);
    daemon.end();
    target.0.end();
}

#[test]
fn an_image_that_is_made_on_a_silent_server_does_not_hold_the_end_up() {
    let place = Place::new();
    let silent = Silent::listen(&place);
    let (mut daemon, _other) = start(&place);
    let server = json!({"type": "unix", "path": place.path("quiet")});
    let file = json!({"driver": "nbd", "server": server});
    let options = json!({"driver": "qcow2", "size": 1 << 20, "file": file});
    daemon.must(
        "blockdev-create",
        json!({"job-id": "j", "options": options}),
    );
    let _client = silent.client();
    use_beside(&mut daemon, &place);
    let begun = Instant::now();
    daemon.running.signal("-TERM");
    assert_ends_soon(daemon, begun);
}

/// A key that takes seconds to find out is nobody else's business either.
#[test]
fn nobody_waits_for_the_key_of_another_disk() {
    let place = Place::new();
    let (mut daemon, mut other) = start(&place);
    let secret = json!({"qom-type": "secret", "id": "s", "data": "geheim"});
    daemon.must("object-add", secret);
    let slow = "create -q -f luks --object secret,id=s,data=geheim \
                -o key-secret=s,iter-time=2000 locked 1M";
    place.img(slow);
    let luks = json!({
        "driver": "luks", "node-name": "slow", "key-secret": "s",
        "file": {"driver": "file", "filename": "locked"},
    });
    other.send("blockdev-add", luks);
    std::thread::sleep(Duration::from_millis(100));
    use_beside(&mut daemon, &place);
    let added = other.answer();
    assert!(added.get("return").is_some(), "{added}");
    until("the disk is there", || kept(&place) == ["disk", "slow"]);
    daemon.end();
}
