//! nginx on loopback, with files of a test's folder.

use std::fs;
use std::io::ErrorKind;
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use vellum_testing::Running;

use super::Place;

/// A running server.
pub struct Nginx {
    _process: Running,
    pub port: u16,
}

/// A port that nobody has just now.
pub fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

impl Nginx {
    /// Serves `www` of a folder; `more` goes into the server's configuration.
    pub fn start(place: &Place, more: &str) -> Nginx {
        Self::start_as(place, "", more)
    }

    /// As [`Nginx::start`]; `kind` is ` ssl` or nothing.
    pub fn start_as(place: &Place, kind: &str, more: &str) -> Nginx {
        let port = free_port();
        let folder = place.name("");
        let user = if fs::metadata("/root").is_ok_and(|_| is_root()) {
            "user root;"
        } else {
            ""
        };
        let temporary: String = ["client_body", "proxy", "fastcgi", "uwsgi", "scgi"]
            .map(|name| format!("{name}_temp_path {folder}/nginx-{name};\n"))
            .concat();
        let text = format!(
            "daemon off;\nmaster_process off;\n{user}\npid {folder}/nginx-{port}.pid;\n\
             error_log {folder}/nginx-{port}.log;\nevents {{}}\nhttp {{\naccess_log off;\n{temporary}\
             server {{\nlisten 127.0.0.1:{port}{kind};\nroot {folder}/www;\n{more}\n}}\n}}\n"
        );
        let configuration = place.path(&format!("nginx-{port}.conf"));
        fs::write(&configuration, text).expect("a file");
        let child = Command::new("nginx")
            .arg("-c")
            .arg(&configuration)
            .args(["-p", &folder])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn();
        let child = child.unwrap_or_else(|error| match error.kind() {
            ErrorKind::NotFound => panic!("nginx is missing: run `cargo xtask setup`"),
            _ => panic!("nginx: {error}"),
        });
        let nginx = Nginx {
            _process: Running { child },
            port,
        };
        let until = Instant::now() + Duration::from_secs(20);
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let log = place.path(&format!("nginx-{port}.log"));
            assert!(
                Instant::now() < until,
                "nginx: {:?}",
                fs::read_to_string(log)
            );
            std::thread::sleep(Duration::from_millis(10));
        }
        nginx
    }

    pub fn url(&self, name: &str) -> String {
        format!("http://127.0.0.1:{}/{name}", self.port)
    }
}

fn is_root() -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().any(|line| line.starts_with("Uid:\t0\t"))
}
