//! A folder with images, daemons in it, and scripts for both.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};
use vellum_testing::{Folder, Qmp, Running, Words, until};

pub const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
pub const NAME: &str = "qemu-storage-daemon";
pub const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with a chain of images, `b`, `m` on it and `t` on that, and an image `o` to put
/// over others.
pub struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Place {
    pub fn new() -> Place {
        let place = Place(Folder::new(VELLUM));
        place.link(NAME);
        place.img("create -q -f qcow2 b 1M");
        place.img("create -q -f qcow2 -b b -F qcow2 m");
        place.img("create -q -f qcow2 -b m -F qcow2 t");
        place.img("create -q -f qcow2 o 1M");
        place.io("t", &["write -P 1 0 128k"]);
        place.io("m", &["write -P 2 64k 128k"]);
        place.io("b", &["write -P 3 128k 256k"]);
        place
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
        words.push(name);
        self.0.io(&words, commands);
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
    pub fn start(&self, program: &Path, words: impl Words) -> Daemon {
        let words = ["--chardev stdio,id=m --monitor m".words(), words.words()].concat();
        let mut command = self.command(program.to_str().expect("a path"), &words);
        let command = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut running = Running::start(command);
        let mut qmp = Qmp::of_child(&mut running.child);
        qmp.try_greet().expect("a greeting");
        Daemon { running, qmp }
    }

    pub fn ours(&self, words: impl Words) -> Daemon {
        self.start(&self.path(NAME), words)
    }
}

/// A daemon with what it has said.
pub struct Daemon {
    pub running: Running,
    qmp: Qmp,
}

impl Deref for Daemon {
    type Target = Qmp;

    fn deref(&self) -> &Qmp {
        &self.qmp
    }
}

impl DerefMut for Daemon {
    fn deref_mut(&mut self) -> &mut Qmp {
        &mut self.qmp
    }
}

impl Daemon {
    /// Removes an export whose client has ended, of which the server may hear later.
    fn remove_left_export(&mut self, id: &str) -> Value {
        let mut answer = json!(null);
        until("the export is not in use", || {
            answer = self.ask("block-export-del", json!({"id": id}));
            let text = answer["error"]["desc"].as_str().unwrap_or_default();
            !text.ends_with("still in use")
        });
        answer
    }

    /// Waits until a job gets into a state, now or earlier.
    pub fn wait(&mut self, id: &str, status: &str) {
        let is_there = self.wait_within(id, status, PATIENCE);
        assert!(is_there, "{id} is not {status}: {:?}", self.events);
    }

    /// Waits for an event, or finds one that has come; its data.
    pub fn event(&mut self, name: &str) -> Value {
        self.qmp.event(name)["data"].take()
    }

    /// As [`Daemon::wait`], but not longer than `limit`; whether the job got there.
    pub fn wait_within(&mut self, id: &str, status: &str, limit: Duration) -> bool {
        let wanted = json!({"status": status, "id": id});
        let is_wanted = |event: &Value| (event["data"] == wanted).then_some(());
        let found = self.try_wait(limit, is_wanted).expect("it is there");
        found.is_some()
    }

    /// Ends it as it is.
    pub fn kill(self) {
        self.running.kill();
    }

    /// Ends it; the events that have come.
    pub fn end(mut self) -> Vec<Value> {
        self.ask("quit", json!({}));
        self.wait_for_exit()
    }

    /// Waits for its end; the events that have come by then.
    pub fn wait_for_exit(mut self) -> Vec<Value> {
        self.running.wait_for_success();
        std::mem::take(&mut self.qmp.events)
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
        let (mut daemon, mut answers) = (place.start(&program, words), Vec::new());
        for step in script {
            match step {
                Ask(command, arguments) => answers.push(daemon.ask(command, arguments.clone())),
                Say(text) => {
                    daemon.say(&format!("{text}\n"));
                    answers.push(daemon.answer());
                }
                RemoveLeft(id) => answers.push(daemon.remove_left_export(id)),
                Wait(id, status) => daemon.wait(id, status),
                Event(name) => drop(daemon.event(name)),
                Io(export, commands) => {
                    let uri = format!("nbd+unix:///{export}?socket=sock");
                    place.io(&uri, commands);
                }
            }
        }
        answers.push(daemon.ask("quit", json!({})));
        (answers, daemon.wait_for_exit())
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
