//! Clients of a monitor at sockets: messages in any order, halved or without end, that nobody
//! reads the answers of, from those who leave in the middle and come again.
//!
//! The input is a script: each byte names an act, the bytes behind it say how (see [`act`]).

use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use serde_json::{Value, json};
use vellum_daemon::{Daemon, Port, ServerEnvironment};
use vellum_graph::Nodes;
use vellum_io::lane::{self, net};
use vellum_io::{Buffer, Buffers, JoinHandle, spawn};
use vellum_options::Options;

/// Most acts of a script.
const MOST_ACTS: usize = 100;
/// Most clients of a script.
const MOST_CLIENTS: usize = 20;
/// How long is waited for what may never come.
const MOMENT: Duration = Duration::from_millis(2);
/// What a script may take, on a machine that is busy with other things.
const MOST_TIME: Duration = Duration::from_secs(60);

/// What a client asks for: nothing that leads out of the process.
const REQUESTS: [&str; 14] = [
    r#"{"execute": "qmp_capabilities"}"#,
    r#"{"execute": "qmp_capabilities", "arguments": {"enable": ["oob"]}}"#,
    r#"{"execute": "query-named-block-nodes", "id": 1}"#,
    r#"{"exec-oob": "query-jobs", "id": "x"}"#,
    r#"{"execute": "blockdev-add", "arguments": {"driver": "null-co", "node-name": "c"}}"#,
    r#"{"execute": "blockdev-del", "arguments": {"node-name": "c"}}"#,
    r#"{"execute": "blockdev-backup", "arguments": {"device": "a", "target": "b", "sync": "full", "job-id": "j", "speed": 1024}}"#,
    r#"{"execute": "job-cancel", "arguments": {"id": "j"}}"#,
    r#"{"execute": "query-qmp-schema"}"#,
    r#"{"execute": "chardev-add", "arguments": {"id": "r", "backend": {"type": "ringbuf", "data": {"size": 16}}}}"#,
    r#"{"execute": "ringbuf-write", "arguments": {"device": "r", "data": "some more than it holds"}}"#,
    r#"{"execute": "chardev-remove", "arguments": {"id": "r"}}"#,
    r#"{"execute": "block-job-set-speed", "arguments": {"device": "j", "speed": 0}}"#,
    r#"{"execute": "object-add", "arguments": {"qom-type": "iothread", "id": "i"}}"#,
];

/// Invariants:
/// - no script makes a monitor panic or hang;
/// - what goes to a client is one JSON object a line;
/// - another client is served meanwhile and afterwards, and the daemon ends when it is told to.
pub fn check_monitor(data: &[u8]) {
    let begin = Instant::now();
    lane::block_on(async {
        let daemon = Daemon::new(Nodes::live(), ServerEnvironment::without_sockets());
        for name in ["a", "b"] {
            let mut options = Options::new();
            options.set_text("driver", "null-co");
            options.set_text("node-name", name);
            options.set_text("size", "1M");
            daemon.add_node(options).await.expect("nothing");
        }
        let mut clients = vec![Client::connect(&daemon)];
        let mut rest = data;
        let mut acts = 0;
        while !rest.is_empty() && acts < MOST_ACTS {
            act(&mut rest, &mut clients, &daemon).await;
            acts += 1;
        }
        check_served(&daemon).await;
        // A node may have failed; it is gone all the same.
        let _ = daemon.shut_down().await;
        for client in clients {
            client.leave().await;
        }
    });
    assert!(begin.elapsed() < MOST_TIME, "{:?}", begin.elapsed());
}

fn next(rest: &mut &[u8]) -> u8 {
    let Some((&byte, behind)) = rest.split_first() else {
        return 0;
    };
    *rest = behind;
    byte
}

/// Does what the next bytes say.
async fn act(rest: &mut &[u8], clients: &mut Vec<Client>, daemon: &Rc<Daemon>) {
    let kind = next(rest);
    let (count, last) = (clients.len(), clients.len() - 1);
    let client = &mut clients[last];
    match kind % 8 {
        0..=2 => {
            let request = REQUESTS[usize::from(next(rest)) % REQUESTS.len()];
            client.send(request.as_bytes()).await;
        }
        3 => {
            let request = REQUESTS[usize::from(next(rest)) % REQUESTS.len()].as_bytes();
            let len = usize::from(next(rest)) % request.len();
            client.send(&request[..len]).await;
        }
        4 => {
            let len = usize::from(next(rest)).min(rest.len());
            let (said, behind) = rest.split_at(len);
            *rest = behind;
            // Its commands could lead anywhere.
            if !said
                .windows(5)
                .any(|part| part == b"execu" || part == b"exec-")
            {
                client.send(said).await;
            }
        }
        5 => client.read().await,
        6 => {
            // Many of one kind.
            let byte = [b"{}[]\"\n "[usize::from(next(rest)) % 7]];
            client.send(&byte.repeat(64 << (next(rest) % 8))).await;
        }
        _ if count < MOST_CLIENTS => {
            // The one before goes on, or is gone.
            if next(rest).is_multiple_of(2) {
                client.hang_up();
            }
            clients.push(Client::connect(daemon));
        }
        _ => check_served(daemon).await,
    }
}

/// Somebody else is answered.
async fn check_served(daemon: &Rc<Daemon>) {
    let mut polite = Client::connect(daemon);
    for request in [
        REQUESTS[0],
        r#"{"execute": "query-version", "id": "served"}"#,
    ] {
        polite.say(request.as_bytes()).await;
    }
    let begin = Instant::now();
    while !polite
        .lines
        .iter()
        .any(|line| line["id"] == json!("served"))
    {
        polite.read().await;
        assert!(begin.elapsed() < MOST_TIME, "nobody else is served");
    }
    polite.leave().await;
}

/// A client, and the monitor that serves it.
struct Client {
    stream: net::Stream,
    served: JoinHandle<()>,
    heard: Vec<u8>,
    lines: Vec<Value>,
    gone: bool,
}

impl Client {
    fn connect(daemon: &Rc<Daemon>) -> Client {
        let (stream, other) = net::Stream::pair().expect("sockets");
        let daemon = daemon.clone();
        let served = spawn(async move { daemon.talk(Port::from(other), false).await });
        Client {
            stream,
            served,
            heard: Vec::new(),
            lines: Vec::new(),
            gone: false,
        }
    }

    /// Says something, for as long as that takes.
    async fn say(&self, bytes: &[u8]) {
        let bytes = Buffers::from_iter([Buffer::copy_of(bytes)]);
        let sending = pin!(self.stream.send(bytes));
        match select(sending, pin!(lane::sleep(MOST_TIME))).await {
            Either::Left((sent, _)) => drop(sent.expect("it is listened to")),
            Either::Right(_) => panic!("nobody else is listened to"),
        }
    }

    /// Says something, unless no more is taken.
    async fn send(&mut self, bytes: &[u8]) {
        if self.gone {
            return;
        }
        let bytes = Buffers::from_iter([Buffer::copy_of(bytes)]);
        let stream = self.stream.clone();
        // What is not taken at once goes on its way.
        let sending = spawn(async move { stream.send(bytes).await.is_ok() });
        match select(sending, pin!(lane::sleep(MOMENT))).await {
            Either::Left((sent, _)) => self.gone |= !sent,
            // Two sends at once would mix.
            Either::Right(_) => self.hang_up(),
        }
    }

    /// Hears what there is.
    async fn read(&mut self) {
        let receiving = pin!(self.stream.recv(Buffer::zeroed(1 << 16)));
        let moment = pin!(lane::sleep(MOMENT));
        if let Either::Left((Ok((buffer, count)), _)) = select(receiving, moment).await {
            self.heard.extend(&buffer[..count]);
            self.gone |= count == 0;
        }
        while let Some(end) = self.heard.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.heard.drain(..=end).collect();
            let line: Value = serde_json::from_slice(&line).expect("a line is JSON");
            assert!(line.is_object(), "{line}");
            self.lines.push(line);
        }
    }

    fn hang_up(&mut self) {
        self.gone = true;
        // The other side may have done so.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }

    async fn leave(mut self) {
        self.hang_up();
        self.served.await;
    }
}
