//! A folder with images and a configuration, and daemons that run as services do: what they tell
//! their manager, and monitors' clients.

use std::fs;
use std::io::ErrorKind;
use std::ops::Deref;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use vellum_testing::{Folder, Qmp, Running, Words};

pub use vellum_testing::PATIENCE;

pub const VELLUM: &str = env!("CARGO_BIN_EXE_vellum");

pub struct Place(Folder);

impl Deref for Place {
    type Target = Folder;

    fn deref(&self) -> &Folder {
        &self.0
    }
}

impl Place {
    /// Images `a` to `d`, qcow2, of 1 MiB each.
    pub fn new() -> Place {
        let place = Place(Folder::new(VELLUM));
        for name in ["a", "b", "c", "d"] {
            place.must("vellum", &["create", "-q", "-f", "qcow2", name, "1M"]);
        }
        place
    }

    /// A client of the monitor `qmp.sock`.
    pub fn monitor(&self) -> Qmp {
        Qmp::connect(self.path("qmp.sock"))
    }

    /// Has `vellum io` do something with an export; no pattern may fail.
    pub fn io(&self, export: &str, commands: &[&str]) {
        let image = format!("-f raw nbd+unix:///{export}?socket=nbd.sock");
        self.io_by("vellum", &image, commands);
    }

    /// Starts a daemon whose manager this is.
    pub fn start(&self, words: impl Words) -> Service {
        let words = [vec!["daemon".to_owned()], words.words()].concat();
        self.start_as(VELLUM, &words, &[])
    }

    /// As [`Place::start`], by a program in front of ours, and with variables.
    pub fn start_as(&self, program: &str, words: impl Words, set: &[(&str, &str)]) -> Service {
        let socket = self.path("notify.sock");
        let _ = fs::remove_file(&socket);
        let manager = UnixDatagram::bind(&socket).expect("a socket");
        manager.set_read_timeout(Some(PATIENCE)).expect("a limit");
        let mut log = fs::File::options();
        let log = log.create(true).append(true).open(self.path("log"));
        let mut command = self.command(program, words);
        command.env("NOTIFY_SOCKET", &socket);
        command.envs(set.iter().copied());
        Service {
            running: Running::start(command.stderr(log.expect("a log"))),
            manager,
            log: self.path("log"),
        }
    }

    /// Starts a daemon, and waits until everything is served.
    pub fn serve(&self, words: impl Words) -> Service {
        let service = self.start(words);
        service.wait_told("READY=1");
        service
    }
}

/// A daemon.
pub struct Service {
    pub running: Running,
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
        self.running.signal(signal);
    }

    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Ends it as a manager does.
    pub fn end(self) {
        self.signal("-TERM");
        self.wait_told("STOPPING=1");
        self.wait();
    }

    /// Waits for an end that somebody else has asked for.
    pub fn wait(mut self) {
        let status = self.running.wait();
        assert_eq!(status.code(), Some(0), "{}", self.log());
    }

    /// Ends it as a lack of memory does.
    pub fn kill(self) {
        self.running.kill();
    }
}
