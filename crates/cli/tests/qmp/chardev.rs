//! Character devices: added and removed as the real daemon does, and a monitor at each kind.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::place::Step::{self, Ask};
use crate::place::{NAME, PATIENCE, Place, same, with};

const HELLO: &str = "{\"execute\": \"qmp_capabilities\"}\n";
const QUIT: &str = "{\"execute\": \"quit\"}\n";

fn new(id: &str, kind: &str, data: Value) -> Step {
    Ask(
        "chardev-add",
        json!({"id": id, "backend": {"type": kind, "data": data}}),
    )
}

fn unix(path: &str) -> Value {
    json!({"type": "unix", "data": {"path": path}})
}

#[test]
fn devices_are_added_and_removed_alike() {
    let id = |id: &str| json!({"id": id});
    let other = |id: &str| json!({"id": id, "backend": {"type": "ringbuf", "data": {}}});
    same(
        &[],
        &[
            Ask("query-chardev", json!({})),
            new("r", "ringbuf", json!({})),
            new("r", "ringbuf", json!({})),
            new("odd", "ringbuf", json!({"size": 100})),
            new("m2", "memory", json!({"size": 8})),
            new("n", "null", json!({})),
            new("f", "file", json!({"out": "written"})),
            new("f2", "file", json!({"out": "no/written"})),
            new("f3", "file", json!({"out": "written", "append": true})),
            new("f4", "file", json!({"out": "written", "in": "no"})),
            new("p", "pipe", json!({"device": "no"})),
            new("s", "socket", json!({"addr": unix("sock")})),
            new("s2", "socket", json!({"addr": unix("no"), "server": false})),
            new(
                "s3",
                "socket",
                json!({"addr": unix("no"), "server": false, "wait": true}),
            ),
            new("s4", "socket", json!({"addr": unix("no"), "reconnect": 1})),
            new(
                "s5",
                "socket",
                json!({"addr": {"type": "fd", "data": {"str": "99"}}}),
            ),
            new(
                "s6",
                "socket",
                json!({"addr": {"type": "unix", "data": {"path": "a", "abstract": true}}}),
            ),
            new("se", "serial", json!({"device": "no"})),
            new("st", "stdio", json!({})),
            new("vc", "vc", json!({})),
            new("x", "nosuch", json!({})),
            new("x", "file", json!({})),
            new("x", "null", json!({"x": 1})),
            Ask(
                "chardev-add",
                json!({"id": "x", "backend": {"type": "null"}}),
            ),
            Ask("chardev-add", json!({"id": "x", "backend": {}})),
            Ask("chardev-add", json!({"backend": {}})),
            Ask("query-chardev", json!({})),
            Ask("chardev-send-break", id("n")),
            Ask("chardev-send-break", id("no")),
            Ask("chardev-change", other("n")),
            Ask("chardev-change", other("no")),
            Ask("chardev-change", other("m")),
            Ask("chardev-remove", id("m")),
            Ask("chardev-remove", id("no")),
            Ask("chardev-remove", id("n")),
            Ask("chardev-remove", id("s")),
            Ask("query-chardev", json!({})),
        ],
    );
}

#[test]
fn rings_are_written_and_read_alike() {
    let write = |data: &str, format: &str| {
        let arguments = json!({"device": "r", "data": data, "format": format});
        Ask("ringbuf-write", arguments)
    };
    let read = |size: i64, format: &str| {
        Ask(
            "ringbuf-read",
            json!({"device": "r", "size": size, "format": format}),
        )
    };
    same(
        &["--chardev", "ringbuf,id=r,size=16"],
        &[
            write("hello", "utf8"),
            read(3, "utf8"),
            read(300, "utf8"),
            read(300, "utf8"),
            read(0, "utf8"),
            read(-1, "utf8"),
            write("aGVsbG8=", "base64"),
            read(30, "base64"),
            write("a*", "base64"),
            write("0123456789abcdefghij", "utf8"),
            read(30, "utf8"),
            write("x", "hex"),
            Ask("ringbuf-write", json!({"device": "no", "data": "x"})),
            Ask("ringbuf-read", json!({"device": "no", "size": 1})),
            Ask("ringbuf-write", json!({"device": "m", "data": "x"})),
            Ask("ringbuf-read", json!({"device": "m", "size": 1})),
        ],
    );
}

/// What both programs say to a command line that cannot be.
fn refusals(words: &[&str]) -> [String; 2] {
    let place = Place::new();
    [place.path(NAME), NAME.into()].map(|program| {
        let output = Command::new(program)
            .current_dir(place.root())
            .args(words)
            .stdin(Stdio::null())
            .output()
            .expect("the program runs");
        assert!(!output.status.success(), "{words:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    })
}

#[test]
fn what_cannot_be_is_refused_alike() {
    for text in [
        "foo,id=a",
        "null",
        "id=a",
        "null,id=a,bogus=1",
        "null,id=1a",
        "socket,id=a",
        "socket,id=a,path=x,host=y",
        "socket,id=a,host=y",
        "socket,id=a,fd=33",
        "socket,id=a,fd=foo",
        "socket,id=a,fd=33,server=on",
        "socket,id=a,fd=0,reconnect=1",
        "socket,id=a,path=no",
        "socket,id=a,path=no,reconnect-ms=100,reconnect=1",
        "socket,id=a,path=no,reconnect=100,server=on",
        "socket,id=a,path=no,wait=off",
        "socket,id=a,path=no,websocket=on",
        "socket,id=a,path=no,tls-authz=foo",
        "socket,id=a,path=no,delay=on,nodelay=on",
        "socket,id=a,path=no,server=foo",
        "socket,id=a,host=127.0.0.1,port=abc",
        "socket,id=a,host=127.0.0.1,port=1",
        "file,id=a",
        "file,id=a,path=no/x",
        "pipe,id=a",
        "pipe,id=a,path=no",
        "ringbuf,id=a,size=100",
        "null,id=a,logfile=no/log",
        "udp,id=a",
        "serial,id=a",
        "vc,id=a",
    ] {
        let [ours, theirs] = refusals(&["--chardev", text]);
        assert_eq!(ours.trim_end(), theirs.trim_end(), "{text}");
    }
    let twice = ["--chardev", "null,id=a", "--monitor", "a", "--monitor", "a"];
    let [ours, theirs] = refusals(&twice);
    assert_eq!(ours, theirs);
}

/// Addresses of a network: what they are, and what they cannot be.
#[test]
fn addresses_of_a_network_are_taken_alike() {
    let held = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = held.local_addr().expect("an address").port();
    let port = taken.to_string();
    let inet = |more| with(json!({"host": "127.0.0.1", "port": "0"}), more);
    let mut script = Vec::new();
    for address in [
        inet(json!({"ipv4": true, "ipv6": false, "numeric": true})),
        inet(json!({"keep-alive": true, "mptcp": true})),
        inet(json!({"port": port, "to": u32::from(taken).min(65_000) + 500})),
        inet(json!({"port": port})),
        inet(json!({"port": port, "to": taken})),
        inet(json!({"to": 65_536})),
        inet(json!({"to": -1})),
        inet(json!({"ipv4": false, "ipv6": false})),
        inet(json!({"ipv6": true})),
        inet(json!({"host": "::1", "ipv4": true})),
        inet(json!({"host": "localhost", "port": "1", "numeric": true})),
        inet(json!({"port": "abc"})),
    ] {
        let address = json!({"type": "inet", "data": address});
        script.push(Ask("nbd-server-start", json!({"addr": address})));
        script.push(Ask("nbd-server-stop", json!({})));
        script.push(new(
            "c",
            "socket",
            json!({"addr": address, "server": true, "wait": false}),
        ));
        script.push(Ask("chardev-remove", json!({"id": "c"})));
    }
    same(&[], &script);
}

/// Reads a message.
fn message(reader: &mut impl BufRead) -> Value {
    let mut line = String::new();
    reader.read_line(&mut line).expect("a line");
    serde_json::from_str(&line).unwrap_or_else(|why| panic!("{why}: {line:?}"))
}

/// Greets, negotiates, and has the daemon end.
fn converse(reader: &mut impl BufRead, writer: &mut impl Write) {
    let greeting = message(reader);
    assert_eq!(greeting["QMP"]["capabilities"], json!(["oob"]));
    writer.write_all(HELLO.as_bytes()).expect("it listens");
    assert_eq!(message(reader), json!({"return": {}}));
    writer.write_all(QUIT.as_bytes()).expect("it listens");
    assert_eq!(message(reader), json!({"return": {}}));
}

fn converse_by_socket(stream: UnixStream) {
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    let mut writer = stream.try_clone().expect("a clone");
    converse(&mut BufReader::new(stream), &mut writer);
}

/// Starts a daemon with a socket of ours as its standard input.
fn with_socket(place: &Place, socket: OwnedFd, chardev: &str) -> std::process::Child {
    Command::new(place.path(NAME))
        .current_dir(place.root())
        .args(["--chardev", chardev, "--monitor", "chardev=m"])
        .stdin(socket)
        .spawn()
        .expect("the program runs")
}

#[test]
fn a_socket_that_is_handed_down_leads_to_a_monitor() {
    let place = Place::new();
    let (own, other) = UnixStream::pair().expect("sockets");
    let mut child = with_socket(&place, other.into(), "socket,id=m,fd=0");
    converse_by_socket(own);
    assert!(child.wait().expect("a child").success());

    let path = place.path("listening");
    let listener = UnixListener::bind(&path).expect("a socket");
    let chardev = "socket,id=m,fd=0,server=on,wait=off";
    let mut child = with_socket(&place, listener.into(), chardev);
    converse_by_socket(UnixStream::connect(path).expect("it listens"));
    assert!(child.wait().expect("a child").success());
}

#[test]
fn a_client_connects_again_after_it_was_hung_up_on() {
    let place = Place::new();
    let listener = UnixListener::bind(place.path("theirs")).expect("a socket");
    let daemon = place.ours("--chardev socket,id=c,path=theirs,reconnect-ms=20 --monitor c");
    for _ in 0..3 {
        let (stream, _) = listener.accept().expect("a client");
        let greeting = message(&mut BufReader::new(stream));
        assert!(greeting.get("QMP").is_some(), "{greeting}");
    }
    let (stream, _) = listener.accept().expect("a client");
    converse_by_socket(stream);
    daemon.wait_for_exit();
}

#[test]
fn a_terminal_leads_to_a_monitor_again_and_again() {
    let place = Place::new();
    let words = ["--chardev", "pty,id=p,path=terminal", "--monitor", "p"];
    let mut child = Command::new(place.path(NAME))
        .current_dir(place.root())
        .args(words)
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program runs");
    let mut said = BufReader::new(child.stdout.take().expect("a pipe"));
    let mut line = String::new();
    said.read_line(&mut line).expect("a line");
    assert!(
        line.starts_with("char device redirected to /dev/pts/"),
        "{line}"
    );
    for round in 0..2 {
        let open = || {
            File::options()
                .read(true)
                .write(true)
                .open(place.path("terminal"))
        };
        let mut writer = open().expect("a terminal");
        let mut reader = BufReader::new(writer.try_clone().expect("a clone"));
        if round == 1 {
            converse(&mut reader, &mut writer);
        } else {
            assert!(message(&mut reader).get("QMP").is_some());
        }
        drop((reader, writer));
        // It looks ten times a second.
        std::thread::sleep(Duration::from_millis(400));
    }
    assert!(child.wait().expect("a child").success());
    assert!(std::fs::symlink_metadata(place.path("terminal")).is_err());
}

#[test]
fn files_and_pipes_lead_to_a_monitor() {
    let place = Place::new();
    place.write("in", format!("{HELLO}{QUIT}"));
    let words = "--chardev file,id=f,path=out,input-path=in,logfile=log --monitor f";
    place.must(
        place.path(NAME).to_str().expect("a path"),
        &words.split(' ').collect::<Vec<_>>(),
    );
    let out = place.text("out");
    assert_eq!(out.lines().count(), 3, "{out}");
    let log = place.text("log");
    assert_eq!(log, out);

    place.must("mkfifo", "fifo.in fifo.out");
    let daemon = place.ours("--chardev pipe,id=p,path=fifo --monitor p");
    let mut writer = File::options()
        .write(true)
        .open(place.path("fifo.in"))
        .expect("a pipe");
    let reader = File::open(place.path("fifo.out")).expect("a pipe");
    converse(&mut BufReader::new(reader), &mut writer);
    daemon.wait_for_exit();
}

#[test]
fn a_monitor_at_a_ring_greets_without_oob_and_tells_events_to_nobody() {
    let place = Place::new();
    let mut daemon =
        place.ours("--chardev ringbuf,id=r --monitor r --chardev null,id=n --monitor n");
    let read = json!({"device": "r", "size": 4096});
    let greeting = daemon.must("ringbuf-read", read);
    let greeting: Value = serde_json::from_str(greeting.as_str().expect("text")).expect("JSON");
    assert_eq!(greeting["QMP"]["capabilities"], json!([]));
    daemon.end();
}

/// All that a daemon answers to lines on its standard input, without its version.
fn answers(program: &std::path::Path, place: &Place, lines: &[&str]) -> Vec<Value> {
    let mut child = Command::new(program)
        .current_dir(place.root())
        .args(["--chardev", "stdio,id=m", "--monitor", "m"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("the program runs");
    let mut input = child.stdin.take().expect("a pipe");
    for line in lines {
        input.write_all(line.as_bytes()).expect("it listens");
        input.write_all(b"\n").expect("it listens");
    }
    let mut said = String::new();
    let mut output = child.stdout.take().expect("a pipe");
    output.read_to_string(&mut said).expect("UTF-8");
    assert!(child.wait().expect("a child").success());
    let mut messages = said.lines();
    assert!(
        messages
            .next()
            .is_some_and(|first| first.contains("[\"oob\"]"))
    );
    let parse = |line: &str| serde_json::from_str(line).expect("JSON");
    messages.map(parse).collect()
}

#[test]
fn requests_out_of_band_are_refused_alike() {
    for lines in [
        // Not enabled.
        &[
            r#"{"exec-oob": "query-version", "id": 1}"#,
            r#"{"execute": "qmp_capabilities", "arguments": {"enable": ["x"]}, "id": 2}"#,
            r#"{"execute": "qmp_capabilities", "id": 3}"#,
            r#"{"exec-oob": "query-jobs", "id": 4}"#,
            r#"{"execute": "qmp_capabilities", "id": 5}"#,
            r#"{"execute": "quit"}"#,
        ][..],
        // Enabled.
        &[
            r#"{"execute": "qmp_capabilities", "arguments": {"enable": ["oob"]}, "id": 1}"#,
            r#"{"exec-oob": "query-jobs", "id": 2}"#,
            r#"{"exec-oob": "nosuch", "id": 3}"#,
            r#"{"exec-oob": 1, "id": 4}"#,
            r#"{"exec-oob": "query-jobs", "arguments": 3, "id": 5}"#,
            r#"{"execute": "query-jobs", "id": 7}"#,
            r#"{"execute": "quit", "id": 8}"#,
        ],
    ] {
        let place = Place::new();
        let ours = answers(&place.path(NAME), &place, lines);
        let theirs = answers(NAME.as_ref(), &place, lines);
        let sorted = |mut all: Vec<Value>| {
            // Those out of band may come early.
            all.sort_by_key(|one| one["id"].as_i64());
            all
        };
        assert_eq!(sorted(ours), sorted(theirs));
    }
}
