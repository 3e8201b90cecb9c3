//! OpenSSH's server on loopback, with keys of a test's own, behind a port at which the test can cut
//! or hold up every connection.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use vellum_testing::{Running, Said};

use crate::place::Place;

/// Debian's place for it, which is not in everybody's PATH. The server wants its full name.
const PROGRAM: &str = "/usr/sbin/sshd";

/// What lies between clients and the server.
#[derive(Default)]
struct Door {
    open: Mutex<Vec<TcpStream>>,
    is_held: AtomicBool,
    /// Whoever comes is sent away.
    is_shut: AtomicBool,
    /// Connections that are still to break in the middle.
    to_break: AtomicUsize,
}

impl Door {
    /// Whether the connection that asks is one that is to break.
    fn breaks_one(&self) -> bool {
        let (set, fetch) = (Ordering::SeqCst, Ordering::SeqCst);
        let left = |left: usize| left.checked_sub(1);
        self.to_break.fetch_update(set, fetch, left).is_ok()
    }
}

/// A running server.
pub struct Sshd {
    _process: Running,
    door: Arc<Door>,
    /// Where clients come.
    pub port: u16,
}

/// After so many bytes a connection breaks that is to: more than it takes to open a file.
const BREAKS_AFTER_BYTES: usize = 256 << 10;

/// Leads bytes one way until either side ends.
fn lead_on(mut from: TcpStream, mut to: TcpStream, door: &Door) {
    let mut bytes = vec![0; 64 << 10];
    let mut all_bytes = 0;
    loop {
        let read = from.read(&mut bytes).unwrap_or(0);
        all_bytes += read;
        if all_bytes > BREAKS_AFTER_BYTES && door.breaks_one() {
            break;
        }
        while door.is_held.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(5));
        }
        if read == 0 || to.write_all(&bytes[..read]).is_err() {
            break;
        }
    }
    // Whichever way it ends, both sides learn of it.
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

fn make_key(place: &Place, name: &str) {
    let path = place.path(name);
    let made = Said::of(
        Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(path),
    );
    assert!(made.code == Some(0), "ssh-keygen: {made:?}");
}

impl Sshd {
    /// A server that lets a key of the place in; `more` are options of its `internal-sftp`.
    pub fn start(place: &Place, more: &str) -> Sshd {
        for name in ["host-key", "other-key", "user-key"] {
            make_key(place, name);
        }
        fs::copy(place.path("user-key.pub"), place.path("authorized")).expect("a file");
        let is_root = rustix::process::getuid().is_root();
        if is_root {
            // The server insists on it.
            fs::create_dir_all("/run/sshd").expect("a folder");
        }
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let (process, inside) = (0..10)
            .find_map(|_| Self::serve(place, more))
            .expect("a server that stays");
        let door = Arc::new(Door::default());
        let server = Sshd {
            _process: process,
            door: door.clone(),
            port: listener.local_addr().expect("an address").port(),
        };
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if door.is_shut.load(Ordering::SeqCst) {
                    continue;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", inside)) else {
                    continue;
                };
                let clone = |stream: &TcpStream| stream.try_clone().expect("a connection");
                let both = [
                    (clone(&client), clone(&server)),
                    (clone(&server), clone(&client)),
                ];
                door.open.lock().expect("a list").extend([client, server]);
                for (from, to) in both {
                    let door = door.clone();
                    thread::spawn(move || lead_on(from, to, &door));
                }
            }
        });
        server.configure_client(place);
        server
    }

    /// The process and its port, unless it ends: somebody else has taken the port meanwhile.
    fn serve(place: &Place, more: &str) -> Option<(Running, u16)> {
        let port = free_port();
        let folder = place.name("");
        let text = format!(
            "Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host-key\nPidFile none\n\
             AuthorizedKeysFile {folder}/authorized\nStrictModes no\nUsePAM no\n\
             PermitRootLogin yes\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n\
             Subsystem sftp internal-sftp {more}\n"
        );
        let configuration = place.path("sshd.conf");
        fs::write(&configuration, text).expect("a file");
        let log = place.path("sshd.log");
        let child = Command::new(PROGRAM)
            .args(["-D", "-f"])
            .arg(&configuration)
            .arg("-E")
            .arg(&log)
            .stdin(Stdio::null())
            .spawn();
        let child = child.unwrap_or_else(|error| match error.kind() {
            ErrorKind::NotFound => panic!("sshd is missing: run `cargo xtask setup`"),
            _ => panic!("sshd: {error}"),
        });
        let mut process = Running { child };
        let until = Instant::now() + Duration::from_secs(30);
        let log = || fs::read_to_string(&log).unwrap_or_default();
        while !log().contains("Server listening on") {
            assert!(Instant::now() < until, "sshd: {}", log());
            if process.child.try_wait().expect("sshd").is_some() {
                return None;
            }
            thread::sleep(Duration::from_millis(10));
        }
        Some((process, port))
    }

    /// A program `ssh` that knows this server and the key that it lets in, and nothing of whoever
    /// runs the test.
    fn configure_client(&self, place: &Place) {
        let folder = place.name("");
        self.know(place, "host-key");
        let text = format!(
            "IdentityFile {folder}/user-key\nIdentitiesOnly yes\n\
             UserKnownHostsFile {folder}/known\nGlobalKnownHostsFile /dev/null\n"
        );
        place.write("ssh.conf", text);
        fs::create_dir_all(place.path("programs")).expect("a folder");
        let script = format!("#!/bin/sh\nexec /usr/bin/ssh -F {folder}/ssh.conf \"$@\"\n");
        let program = place.path("programs/ssh");
        fs::write(&program, script).expect("a file");
        fs::set_permissions(program, fs::Permissions::from_mode(0o755)).expect("a program");
    }

    /// Has `ssh` expect this key of the server.
    pub fn know(&self, place: &Place, key: &str) {
        let key = fs::read_to_string(place.path(&format!("{key}.pub"))).expect("a key");
        let line = format!("[127.0.0.1]:{} {key}", self.port);
        place.write("known", line);
    }

    /// The URL of a file of the place.
    pub fn url(&self, place: &Place, name: &str) -> String {
        format!(
            "ssh://127.0.0.1:{}{}",
            self.port,
            place.path(name).display()
        )
    }

    /// Ends every connection.
    pub fn cut(&self) {
        for stream in self.door.open.lock().expect("a list").drain(..) {
            // It may have ended already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Ends every connection, and lets nobody in any more.
    pub fn refuse(&self) {
        self.door.is_shut.store(true, Ordering::SeqCst);
        self.cut();
    }

    /// Has the next connections that carry much break in the middle.
    pub fn break_next(&self, connections: usize) {
        self.door.to_break.store(connections, Ordering::SeqCst);
    }

    /// Has the server be silent from now on, or speak again.
    pub fn hold(&self, is_held: bool) {
        self.door.is_held.store(is_held, Ordering::SeqCst);
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        self.hold(false);
        self.cut();
    }
}

/// One of our programs, which finds the `ssh` of the place.
pub fn command(place: &Place, program: &str) -> Command {
    let mut command = Command::new(place.own(program));
    let path = std::env::var("PATH").unwrap_or_default();
    command.env(
        "PATH",
        format!("{}:{path}", place.path("programs").display()),
    );
    command.current_dir(place.root());
    command
}

/// Runs one of our programs.
pub fn run(place: &Place, program: &str, words: &[&str]) -> Said {
    Said::of(command(place, program).args(words))
}

/// Runs one of our programs, which must succeed.
pub fn good(place: &Place, program: &str, words: &[&str]) -> String {
    let said = run(place, program, words);
    assert_eq!(
        said.code,
        Some(0),
        "{program} {words:?}: {} {}",
        said.err,
        said.out
    );
    said.out
}
