//! A folder with images, daemons in it, and scripts for both.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

pub const NAME: &str = "qemu-storage-daemon";
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with a chain of images, `b`, `m` on it and `t` on that, and an image `o` to put
/// over others.
pub struct Place {
    pub folder: TempDir,
}

impl Place {
    pub fn new() -> Place {
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

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn must(&self, program: &str, words: &[&str]) -> String {
        let output = Command::new(program)
            .current_dir(self.folder.path())
            .args(words)
            .output()
            .expect("the program of `cargo xtask setup`");
        assert!(output.status.success(), "{program} {words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    pub fn img(&self, line: &str) {
        let words: Vec<&str> = line.split_whitespace().collect();
        self.must("qemu-img", &words);
    }

    /// Has the real `qemu-io` do something with an image; no pattern may fail.
    pub fn io(&self, name: &str, commands: &[&str]) {
        let mut words = Vec::new();
        if name.starts_with("nbd") {
            words.extend(["-f", "raw"]);
        }
        if commands.iter().all(|command| command.starts_with("read")) {
            words.push("-r");
        }
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
        words.push(name);
        let said = self.must("qemu-io", &words);
        assert!(!said.contains("failed"), "{said}");
    }

    /// Our daemon, for measurements: that of the program that `VELLUM` names, which is built for
    /// speed, where it does.
    pub fn fast(&self) -> PathBuf {
        let Ok(program) = std::env::var("VELLUM") else {
            return self.path(NAME);
        };
        let folder = self.path("fast");
        std::fs::create_dir(&folder).expect("a folder");
        let link = folder.join(NAME);
        std::os::unix::fs::symlink(program, &link).expect("a link");
        link
    }

    /// Starts a daemon that is asked through its standard input.
    pub fn start(&self, program: &Path, words: &[&str]) -> Daemon {
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
                // QEMU says among its answers what image it makes.
                if line.starts_with("Formatting '") {
                    continue;
                }
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

    pub fn ours(&self, words: &[&str]) -> Daemon {
        self.start(&self.path(NAME), words)
    }
}

/// A daemon with what it has said.
pub struct Daemon {
    pub child: Child,
    pub input: Option<ChildStdin>,
    pub lines: Receiver<String>,
    answers: Vec<Value>,
    events: Vec<Value>,
}

impl Daemon {
    /// The next message, if there comes one.
    pub fn next(&mut self) -> Option<Value> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(serde_json::from_str(&line).expect("JSON")),
            Err(RecvTimeoutError::Disconnected) => None,
            Err(RecvTimeoutError::Timeout) => {
                let (answers, events) = (&self.answers, &self.events);
                panic!("nothing comes; so far: {answers:?}, {events:?}")
            }
        }
    }

    pub fn send(&mut self, text: &str) {
        let input = self.input.as_mut().expect("a pipe");
        input.write_all(text.as_bytes()).expect("it listens");
    }

    /// The answer to what was sent; events before it are kept.
    pub fn answer(&mut self) -> Value {
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

    pub fn ask(&mut self, command: &str, arguments: Value) -> Value {
        let request = json!({"execute": command, "arguments": arguments});
        self.send(&format!("{request}\n"));
        self.answer()
    }

    /// Removes an export whose client has ended, of which the server may hear later.
    fn remove_left_export(&mut self, id: &str) {
        loop {
            let answer = self.ask("block-export-del", json!({"id": id}));
            let text = answer["error"]["desc"].as_str().unwrap_or_default();
            if !text.ends_with("still in use") {
                return;
            }
            self.answers.pop();
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// As [`Daemon::ask`]; it must succeed.
    pub fn must(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.ask(command, arguments);
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].take()
    }

    /// Waits until a job gets into a state, now or earlier.
    pub fn wait(&mut self, id: &str, status: &str) {
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

    /// Waits for an event, or finds one that has come; its data.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            if let Some(event) = self.events.iter().find(|event| event["event"] == name) {
                return event["data"].clone();
            }
            let mut event = self.next().expect("an event");
            let members = event.as_object_mut().expect("an object");
            members.remove("timestamp");
            self.events.push(event);
        }
    }

    /// As [`Daemon::wait`], but not longer than `limit`; whether the job got there.
    pub fn wait_within(&mut self, id: &str, status: &str, limit: Duration) -> bool {
        let wanted = json!({"status": status, "id": id});
        let end = Instant::now() + limit;
        while !self.events.iter().any(|event| event["data"] == wanted) {
            let left = end.saturating_duration_since(Instant::now());
            let Ok(line) = self.lines.recv_timeout(left) else {
                return false;
            };
            let mut message: Value = serde_json::from_str(&line).expect("JSON");
            let members = message.as_object_mut().expect("an object");
            members.remove("timestamp");
            self.events.push(message);
        }
        true
    }

    /// Ends it as it is.
    pub fn kill(mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }

    /// Ends it; what it has said.
    pub fn end(mut self) -> (Vec<Value>, Vec<Value>) {
        self.ask("quit", json!({}));
        self.wait_for_exit();
        (
            std::mem::take(&mut self.answers),
            std::mem::take(&mut self.events),
        )
    }

    pub fn wait_for_exit(&mut self) {
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
pub enum Step {
    Ask(&'static str, Value),
    /// A text that is no proper request.
    Say(&'static str),
    /// Until a job is in a state.
    Wait(&'static str, &'static str),
    /// Until an event has come.
    Event(&'static str),
    /// `block-export-del` of an export that an [`Step::Io`] has used.
    RemoveLeft(&'static str),
    /// Commands of the real `qemu-io` for an export, by its name, at the socket `sock`.
    Io(&'static str, &'static [&'static str]),
}

use Step::{Ask, Event, Io, RemoveLeft, Say, Wait};

/// Plays a script with both daemons, in a folder each: they must say the same.
pub fn same(words: &[&str], script: &[Step]) {
    alike(words, script, &Tolerance::default());
}

/// What may differ.
#[derive(Default)]
pub struct Tolerance {
    /// These members of answers and events.
    pub left_out: &'static [&'static str],
    /// The order of events of different jobs.
    pub by_job: bool,
    /// Events.
    pub events: bool,
}

/// As [`same`], but for what may differ.
pub fn alike(words: &[&str], script: &[Step], tolerance: &Tolerance) {
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
                RemoveLeft(id) => daemon.remove_left_export(id),
                Wait(id, status) => daemon.wait(id, status),
                Event(name) => drop(daemon.event(name)),
                Io(export, commands) => {
                    let uri = format!("nbd+unix:///{export}?socket=sock");
                    place.io(&uri, commands);
                }
            }
        }
        daemon.end()
    };
    let ((our_answers, our_events), (answers, events)) = (play(false), play(true));
    for (at, (ours, theirs)) in our_answers.iter().zip(&answers).enumerate() {
        let left_out = tolerance.left_out;
        let (ours, theirs) = (without(left_out, ours), without(left_out, theirs));
        assert_eq!(sorted(&ours), sorted(&theirs), "answer {at}");
    }
    if tolerance.events {
        return;
    }
    let told = |events: Vec<Value>| -> Vec<Value> {
        let events = calm(events).into_iter();
        let mut events: Vec<Value> = events
            .map(|event| without(tolerance.left_out, &event))
            .collect();
        if tolerance.by_job {
            events.sort_by_key(|event| job_of(event).to_owned());
        }
        events
    };
    assert_eq!(told(our_events), told(events));
}

/// The job that an event is about.
fn job_of(event: &Value) -> &str {
    let data = &event["data"];
    let name = data["id"].as_str().or_else(|| data["device"].as_str());
    name.unwrap_or_default()
}

/// An object with the members of another one, which win.
pub fn with(mut object: Value, more: Value) -> Value {
    for (key, value) in more.as_object().expect("members") {
        object[key] = value.clone();
    }
    object
}

/// A value without some members, wherever they are.
fn without(left_out: &[&str], value: &Value) -> Value {
    match value {
        Value::Array(list) => list.iter().map(|one| without(left_out, one)).collect(),
        Value::Object(members) => members
            .iter()
            .filter(|(key, _)| !left_out.contains(&key.as_str()))
            .map(|(key, value)| (key.clone(), without(left_out, value)))
            .collect(),
        other => other.clone(),
    }
}

/// An answer whose list is of things with names, in the order of these: QEMU's order is that of
/// a hash.
fn sorted(answer: &Value) -> Value {
    let mut answer = answer.clone();
    for key in ["label", "name"] {
        if let Some(list) = answer.get_mut("return").and_then(Value::as_array_mut)
            && list.iter().all(|one| one[key].is_string())
        {
            list.sort_by_key(|one| one[key].as_str().map(str::to_owned));
        }
    }
    answer
}

/// Events without those of jobs that QEMU holds up for a moment, whenever it changes a
/// graph: they pause, and run again.
fn calm(events: Vec<Value>) -> Vec<Value> {
    let mut left: Vec<Value> = Vec::new();
    for event in events {
        let status = &event["data"]["status"];
        let is_known = left.contains(&event);
        if status != "paused" && (status != "running" || !is_known) {
            left.push(event);
        }
    }
    left
}

/// A qcow2 node over a file; `""` leaves the backing file to the image.
pub fn qcow2(name: &str, file: &str, backing: Value) -> Value {
    let mut options = json!({
        "driver": "qcow2",
        "node-name": name,
        "file": {"driver": "file", "filename": file},
    });
    if backing != json!("") {
        options["backing"] = backing;
    }
    options
}

pub fn add(name: &str, file: &str, backing: Value) -> Step {
    Ask("blockdev-add", qcow2(name, file, backing))
}
