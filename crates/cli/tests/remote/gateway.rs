//! versitygw on loopback: an object store over folders of a test.

use std::fs;
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::Place;
use super::server::{Killed, free_port};

/// A running object store. Buckets are folders below `store`.
pub struct Gateway {
    _process: Killed,
    pub port: u16,
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
        Self::start_at(place, free_port())
    }

    pub fn start_at(place: &Place, port: u16) -> Gateway {
        for folder in ["store/images", "sidecar"] {
            fs::create_dir_all(place.path(folder)).expect("a folder");
        }
        let log = fs::File::create(place.path("gateway.log")).expect("a file");
        let child = Command::new(program())
            .args(["--access", KEY, "--secret", SECRET, "--port"])
            .arg(format!("127.0.0.1:{port}"))
            .args(["posix", "--sidecar"])
            .arg(place.path("sidecar"))
            .arg(place.path("store"))
            .stdout(log.try_clone().expect("a file"))
            .stderr(log)
            .stdin(Stdio::null())
            .spawn();
        let process = Killed(child.expect("versitygw"));
        let until = Instant::now() + Duration::from_secs(30);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let log = fs::read_to_string(place.path("gateway.log"));
            assert!(Instant::now() < until, "versitygw: {log:?}");
            std::thread::sleep(Duration::from_millis(10));
        }
        Gateway {
            _process: process,
            port,
        }
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
