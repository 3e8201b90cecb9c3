//! A client of the NBD server that says anything, message after message, in any order and
//! cut off anywhere.
//!
//! The input is a script: each byte names an act, the bytes behind it say how (see
//! [`Script`]). What the acts send is what real clients send, or bytes of the input.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use vellum::Raw;
use vellum::raw::RawOptions;
use vellum_export::nbd::{Export, Exports, Listener, ServerOptions, Stop, serve};
use vellum_io::lane;
use vellum_nbd::proto;
use vellum_storage::MemStorage;

const SIZE_BYTES: usize = 64 << 10;
/// Most acts of a script.
const MOST_ACTS: usize = 200;
/// What a session may take, on a machine that is busy with other things.
const MOST_TIME: Duration = Duration::from_secs(30);
/// What goes back may be this much for each act: the longest answer is the whole disk, in
/// chunks of no less than a byte of it.
const MOST_ANSWER_BYTES: usize = 40 * SIZE_BYTES;

/// Invariants:
/// - no script makes the server panic, hang, or answer without end;
/// - what comes back is well formed, in the order of options, and each request is answered
///   once at most, by its cookie;
/// - a read-only export keeps its bytes;
/// - another client is served afterwards, and the server ends when it is told to.
pub fn check_nbd_server(data: &[u8]) {
    let begin = Instant::now();
    let read_only = data.first().is_some_and(|byte| byte & 1 == 1);
    let script = Script::of(data.get(1..).unwrap_or_default());
    let storage = Arc::new(MemStorage::with_bytes(vec![0x5a; SIZE_BYTES]));
    let raw = Raw::open(storage.clone(), RawOptions::default()).expect("memory");
    let (listener, address) = listen();
    let stop = Stop::new();
    let end = stop.clone();
    let hostile = std::thread::spawn(move || {
        let answers = converse(&address, &script);
        let most = MOST_ANSWER_BYTES * (script.acts.len() + 1);
        assert!(answers.len() <= most, "{} bytes of answers", answers.len());
        check_answers(&answers, &script);
        // Somebody else.
        let polite = Script::of(&[]);
        let answers = converse(&address, &polite);
        check_answers(&answers, &polite);
        assert!(answers.len() > SIZE_BYTES, "the next client is served");
        end.request();
    });
    lane::block_on(async {
        let mut export = Export::new("", raw);
        export.read_only = read_only;
        let options = ServerOptions {
            max_connections: 2,
            persistent: true,
            max_lanes: 1,
            ..ServerOptions::default()
        };
        serve(vec![listener], Exports::new([export]), options, &stop).await;
    });
    if let Err(panic) = hostile.join() {
        std::panic::resume_unwind(panic);
    }
    if read_only {
        assert!(
            storage.snapshot() == [0x5a; SIZE_BYTES],
            "it was written to"
        );
    }
    assert!(begin.elapsed() < MOST_TIME, "{:?}", begin.elapsed());
}

/// Listens on a name of its own.
fn listen() -> (Listener, SocketAddr) {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("vellum-fuzz-{}-{number}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).expect("a name");
    let listener = UnixListener::bind_addr(&address).expect("a socket");
    (
        Listener::from_fd(listener.into()).expect("a socket"),
        address,
    )
}

/// What a client does.
#[derive(Debug)]
enum Act {
    Say(Vec<u8>),
    /// Nothing more is said.
    Finish,
    /// The socket goes, whatever is on its way.
    Leave,
}

/// The acts, and the requests among them.
#[derive(Debug)]
struct Script {
    acts: Vec<Act>,
    /// The length of reads, by cookie; 0 for others.
    requests: HashMap<u64, usize>,
    no_zeroes: bool,
}

/// The bytes of the input, taken one by one; zeroes behind their end.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        match self.0.split_first() {
            Some((&byte, rest)) => {
                self.0 = rest;
                byte
            }
            None => 0,
        }
    }

    fn take(&mut self, most: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(most.min(self.0.len()));
        self.0 = rest;
        taken.to_vec()
    }
}

/// Numbers at which something changes.
fn interesting(byte: u8) -> u64 {
    let size = SIZE_BYTES as u64;
    match byte % 16 {
        0 => 0,
        1 => 1,
        2 => 511,
        3 => 512,
        4 => 4096,
        5 => size - 1,
        6 => size,
        7 => size + 1,
        8 => size / 2,
        9 => u64::from(u32::MAX),
        10 => u64::MAX,
        11 => u64::MAX - 511,
        12 => 32 << 20,
        13 => (32 << 20) + 1,
        14 => i64::MAX as u64,
        _ => u64::from(byte),
    }
}

impl Script {
    fn of(data: &[u8]) -> Script {
        let mut bytes = Bytes(data);
        let mut script = Script {
            acts: Vec::new(),
            requests: HashMap::new(),
            no_zeroes: true,
        };
        let flags = match bytes.next() {
            byte @ 0..=3 if !data.is_empty() => byte,
            _ => 3,
        };
        script.no_zeroes = flags & 2 != 0;
        script.say(u32::from(flags).to_be_bytes().to_vec());
        let mut extended = false;
        while !bytes.0.is_empty() && script.acts.len() < MOST_ACTS {
            script.act(&mut bytes, &mut extended);
        }
        if data.is_empty() {
            script.option(proto::OPT_GO, &[0; 6]);
            script.request(false, proto::CMD_READ, 0, 0, SIZE_BYTES as u64);
            script.request(false, proto::CMD_DISC, 0, 0, 0);
        }
        script
    }

    fn say(&mut self, bytes: Vec<u8>) {
        self.acts.push(Act::Say(bytes));
    }

    fn option(&mut self, number: u32, data: &[u8]) {
        let mut bytes = proto::OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(number.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.say(bytes);
    }

    fn request(&mut self, extended: bool, command: u16, flags: u16, offset: u64, len: u64) {
        let cookie = 0xc00c_1e00 + self.requests.len() as u64;
        let mut bytes = match extended {
            true => proto::EXTENDED_REQUEST_MAGIC,
            false => proto::REQUEST_MAGIC,
        }
        .to_be_bytes()
        .to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(command.to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset.to_be_bytes());
        match extended {
            true => bytes.extend(len.to_be_bytes()),
            false => bytes.extend((len as u32).to_be_bytes()),
        }
        let reads = command == proto::CMD_READ;
        let len = if reads { len as u32 as usize } else { 0 };
        self.requests.insert(cookie, len);
        self.say(bytes);
    }

    fn act(&mut self, bytes: &mut Bytes<'_>, extended: &mut bool) {
        match bytes.next() % 16 {
            0 => self.option(proto::OPT_GO, &[0; 6]),
            1 => {
                let context = proto::CONTEXT_ALLOCATION.as_bytes();
                let lens = [0_u32, 1, context.len() as u32]
                    .map(u32::to_be_bytes)
                    .concat();
                let option = match bytes.next() % 2 {
                    0 => proto::OPT_SET_META_CONTEXT,
                    _ => proto::OPT_LIST_META_CONTEXT,
                };
                self.option(option, &[&lens, context].concat());
            }
            2 => self.option(proto::OPT_STRUCTURED_REPLY, &[]),
            3 => {
                self.option(proto::OPT_EXTENDED_HEADERS, &[]);
                *extended = true;
            }
            4 => self.option(proto::OPT_EXPORT_NAME, &[]),
            5 => {
                let number = u32::from(bytes.next());
                let len = usize::from(bytes.next());
                let data = bytes.take(len);
                self.option(number, &data);
            }
            6 => {
                // A part of an option, or one that is longer than what comes of it.
                let mut said = proto::OPTION_MAGIC.to_be_bytes().to_vec();
                said.extend(u32::from(bytes.next()).to_be_bytes());
                said.extend((interesting(bytes.next()) as u32).to_be_bytes());
                said.truncate(usize::from(bytes.next()).max(1));
                self.say(said);
            }
            7..=11 => {
                let [command, flags, offset, len] = [(); 4].map(|()| bytes.next());
                let command = u16::from(command % 9);
                let flags = match flags {
                    0..=63 => u16::from(flags),
                    _ => 0,
                };
                let (offset, len) = (interesting(offset), interesting(len));
                self.request(*extended, command, flags, offset, len);
                if command == proto::CMD_WRITE && len <= 2 * SIZE_BYTES as u64 {
                    // The payload, or less of it.
                    let cut = u64::from(bytes.next() & 1);
                    self.say(vec![0xee; len.saturating_sub(cut) as usize]);
                }
            }
            12 => {
                let len = usize::from(bytes.next());
                let said = bytes.take(len);
                self.say(said);
            }
            13 => self.acts.push(Act::Finish),
            14 => self.acts.push(Act::Leave),
            _ => self.option(proto::OPT_STARTTLS, &[]),
        }
    }
}

/// Plays a script; what came back.
fn converse(address: &SocketAddr, script: &Script) -> Vec<u8> {
    let mut stream = UnixStream::connect_addr(address).expect("a server");
    stream.set_read_timeout(Some(MOST_TIME)).expect("set");
    stream.set_write_timeout(Some(MOST_TIME)).expect("set");
    let mut answers = stream.try_clone().expect("a socket");
    let listening = std::thread::spawn(move || {
        let mut heard = Vec::new();
        // What ends it is the server's end, or ours.
        let ended = answers.read_to_end(&mut heard);
        if let Err(error) = ended {
            let kind = error.kind();
            assert!(kind != std::io::ErrorKind::WouldBlock, "the server hangs");
        }
        heard
    });
    for act in &script.acts {
        let told = match act {
            Act::Say(bytes) => stream.write_all(bytes),
            Act::Finish => stream.shutdown(Shutdown::Write),
            Act::Leave => stream.shutdown(Shutdown::Both),
        };
        if told.is_err() {
            // The server has had enough.
            break;
        }
    }
    // It may be gone already.
    let _ = stream.shutdown(Shutdown::Write);
    listening.join().expect("the server's answers end")
}

/// Takes what a server has said apart. What comes after a message that was cut off is the
/// end of the connection.
fn check_answers(answers: &[u8], script: &Script) {
    let mut rest = Rest(answers);
    if rest.take(18).is_none() {
        return;
    }
    let mut framing = 0;
    loop {
        let Some(head) = rest.take(8) else { return };
        if head != proto::OPTION_REPLY_MAGIC.to_be_bytes() {
            // The answer to a request by name.
            assert_eq!(
                head,
                (SIZE_BYTES as u64).to_be_bytes(),
                "no answer to an option"
            );
            let reserved = if script.no_zeroes { 0 } else { 124 };
            if rest.take(2 + reserved).is_none() {
                return;
            }
            break;
        }
        let (Some(option), Some(kind)) = (rest.number(), rest.number()) else {
            return;
        };
        let Some(len) = rest.number() else { return };
        assert!(len < 1 << 16, "a long answer");
        if rest.take(len as usize).is_none() {
            return;
        }
        match (option, kind) {
            (proto::OPT_GO, proto::REP_ACK) => break,
            (proto::OPT_STRUCTURED_REPLY, proto::REP_ACK) => framing = 1,
            (proto::OPT_EXTENDED_HEADERS, proto::REP_ACK) => framing = 2,
            _ => {}
        }
    }
    check_replies(&mut rest, script, framing);
}

fn check_replies(rest: &mut Rest<'_>, script: &Script, framing: u8) {
    let mut open = script.requests.clone();
    while let Some(magic) = rest.number() {
        let (last, len, cookie);
        if magic == proto::SIMPLE_REPLY_MAGIC {
            assert!(framing < 2, "a simple reply among extended ones");
            let Some(error) = rest.number() else { return };
            let Some(known) = rest.cookie(&open) else {
                return;
            };
            let reads = *open.get(&known).unwrap_or(&0);
            (last, cookie) = (true, known);
            len = if error == 0 { reads } else { 0 };
        } else {
            let extended = magic == proto::EXTENDED_REPLY_MAGIC;
            assert!(
                extended || magic == proto::STRUCTURED_REPLY_MAGIC,
                "{magic:#x}"
            );
            assert_eq!(framing, if extended { 2 } else { 1 }, "another framing");
            let Some(flags) = rest.number() else { return };
            let Some(known) = rest.cookie(&open) else {
                return;
            };
            if extended && rest.take(8).is_none() {
                return;
            }
            if extended && rest.number().is_none() {
                return;
            }
            let Some(told) = rest.number() else { return };
            (last, len, cookie) = (flags >> 16 & 1 == 1, told as usize, known);
        }
        if rest.take(len).is_none() {
            return;
        }
        if last {
            open.remove(&cookie);
        }
    }
}

/// What of the answers was not looked at.
struct Rest<'a>(&'a [u8]);

impl<'a> Rest<'a> {
    fn take(&mut self, len: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(taken)
    }

    fn number(&mut self) -> Option<u32> {
        let bytes = self.take(4)?;
        Some(u32::from_be_bytes(bytes.try_into().expect("four bytes")))
    }

    /// The cookie of a request that was made; `None` also for those that bytes of the
    /// input have made by chance.
    fn cookie(&mut self, open: &HashMap<u64, usize>) -> Option<u64> {
        let bytes = self.take(8)?;
        let cookie = u64::from_be_bytes(bytes.try_into().expect("eight bytes"));
        let ours = cookie >> 16 == 0xc00c;
        assert!(
            !ours || open.contains_key(&cookie),
            "answered twice: {cookie:#x}"
        );
        ours.then_some(cookie)
    }
}
