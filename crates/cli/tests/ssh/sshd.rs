//! OpenSSH's server on loopback, with keys of a test's own, behind a port at which the test can cut
//! or hold up every connection.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::place::{Place, Said, output};

/// Debian's place for it, which is not in everybody's PATH. The server wants its full name.
const PROGRAM: &str = "/usr/sbin/sshd";

/// A process that is killed when it is dropped.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

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
    _process: Killed,
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
    let made = output(
        Command::new("ssh-keygen")
            .args(["-q", "-t", "ed25519", "-N", "", "-f"])
            .arg(path),
    );
    assert!(made.status.success(), "ssh-keygen: {made:?}");
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
    fn serve(place: &Place, more: &str) -> Option<(Killed, u16)> {
        let port = free_port();
        let folder = place.path("").display().to_string();
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
        let mut process = Killed(child);
        let until = Instant::now() + Duration::from_secs(30);
        let log = || fs::read_to_string(&log).unwrap_or_default();
        while !log().contains("Server listening on") {
            assert!(Instant::now() < until, "sshd: {}", log());
            if process.0.try_wait().expect("sshd").is_some() {
                return None;
            }
            thread::sleep(Duration::from_millis(10));
        }
        Some((process, port))
    }

    /// A program `ssh` that knows this server and the key that it lets in, and nothing of whoever
    /// runs the test.
    fn configure_client(&self, place: &Place) {
        let folder = place.path("").display().to_string();
        self.know(place, "host-key");
        let text = format!(
            "IdentityFile {folder}/user-key\nIdentitiesOnly yes\n\
             UserKnownHostsFile {folder}/known\nGlobalKnownHostsFile /dev/null\n"
        );
        fs::write(place.path("ssh.conf"), text).expect("a file");
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
        fs::write(place.path("known"), line).expect("a file");
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
    let mut command = Command::new(place.path("bin").join(program));
    let path = std::env::var("PATH").unwrap_or_default();
    command.env(
        "PATH",
        format!("{}:{path}", place.path("programs").display()),
    );
    command.current_dir(place.folder.path());
    command
}

/// Runs one of our programs.
pub fn run(place: &Place, program: &str, words: &[&str]) -> Said {
    let done = output(command(place, program).args(words));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Said {
        code: done.status.code(),
        out: text(&done.stdout),
        err: text(&done.stderr),
    }
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
