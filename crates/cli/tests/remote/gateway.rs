//! versitygw on loopback: an object store over folders of a test, behind a port that stays the
//! test's own while the store is away.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use vellum_testing::Running;

use super::Place;
use super::server::free_port;

/// An object store. Buckets are folders below `store`.
pub struct Gateway {
    process: Option<Running>,
    /// Where clients come.
    port: u16,
    /// Where the store listens, at an address of its own; 0: it is away.
    inside: Arc<AtomicU16>,
    address: Ipv4Addr,
}

/// An address that no other store, of this process or another one, listens at: who finds a port
/// free at the common one may find it taken when the store has started.
fn own_address() -> Ipv4Addr {
    static COUNT: AtomicU8 = AtomicU8::new(0);
    let count = COUNT.fetch_add(1, Ordering::SeqCst);
    let [.., high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 64 + count % 128, high, low.max(1))
}

/// Leads bytes both ways until either side ends.
fn lead_on(client: &TcpStream, store: &TcpStream) {
    let clone = |stream: &TcpStream| stream.try_clone().expect("a connection");
    for (mut from, mut to) in [(clone(client), clone(store)), (clone(store), clone(client))] {
        thread::spawn(move || {
            // Whichever way it ends, the other side learns of it.
            let _ = io::copy(&mut from, &mut to);
            let _ = to.shutdown(Shutdown::Both);
        });
    }
}

/// Who may do everything there.
pub const KEY: &str = "tester";
pub const SECRET: &str = "hidden-for-tests";

/// What `cargo xtask setup` has built.
fn program() -> PathBuf {
    let target = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let target = target.parent().expect("the target folder");
    let program = target.join("programs/versitygw");
    let message = "versitygw is missing: run `cargo xtask setup`";
    assert!(program.exists(), "{message} ({})", program.display());
    program
}

impl Gateway {
    /// Serves the folder `store`, in which there is a bucket `images`.
    pub fn start(place: &Place) -> Gateway {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let inside = Arc::<AtomicU16>::default();
        let mut gateway = Gateway {
            process: None,
            port: listener.local_addr().expect("an address").port(),
            inside: inside.clone(),
            address: own_address(),
        };
        let address = gateway.address;
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                // Whoever comes while the store is away is sent away, too.
                let store = TcpStream::connect((address, inside.load(Ordering::SeqCst)));
                if let Ok(store) = store {
                    lead_on(&client, &store);
                }
            }
        });
        gateway.come_back(place);
        gateway
    }

    /// Ends the store; its clients are sent away.
    pub fn go_away(&mut self) {
        self.inside.store(0, Ordering::SeqCst);
        self.process = None;
    }

    /// Starts the store anew.
    pub fn come_back(&mut self, place: &Place) {
        for _ in 0..10 {
            let port = free_port();
            if let Some(process) = Self::serve(place, (self.address, port)) {
                self.process = Some(process);
                self.inside.store(port, Ordering::SeqCst);
                return;
            }
        }
        let log = fs::read_to_string(place.path("gateway.log"));
        panic!("versitygw ends at once: {log:?}");
    }

    /// The process, unless it ends: somebody else has taken the port meanwhile.
    fn serve(place: &Place, (address, port): (Ipv4Addr, u16)) -> Option<Running> {
        for folder in ["store/images", "sidecar"] {
            fs::create_dir_all(place.path(folder)).expect("a folder");
        }
        let log = fs::File::create(place.path("gateway.log")).expect("a file");
        let child = Command::new(program())
            .args(["--access", KEY, "--secret", SECRET, "--port"])
            .arg(format!("{address}:{port}"))
            .args(["posix", "--sidecar"])
            .arg(place.path("sidecar"))
            .arg(place.path("store"))
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .stdin(Stdio::null())
            .spawn();
        let mut process = Running {
            child: child.expect("versitygw"),
        };
        let until = Instant::now() + Duration::from_secs(30);
        // Who answers may be somebody else, and this one about to end: it says when it listens.
        let is_listening = || {
            let log = fs::read_to_string(place.path("gateway.log"));
            log.is_ok_and(|log| log.contains("listening on"))
                && TcpStream::connect((address, port)).is_ok()
        };
        while !is_listening() {
            assert!(Instant::now() < until, "versitygw does not listen");
            if process.child.try_wait().expect("versitygw").is_some() {
                return None;
            }
            thread::sleep(Duration::from_millis(10));
        }
        thread::sleep(Duration::from_millis(100));
        let ended = process.child.try_wait().expect("versitygw").is_some();
        (!ended).then_some(process)
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// The environment of a program that is to use it.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_ENDPOINT", self.endpoint()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
    }
}
