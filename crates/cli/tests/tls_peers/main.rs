//! TLS against peers that mean harm: every kind of credentials, as a client and as a
//! server, and whoever cannot prove what it is asked to prove. Each line of the tables says
//! what we make of such a peer, and beside it what QEMU (with GnuTLS) makes of it.
//!
//! What QEMU refuses is never taken here. The other way round the table has the reason.

#![allow(missing_docs, reason = "nobody reads the documentation of a test")]

mod authority;
mod forgeries;
mod forgers;
mod intruders;
mod intrusions;
mod nbd;
mod stalls;
mod tools;

use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use authority::{Identity, Purpose, Wish};
use tempfile::TempDir;

/// Threads that play cases: they mostly wait for processes.
const THREADS: usize = 4;
/// The key that both sides have.
pub const KEY: [u8; 16] = *b"sixteen bytes...";

/// What became of a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It was believed: its bytes were taken, or it was given some.
    Taken,
    /// It got, or gave, nothing.
    Refused,
}

pub use Verdict::{Refused, Taken};

/// The programs that are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    Ours,
    Qemu,
}

/// A folder with everybody's files.
pub struct Place {
    folder: TempDir,
    /// Whom both sides believe.
    pub root: Identity,
    /// Whom nobody believes.
    pub stranger: Identity,
    /// Whom nobody believes, with the name of the one whom all do.
    pub impostor: Identity,
}

impl Place {
    pub fn make() -> Place {
        let authority = |name| Wish::new(name, Purpose::Authority).self_signed();
        let place = Place {
            folder: tempfile::tempdir().expect("a folder"),
            root: authority("root"),
            stranger: authority("stranger"),
            impostor: authority("root"),
        };
        fs::create_dir(place.path("bin")).expect("a folder");
        for name in ["qemu-img", "qemu-nbd", "qemu-storage-daemon"] {
            let link = place.path("bin").join(name);
            symlink(env!("CARGO_BIN_EXE_vellum"), link).expect("a link");
        }
        let client = Wish::new("guest", Purpose::Client).signed_by(&place.root);
        client.write(&place.path("client"), "client", &place.root);
        let server = Wish::new("localhost", Purpose::Server).also(&["DNS:localhost"]);
        let server = server.signed_by(&place.root);
        server.write(&place.path("server"), "server", &place.root);
        let digits: String = KEY.iter().map(|byte| format!("{byte:02x}")).collect();
        fs::create_dir(place.path("keys")).expect("a folder");
        fs::write(place.path("keys/keys.psk"), format!("qemu:{digits}\n")).expect("written");
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn name(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// One of the programs, ours or the real one.
    pub fn command(&self, program: Program, name: &str) -> Command {
        let mut command = match program {
            Program::Ours => Command::new(self.path("bin").join(name)),
            Program::Qemu => Command::new(name),
        };
        command.current_dir(self.folder.path());
        command
    }
}

/// Runs a program to its end; a missing one is an error that says what to do.
pub fn output(command: &mut Command) -> Output {
    let name = command.get_program().to_string_lossy().into_owned();
    command.output().unwrap_or_else(|error| match error.kind() {
        ErrorKind::NotFound => panic!("{name} is missing: run `cargo xtask setup`"),
        _ => panic!("{name}: {error}"),
    })
}

/// Plays all cases, several at a time, and returns what is not as it should be.
pub fn play<T: Sync>(cases: &[T], one: impl Fn(usize, &T) -> Vec<String> + Sync) -> Vec<String> {
    let (next, wrong) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(case) = cases.get(index) else {
                        return;
                    };
                    let found = one(index, case);
                    wrong.lock().expect("no panic").extend(found);
                }
            });
        }
    });
    wrong.into_inner().expect("no panic")
}

/// What is wrong with the verdicts on a peer.
pub fn compare(what: &str, expected: [Verdict; 2], found: [(Verdict, String); 2]) -> Vec<String> {
    let mut wrong = Vec::new();
    for (who, expected, (verdict, said)) in [
        ("we", expected[0], &found[0]),
        ("QEMU", expected[1], &found[1]),
    ] {
        if *verdict != expected {
            wrong.push(format!(
                "{what}: {who}: {verdict:?}, not {expected:?}: {said}"
            ));
        }
    }
    if found[0].0 == Taken && found[1].0 == Refused {
        wrong.push(format!("{what}: taken by us, but not by QEMU"));
    }
    wrong
}
