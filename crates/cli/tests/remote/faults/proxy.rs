//! A proxy before an object store, which does wrong what a test wants.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use super::super::gateway::{Gateway, KEY, SECRET};

/// What is asked of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asked {
    pub method: String,
    /// With what is behind the question mark.
    pub path: String,
    /// It is to be done only if there is no such object.
    pub is_new: bool,
    /// How many requests came before it.
    pub number: usize,
}

impl Asked {
    /// It reads a part of an object.
    pub fn is_read(&self) -> bool {
        self.method == "GET" && !self.path.contains('?')
    }

    /// It begins an upload of parts.
    pub fn is_begin(&self) -> bool {
        self.method == "POST" && self.path.contains("?uploads")
    }

    /// It sends a part.
    pub fn is_part(&self) -> bool {
        self.method == "PUT" && self.path.contains("partNumber=")
    }

    /// It makes an object of the parts that were sent.
    pub fn is_end(&self) -> bool {
        self.method == "POST" && self.path.contains("?uploadId=")
    }

    /// It gives an upload up.
    pub fn is_abort(&self) -> bool {
        self.method == "DELETE" && self.path.contains("?uploadId=")
    }
}

/// What becomes of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// The store's answer.
    Nothing,
    /// The connection ends, and the store learns of nothing.
    Reset,
    /// The store does it, and the connection ends before its answer.
    LostAnswer,
    /// The store's refusal, by status and code; it learns of nothing.
    Refused(u16, &'static str),
    /// The store fails after the head of its answer: `200 OK`, and an error in the body.
    ErrorInside(&'static str),
    /// No answer.
    Silence,
    /// A few bytes at a time.
    Slow,
    /// What is sent is taken slowly, as over a slow line: all of it takes longer than a server may be
    /// silent.
    SlowTake,
    /// Only so many bytes of the body, then the connection ends.
    Short(usize),
    /// A body that is whole, and some bytes shorter than the range that it says it is.
    Fewer,
    /// The range says other bytes than were asked for.
    WrongRange,
    /// What is to be all of the object, in the place of a range: the store knows none.
    NoRange,
    /// The object has another entity tag all of a sudden, which the store has not compared.
    OtherTag,
}

type Decide = Box<dyn Fn(&Asked) -> Fault + Send + Sync>;

struct State {
    store: SocketAddr,
    decide: Mutex<Arc<Decide>>,
    log: Mutex<Vec<Asked>>,
    ended: AtomicBool,
}

/// The proxy; it ends when it is dropped.
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

impl Proxy {
    pub fn start(gateway: &Gateway) -> Proxy {
        let endpoint = gateway.endpoint();
        let store = endpoint.strip_prefix("http://").expect("an endpoint");
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let state = Arc::new(State {
            store: store.parse().expect("an address"),
            decide: Mutex::new(Arc::new(Box::new(|_| Fault::Nothing))),
            log: Mutex::default(),
            ended: AtomicBool::new(false),
        });
        let shared = state.clone();
        thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                let shared = shared.clone();
                // Clients that leave in the middle are a part of it.
                thread::spawn(move || drop(shared.serve(client)));
            }
        });
        Proxy { address, state }
    }

    /// What becomes of requests from now on; what was asked before is forgotten.
    pub fn decide(&self, decide: impl Fn(&Asked) -> Fault + Send + Sync + 'static) {
        self.state.log.lock().expect("a list").clear();
        *self.state.decide.lock().expect("a rule") = Arc::new(Box::new(decide));
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.state.log.lock().expect("a list").clone()
    }

    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// The environment of a program that is to use it.
    pub fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("AWS_ACCESS_KEY_ID", KEY.to_owned()),
            ("AWS_SECRET_ACCESS_KEY", SECRET.to_owned()),
            ("AWS_REGION", "us-east-1".to_owned()),
        ]
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        // It waits for somebody to come.
        drop(TcpStream::connect(self.address));
    }
}

/// What is taken slowly goes in such pieces, all of it in this time.
const SLOW_BYTES: usize = 64 << 10;
const SLOW_TIME: Duration = Duration::from_millis(3500);

/// A request as it came: its head without the empty line, and its body.
struct Request {
    head: String,
    body: Vec<u8>,
}

impl Request {
    fn read(lines: &mut impl BufRead) -> std::io::Result<Option<Request>> {
        let mut head = String::new();
        loop {
            let begin = head.len();
            if lines.read_line(&mut head)? == 0 {
                return Ok(None);
            }
            if head[begin..].trim().is_empty() {
                head.truncate(begin);
                break;
            }
        }
        let body = Vec::new();
        Ok(Some(Request { head, body }))
    }

    fn read_body(&mut self, lines: &mut impl BufRead, fault: Fault) -> std::io::Result<()> {
        let len = header(&self.head, "content-length");
        self.body = vec![0; len.map_or(0, |len| len.parse().expect("a length"))];
        let pieces = self.body.len().div_ceil(SLOW_BYTES) as u32;
        for piece in self.body.chunks_mut(SLOW_BYTES) {
            if fault == Fault::SlowTake {
                thread::sleep(SLOW_TIME / pieces);
            }
            lines.read_exact(piece)?;
        }
        Ok(())
    }

    fn asked(&self, number: usize) -> Asked {
        let mut words = self.head.split(' ');
        Asked {
            method: words.next().unwrap_or_default().to_owned(),
            path: words.next().unwrap_or_default().to_owned(),
            is_new: header(&self.head, "if-none-match").is_some(),
            number,
        }
    }

    /// Has the store answer; all that it says.
    fn send(&self, store: SocketAddr) -> std::io::Result<Answer> {
        let mut store = TcpStream::connect(store)?;
        let head = &self.head;
        store.write_all(format!("{head}Connection: close\r\n\r\n").as_bytes())?;
        store.write_all(&self.body)?;
        let mut all = Vec::new();
        store.read_to_end(&mut all)?;
        let end = all.windows(4).position(|four| four == b"\r\n\r\n");
        let end = end.ok_or(std::io::ErrorKind::UnexpectedEof)?;
        Ok(Answer {
            head: String::from_utf8_lossy(&all[..end + 2]).into_owned(),
            body: all[end + 4..].to_vec(),
        })
    }
}

/// The content of a header field.
fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut fields = head.lines().filter_map(|line| line.split_once(':'));
    let found = fields.find(|(field, _)| field.eq_ignore_ascii_case(name));
    found.map(|(_, content)| content.trim())
}

/// An answer: its head without the empty line, and its body.
struct Answer {
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn of(status: u16, code: &str) -> Answer {
        let body = format!(
            "<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>It was refused by the \
             test.</Message></Error>"
        );
        let len = body.len();
        Answer {
            head: format!("HTTP/1.1 {status} Said\r\nContent-Length: {len}\r\n"),
            body: body.into_bytes(),
        }
    }

    /// Puts another content into a header field that is there.
    fn change(&mut self, name: &str, content: impl Fn(&str) -> String) {
        let lines = self.head.lines().map(|line| match line.split_once(':') {
            Some((field, old)) if field.eq_ignore_ascii_case(name) => {
                format!("{field}: {}\r\n", content(old.trim()))
            }
            _ => format!("{line}\r\n"),
        });
        self.head = lines.collect();
    }

    fn write(&self, client: &mut TcpStream, fault: Fault) -> std::io::Result<()> {
        client.write_all(format!("{}\r\n", self.head).as_bytes())?;
        match fault {
            Fault::Short(len) => client.write_all(&self.body[..self.body.len().min(len)]),
            Fault::Slow => {
                for byte in self.body.chunks(1) {
                    client.write_all(byte)?;
                    thread::sleep(Duration::from_millis(200));
                }
                Ok(())
            }
            _ => client.write_all(&self.body),
        }
    }
}

impl State {
    /// One request a connection, and those that fail leave it.
    fn serve(&self, client: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(client.try_clone()?);
        let mut client = client;
        let Some(mut request) = Request::read(&mut lines)? else {
            return Ok(());
        };
        let asked = {
            let mut log = self.log.lock().expect("a list");
            let asked = request.asked(log.len());
            log.push(asked.clone());
            asked
        };
        let decide = self.decide.lock().expect("a rule").clone();
        let fault = decide(&asked);
        request.read_body(&mut lines, fault)?;
        if let Some(answer) = self.answer(&request, fault)? {
            answer.write(&mut client, fault)?;
        } else if fault == Fault::Silence {
            // Until the client has had enough.
            let _ = lines.read(&mut [0]);
        }
        client.shutdown(Shutdown::Both)
    }

    /// What is answered, if anything is.
    fn answer(&self, request: &Request, fault: Fault) -> std::io::Result<Option<Answer>> {
        let mut answer = match fault {
            Fault::Reset | Fault::Silence => return Ok(None),
            Fault::Refused(status, code) => Answer::of(status, code),
            Fault::ErrorInside(code) => Answer::of(200, code),
            _ => request.send(self.store)?,
        };
        match fault {
            Fault::LostAnswer => return Ok(None),
            Fault::Fewer => {
                answer.body.truncate(answer.body.len().saturating_sub(100));
                let len = answer.body.len();
                answer.change("content-length", |_| len.to_string());
            }
            Fault::NoRange => {
                let fields = answer.head.lines().skip(1);
                let fields =
                    fields.filter(|line| !line.to_lowercase().starts_with("content-range"));
                let fields: String = fields.map(|line| format!("{line}\r\n")).collect();
                answer.head = format!("HTTP/1.1 200 OK\r\n{fields}");
            }
            Fault::WrongRange => answer.change("content-range", shifted),
            Fault::OtherTag => answer.change("etag", |_| "\"another\"".to_owned()),
            _ => {}
        }
        if header(&answer.head, "connection").is_none() {
            answer.head += "Connection: close\r\n";
        }
        // A refusal of a question for a head has none of its own.
        if request.head.starts_with("HEAD") {
            answer.body.clear();
        }
        Ok(Some(answer))
    }
}

/// A range one byte further on, of an object of the same length.
fn shifted(range: &str) -> String {
    let (range, total) = range.split_once('/').expect("a range");
    let (first, last) = range
        .trim_start_matches("bytes ")
        .split_once('-')
        .expect("a range");
    let [first, last] = [first, last].map(|at| at.parse::<u64>().expect("a number") + 1);
    format!("bytes {first}-{last}/{total}")
}
