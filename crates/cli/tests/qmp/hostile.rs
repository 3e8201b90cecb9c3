//! Clients of a monitor that mean harm, while others are served.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::place::{Daemon, PATIENCE, Place, Step, same};

/// What a polite client's answer may take beside all that.
const MOST_TIME: Duration = Duration::from_secs(5);

fn connect(place: &Place) -> UnixStream {
    let stream = UnixStream::connect(place.path("qmp")).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream.set_write_timeout(Some(PATIENCE)).expect("set");
    stream
}

/// The client on standard input and output is answered in time.
fn check_served(daemon: &mut Daemon) {
    let begin = Instant::now();
    daemon.must("query-named-block-nodes", json!({}));
    assert!(begin.elapsed() < MOST_TIME, "{:?}", begin.elapsed());
}

/// Reads until the other end is closed, or nothing more comes within a moment.
fn read_out(stream: &mut UnixStream) -> usize {
    let moment = Duration::from_millis(200);
    stream.set_read_timeout(Some(moment)).expect("set");
    let (mut count, mut piece) = (0, [0; 4096]);
    while let Ok(read) = stream.read(&mut piece) {
        if read == 0 {
            break;
        }
        count += read;
    }
    count
}

/// The real one has it infinite, and repeats that as `inf`, which is no JSON.
#[test]
fn a_number_beyond_all_numbers_is_one_that_does_not_fit() {
    let null = r#"{"execute":"blockdev-add","arguments":{"driver":"null-co","node-name":"a","size":1E400}}"#;
    let watch = r#"{"execute":"block-set-write-threshold","arguments":{"node-name":"a","write-threshold":-1e400}}"#;
    same(&[], &[Step::Say(null), Step::Say(watch)]);
    let place = Place::new();
    let mut daemon = place.ours("");
    daemon.say("{\"execute\": \"query-jobs\", \"id\": [1E400]}\n");
    assert_eq!(daemon.answer(), json!({"return": [], "id": [f64::MAX]}));
}

#[test]
fn others_are_served_whatever_a_client_sends() {
    let place = Place::new();
    let mut daemon = place.ours("--chardev socket,id=s,path=qmp,server=on,wait=off --monitor s");
    let hello = b"{\"execute\": \"qmp_capabilities\"}\n";
    let long = format!("{{\"execute\": \"{}", "x".repeat(9 << 20));
    let deep = "[".repeat(1 << 20);
    let many = "{\"execute\": \"query-version\"}\n".repeat(2000);
    let bad = "}\n".repeat(2000);
    for text in [
        "{\"execute\": \"query-jo",
        &long,
        &deep,
        &many,
        &bad,
        "\u{0}\u{0}\u{0}",
    ] {
        let mut stream = connect(&place);
        // It may be hung up on in the middle.
        let _ = stream.write_all(hello);
        let sender = {
            let mut stream = stream.try_clone().expect("a clone");
            let text = text.to_owned();
            std::thread::spawn(move || {
                let _ = stream.write_all(text.as_bytes());
            })
        };
        check_served(&mut daemon);
        assert!(read_out(&mut stream) > 0, "it was greeted");
        check_served(&mut daemon);
        let _ = stream.shutdown(std::net::Shutdown::Both);
        sender.join().expect("it ends");
        check_served(&mut daemon);
    }
    daemon.end();
}

/// As deep as QEMU takes them, wherever they end up: as an `id`, and as what an option is.
#[test]
fn messages_may_nest_deep() {
    let place = Place::new();
    let mut daemon = place.ours("");
    let lists = "[".repeat(1023) + &"]".repeat(1023);
    daemon.say(&format!(
        "{{\"execute\": \"query-jobs\", \"id\": {lists}}}\n"
    ));
    // Deeper than the tests' own reader goes.
    let answer = daemon.lines.recv_timeout(PATIENCE).expect("an answer");
    assert!(answer.contains(&lists), "{answer}");
    let objects = "{\"file\": ".repeat(1022) + "1" + &"}".repeat(1022);
    let add = "\"execute\": \"blockdev-add\", \"arguments\"";
    for (arguments, complaint) in [
        (objects, "'driver' is missing"),
        (
            format!("{{\"x\": {lists}}}"),
            "nesting depth limit exceeded",
        ),
    ] {
        daemon.say(&format!("{{{add}: {arguments}}}\n"));
        let answer = daemon.answer();
        let text = answer["error"]["desc"].as_str().unwrap_or_default();
        assert!(text.contains(complaint), "{answer}");
    }
    check_served(&mut daemon);
    daemon.end();
}

#[test]
fn a_client_that_reads_nothing_holds_up_nobody() {
    let place = Place::new();
    let mut daemon = place.ours("--chardev socket,id=s,path=qmp,server=on,wait=off --monitor s");
    let mut deaf = connect(&place);
    deaf.write_all(b"{\"execute\": \"qmp_capabilities\"}\n")
        .expect("it listens");
    deaf.set_write_timeout(Some(Duration::from_millis(300)))
        .expect("set");
    // Until no more is taken: the daemon waits with it until its answers are read.
    let ask = "{\"execute\": \"query-qmp-schema\"}\n".repeat(100);
    while deaf.write_all(ask.as_bytes()).is_ok() {}
    for _ in 0..20 {
        check_served(&mut daemon);
        let node = json!({"driver": "null-co", "node-name": "n"});
        daemon.must("blockdev-add", node);
        daemon.must("blockdev-del", json!({"node-name": "n"}));
    }
    daemon.end();
}

#[test]
fn thousands_of_connections_come_and_go() {
    let place = Place::new();
    let mut daemon = place.ours("--chardev socket,id=s,path=qmp,server=on,wait=off --monitor s");
    let text = b"{\"execute\": \"qmp_capabilities\"}{\"execute\": \"query-named-block-nodes\"}{";
    for round in 0..2000 {
        let mut stream = connect(&place);
        let len = round % (text.len() + 1);
        stream.write_all(&text[..len]).expect("it listens");
        if round % 500 == 0 {
            check_served(&mut daemon);
        }
    }
    check_served(&mut daemon);
    let descriptors = format!("/proc/{}/fd", daemon.running.id());
    // The last of them are on their way out.
    let deadline = Instant::now() + PATIENCE;
    while std::fs::read_dir(&descriptors).expect("a folder").count() > 60 {
        assert!(Instant::now() < deadline, "descriptors are left");
        std::thread::sleep(Duration::from_millis(20));
    }
    daemon.end();
}

#[test]
fn what_a_client_began_is_done_when_it_leaves() {
    let place = Place::new();
    let mut daemon = place.ours("--chardev socket,id=s,path=qmp,server=on,wait=off --monitor s");
    for round in 0..50 {
        let mut stream = connect(&place);
        let name = format!("n{round}");
        let add = json!({
            "execute": "blockdev-add",
            "arguments": {"driver": "null-co", "node-name": name},
        });
        let text = format!("{{\"execute\": \"qmp_capabilities\"}}{add}");
        stream.write_all(text.as_bytes()).expect("it listens");
        // Sometimes before the answer, and sometimes after it.
        if round % 2 == 0 {
            assert!(read_out(&mut stream) > 0);
        }
        drop(stream);
        if round % 2 == 0 {
            daemon.must("blockdev-del", json!({"node-name": name}));
        }
    }
    check_served(&mut daemon);
    daemon.end();
}
