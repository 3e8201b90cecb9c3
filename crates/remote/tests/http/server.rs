//! A small web server on loopback that does wrong what a test wants.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// What was asked.
#[derive(Debug, Clone)]
pub struct Request {
    pub path: String,
    pub range: Option<Range<u64>>,
    /// By names in small letters.
    pub headers: BTreeMap<String, String>,
    /// How many came before it.
    pub number: usize,
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Answer {
    /// The range, as HTTP has it.
    Right,
    /// A status, with headers.
    Status(u16, Vec<(&'static str, String)>),
    /// The connection is reset, before an answer.
    Reset,
    /// The head and so many bytes, then the connection ends.
    Cut(usize),
    /// The range, in chunks that say no length.
    Chunked,
    /// The whole file, as if no range had been asked for.
    Whole,
    /// The whole file in chunks.
    WholeChunked,
    /// As much of the whole file as of old servers: its end is that of the connection.
    WholeUntilTheEnd(usize),
    /// Other bytes than were asked for, and the answer says so.
    Shifted,
    /// Fewer than were asked for, and the answer says so.
    Fewer,
    /// A longer range than was asked for.
    More,
    /// Nothing for a time, then the range.
    Late(Duration),
    /// A few bytes at a time, with a pause after each.
    Slow(usize, Duration),
    /// Bytes that are no answer.
    Garbage,
    /// The range, whatever the request says of versions.
    Unconditional,
}

/// The file that is served.
#[derive(Debug, Clone)]
pub struct Served {
    pub bytes: Arc<Vec<u8>>,
    pub etag: Option<String>,
    pub modified: Option<String>,
}

type Decide = Box<dyn Fn(&Request) -> Answer + Send + Sync>;

struct State {
    served: Mutex<Served>,
    decide: Mutex<Arc<Decide>>,
    log: Mutex<Vec<Request>>,
    connections: Mutex<usize>,
    ended: AtomicBool,
}

/// The server; it ends when it is dropped.
pub struct Server {
    address: SocketAddr,
    state: Arc<State>,
}

/// Bytes that differ at all places.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; len];
    random.fill(&mut bytes);
    bytes
}

impl Server {
    pub fn new(bytes: Vec<u8>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(State {
            served: Mutex::new(Served {
                bytes: Arc::new(bytes),
                etag: Some("\"one\"".to_owned()),
                modified: Some("Wed, 25 Nov 2026 10:00:00 GMT".to_owned()),
            }),
            decide: Mutex::new(Arc::new(Box::new(|_| Answer::Right))),
            log: Mutex::default(),
            connections: Mutex::default(),
            ended: AtomicBool::new(false),
        });
        let shared = state.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                *shared.connections.lock().unwrap() += 1;
                let shared = shared.clone();
                thread::spawn(move || drop(shared.serve(stream)));
            }
        });
        Server { address, state }
    }

    pub fn url(&self) -> String {
        format!("http://{}/disk", self.address)
    }

    pub fn decide(&self, decide: impl Fn(&Request) -> Answer + Send + Sync + 'static) {
        *self.state.decide.lock().unwrap() = Arc::new(Box::new(decide));
    }

    pub fn change(&self, change: impl FnOnce(&mut Served)) {
        change(&mut self.state.served.lock().unwrap());
    }

    pub fn requests(&self) -> Vec<Request> {
        self.state.log.lock().unwrap().clone()
    }

    pub fn connections(&self) -> usize {
        *self.state.connections.lock().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        // It waits for somebody to come.
        drop(TcpStream::connect(self.address));
    }
}

impl State {
    fn serve(&self, stream: TcpStream) -> std::io::Result<()> {
        stream.set_nodelay(true)?;
        let mut lines = BufReader::new(stream.try_clone()?);
        let mut out = stream;
        while let Some(mut request) = read_request(&mut lines)? {
            {
                let mut log = self.log.lock().unwrap();
                request.number = log.len();
                log.push(request.clone());
            }
            let decide = self.decide.lock().unwrap().clone();
            let answer = decide(&request);
            let served = self.served.lock().unwrap().clone();
            if !served.answer(&request, &answer, &mut out)? {
                out.shutdown(Shutdown::Both)?;
                return Ok(());
            }
        }
        Ok(())
    }
}

fn read_request(lines: &mut impl BufRead) -> std::io::Result<Option<Request>> {
    let mut line = String::new();
    if lines.read_line(&mut line)? == 0 {
        return Ok(None);
    }
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        lines.read_line(&mut line)?;
        let Some((name, value)) = line.trim().split_once(':') else {
            break;
        };
        headers.insert(name.to_ascii_lowercase(), value.trim().to_owned());
    }
    let range = headers.get("range").and_then(|text| {
        let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
        Some(first.parse().ok()?..last.parse::<u64>().ok()? + 1)
    });
    Ok(Some(Request {
        path,
        range,
        headers,
        number: 0,
    }))
}

impl Served {
    /// The part of an answer's head that tells the version.
    fn version(&self) -> String {
        let line = |name: &str, value: &Option<String>| {
            let value = value.as_ref();
            value.map_or_else(String::new, |value| format!("{name}: {value}\r\n"))
        };
        line("ETag", &self.etag) + &line("Last-Modified", &self.modified)
    }

    fn is_refused(&self, request: &Request) -> bool {
        let differs = |name: &str, now: &Option<String>| {
            let wanted = request.headers.get(name);
            wanted.is_some() && wanted != now.as_ref()
        };
        differs("if-match", &self.etag) || differs("if-unmodified-since", &self.modified)
    }

    /// Answers; whether the connection goes on.
    fn answer(
        &self,
        request: &Request,
        answer: &Answer,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        match answer {
            Answer::Reset => return Ok(false),
            Answer::Garbage => {
                out.write_all(b"\0\x01SSH-2.0-nothing of the kind\r\n\r\n")?;
                return Ok(false);
            }
            Answer::Status(status, headers) => {
                let mut head = format!("HTTP/1.1 {status} Said\r\nContent-Length: 0\r\n");
                for (name, value) in headers {
                    head += &format!("{name}: {value}\r\n");
                }
                out.write_all((head + "\r\n").as_bytes())?;
                return Ok(true);
            }
            Answer::Late(time) => thread::sleep(*time),
            _ => {}
        }
        let total = self.bytes.len() as u64;
        let whole = matches!(
            answer,
            Answer::Whole | Answer::WholeChunked | Answer::WholeUntilTheEnd(_)
        );
        let Some(range) = request.range.clone().filter(|_| !whole) else {
            return self.send_whole(answer, out);
        };
        if self.is_refused(request) && *answer != Answer::Unconditional {
            out.write_all(b"HTTP/1.1 412 Changed\r\nContent-Length: 0\r\n\r\n")?;
            return Ok(true);
        }
        if range.start >= total {
            let head = format!(
                "HTTP/1.1 416 Beyond\r\nContent-Length: 0\r\nContent-Range: bytes */{total}\r\n{}\r\n",
                self.version()
            );
            out.write_all(head.as_bytes())?;
            return Ok(true);
        }
        let mut range = range.start..range.end.min(total);
        match answer {
            Answer::Shifted => range = range.start / 2..range.end.div_ceil(2).max(1),
            Answer::Fewer => range.end = range.start + (range.end - range.start).div_ceil(2),
            Answer::More => range.end = total,
            _ => {}
        }
        self.send_part(range, answer, out)
    }

    fn send_whole(&self, answer: &Answer, out: &mut TcpStream) -> std::io::Result<bool> {
        let head = format!("HTTP/1.1 200 OK\r\n{}", self.version());
        self.send(head, &self.bytes, answer, out)
    }

    fn send_part(
        &self,
        range: Range<u64>,
        answer: &Answer,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        let head = format!(
            "HTTP/1.1 206 Part\r\nContent-Range: bytes {}-{}/{}\r\n{}",
            range.start,
            range.end - 1,
            self.bytes.len(),
            self.version()
        );
        let bytes = &self.bytes[range.start as usize..range.end as usize];
        self.send(head, bytes, answer, out)
    }

    fn send(
        &self,
        mut head: String,
        bytes: &[u8],
        answer: &Answer,
        out: &mut TcpStream,
    ) -> std::io::Result<bool> {
        if matches!(answer, Answer::Chunked | Answer::WholeChunked) {
            head += "Transfer-Encoding: chunked\r\n\r\n";
            out.write_all(head.as_bytes())?;
            for chunk in bytes.chunks(10_000) {
                out.write_all(format!("{:x}\r\n", chunk.len()).as_bytes())?;
                out.write_all(chunk)?;
                out.write_all(b"\r\n")?;
            }
            out.write_all(b"0\r\n\r\n")?;
            return Ok(true);
        }
        if let Answer::WholeUntilTheEnd(len) = answer {
            out.write_all((head + "Connection: close\r\n\r\n").as_bytes())?;
            out.write_all(&bytes[..bytes.len().min(*len)])?;
            return Ok(false);
        }
        head += &format!("Content-Length: {}\r\n\r\n", bytes.len());
        out.write_all(head.as_bytes())?;
        match answer {
            Answer::Cut(len) => {
                out.write_all(&bytes[..bytes.len().min(*len)])?;
                return Ok(false);
            }
            Answer::Slow(len, pause) => {
                for piece in bytes.chunks(*len) {
                    out.write_all(piece)?;
                    thread::sleep(*pause);
                }
            }
            _ => out.write_all(bytes)?,
        }
        Ok(true)
    }
}
