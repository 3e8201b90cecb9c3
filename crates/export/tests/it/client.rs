//! The client of this workspace against its server, and against servers that lie.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::{SIZE_BYTES, Server, pattern};
use vellum::{Buffer, Error, ErrorKind, Storage};
use vellum_io::{Buffers, lane, spawn};
use vellum_nbd::client::{Address, ClientOptions, NbdStorage};
use vellum_nbd::proto;
use vellum_storage::{BlockStatus, FileOptions, FileStorage, MemStorage, WriteFlags, ZeroFlags};

fn options(socket: &Path) -> ClientOptions {
    let address = Address::Unix(socket.display().to_string());
    let mut options = ClientOptions::new("nbd", address);
    options.writable = true;
    options
}

fn one(bytes: &[u8]) -> Buffers {
    Buffers::from_iter([Buffer::copy_of(bytes)])
}

async fn read(disk: &NbdStorage, at: u64, len: usize) -> Result<Vec<u8>, Error> {
    let buffers = disk.read(at, Buffers::from_iter([Buffer::for_read(len)]));
    Ok(buffers.await?[0].to_vec())
}

#[test]
fn everything_that_a_storage_does_reaches_the_server() {
    let server = Server::start();
    let mut expected = pattern();
    lane::block_on(async {
        let disk = NbdStorage::open(options(&server.socket)).await.unwrap();
        assert_eq!(disk.len_bytes().unwrap(), SIZE_BYTES as u64);
        assert!(read(&disk, 5000, 70_000).await.unwrap() == expected[5000..75_000]);
        // Several buffers, none of them aligned.
        let pieces: Buffers = [1000, 1, 9000]
            .map(|len: usize| Buffer::copy_of(&vec![len as u8; len]))
            .into_iter()
            .collect();
        let written = disk
            .write(333, pieces, WriteFlags { fua: true })
            .await
            .unwrap();
        let lens: Vec<_> = written.iter().map(|piece| piece.len()).collect();
        assert_eq!(lens, [1000, 1, 9000]);
        for (len, at) in [(1000, 333), (1, 1333), (9000, 1334)] {
            expected[at..at + len].fill(len as u8);
        }
        disk.write_zeroes(100_001, 50_000, ZeroFlags::default())
            .await
            .unwrap();
        expected[100_001..150_001].fill(0);
        disk.flush().await.unwrap();
        disk.discard(0, 10).await.unwrap();
        expected[..10].fill(0);
        assert!(read(&disk, 0, SIZE_BYTES).await.unwrap() == expected);
        // Beyond the end are zeroes, and nothing to write.
        let tail = read(&disk, SIZE_BYTES as u64 - 4, 8).await.unwrap();
        assert_eq!(tail[..4], expected[SIZE_BYTES - 4..]);
        assert_eq!(tail[4..], [0; 4]);
        let beyond = disk.write(SIZE_BYTES as u64 - 1, one(&[1; 2]), WriteFlags::default());
        assert_eq!(beyond.await.unwrap_err().kind(), ErrorKind::OutOfRange);
        let grown = disk.truncate(SIZE_BYTES as u64 + 1).await.unwrap_err();
        assert_eq!(grown.message(), "Cannot grow NBD nodes");
        disk.close().await.unwrap();
    });
    assert!(server.stop().snapshot() == expected);
}

#[test]
fn long_requests_go_in_pieces_that_the_server_takes() {
    let size = 80 << 20;
    let storage = Arc::new(MemStorage::with_bytes(vec![7; size]));
    let raw = vellum::Raw::open(storage.clone(), Default::default()).unwrap();
    let server = Server::serving(storage, raw, |_| {}, |_| {});
    lane::block_on(async {
        let disk = NbdStorage::open(options(&server.socket)).await.unwrap();
        disk.write_zeroes(1 << 20, 70 << 20, ZeroFlags::default())
            .await
            .unwrap();
        let all = read(&disk, 0, size).await.unwrap();
        assert_eq!(all.iter().filter(|byte| **byte == 7).count(), 10 << 20);
        disk.close().await.unwrap();
    });
}

#[test]
fn holes_are_seen() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    let mut bytes = vec![5; 1 << 20];
    bytes[64 << 10..512 << 10].fill(0);
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    file.write_all_at(&bytes[..64 << 10], 0).unwrap();
    file.write_all_at(&bytes[512 << 10..], 512 << 10).unwrap();
    let file = FileStorage::open(&path, &FileOptions::default()).unwrap();
    let raw = vellum::Raw::open(file, Default::default()).unwrap();
    let server = Server::serving(Arc::new(MemStorage::new()), raw, |_| {}, |_| {});
    lane::block_on(async {
        let disk = NbdStorage::open(options(&server.socket)).await.unwrap();
        let mut found = Vec::new();
        let mut at = 0;
        while at < 1 << 20 {
            let extent = disk.block_status(at, (1 << 20) - at).await.unwrap();
            found.push((extent.status, extent.len_bytes >> 10));
            at += extent.len_bytes;
        }
        use BlockStatus::{Data, Hole};
        assert_eq!(found, [(Data, 64), (Hole, 448), (Data, 512)]);
        assert!(read(&disk, 0, 1 << 20).await.unwrap() == bytes);
        disk.close().await.unwrap();
    });
}

/// Every word names its place, so that what went astray shows.
fn stamped(at: u64, len: usize, round: u64) -> Vec<u8> {
    (at / 8..at / 8 + len as u64 / 8)
        .flat_map(|word| (word << 8 | round).to_be_bytes())
        .collect()
}

async fn work(disk: Arc<NbdStorage>, lane: u64) {
    const PART: u64 = 512 << 10;
    let tasks = (0..16_u64).map(|task| {
        let disk = disk.clone();
        spawn(async move {
            let at = lane * PART + task * (PART / 16);
            for round in 1..=10 {
                let len = 4096 * (1 + (task as usize + round as usize) % 7);
                let bytes = stamped(at, len, round);
                disk.write(at, one(&bytes), WriteFlags::default())
                    .await
                    .unwrap();
                assert!(read(&disk, at, len).await.unwrap() == bytes);
                if round == 5 {
                    disk.flush().await.unwrap();
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await;
    }
}

#[test]
fn lanes_share_one_connection_or_have_their_own() {
    for multi_conn in [false, true] {
        let server = Server::with(move |export| export.multi_conn = multi_conn, |_| {});
        let disk = lane::block_on(NbdStorage::open(options(&server.socket))).unwrap();
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let disk = disk.clone();
                std::thread::spawn(move || {
                    lane::block_on(work(disk, number));
                    lane::finish();
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        lane::block_on(async { disk.close().await }).unwrap();
    }
}

#[test]
fn a_server_without_room_for_a_second_connection_serves_with_the_first() {
    let server = Server::with(
        |export| export.multi_conn = true,
        |options| options.max_connections = 1,
    );
    let disk = lane::block_on(NbdStorage::open(options(&server.socket))).unwrap();
    let threads: Vec<_> = (0..3)
        .map(|number| {
            let disk = disk.clone();
            std::thread::spawn(move || lane::block_on(work(disk, number)))
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    lane::block_on(async { disk.close().await }).unwrap();
}

#[test]
fn read_only_exports_refuse_changes() {
    let server = Server::with(|export| export.read_only = true, |_| {});
    lane::block_on(async {
        let disk = NbdStorage::open(options(&server.socket)).await.unwrap();
        assert!(disk.capabilities().read_only);
        let refused = disk.write(0, one(&[1; 512]), WriteFlags::default()).await;
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::ReadOnly);
        disk.close().await.unwrap();
    });
}

/// A server that answers each connection as its script says.
struct Scripted {
    socket: PathBuf,
    thread: Option<JoinHandle<()>>,
    _folder: tempfile::TempDir,
}

impl Scripted {
    /// Plays a script a connection, then goes away.
    fn play(scripts: Vec<fn(&mut UnixStream)>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("s");
        let listener = UnixListener::bind(&socket).unwrap();
        let path = socket.clone();
        let thread = std::thread::spawn(move || {
            for script in scripts {
                let (mut stream, _) = listener.accept().unwrap();
                let limit = Some(Duration::from_secs(20));
                stream.set_read_timeout(limit).unwrap();
                script(&mut stream);
            }
            std::fs::remove_file(path).unwrap();
        });
        Scripted {
            socket,
            thread: Some(thread),
            _folder: folder,
        }
    }

    fn end(mut self) {
        self.thread.take().unwrap().join().unwrap();
    }
}

fn take<const N: usize>(stream: &mut UnixStream) -> [u8; N] {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).unwrap();
    bytes
}

/// Greets as a server of the old kind: one export of a mebibyte, simple replies.
fn greet(stream: &mut UnixStream) {
    let mut bytes = proto::INIT_MAGIC.to_be_bytes().to_vec();
    bytes.extend(proto::OLDSTYLE_MAGIC.to_be_bytes());
    bytes.extend((1_u64 << 20).to_be_bytes());
    bytes.extend(u32::from(proto::FLAG_HAS_FLAGS | proto::FLAG_SEND_FLUSH).to_be_bytes());
    bytes.extend([0; 124]);
    stream.write_all(&bytes).unwrap();
}

/// Takes a request; returns its command and cookie.
fn request(stream: &mut UnixStream) -> (u16, [u8; 8]) {
    let bytes = take::<28>(stream);
    let command = u16::from_be_bytes([bytes[6], bytes[7]]);
    if command == proto::CMD_WRITE {
        let len = u32::from_be_bytes(bytes[24..].try_into().unwrap());
        stream.read_exact(&mut vec![0; len as usize]).unwrap();
    }
    (command, bytes[8..16].try_into().unwrap())
}

fn reply(stream: &mut UnixStream, cookie: [u8; 8], data: &[u8]) {
    let mut bytes = proto::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
    bytes.extend([0; 4]);
    bytes.extend(cookie);
    bytes.extend(data);
    stream.write_all(&bytes).unwrap();
}

/// Answers everything until the client leaves.
fn serve(stream: &mut UnixStream) {
    greet(stream);
    loop {
        match request(stream) {
            (proto::CMD_DISC, _) => return,
            (proto::CMD_READ, cookie) => reply(stream, cookie, &[9; 512]),
            (_, cookie) => reply(stream, cookie, &[]),
        }
    }
}

/// Hears one request and hangs up.
fn hang_up(stream: &mut UnixStream) {
    greet(stream);
    request(stream);
}

#[test]
fn requests_wait_for_the_server_to_come_back() {
    let server = Scripted::play(vec![hang_up, serve]);
    lane::block_on(async {
        let mut options = options(&server.socket);
        options.reconnect_delay = Duration::from_secs(20);
        let disk = NbdStorage::open(options).await.unwrap();
        let write = disk.write(0, one(&[1; 512]), WriteFlags::default());
        let read = read(&disk, 512, 512);
        write.await.unwrap();
        assert_eq!(read.await.unwrap(), [9; 512]);
        disk.close().await.unwrap();
    });
    server.end();
}

#[test]
fn without_a_delay_requests_fail_and_later_ones_connect_again() {
    let server = Scripted::play(vec![hang_up, serve]);
    lane::block_on(async {
        let disk = NbdStorage::open(options(&server.socket)).await.unwrap();
        let lost = read(&disk, 0, 512).await.unwrap_err();
        assert_eq!(lost.errno(), 5);
        assert_eq!(read(&disk, 0, 512).await.unwrap(), [9; 512]);
        disk.close().await.unwrap();
    });
    server.end();
}

#[test]
fn the_patience_of_requests_ends() {
    let server = Scripted::play(vec![hang_up]);
    lane::block_on(async {
        let mut options = options(&server.socket);
        options.reconnect_delay = Duration::from_millis(600);
        let disk = NbdStorage::open(options).await.unwrap();
        let started = Instant::now();
        assert_eq!(read(&disk, 0, 512).await.unwrap_err().errno(), 5);
        let waited = started.elapsed();
        assert!(waited > Duration::from_millis(200), "{waited:?}");
        // From now on they fail at once.
        let started = Instant::now();
        assert!(read(&disk, 0, 512).await.is_err());
        assert!(started.elapsed() < Duration::from_millis(200));
        disk.close().await.unwrap();
    });
    server.end();
}

#[test]
fn writes_that_may_be_lost_fail_every_later_flush() {
    let server = Scripted::play(vec![
        |stream| {
            greet(stream);
            let (_, cookie) = request(stream);
            reply(stream, cookie, &[]);
        },
        serve,
    ]);
    lane::block_on(async {
        let disk = NbdStorage::open(options(&server.socket)).await.unwrap();
        disk.write(0, one(&[1; 512]), WriteFlags::default())
            .await
            .unwrap();
        let deadline = Instant::now() + Duration::from_secs(10);
        // The first request finds the connection gone, the second makes another one.
        while read(&disk, 0, 512).await.is_err() {
            assert!(Instant::now() < deadline);
        }
        let lost = disk.flush().await.unwrap_err();
        assert_eq!(lost.errno(), 5);
        // No later one may say that they are durable.
        assert_eq!(disk.flush().await.unwrap_err().errno(), 5);
        disk.close().await.unwrap();
    });
    server.end();
}

#[test]
fn opening_waits_for_a_server_that_is_not_there_yet() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let path = socket.clone();
    let late = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        let listener = UnixListener::bind(path).unwrap();
        serve(&mut listener.accept().unwrap().0);
    });
    lane::block_on(async {
        let missing = NbdStorage::open(options(&socket)).await.unwrap_err();
        let name = socket.display();
        assert_eq!(
            missing.message(),
            format!("Failed to connect to '{name}': No such file or directory")
        );
        let mut options = options(&socket);
        options.open_timeout = Duration::from_secs(20);
        let disk = NbdStorage::open(options).await.unwrap();
        disk.close().await.unwrap();
    });
    late.join().unwrap();
}

#[test]
fn lies_end_the_connection_and_nothing_else() {
    let lies: [fn(&mut UnixStream); 6] = [
        // Another magic number.
        |stream| {
            greet(stream);
            request(stream);
            stream.write_all(&[0x55; 600]).unwrap();
        },
        // An answer to nobody.
        |stream| {
            greet(stream);
            request(stream);
            reply(stream, [0xff; 8], &[]);
        },
        // The same answer twice.
        |stream| {
            greet(stream);
            let (_, cookie) = request(stream);
            reply(stream, cookie, &[1; 512]);
            reply(stream, cookie, &[1; 512]);
            request(stream);
        },
        // Half of the data.
        |stream| {
            greet(stream);
            let (_, cookie) = request(stream);
            reply(stream, cookie, &[1; 100]);
        },
        // Chunks that were not agreed on.
        |stream| {
            greet(stream);
            let (_, cookie) = request(stream);
            let mut bytes = proto::STRUCTURED_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend([0, 1, 0, 0]);
            bytes.extend(cookie);
            bytes.extend([0; 4]);
            stream.write_all(&bytes).unwrap();
        },
        // Silence, then the end.
        |stream| {
            greet(stream);
            request(stream);
        },
    ];
    for lie in lies {
        let server = Scripted::play(vec![lie]);
        lane::block_on(async {
            let disk = NbdStorage::open(options(&server.socket)).await.unwrap();
            let first = read(&disk, 0, 512).await;
            let second = read(&disk, 0, 512).await;
            assert!(first.is_err() || second.is_err());
            disk.close().await.unwrap();
        });
        server.end();
    }
}

#[test]
fn a_handshake_that_never_ends_is_bounded() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut bytes = proto::INIT_MAGIC.to_be_bytes().to_vec();
        bytes.extend(proto::OPTION_MAGIC.to_be_bytes());
        bytes.extend(proto::FLAG_FIXED_NEWSTYLE.to_be_bytes());
        stream.write_all(&bytes).unwrap();
        take::<4>(&mut stream);
        take::<16>(&mut stream);
        let mut told = proto::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        told.extend(proto::OPT_EXTENDED_HEADERS.to_be_bytes());
        told.extend(proto::REP_INFO.to_be_bytes());
        told.extend(30_000_u32.to_be_bytes());
        told.extend([1; 30_000]);
        // Until the client has had enough.
        while stream.write_all(&told).is_ok() {}
    });
    let error = lane::block_on(NbdStorage::open(options(&socket))).unwrap_err();
    assert_eq!(error.message(), "too many replies to one option");
    server.join().unwrap();
}
