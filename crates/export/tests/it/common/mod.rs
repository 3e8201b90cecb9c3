//! A raw socket client, and a server over memory to throw bytes at.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use vellum::raw::RawOptions;
use vellum::{BlockDevice, Raw};
use vellum_export::nbd::{Export, Exports, Listener, ServerOptions, Stop, serve};
use vellum_io::lane;
use vellum_nbd::client::list::{Listing, list};
use vellum_nbd::{Channel, proto};
use vellum_storage::MemStorage;

pub const SIZE_BYTES: usize = 4 << 20;

/// A server on a thread of its own.
pub struct Server {
    pub socket: PathBuf,
    pub storage: Arc<MemStorage>,
    pub exports: Exports,
    stop: Stop,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Server {
    /// Serves memory with a pattern, for up to 16 clients.
    pub fn start() -> Self {
        Self::with(|_| {}, |_| {})
    }

    pub fn with(
        change_export: impl FnOnce(&mut Export) + Send + 'static,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let storage = Arc::new(MemStorage::with_bytes(pattern()));
        let raw = Raw::open(storage.clone(), RawOptions::default()).expect("open memory");
        Self::serving(storage, raw, change_export, change)
    }

    /// What the server says that it offers.
    pub fn list(&self) -> Listing {
        let stream = OwnedFd::from(self.connect().stream);
        let channel = Channel::from(lane::net::Stream::from_fd(stream));
        lane::block_on(list(channel, None)).expect("list")
    }

    /// Serves any device.
    pub fn serving(
        storage: Arc<MemStorage>,
        device: Arc<dyn BlockDevice>,
        change_export: impl FnOnce(&mut Export) + Send + 'static,
        change: impl FnOnce(&mut ServerOptions),
    ) -> Self {
        let folder = tempfile::tempdir().expect("make a folder");
        let socket = folder.path().join("nbd");
        let stop = Stop::new();
        let mut options = ServerOptions {
            max_connections: 16,
            persistent: true,
            max_lanes: 2,
            ..ServerOptions::default()
        };
        change(&mut options);
        let listener = Listener::bind_unix(&socket).expect("listen");
        let end = stop.clone();
        let exports = Exports::default();
        let offered = exports.clone();
        let thread = std::thread::spawn(move || {
            let mut export = Export::new("", device);
            change_export(&mut export);
            offered.add(export);
            lane::block_on(serve(vec![listener], offered, options, &end));
        });
        Server {
            socket,
            storage,
            exports,
            stop,
            thread: Some(thread),
            _folder: folder,
        }
    }

    pub fn connect(&self) -> Client {
        Client::connect(&self.socket)
    }

    /// Asks the server to stop and waits until it has.
    pub fn stop(mut self) -> Arc<MemStorage> {
        self.stop.request();
        self.join();
        self.storage.clone()
    }

    /// Asks the server to stop.
    pub fn request_stop(&self) {
        self.stop.request();
    }

    /// Waits until the server has stopped by itself.
    pub fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server must not panic");
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.request();
        if !std::thread::panicking() {
            self.join();
        }
    }
}

/// Every sector differs from its neighbours.
pub fn pattern() -> Vec<u8> {
    (0..SIZE_BYTES)
        .map(|at| (at / 512) as u8 ^ at as u8)
        .collect()
}

/// A client that says exactly what it is told to.
pub struct Client {
    pub stream: UnixStream,
}

/// One chunk of a structured reply.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chunk {
    pub flags: u16,
    pub kind: u16,
    pub cookie: u64,
    pub payload: Vec<u8>,
}

impl Chunk {
    pub fn is_last(&self) -> bool {
        self.flags & proto::REPLY_FLAG_DONE != 0
    }

    /// The error number of an error chunk.
    pub fn error(&self) -> u32 {
        assert!(self.kind & 1 << 15 != 0, "{self:?} is no error");
        u32::from_be_bytes(self.payload[..4].try_into().expect("four bytes"))
    }
}

impl Client {
    pub fn connect(path: &Path) -> Self {
        let stream = UnixStream::connect(path).expect("connect");
        // A test that waits for bytes that never come fails rather than hangs.
        stream
            .set_read_timeout(Some(Duration::from_secs(20)))
            .expect("set a timeout");
        Client { stream }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("send");
    }

    pub fn receive(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.stream.read_exact(&mut bytes).expect("receive");
        bytes
    }

    /// Whether the server has closed the connection.
    pub fn is_closed(&mut self) -> bool {
        match self.stream.read(&mut [0]) {
            Ok(count) => count == 0,
            Err(error) => error.kind() == io::ErrorKind::ConnectionReset,
        }
    }

    pub fn greet(&mut self) {
        assert_eq!(self.receive(18)[..8], proto::INIT_MAGIC.to_be_bytes());
        self.send(&(proto::FLAG_C_FIXED_NEWSTYLE | proto::FLAG_C_NO_ZEROES).to_be_bytes());
    }

    pub fn option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = proto::OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.send(&bytes);
    }

    pub fn option_reply(&mut self) -> (u32, Vec<u8>) {
        let header = self.receive(20);
        assert_eq!(header[..8], proto::OPTION_REPLY_MAGIC.to_be_bytes());
        let field = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().expect("four"));
        let (kind, len) = (field(12), field(16));
        (kind, self.receive(len as usize))
    }

    /// Sends an option and returns the last reply to it.
    pub fn ask(&mut self, option: u32, data: &[u8]) -> (u32, Vec<u8>) {
        self.option(option, data);
        loop {
            let reply = self.option_reply();
            if reply.0 == proto::REP_ACK || reply.0 & proto::REP_FLAG_ERROR != 0 {
                return reply;
            }
        }
    }

    fn meta_data(contexts: &[&str]) -> Vec<u8> {
        let mut data = 0u32.to_be_bytes().to_vec();
        data.extend((contexts.len() as u32).to_be_bytes());
        for context in contexts {
            data.extend((context.len() as u32).to_be_bytes());
            data.extend(context.as_bytes());
        }
        data
    }

    pub fn set_contexts(&mut self, contexts: &[&str]) {
        let data = Self::meta_data(contexts);
        assert_eq!(
            self.ask(proto::OPT_SET_META_CONTEXT, &data).0,
            proto::REP_ACK
        );
    }

    pub fn go(&mut self) {
        let (kind, _) = self.ask(proto::OPT_GO, &[0; 6]);
        assert_eq!(kind, proto::REP_ACK);
    }

    /// Negotiates simple replies.
    pub fn simple(mut self) -> Self {
        self.greet();
        self.go();
        self
    }

    /// Negotiates structured replies and `base:allocation`.
    pub fn structured(mut self) -> Self {
        self.greet();
        assert_eq!(self.ask(proto::OPT_STRUCTURED_REPLY, &[]).0, proto::REP_ACK);
        self.set_contexts(&[proto::CONTEXT_ALLOCATION]);
        self.go();
        self
    }

    pub fn request(&mut self, flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        self.send(&compact(flags, command, cookie, offset, len));
    }

    /// The error and cookie of a simple reply.
    pub fn simple_reply(&mut self) -> (u32, u64) {
        let reply = self.receive(16);
        assert_eq!(reply[..4], proto::SIMPLE_REPLY_MAGIC.to_be_bytes());
        (
            u32::from_be_bytes(reply[4..8].try_into().expect("four bytes")),
            u64::from_be_bytes(reply[8..].try_into().expect("eight bytes")),
        )
    }

    pub fn chunk(&mut self) -> Chunk {
        let header = self.receive(20);
        assert_eq!(header[..4], proto::STRUCTURED_REPLY_MAGIC.to_be_bytes());
        let short = |at: usize| u16::from_be_bytes([header[at], header[at + 1]]);
        let len = u32::from_be_bytes(header[16..].try_into().expect("four bytes"));
        Chunk {
            flags: short(4),
            kind: short(6),
            cookie: u64::from_be_bytes(header[8..16].try_into().expect("eight bytes")),
            payload: self.receive(len as usize),
        }
    }

    /// Proves that the connection still works.
    pub fn assert_usable(&mut self) {
        self.request(0, proto::CMD_READ, 77, 4096, 512);
        assert_eq!(self.simple_reply(), (0, 77));
        assert_eq!(self.receive(512), pattern()[4096..4608]);
    }
}

/// The bytes of a compact request.
pub fn compact(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = proto::REQUEST_MAGIC.to_be_bytes().to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(command.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}
