//! The NBD client against a server that dies and comes back without what it had not made durable.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Duration;

use vellum_io::lane::block_on;
use vellum_io::{Buffer, Buffers, Result};
use vellum_nbd::client::{Address, ClientOptions, NbdStorage};
use vellum_nbd::proto;
use vellum_storage::{Storage, WriteFlags};

const SIZE_BYTES: usize = 1 << 16;

/// What all connections of a server share.
struct Export {
    durable: Vec<u8>,
    cache: Vec<u8>,
    /// Fails so many flushes.
    failing_flushes: u32,
    connections: Vec<UnixStream>,
    /// Takes leave of whoever asks something.
    takes_leave: bool,
    /// Whoever connects next ends the listener.
    ending: bool,
}

/// A server with a volatile cache.
struct Server {
    socket: PathBuf,
    export: Arc<Mutex<Export>>,
    listening: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

fn lock(export: &Mutex<Export>) -> MutexGuard<'_, Export> {
    export.lock().expect("no connection panics")
}

impl Server {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let export = Export {
            durable: vec![0; SIZE_BYTES],
            cache: vec![0; SIZE_BYTES],
            failing_flushes: 0,
            connections: Vec::new(),
            takes_leave: false,
            ending: false,
        };
        let mut server = Server {
            socket: folder.path().join("s"),
            export: Arc::new(Mutex::new(export)),
            listening: None,
            _folder: folder,
        };
        server.listen();
        server
    }

    fn listen(&mut self) {
        let listener = UnixListener::bind(&self.socket).expect("a free name");
        let export = self.export.clone();
        self.listening = Some(std::thread::spawn(move || {
            while let Ok((stream, _)) = listener.accept() {
                let mut all = lock(&export);
                if all.ending {
                    return;
                }
                all.connections
                    .push(stream.try_clone().expect("a descriptor"));
                drop(all);
                let export = export.clone();
                std::thread::spawn(move || serve(stream, &export));
            }
        }));
    }

    /// Ends one connection; the server goes on.
    fn cut(&self, number: usize) {
        let connection = lock(&self.export).connections.remove(number);
        drop(connection.shutdown(std::net::Shutdown::Both));
    }

    /// Ends the server, with what it has not made durable, and starts it anew.
    fn restart(&mut self) {
        lock(&self.export).ending = true;
        UnixStream::connect(&self.socket).expect("it listens");
        let listening = self.listening.take().expect("it was started");
        listening.join().expect("it ends when it is told");
        let mut export = lock(&self.export);
        for connection in std::mem::take(&mut export.connections) {
            drop(connection.shutdown(std::net::Shutdown::Both));
        }
        export.cache = export.durable.clone();
        export.ending = false;
        drop(export);
        std::fs::remove_file(&self.socket).expect("its name");
        self.listen();
    }

    fn connections(&self) -> usize {
        lock(&self.export).connections.len()
    }

    fn durable(&self, at: usize) -> u8 {
        lock(&self.export).durable[at]
    }
}

/// Greets as a server of the old kind, with simple replies.
fn greet(stream: &mut UnixStream) -> std::io::Result<()> {
    let flags = proto::FLAG_HAS_FLAGS
        | proto::FLAG_SEND_FLUSH
        | proto::FLAG_SEND_FUA
        | proto::FLAG_CAN_MULTI_CONN;
    let mut bytes = proto::INIT_MAGIC.to_be_bytes().to_vec();
    bytes.extend(proto::OLDSTYLE_MAGIC.to_be_bytes());
    bytes.extend((SIZE_BYTES as u64).to_be_bytes());
    bytes.extend(u32::from(flags).to_be_bytes());
    bytes.extend([0; 124]);
    stream.write_all(&bytes)
}

/// Answers until the connection ends.
fn serve(mut stream: UnixStream, export: &Mutex<Export>) {
    let mut head = [0; 28];
    if greet(&mut stream).is_err() {
        return;
    }
    while stream.read_exact(&mut head).is_ok() {
        if lock(export).takes_leave {
            drop(stream.shutdown(std::net::Shutdown::Both));
            return;
        }
        let word = |at: usize| u16::from_be_bytes([head[at], head[at + 1]]);
        let (flags, command) = (word(4), word(6));
        let from = u64::from_be_bytes(head[16..24].try_into().expect("eight")) as usize;
        let len = u32::from_be_bytes(head[24..].try_into().expect("four")) as usize;
        let mut data = Vec::new();
        let mut error = 0;
        match command {
            proto::CMD_WRITE => {
                let mut bytes = vec![0; len];
                if stream.read_exact(&mut bytes).is_err() {
                    return;
                }
                let mut export = lock(export);
                export.cache[from..from + len].copy_from_slice(&bytes);
                if flags & proto::CMD_FLAG_FUA != 0 {
                    export.durable[from..from + len].copy_from_slice(&bytes);
                }
            }
            proto::CMD_READ => data = lock(export).cache[from..from + len].to_vec(),
            proto::CMD_FLUSH => {
                let mut export = lock(export);
                if export.failing_flushes > 0 {
                    export.failing_flushes -= 1;
                    error = 28;
                } else {
                    export.durable = export.cache.clone();
                }
            }
            _ => return,
        }
        let mut reply = proto::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
        reply.extend(u32::to_be_bytes(error));
        reply.extend(&head[8..16]);
        reply.extend(data);
        if stream.write_all(&reply).is_err() {
            return;
        }
    }
}

async fn open(socket: &Path) -> Arc<NbdStorage> {
    open_with_delay(socket, Duration::ZERO).await
}

async fn open_with_delay(socket: &Path, reconnect_delay: Duration) -> Arc<NbdStorage> {
    let address = Address::Unix(socket.display().to_string());
    let mut options = ClientOptions::new("nbd", address);
    options.writable = true;
    options.max_connections = 16;
    options.reconnect_delay = reconnect_delay;
    NbdStorage::open(options).await.expect("a server")
}

fn write(disk: &NbdStorage, byte: u8, fua: bool) -> Result<()> {
    let buffers = Buffers::from_iter([Buffer::copy_of(&[byte; 512])]);
    block_on(async { disk.write(0, buffers, WriteFlags { fua }).await }).map(drop)
}

fn read(disk: &NbdStorage) -> Result<u8> {
    let buffers = Buffers::from_iter([Buffer::for_read(512)]);
    block_on(async { disk.read(0, buffers).await }).map(|buffers| buffers[0][0])
}

fn flush(disk: &NbdStorage) -> Result<()> {
    block_on(async { disk.flush().await })
}

/// Another lane, which stays for as many calls as it is told to make.
struct Lane {
    calls: std::sync::mpsc::Sender<Box<dyn FnOnce() + Send>>,
}

impl Lane {
    fn new() -> Self {
        let (calls, called) = std::sync::mpsc::channel::<Box<dyn FnOnce() + Send>>();
        std::thread::spawn(move || called.into_iter().for_each(|call| call()));
        Lane { calls }
    }

    fn run<T: Send + 'static>(&self, call: impl FnOnce() -> T + Send + 'static) -> T {
        let (give, given) = std::sync::mpsc::channel();
        let call = Box::new(move || drop(give.send(call())));
        self.calls.send(call).expect("it is there");
        let limit = Duration::from_secs(30);
        given
            .recv_timeout(limit)
            .expect("it does not wait for ever")
    }

    /// Lanes, each of which has a connection of its own after it has read once.
    fn with_connections(server: &Server, disk: &Arc<NbdStorage>, count: usize) -> Vec<Lane> {
        let mut lanes = Vec::new();
        while lanes.len() < count {
            let (lane, before) = (Lane::new(), server.connections());
            let shared = disk.clone();
            lane.run(move || read(&shared)).expect("a server");
            // Tests that run beside this one number their lanes too.
            if server.connections() > before {
                lanes.push(lane);
            }
        }
        lanes
    }
}

#[test]
fn a_flush_on_a_fresh_connection_does_not_hide_what_another_one_lost() {
    let mut server = Server::start();
    let disk = block_on(open(&server.socket));
    let lanes = Lane::with_connections(&server, &disk, 1);
    let shared = disk.clone();
    lanes[0]
        .run(move || write(&shared, 7, false))
        .expect("a server");
    server.restart();
    // Some lanes are on connections that nobody used yet: whatever they find, none may say
    // that the write is durable, now or later.
    for _ in 0..17 {
        let shared = disk.clone();
        let flushed = Lane::new().run(move || flush(&shared));
        assert_eq!(flushed.expect_err("it is lost").errno(), libc::EIO);
    }
    assert_eq!(server.durable(0), 0);
    // The export opened anew is as good as ever.
    let disk = block_on(open(&server.socket));
    write(&disk, 8, false).expect("a server");
    flush(&disk).expect("nothing is lost");
    assert_eq!(server.durable(0), 8);
}

#[test]
fn a_server_that_comes_back_without_losing_anything_makes_no_flush_fail() {
    let mut server = Server::start();
    let disk = block_on(open(&server.socket));
    let lanes = Lane::with_connections(&server, &disk, 2);
    let shared = disk.clone();
    lanes[0]
        .run(move || write(&shared, 1, false))
        .expect("a server");
    let shared = disk.clone();
    lanes[1]
        .run(move || flush(&shared))
        .expect("one covers all");
    assert_eq!(server.durable(0), 1);
    // Durable at once, so that no flush is needed.
    let shared = disk.clone();
    lanes[1]
        .run(move || write(&shared, 2, true))
        .expect("a server");
    server.restart();
    for lane in &lanes {
        let shared = disk.clone();
        // It finds its connection gone.
        lane.run(move || flush(&shared).expect("nothing is lost"));
    }
    assert_eq!(server.durable(0), 2);
}

#[test]
fn a_connection_that_is_lost_alone_makes_a_flush_fail_only_if_no_other_covers_it() {
    let server = Server::start();
    let disk = block_on(open(&server.socket));
    let lanes = Lane::with_connections(&server, &disk, 2);
    // The first connection was made when the export was opened.
    let (first, second) = (&lanes[0], &lanes[1]);
    let shared = disk.clone();
    first
        .run(move || write(&shared, 1, false))
        .expect("a server");
    // One that is idle.
    server.cut(2);
    let shared = disk.clone();
    second.run(move || while read(&shared).is_err() {});
    let shared = disk.clone();
    first
        .run(move || flush(&shared))
        .expect("its writes are there");
    assert_eq!(server.durable(0), 1);
    // One with writes, beside one that was there before them.
    let shared = disk.clone();
    first
        .run(move || write(&shared, 2, false))
        .expect("a server");
    server.cut(1);
    let shared = disk.clone();
    second
        .run(move || flush(&shared))
        .expect("the server has them");
    assert_eq!(server.durable(0), 2);
    let shared = disk.clone();
    first.run(move || while read(&shared).is_err() {});
    let shared = disk.clone();
    first.run(move || flush(&shared)).expect("they are durable");
}

#[test]
fn after_a_flush_that_the_server_failed_none_succeeds() {
    let server = Server::start();
    let disk = block_on(open(&server.socket));
    write(&disk, 1, false).expect("a server");
    lock(&server.export).failing_flushes = 1;
    assert_eq!(flush(&disk).expect_err("it fails").errno(), libc::ENOSPC);
    assert_eq!(flush(&disk).expect_err("it failed").errno(), libc::ENOSPC);
    let disk = block_on(open(&server.socket));
    flush(&disk).expect("another opening");
}

#[test]
fn a_server_that_takes_leave_of_whoever_asks_is_given_up_in_the_time_that_one_has_that_is_away() {
    let server = Server::start();
    let disk = block_on(open_with_delay(&server.socket, Duration::from_millis(300)));
    let lane = Lane::new();
    let shared = disk.clone();
    lane.run(move || write(&shared, 7, false))
        .expect("a server");
    lock(&server.export).takes_leave = true;
    // The lane waits for half a minute at most.
    let shared = disk.clone();
    lane.run(move || read(&shared))
        .expect_err("it is never read");
    let shared = disk.clone();
    lane.run(move || flush(&shared))
        .expect_err("it is never durable");
    let shared = disk.clone();
    lane.run(move || block_on(async { shared.close().await }))
        .expect("it was told already");
}
