//! A folder with images and a configuration, and daemons that run as services do: what they tell
//! their manager, and monitors' clients.

use std::fs;
use std::io::{BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;

pub const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");
/// How long anything may take on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub struct Place {
    pub folder: TempDir,
}

pub fn wait_for(what: &str, mut is_true: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !is_true() {
        assert!(Instant::now() < end, "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl Place {
    /// Images `a` to `d`, qcow2, of 1 MiB each.
    pub fn new() -> Place {
        let place = Place {
            folder: tempfile::tempdir().expect("a folder"),
        };
        for name in ["a", "b", "c", "d"] {
            place.must(VELLUM, &["create", "-q", "-f", "qcow2", name, "1M"]);
        }
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("a file");
    }

    pub fn output(&self, program: &str, words: &[&str]) -> Output {
        let mut command = Command::new(program);
        let command = command.current_dir(self.folder.path()).args(words);
        command
            .output()
            .expect("the program of `cargo xtask setup`")
    }

    pub fn must(&self, program: &str, words: &[&str]) -> String {
        let output = self.output(program, words);
        assert!(output.status.success(), "{program} {words:?}: {output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// Has `vellum io` do something with an export; no pattern may fail.
    pub fn io(&self, export: &str, commands: &[&str]) {
        let uri = format!("nbd+unix:///{export}?socket=nbd.sock");
        let mut words = vec!["io", "-f", "raw"];
        words.extend(commands.iter().flat_map(|command| ["-c", command]));
        words.push(&uri);
        let said = self.must(VELLUM, &words);
        assert!(!said.contains("failed"), "{said}");
    }

    /// Starts a daemon whose manager this is.
    pub fn start(&self, words: &[&str]) -> Service {
        self.start_as(&[VELLUM, "daemon"], words, &[])
    }

    /// As [`Place::start`], by a program in front of ours, and with variables.
    pub fn start_as(&self, program: &[&str], words: &[&str], set: &[(&str, &str)]) -> Service {
        let socket = self.path("notify.sock");
        let _ = fs::remove_file(&socket);
        let manager = UnixDatagram::bind(&socket).expect("a socket");
        manager.set_read_timeout(Some(PATIENCE)).expect("a limit");
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.path("log"));
        let mut command = Command::new(program[0]);
        let child = command
            .current_dir(self.folder.path())
            .args(&program[1..])
            .args(words)
            .env("NOTIFY_SOCKET", &socket)
            .envs(set.iter().copied())
            .stdin(Stdio::null())
            .stderr(log.expect("a log"))
            .spawn()
            .expect("the program runs");
        Service {
            child,
            manager,
            log: self.path("log"),
        }
    }

    /// Starts a daemon, and waits until everything is served.
    pub fn serve(&self, words: &[&str]) -> Service {
        let service = self.start(words);
        service.wait_told("READY=1");
        service
    }
}

/// A daemon.
pub struct Service {
    pub child: Child,
    manager: UnixDatagram,
    log: PathBuf,
}

impl Service {
    /// The next message to the manager.
    pub fn told(&self) -> String {
        let mut bytes = [0; 4096];
        let received = loop {
            match self.manager.recv(&mut bytes) {
                // A signal to this process says nothing of the daemon.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                received => break received,
            }
        };
        let count = received
            .unwrap_or_else(|error| panic!("nothing is told: {error}; the log: {}", self.log()));
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    }

    /// Waits for a message with a line.
    pub fn wait_told(&self, line: &str) -> String {
        loop {
            let told = self.told();
            if told.lines().any(|other| other == line) {
                return told;
            }
        }
    }

    /// Has it read its configuration again, and waits for that; what is told of it.
    pub fn reload(&self) -> String {
        self.signal("-HUP");
        let begun = self.wait_told("RELOADING=1");
        assert!(begun.contains("MONOTONIC_USEC="), "{begun}");
        self.wait_told("READY=1")
    }

    pub fn signal(&self, signal: &str) {
        let sent = Command::new("kill")
            .args([signal, &self.child.id().to_string()])
            .status();
        assert!(sent.expect("kill").success());
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it as a manager does.
    pub fn end(mut self) {
        self.signal("-TERM");
        self.wait_told("STOPPING=1");
        let status = self.child.wait().expect("a child");
        assert_eq!(status.code(), Some(0), "{}", self.log());
    }

    /// Waits for an end that somebody else has asked for.
    pub fn wait(mut self) {
        let status = self.child.wait().expect("a child");
        assert_eq!(status.code(), Some(0), "{}", self.log());
    }

    /// Ends it as a lack of memory does.
    pub fn kill(mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It has ended already, unless a test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client of a monitor.
pub struct Client {
    stream: UnixStream,
    lines: Receiver<String>,
    pub events: Vec<Value>,
}

impl Client {
    pub fn connect(path: &Path) -> Client {
        let mut stream = None;
        wait_for("a monitor", || {
            stream = UnixStream::connect(path).ok();
            stream.is_some()
        });
        let stream = stream.expect("as was seen");
        let (sender, lines) = channel();
        let input = BufReader::new(stream.try_clone().expect("a socket"));
        std::thread::spawn(move || {
            for line in input.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let mut client = Client {
            stream,
            lines,
            events: Vec::new(),
        };
        assert!(client.next().expect("a greeting").get("QMP").is_some());
        client.must("qmp_capabilities", json!({}));
        client
    }

    /// The next message; `None` if the daemon is gone.
    pub fn next(&mut self) -> Option<Value> {
        let line = self.lines.recv_timeout(PATIENCE).ok()?;
        Some(serde_json::from_str(&line).expect("JSON"))
    }

    /// Asks for something, whatever the answer will be.
    pub fn send(&mut self, command: &str, arguments: Value) {
        let request = json!({"execute": command, "arguments": arguments});
        let sent = self.stream.write_all(format!("{request}\n").as_bytes());
        sent.expect("it listens");
    }

    /// The answer to a request.
    fn ask(&mut self, command: &str, arguments: Value) -> Option<Value> {
        self.send(command, arguments);
        loop {
            let message = self.next()?;
            if message.get("event").is_none() {
                return Some(message);
            }
            self.events.push(message);
        }
    }

    pub fn must(&mut self, command: &str, arguments: Value) -> Value {
        let mut answer = self.ask(command, arguments).expect("an answer");
        assert!(answer.get("return").is_some(), "{command}: {answer}");
        answer["return"].take()
    }

    /// Why something is not done.
    pub fn refused(&mut self, command: &str, arguments: Value) -> String {
        let answer = self.ask(command, arguments).expect("an answer");
        let why = answer["error"]["desc"].as_str();
        why.unwrap_or_else(|| panic!("{command}: {answer}"))
            .to_owned()
    }

    /// What a list names by `key`, sorted.
    pub fn names(&mut self, command: &str, key: &str) -> Vec<String> {
        let list = self.must(command, json!({}));
        let names = list.as_array().expect("a list").iter();
        let mut names: Vec<String> = names
            .filter_map(|one| one[key].as_str().map(str::to_owned))
            .collect();
        names.sort();
        names
    }

    pub fn exports(&mut self) -> Vec<String> {
        self.names("query-block-exports", "id")
    }

    /// How many events of a name have come.
    pub fn events_of(&mut self, name: &str) -> usize {
        // They come before the answer to what is asked now.
        self.must("query-version", json!({}));
        let named = |event: &&Value| event["event"] == name;
        self.events.iter().filter(named).count()
    }

    /// Waits for an event, or finds one that has come.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            if let Some(at) = self.events.iter().position(|event| event["event"] == name) {
                return self.events.remove(at);
            }
            let message = self.next().expect("an event");
            self.events.push(message);
        }
    }
}
