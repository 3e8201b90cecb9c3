//! A server that answers whatever a test wants, and remembers what it was asked.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

#[derive(Clone)]
pub struct Answer {
    status: u16,
    leads_to: Option<String>,
    body: Vec<u8>,
    /// The connection breaks after so many bytes of the body.
    cut_after: Option<usize>,
    /// Nothing comes after so many bytes.
    stalls_after: Option<usize>,
}

impl Answer {
    pub fn ok(body: impl AsRef<[u8]>) -> Answer {
        Answer {
            status: 200,
            leads_to: None,
            body: body.as_ref().to_vec(),
            cut_after: None,
            stalls_after: None,
        }
    }

    pub fn leads(to: &str) -> Answer {
        Answer {
            status: 307,
            leads_to: Some(to.to_owned()),
            ..Answer::ok("")
        }
    }

    pub fn status(self, status: u16) -> Answer {
        Answer { status, ..self }
    }

    pub fn cut_after(self, bytes: usize) -> Answer {
        Answer {
            cut_after: Some(bytes),
            ..self
        }
    }

    pub fn stalls_after(self, bytes: usize) -> Answer {
        Answer {
            stalls_after: Some(bytes),
            ..self
        }
    }
}

#[derive(Default)]
struct World {
    answers: HashMap<String, Answer>,
    /// Requests without a proof get this.
    challenge: Option<String>,
    asked: Vec<(String, String)>,
}

pub struct Fake {
    pub port: u16,
    world: Arc<Mutex<World>>,
}

impl Fake {
    pub fn start() -> Fake {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port();
        let world = Arc::<Mutex<World>>::default();
        let shared = world.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let world = shared.clone();
                std::thread::spawn(move || {
                    // A client that leaves is its own affair.
                    let _ = serve(&client, &world);
                });
            }
        });
        Fake { port, world }
    }

    pub fn put(&self, path: &str, answer: Answer) {
        let mut world = self.world.lock().unwrap();
        world.answers.insert(path.to_owned(), answer);
    }

    pub fn protect(&self, challenge: &str) {
        self.world.lock().unwrap().challenge = Some(challenge.to_owned());
    }

    /// The heads of all requests for a path, in lowercase.
    pub fn asked(&self, path: &str) -> Vec<String> {
        let world = self.world.lock().unwrap();
        let asked = world.asked.iter().filter(|(asked, _)| asked == path);
        asked.map(|(_, head)| head.to_lowercase()).collect()
    }
}

/// Reads what comes behind a head: what is left of it would be taken for the next request.
fn skip_body(reader: &mut impl BufRead, lower: &str) -> std::io::Result<()> {
    let value = |name: &str| lower.lines().find_map(|line| line.strip_prefix(name));
    if let Some(len_bytes) = value("content-length: ").and_then(|value| value.parse().ok()) {
        std::io::copy(&mut reader.take(len_bytes), &mut std::io::sink())?;
        return Ok(());
    }
    if value("transfer-encoding: ").is_none() {
        return Ok(());
    }
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let len_bytes = u64::from_str_radix(line.trim(), 16).unwrap_or(0);
        // The end of the chunk's line too.
        std::io::copy(&mut reader.take(len_bytes + 2), &mut std::io::sink())?;
        if len_bytes == 0 {
            return Ok(());
        }
    }
}

fn serve(client: &TcpStream, world: &Mutex<World>) -> std::io::Result<()> {
    let mut reader = BufReader::new(client.try_clone()?);
    loop {
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head)? == 0 {
                return Ok(());
            }
        }
        let lower = head.to_lowercase();
        skip_body(&mut reader, &lower)?;
        let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
        let (answer, challenge) = {
            let mut world = world.lock().unwrap();
            world.asked.push((path.clone(), head.clone()));
            let plain = path.split('?').next().unwrap_or_default();
            let challenge = world.challenge.clone();
            let challenge =
                challenge.filter(|_| plain != "/token" && !lower.contains("\r\nauthorization:"));
            (world.answers.get(plain).cloned(), challenge)
        };
        let answer = answer.unwrap_or_else(|| Answer::ok("{}").status(404));
        let start = lower
            .lines()
            .find_map(|line| line.strip_prefix("range: bytes="))
            .and_then(|range| range.trim_end_matches('-').parse::<usize>().ok());
        let mut client = client;
        if let Some(challenge) = challenge {
            let line = format!("www-authenticate: {challenge}\r\ncontent-length: 0");
            write!(client, "HTTP/1.1 401 No\r\n{line}\r\n\r\n")?;
            continue;
        }
        let body = answer.body.get(start.unwrap_or(0)..).unwrap_or_default();
        let status = if start.is_some() { 206 } else { answer.status };
        write!(
            client,
            "HTTP/1.1 {status} X\r\ncontent-length: {}\r\n",
            body.len()
        )?;
        if let Some(to) = &answer.leads_to {
            write!(client, "location: {to}\r\n")?;
        }
        if let Some(start) = start {
            let all = answer.body.len();
            write!(client, "content-range: bytes {start}-{}/{all}\r\n", all - 1)?;
        }
        write!(client, "\r\n")?;
        let end = answer
            .cut_after
            .or(answer.stalls_after)
            .unwrap_or(body.len());
        if head.starts_with("HEAD ") {
            // Bytes behind such a head would be taken for the next answer.
            continue;
        }
        client.write_all(&body[..end.min(body.len())])?;
        if answer.stalls_after.is_some() {
            std::thread::sleep(Duration::from_secs(1000));
        }
        if end < body.len() {
            return Ok(());
        }
    }
}
