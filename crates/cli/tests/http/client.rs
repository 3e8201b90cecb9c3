//! A client of HTTP that says exactly what it is told to.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::place::{Daemon, PATIENCE, Place};

/// What a polite client's answer may take, whatever others do meanwhile.
pub const MOST_TIME: Duration = Duration::from_secs(5);

/// A connection.
pub trait Wire: Read + Write {}

impl<S: Read + Write> Wire for S {}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub head: String,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).expect("JSON")
    }

    pub fn text(&self) -> String {
        String::from_utf8(self.body.clone()).expect("text")
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let mut lines = self.head.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, value)| value)
    }
}

pub fn unix(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream.set_write_timeout(Some(PATIENCE)).expect("set");
    stream
}

pub fn tcp(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("set");
    stream.set_write_timeout(Some(PATIENCE)).expect("set");
    stream
}

/// Says something, and reads all that is answered until the other side hangs up.
pub fn say(stream: &mut impl Wire, text: &[u8]) -> Vec<u8> {
    // Whoever does not listen any more answers all the same.
    let _ = stream.write_all(text);
    let mut heard = Vec::new();
    let _ = stream.read_to_end(&mut heard);
    heard
}

/// Takes an answer apart.
pub fn parse(heard: &[u8]) -> Answer {
    let text = String::from_utf8_lossy(heard);
    let end = text
        .find("\r\n\r\n")
        .unwrap_or_else(|| panic!("no answer: {text:?}"));
    let head = text[..end].to_owned();
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok());
    Answer {
        status: status.expect("a status"),
        head,
        body: heard[end + 4..].to_vec(),
    }
}

/// Asks once, with headers.
pub fn ask(
    stream: &mut impl Wire,
    (method, target): (&str, &str),
    headers: &[(&str, &str)],
    body: &[u8],
) -> Answer {
    let mut text = format!("{method} {target} HTTP/1.1\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| *name == "Host") {
        text += "Host: localhost\r\n";
    }
    for (name, value) in headers {
        text += &format!("{name}: {value}\r\n");
    }
    if !body.is_empty() {
        text += &format!(
            "Content-Type: application/json\r\nContent-Length: {}\r\n",
            body.len()
        );
    }
    text += "\r\n";
    parse(&say(stream, &[text.as_bytes(), body].concat()))
}

/// A place with a daemon that listens at the unix socket `ctl`, and, with a port, there too.
pub struct Served {
    pub place: Place,
    pub daemon: Daemon,
    pub port: u16,
}

impl Served {
    /// Starts it with more words; `tcp` is what follows the port's address.
    pub fn new(words: &[&str], tcp: Option<&str>) -> Served {
        let place = Place::new();
        let port = free_port();
        let address = format!("127.0.0.1:{port}{}", tcp.unwrap_or_default());
        let mut all: Vec<&str> = words.to_vec();
        all.extend(["--metrics", "unix:ctl"]);
        if tcp.is_some() {
            all.extend(["--metrics", &address]);
        }
        let daemon = place.ours(&all);
        Served {
            place,
            daemon,
            port,
        }
    }

    pub fn unix(&self) -> UnixStream {
        unix(&self.place.path("ctl"))
    }

    pub fn ask(&self, method: &str, target: &str, body: Value) -> Answer {
        let body = match body.is_null() {
            true => Vec::new(),
            false => body.to_string().into_bytes(),
        };
        ask(&mut self.unix(), (method, target), &[], &body)
    }

    /// As [`Served::ask`]; it must succeed.
    pub fn must(&self, method: &str, target: &str, body: Value) -> Value {
        let answer = self.ask(method, target, body);
        assert_eq!(answer.status, 200, "{method} {target}: {}", answer.text());
        answer.json()
    }

    /// Somebody else is answered in time.
    pub fn check_served(&self) {
        let begin = Instant::now();
        let answer = self.ask("GET", "/v1/host", Value::Null);
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert!(begin.elapsed() < MOST_TIME, "{:?}", begin.elapsed());
    }
}

/// A port that nobody listened on a moment ago.
fn free_port() -> u16 {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// A disk `d`, the image `t` on `m` on `b`, exported at the socket `sock` as `x`.
pub const DISK: &[&str] = &[
    "--nbd-server",
    "addr.type=unix,addr.path=sock",
    "--blockdev",
    "driver=qcow2,node-name=d,file.driver=file,file.filename=t",
    "--export",
    "nbd,id=e,node-name=d,name=x,writable=on",
];

pub const URI: &str = "nbd+unix:///x?socket=sock";
