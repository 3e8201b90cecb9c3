//! The monitor of `qemu-storage-daemon` beside the real one: the same scripts, the same
//! answers and events.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

const NAME: &str = "qemu-storage-daemon";
const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with a chain of images, `b`, `m` on it and `t` on that, and an image `o` to put
/// over others.
struct Place {
    folder: TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        symlink(env!("CARGO_BIN_EXE_vellum"), folder.path().join(NAME)).expect("a link");
        let place = Place { folder };
        place.img("create -q -f qcow2 b 1M");
        place.img("create -q -f qcow2 -b b -F qcow2 m");
        place.img("create -q -f qcow2 -b m -F qcow2 t");
        place.img("create -q -f qcow2 o 1M");
        place.io("t", &["write -P 1 0 128k"]);
        place.io("m", &["write -P 2 64k 128k"]);
        place.io("b", &["write -P 3 128k 256k"]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn must(&self, program: &str, words: &[&str]) -> String {
        let output = Command::new(program)
            .current_dir(self.folder.path())
            .args(words)
            .output()
            .expect("the program of `cargo xtask setup`");
        assert!(output.status.success(), "{program} {words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    fn img(&self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.must("qemu-img", &words);
    }

    /// Has the real `qemu-io` do something with an image; no pattern may fail.
    fn io(&self, name: &str, commands: &[&str]) {
        let mut words = Vec::new();
        if name.starts_with("nbd") {
            words.extend(["-f", "raw"]);
        }
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
        words.push(name);
        let said = self.must("qemu-io", &words);
        assert!(!said.contains("failed"), "{said}");
    }

    /// Starts a daemon that is asked through its standard input.
    fn start(&self, program: &Path, words: &[&str]) -> Daemon {
        let mut child = Command::new(program)
            .current_dir(self.folder.path())
            .args(["--chardev", "stdio,id=m", "--monitor", "m"])
            .args(words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program runs");
        let (sender, lines) = channel();
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut daemon = Daemon {
            input: child.stdin.take(),
            child,
            lines,
            answers: Vec::new(),
            events: Vec::new(),
        };
        let greeting = daemon.next().expect("a greeting");
        assert!(greeting.get("QMP").is_some(), "{greeting}");
        daemon.ask("qmp_capabilities", json!({}));
        daemon
    }

    fn ours(&self, words: &[&str]) -> Daemon {
        self.start(&self.path(NAME), words)
    }
}

/// A daemon with what it has said.
struct Daemon {
    child: Child,
    input: Option<ChildStdin>,
    lines: Receiver<String>,
    answers: Vec<Value>,
    events: Vec<Value>,
}

impl Daemon {
    /// The next message, if there comes one.
    fn next(&mut self) -> Option<Value> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(serde_json::from_str(&line).expect("JSON")),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => panic!("nothing comes; so far: {:?}", self.events),
        }
    }

    fn send(&mut self, text: &str) {
        let input = self.input.as_mut().expect("a pipe");
        input.write_all(text.as_bytes()).expect("it listens");
    }

    /// The answer to what was sent; events before it are kept.
    fn answer(&mut self) -> Value {
        loop {
            let mut message = self.next().expect("an answer");
            let Some(members) = message.as_object_mut() else {
                panic!("{message}")
            };
            if members.remove("timestamp").is_none() {
                self.answers.push(message.clone());
                return message;
            }
            self.events.push(message);
        }
    }

    fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments});
        self.send(&format!("{request}\n"));
        self.answer()
    }

    /// As [`Daemon::ask`]; it must succeed.
    fn must(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.ask(command, arguments);
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].take()
    }

    /// Waits until a job gets into a state, now or earlier.
    fn wait(&mut self, id: &str, status: &str) {
        let wanted = json!({"status": status, "id": id});
        while !self.events.iter().any(|event| event["data"] == wanted) {
            let mut message = self.next().expect("an event");
            message
                .as_object_mut()
                .expect("an object")
                .remove("timestamp");
            self.events.push(message);
        }
    }

    /// Ends it; what it has said.
    fn end(mut self) -> (Vec<Value>, Vec<Value>) {
        self.ask("quit", json!({}));
        self.wait_for_exit();
        (
            std::mem::take(&mut self.answers),
            std::mem::take(&mut self.events),
        )
    }

    fn wait_for_exit(&mut self) {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                assert!(status.success(), "{status}");
                return;
            }
            assert!(Instant::now() < end, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It has ended already, unless a test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A step of a script.
enum Step {
    Ask(&'static str, Value),
    /// A text that is no proper request.
    Say(&'static str),
    /// Until a job is in a state.
    Wait(&'static str, &'static str),
}

use Step::{Ask, Say, Wait};

/// Plays a script with both daemons, in a folder each: they must say the same.
fn same(words: &[&str], script: &[Step]) {
    let play = |real: bool| {
        let place = Place::new();
        let program = match real {
            true => PathBuf::from(NAME),
            false => place.path(NAME),
        };
        let mut daemon = place.start(&program, words);
        for step in script {
            match step {
                Ask(command, arguments) => drop(daemon.ask(command, arguments.clone())),
                Say(text) => {
                    daemon.send(&format!("{text}\n"));
                    daemon.answer();
                }
                Wait(id, status) => daemon.wait(id, status),
            }
        }
        daemon.end()
    };
    let ((our_answers, our_events), (answers, events)) = (play(false), play(true));
    for (at, (ours, theirs)) in our_answers.iter().zip(&answers).enumerate() {
        assert_eq!(ours, theirs, "answer {at}");
    }
    assert_eq!(our_events, events);
}

fn add(name: &str, file: &str, backing: Value) -> Step {
    let mut options = json!({
        "driver": "qcow2",
        "node-name": name,
        "file": {"driver": "file", "filename": file},
    });
    if backing != json!("") {
        options["backing"] = backing;
    }
    Ask("blockdev-add", options)
}

#[test]
fn what_is_no_request_is_answered_alike() {
    same(
        &[],
        &[
            Ask("qmp_capabilities", json!({})),
            Ask("nosuch", json!({})),
            Say("hello"),
            Say("[1]"),
            Say("3 "),
            Say("\"text\""),
            Say("{}"),
            Say(r#"{"execute": 1}"#),
            Say(r#"{"execute": "query-jobs", "arguments": 1}"#),
            Say(r#"{"execute": "query-jobs", "other": 1}"#),
            Say(r#"{"execute": "query-jobs", "arguments": {"a": 1}}"#),
            Say(r#"{"execute": "query-jobs", "id": {"b": [1], "a": null}}"#),
            Say("{'execute': 'query-jobs',\r\n 'id': 'it\\'s'}"),
            Say("}"),
            Say("]"),
            Say("{]"),
            Say(r#"{"execute": "blockdev-del"}"#),
            Say(r#"{"execute": "blockdev-del", "arguments": {"node-name": 1}}"#),
        ],
    );
}

#[test]
fn nodes_and_exports_come_and_go_alike() {
    let null = json!({"driver": "null-co", "node-name": "n", "size": 1048576});
    let export = json!({"type": "nbd", "id": "e", "node-name": "n"});
    let address = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    same(
        &["--object", "iothread,id=i0"],
        &[
            add("top", "t", json!("")),
            add("top", "t", json!("")),
            add("other", "nosuch", json!(null)),
            add("other", "o", json!("nosuch")),
            add("0", "o", json!(null)),
            Ask("blockdev-add", json!({"driver": "bad", "node-name": "x"})),
            Ask("blockdev-add", json!({"node-name": "x"})),
            Ask("blockdev-add", json!({"driver": "null-co"})),
            Ask("blockdev-add", null),
            Ask("block-export-add", export.clone()),
            Ask("nbd-server-stop", json!({})),
            Ask("nbd-server-start", address.clone()),
            Ask("nbd-server-start", address),
            Ask("block-export-add", export.clone()),
            Ask("block-export-add", export),
            Ask(
                "block-export-add",
                json!({"type": "nbd", "id": "x", "node-name": "no"}),
            ),
            Ask("query-block-exports", json!({})),
            Ask("blockdev-del", json!({"node-name": "n"})),
            Ask("blockdev-del", json!({"node-name": "nosuch"})),
            Ask("block-export-del", json!({"id": "nosuch"})),
            Ask("block-export-del", json!({"id": "e"})),
            Ask("query-block-exports", json!({})),
            Ask(
                "nbd-server-add",
                json!({"device": "n", "name": "x", "writable": true}),
            ),
            Ask("nbd-server-remove", json!({"name": "y"})),
            Ask("nbd-server-remove", json!({"name": "x"})),
            Ask("nbd-server-add", json!({"device": "n"})),
            Ask("nbd-server-stop", json!({})),
            Ask("blockdev-del", json!({"node-name": "n"})),
            Ask("block_resize", json!({"node-name": "top", "size": 2097152})),
            Ask("block_resize", json!({"node-name": "no", "size": 2097152})),
            Ask("block_resize", json!({"node-name": "top", "size": -1})),
            Ask("object-add", json!({"qom-type": "iothread", "id": "i0"})),
            Ask(
                "object-add",
                json!({"qom-type": "secret", "id": "s", "data": "x"}),
            ),
            Ask("object-del", json!({"id": "i0"})),
            Ask("object-del", json!({"id": "i0"})),
            Ask("object-del", json!({"id": "s"})),
            Ask("blockdev-del", json!({"node-name": "top"})),
        ],
    );
}

#[test]
fn bitmaps_are_led_alike() {
    let named = |name: &str| json!({"node": "top", "name": name});
    let new = |name: &str| json!({"node": "top", "name": name, "persistent": true});
    let merge = |bitmaps: Value| json!({"node": "top", "target": "a", "bitmaps": bitmaps});
    same(
        &[],
        &[
            add("top", "t", json!("")),
            Ask("block-dirty-bitmap-add", new("a")),
            Ask("block-dirty-bitmap-add", new("a")),
            Ask("block-dirty-bitmap-add", new("b")),
            Ask("block-dirty-bitmap-add", json!({"node": "no", "name": "a"})),
            Ask("block-dirty-bitmap-disable", named("a")),
            Ask("block-dirty-bitmap-enable", named("a")),
            Ask("block-dirty-bitmap-merge", merge(json!(["b"]))),
            Ask(
                "block-dirty-bitmap-merge",
                merge(json!([{"node": "top", "name": "b"}])),
            ),
            Ask("block-dirty-bitmap-merge", merge(json!(["c"]))),
            Ask("block-dirty-bitmap-clear", named("a")),
            Ask("block-dirty-bitmap-remove", named("c")),
            Ask("block-dirty-bitmap-remove", named("b")),
        ],
    );
}

#[test]
fn who_gets_in_the_way_of_whom_is_told_alike() {
    let file = json!({"driver": "file", "node-name": "f", "filename": "o"});
    let format = |name: &str| json!({"driver": "qcow2", "node-name": name, "file": "f"});
    let raw = json!({"driver": "raw", "node-name": "r", "file": "f"});
    let address = json!({"addr": {"type": "unix", "data": {"path": "sock"}}});
    let export = |writable: bool| {
        let id = if writable { "w" } else { "r" };
        let export =
            json!({"type": "nbd", "id": id, "node-name": "f", "name": id, "writable": writable});
        Ask("block-export-add", export)
    };
    same(
        &[],
        &[
            Ask("blockdev-add", file),
            Ask("nbd-server-start", address),
            Ask("blockdev-add", format("one")),
            Ask("blockdev-del", json!({"node-name": "f"})),
            export(true),
            export(false),
            Ask("blockdev-add", raw.clone()),
            Ask("blockdev-add", format("two")),
            Ask("blockdev-del", json!({"node-name": "one"})),
            export(true),
            Ask("blockdev-add", format("two")),
        ],
    );
}

/// The chain of a place as nodes that are called `base`, `mid` and `top`.
fn chain() -> Vec<Step> {
    vec![
        add("base", "b", json!(null)),
        add("mid", "m", json!("base")),
        add("top", "t", json!("mid")),
    ]
}

#[test]
fn snapshots_and_commits_are_made_alike() {
    let job = |id: &str| json!({"id": id});
    let commit = |more: Value| {
        let mut arguments = json!({"device": "over", "job-id": "j"});
        for (key, value) in more.as_object().expect("members") {
            arguments[key] = value.clone();
        }
        Ask("block-commit", arguments)
    };
    let snapshot = |node: &str, overlay: &str| {
        Ask(
            "blockdev-snapshot",
            json!({"node": node, "overlay": overlay}),
        )
    };
    let mut script = chain();
    script.extend([
        Ask("blockdev-del", json!({"node-name": "mid"})),
        add("over", "o", json!(null)),
        snapshot("no", "over"),
        snapshot("top", "no"),
        snapshot("top", "mid"),
        snapshot("top", "over"),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("block-commit", json!({"device": "over"})),
        Ask("block-commit", json!({"device": "no", "job-id": "j"})),
        Ask("block-commit", json!({"device": "base", "job-id": "j"})),
        commit(json!({"top-node": "no"})),
        commit(json!({"base-node": "no"})),
        commit(json!({"job-id": "x", "top-node": "mid", "speed": -1})),
        Ask("job-complete", job("no")),
        Ask("block-job-complete", json!({"device": "no"})),
        // In the middle.
        commit(json!({"top-node": "mid"})),
        Wait("j", "null"),
        Ask("query-jobs", json!({})),
        // From the top, given up.
        commit(json!({"job-id": "given-up", "auto-dismiss": false})),
        Wait("given-up", "ready"),
        commit(json!({"job-id": "k"})),
        Ask("blockdev-del", json!({"node-name": "over"})),
        Ask("job-dismiss", job("given-up")),
        Ask("job-finalize", job("given-up")),
        Ask("job-resume", job("given-up")),
        Ask("job-pause", job("given-up")),
        Ask("job-pause", job("given-up")),
        Ask("job-resume", job("given-up")),
        Ask("job-cancel", job("given-up")),
        Wait("given-up", "concluded"),
        Ask("query-jobs", json!({})),
        Ask("job-cancel", job("given-up")),
        Ask("job-dismiss", job("given-up")),
        // From the top, to its end.
        commit(json!({"job-id": "whole"})),
        Wait("whole", "ready"),
        Ask("query-block-jobs", json!({})),
        Ask("job-complete", job("whole")),
        Wait("whole", "null"),
        Ask("blockdev-del", json!({"node-name": "over"})),
    ]);
    same(&[], &script);
}

#[test]
fn streams_are_made_alike() {
    let mut script = chain();
    script.extend([
        Ask("block-stream", json!({"device": "no", "job-id": "s"})),
        Ask("block-stream", json!({"device": "top"})),
        Ask(
            "block-stream",
            json!({"device": "top", "job-id": "s", "base-node": "base"}),
        ),
        Wait("s", "null"),
        Ask("block-stream", json!({"device": "top", "job-id": "whole"})),
        Wait("whole", "null"),
        Ask("query-jobs", json!({})),
        Ask(
            "block-stream",
            json!({"device": "top", "job-id": "nothing"}),
        ),
        Wait("nothing", "null"),
        Ask("blockdev-del", json!({"node-name": "top"})),
        Ask("blockdev-del", json!({"node-name": "base"})),
    ]);
    same(&[], &script);
}

const EXPORT: &[&str] = &[
    "--nbd-server",
    "addr.type=unix,addr.path=sock",
    "--blockdev",
    "driver=qcow2,node-name=base,file.driver=file,file.filename=b",
    "--export",
    "nbd,id=e,node-name=base,name=,writable=on",
];
const URI: &str = "nbd+unix:///?socket=sock";

#[test]
fn a_client_goes_on_over_a_snapshot_and_its_commit() {
    let place = Place::new();
    let mut daemon = place.ours(EXPORT);
    place.io(URI, &["write -P 5 0 64k"]);
    let over = json!({
        "driver": "qcow2", "node-name": "over", "backing": null,
        "file": {"driver": "file", "filename": "o"},
    });
    daemon.must("blockdev-add", over);
    daemon.must(
        "blockdev-snapshot",
        json!({"node": "base", "overlay": "over"}),
    );
    place.io(URI, &["read -P 5 0 64k", "write -P 6 32k 64k"]);
    daemon.must("block-commit", json!({"device": "over", "job-id": "j"}));
    daemon.wait("j", "ready");
    place.io(URI, &["write -P 7 64k 64k", "write -P 8 512k 64k"]);
    daemon.must("job-complete", json!({"id": "j"}));
    daemon.wait("j", "null");
    let exports = daemon.must("query-block-exports", json!({}));
    assert_eq!(exports[0]["node-name"], "base");
    daemon.must("blockdev-del", json!({"node-name": "over"}));
    place.io(URI, &["write -P 9 768k 64k"]);
    let (_, events) = daemon.end();
    let last = events.last().expect("an event");
    assert_eq!(
        *last,
        json!({"event": "BLOCK_EXPORT_DELETED", "data": {"id": "e"}})
    );
    place.img("check -q b");
    place.io(
        "b",
        &[
            "read -P 5 0 32k",
            "read -P 6 32k 32k",
            "read -P 7 64k 64k",
            "read -P 8 512k 64k",
            "read -P 9 768k 64k",
        ],
    );
}

#[test]
fn a_commit_that_is_killed_costs_nothing() {
    let place = Place::new();
    let mut daemon = place.ours(EXPORT);
    let over = json!({
        "driver": "qcow2", "node-name": "over", "backing": null,
        "file": {"driver": "file", "filename": "o"},
    });
    daemon.must("blockdev-add", over);
    daemon.must(
        "blockdev-snapshot",
        json!({"node": "base", "overlay": "over"}),
    );
    place.io(URI, &["write -P 6 0 1M", "flush"]);
    // Slow enough to be in the middle of it.
    let commit = json!({"device": "over", "job-id": "j", "speed": 65536});
    daemon.must("block-commit", commit);
    let late = json!({
        "driver": "qcow2", "node-name": "late", "backing": "base",
        "file": {"driver": "file", "filename": "t"},
    });
    let refused = daemon.ask("blockdev-add", late);
    let text = "Could not open backing file: Node 'base' is busy: block device is in use by block \
                job: commit";
    assert_eq!(refused["error"]["desc"], text);
    place.io(URI, &["write -P 7 64k 64k", "write -P 8 512k 64k", "flush"]);
    let jobs = daemon.must("query-jobs", json!({}));
    assert_eq!(jobs[0]["status"], "running", "{jobs}");
    daemon.child.kill().expect("a child");
    daemon.child.wait().expect("a child");
    for image in ["b", "o"] {
        let words = ["check", "-q", image];
        let status = Command::new("qemu-img")
            .current_dir(place.folder.path())
            .args(words)
            .status();
        // Leaks at worst.
        let code = status.expect("qemu-img").code();
        assert!(matches!(code, Some(0 | 3)), "{image}: {code:?}");
    }
    let options = "driver=qcow2,file.filename=o,backing.driver=qcow2,backing.file.filename=b";
    let reads = [
        "read -P 6 0 64k",
        "read -P 7 64k 64k",
        "read -P 6 128k 384k",
        "read -P 8 512k 64k",
        "read -P 6 576k 448k",
    ];
    let mut words = vec!["--image-opts"];
    words.extend(reads.iter().flat_map(|read| ["-c", read]));
    words.push(options);
    let said = place.must("qemu-io", &words);
    assert!(!said.contains("failed"), "{said}");
}

#[test]
fn headers_name_what_images_stand_on_after_commits_and_streams() {
    let place = Place::new();
    let mut daemon = place.ours(&[
        "--blockdev",
        "driver=qcow2,node-name=top,file.driver=file,file.filename=t",
    ]);
    let nodes = daemon.must("query-named-block-nodes", json!({"flat": true}));
    let named = |file: &str, format: &str| {
        let nodes = nodes.as_array().expect("nodes");
        let mut found = nodes
            .iter()
            .filter(|node| node["file"] == file && node["drv"] == format);
        found.next().expect("a node")["node-name"].clone()
    };
    let (mid, base) = (named("m", "qcow2"), named("b", "qcow2"));
    let commit = json!({"device": "top", "job-id": "j", "top-node": mid, "base-node": base});
    daemon.must("block-commit", commit);
    daemon.wait("j", "null");
    daemon.end();
    let info = place.must("qemu-img", &["info", "t"]);
    assert!(info.contains("backing file: b\n"), "{info}");
    place.io(
        "t",
        &[
            "read -P 1 0 128k",
            "read -P 2 128k 64k",
            "read -P 3 192k 192k",
        ],
    );
    let mut daemon = place.ours(&[
        "--blockdev",
        "driver=qcow2,node-name=top,file.driver=file,file.filename=t",
    ]);
    daemon.must("block-stream", json!({"device": "top", "job-id": "s"}));
    daemon.wait("s", "null");
    daemon.end();
    let info = place.must("qemu-img", &["info", "t"]);
    assert!(!info.contains("backing file"), "{info}");
    place.img("check -q t");
    place.io(
        "t",
        &[
            "read -P 1 0 128k",
            "read -P 2 128k 64k",
            "read -P 3 192k 192k",
        ],
    );
}

#[test]
fn what_a_client_sends_and_leaves_behind_harms_nobody() {
    let place = Place::new();
    let mut daemon = place.ours(&[
        "--chardev",
        "socket,id=s,path=qmp,server=on,wait=off",
        "--monitor",
        "s,pretty=on",
    ]);
    for _ in 0..2 {
        let stream = std::os::unix::net::UnixStream::connect(place.path("qmp")).expect("a socket");
        let mut input = stream.try_clone().expect("a clone");
        let mut lines = BufReader::new(stream).lines();
        assert_eq!(lines.next().expect("a line").expect("a line"), "{");
        input
            .write_all(b"}}}}\x00\xff{\"execute\": \"qmp_cap")
            .expect("it listens");
    }
    daemon.must("query-version", json!({}));
    // The end of input is not the end of the program.
    daemon.input = None;
    std::thread::sleep(Duration::from_millis(50));
    assert!(daemon.child.try_wait().expect("a child").is_none());
    place.must("kill", &["-TERM", &daemon.child.id().to_string()]);
    daemon.wait_for_exit();
    assert!(!place.path("qmp").exists());
}
