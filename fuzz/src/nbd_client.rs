//! A server that answers an NBD client's options and requests in any way, on one connection
//! after the other.
//!
//! Each byte of the input says how the next option or request is answered; behind the end of
//! the input everything is answered well, so that what has been started ends.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use vellum_io::{Buffer, Buffers, lane};
use vellum_nbd::client::{Address, ClientOptions, NbdStorage};
use vellum_nbd::proto;
use vellum_storage::{Storage, WriteFlags, ZeroFlags};

const SIZE_BYTES: u64 = 64 << 10;
/// What a client may take, on a machine that is busy with other things.
const MOST_TIME: Duration = Duration::from_secs(40);
/// How long a server waits for the client's next word: where a length was a lie both wait,
/// and the protocol knows no limit. Whoever is only slow is cut off, which is a lie too.
const SILENCE: Duration = Duration::from_millis(20);
/// Connections after which the server is gone.
const MOST_CONNECTIONS: usize = 20;

/// Invariants:
/// - no answers make the client panic or hang;
/// - what a read gives is as long as what was asked for, whatever connection it came on;
/// - block status lies within what was asked for;
/// - the client ends when it is closed.
pub fn check_nbd_client(data: &[u8]) {
    let begin = Instant::now();
    let path = socket();
    let listener = UnixListener::bind(&path).expect("a socket");
    let over = Arc::new(AtomicBool::new(false));
    let (done, script) = (over.clone(), Arc::new(Mutex::new(data.to_vec())));
    let server = std::thread::spawn(move || {
        let mut met = Vec::new();
        for stream in listener.incoming().take(MOST_CONNECTIONS) {
            if done.load(Ordering::SeqCst) {
                break;
            }
            let (stream, script) = (stream.expect("a client"), script.clone());
            met.push(std::thread::spawn(move || {
                // What a client does not like, it ends.
                let _ = Liar { stream, script }.serve();
            }));
        }
        drop(listener);
        met.into_iter()
            .for_each(|one| one.join().expect("no panic"));
    });
    lane::block_on(use_it(&path));
    over.store(true, Ordering::SeqCst);
    // The server may have gone by itself.
    drop(UnixStream::connect(&path));
    server.join().expect("no panic");
    // It is not there if somebody has cleaned up.
    let _ = std::fs::remove_file(&path);
    assert!(begin.elapsed() < MOST_TIME, "{:?}", begin.elapsed());
}

fn socket() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = format!("vellum-fuzz-{}-{number}", std::process::id());
    std::env::temp_dir().join(name)
}

async fn use_it(path: &std::path::Path) {
    let address = Address::Unix(path.display().to_string());
    let mut options = ClientOptions::new("it", address);
    options.writable = true;
    options.max_connections = 2;
    let Ok(storage) = NbdStorage::open(options).await else {
        return;
    };
    // The size is the server's word.
    let size = storage.session().size_bytes;
    for (offset, len) in [(0, 4096), (512, 512), (size.saturating_sub(1000), 1000)] {
        let len = len.min(size.saturating_sub(offset)) as usize;
        let buffers = || Buffers::from_iter([Buffer::zeroed(len)]);
        if let Ok(read) = storage.read(offset, buffers()).await {
            assert_eq!(read.iter().map(|one| one.len()).sum::<usize>(), len);
        }
        if len > 0
            && let Ok(extent) = storage.block_status(offset, len as u64).await
        {
            assert!(
                extent.len_bytes > 0 && extent.len_bytes <= len as u64,
                "{extent:?}"
            );
        }
        // Each is taken or refused.
        let _ = storage
            .write(offset, buffers(), WriteFlags::default())
            .await;
        let _ = storage.flush().await;
        let _ = storage
            .write_zeroes(offset, len as u64, ZeroFlags::default())
            .await;
        let _ = storage.discard(offset, len as u64).await;
    }
    let _ = storage.flush().await;
    let _ = storage.close().await;
}

/// One connection's server.
struct Liar {
    stream: UnixStream,
    script: Arc<Mutex<Vec<u8>>>,
}

impl Liar {
    /// The next byte of the script; `None` behind its end.
    fn next(&self) -> Option<u8> {
        let mut script = self.script.lock().expect("no panic");
        match script.is_empty() {
            true => None,
            false => Some(script.remove(0)),
        }
    }

    fn receive<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.stream.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn number(&mut self) -> io::Result<u32> {
        self.receive().map(u32::from_be_bytes)
    }

    fn skip(&mut self, len: u64) -> io::Result<()> {
        let taken = io::copy(&mut (&self.stream).take(len), &mut io::sink())?;
        match taken == len {
            true => Ok(()),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Sends as much of a message as the script wants.
    fn say(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self.next() {
            Some(255) => {
                let len = usize::from(self.next().unwrap_or(0)).min(bytes.len());
                self.stream.write_all(&bytes[..len])?;
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            Some(254) => {
                let mut wrong = bytes.to_vec();
                let at = usize::from(self.next().unwrap_or(0)) % wrong.len().max(1);
                if let Some(byte) = wrong.get_mut(at) {
                    *byte ^= self.next().unwrap_or(1);
                }
                self.stream.write_all(&wrong)
            }
            Some(253) => {
                self.stream.write_all(bytes)?;
                self.stream.write_all(bytes)
            }
            _ => self.stream.write_all(bytes),
        }
    }

    fn serve(&mut self) -> io::Result<()> {
        self.stream.set_read_timeout(Some(SILENCE))?;
        self.stream.set_write_timeout(Some(MOST_TIME))?;
        let mut greeting = proto::INIT_MAGIC.to_be_bytes().to_vec();
        greeting.extend(proto::OPTION_MAGIC.to_be_bytes());
        greeting.extend([0, 3]);
        self.say(&greeting)?;
        self.receive::<4>()?;
        let mut framing = 0;
        loop {
            self.receive::<8>()?;
            let option = self.number()?;
            let len = self.number()?;
            self.skip(u64::from(len))?;
            if self.answer_option(option, &mut framing)? {
                return self.transmit(framing);
            }
        }
    }

    fn reply(&mut self, option: u32, kind: u32, data: &[u8]) -> io::Result<()> {
        let mut bytes = proto::OPTION_REPLY_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.say(&bytes)
    }

    /// Returns whether transmission begins.
    fn answer_option(&mut self, option: u32, framing: &mut u8) -> io::Result<bool> {
        let how = self.next().unwrap_or(0);
        match (option, how % 8) {
            (_, 7) => self.reply(option, proto::REP_FLAG_ERROR | u32::from(how), b"no")?,
            (proto::OPT_EXTENDED_HEADERS, 0..=1) => {
                *framing = 2;
                self.reply(option, proto::REP_ACK, &[])?;
            }
            (proto::OPT_STRUCTURED_REPLY, 0..=3) => {
                *framing = 1;
                self.reply(option, proto::REP_ACK, &[])?;
            }
            (proto::OPT_SET_META_CONTEXT, 0..=3) => {
                let name = proto::CONTEXT_ALLOCATION.as_bytes();
                let data = [&[0, 0, 0, 1][..], name].concat();
                self.reply(option, proto::REP_META_CONTEXT, &data)?;
                self.reply(option, proto::REP_ACK, &[])?;
            }
            (proto::OPT_GO, 0..=4) => {
                let sizes = match self.next().unwrap_or(0) {
                    1 => [512, 4096, 32 << 20],
                    2 => [1, 1, 1],
                    3 => [3, 0, 0],
                    4 => [1 << 16, 1 << 16, 1 << 16],
                    _ => [1, 4096, 32 << 20_u32],
                };
                let sizes = sizes.map(u32::to_be_bytes).concat();
                let data = [&[0, 3][..], &sizes].concat();
                self.reply(option, proto::REP_INFO, &data)?;
                let size = match self.next().unwrap_or(0) {
                    1 => 0,
                    2 => 1,
                    3 => u64::MAX,
                    4 => i64::MAX as u64,
                    5 => 1000,
                    _ => SIZE_BYTES,
                };
                let flags = match self.next() {
                    Some(byte) => u16::from(byte) << 2 | 1,
                    None => 0x0565,
                };
                let mut data = vec![0, 0];
                data.extend(size.to_be_bytes());
                data.extend(flags.to_be_bytes());
                self.reply(option, proto::REP_INFO, &data)?;
                self.reply(option, proto::REP_ACK, &[])?;
                return Ok(true);
            }
            (proto::OPT_EXPORT_NAME, _) => {
                let mut data = SIZE_BYTES.to_be_bytes().to_vec();
                data.extend([1, 0x65]);
                self.say(&data)?;
                return Ok(true);
            }
            (proto::OPT_ABORT, _) => {
                self.reply(option, proto::REP_ACK, &[])?;
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            (_, 5) => self.reply(option, proto::REP_ACK, &[])?,
            _ => self.reply(option, proto::REP_ERR_UNSUP, &[])?,
        }
        Ok(false)
    }

    fn transmit(&mut self, framing: u8) -> io::Result<()> {
        loop {
            self.receive::<4>()?;
            let head: [u8; 4] = self.receive()?;
            let flags = u16::from_be_bytes([head[0], head[1]]);
            let command = u16::from_be_bytes([head[2], head[3]]);
            let cookie: [u8; 8] = self.receive()?;
            let offset: [u8; 8] = self.receive()?;
            let len = match framing {
                2 => u64::from_be_bytes(self.receive()?),
                _ => u64::from(self.number()?),
            };
            if command == proto::CMD_WRITE || flags & proto::CMD_FLAG_PAYLOAD_LEN != 0 {
                self.skip(len)?;
            }
            if command == proto::CMD_DISC {
                return Ok(());
            }
            self.answer_request(framing, command, cookie, offset, len)?;
        }
    }

    fn answer_request(
        &mut self,
        framing: u8,
        command: u16,
        cookie: [u8; 8],
        offset: [u8; 8],
        len: u64,
    ) -> io::Result<()> {
        let how = self.next().unwrap_or(0);
        let len = len.min(1 << 20) as u32;
        if framing == 0 || how % 16 == 1 {
            let error = if how % 16 == 2 { proto::EIO } else { 0 };
            let mut bytes = proto::SIMPLE_REPLY_MAGIC.to_be_bytes().to_vec();
            bytes.extend(error.to_be_bytes());
            bytes.extend(cookie);
            if command == proto::CMD_READ && error == 0 {
                bytes.resize(bytes.len() + len as usize, 0x5a);
            }
            return self.say(&bytes);
        }
        let reply = Reply {
            framing,
            cookie,
            offset,
        };
        for bytes in reply.chunks(command, how, len) {
            self.say(&bytes)?;
        }
        Ok(())
    }
}

/// A request that is answered in chunks.
struct Reply {
    framing: u8,
    cookie: [u8; 8],
    offset: [u8; 8],
}

impl Reply {
    fn chunk(&self, kind: u16, last: bool, payload: &[u8]) -> Vec<u8> {
        let magic = match self.framing {
            2 => proto::EXTENDED_REPLY_MAGIC,
            _ => proto::STRUCTURED_REPLY_MAGIC,
        };
        let mut bytes = magic.to_be_bytes().to_vec();
        bytes.extend(u16::from(last).to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend(self.cookie);
        match self.framing {
            2 => {
                bytes.extend(self.offset);
                bytes.extend((payload.len() as u64).to_be_bytes());
            }
            _ => bytes.extend((payload.len() as u32).to_be_bytes()),
        }
        bytes.extend(payload);
        bytes
    }

    /// Where a part of what was asked for begins.
    fn at(&self, from: u64) -> Vec<u8> {
        let offset = u64::from_be_bytes(self.offset).wrapping_add(from);
        offset.to_be_bytes().to_vec()
    }

    fn data(&self, last: bool, from: u64, len: u32) -> Vec<u8> {
        let mut payload = self.at(from);
        payload.resize(8 + len as usize, 0x5a);
        self.chunk(proto::REPLY_TYPE_OFFSET_DATA, last, &payload)
    }

    fn hole(&self, last: bool, from: u64, len: u32) -> Vec<u8> {
        let mut payload = self.at(from);
        payload.extend(len.to_be_bytes());
        self.chunk(proto::REPLY_TYPE_OFFSET_HOLE, last, &payload)
    }

    /// The answer to a request, true or false as `how` says.
    fn chunks(&self, command: u16, how: u8, len: u32) -> Vec<Vec<u8>> {
        match (command, how % 16) {
            (_, 2) => vec![self.chunk(proto::REPLY_TYPE_ERROR, true, &[0, 0, 0, 5, 0, 0])],
            (_, 3) => vec![self.chunk(proto::REPLY_TYPE_NONE, true, &[])],
            (_, 4) => vec![self.chunk(u16::from(how), true, &vec![how; usize::from(how)])],
            (proto::CMD_READ, 5) => {
                let half = len / 2;
                vec![
                    self.hole(false, u64::from(half), len - half),
                    self.data(true, 0, half),
                ]
            }
            (proto::CMD_READ, 6) => vec![self.data(false, 0, len), self.data(true, 1, len)],
            (proto::CMD_READ, 7) => vec![self.hole(true, 0, u32::MAX)],
            (proto::CMD_READ, 8) => vec![self.data(false, 0, 1); 100],
            (proto::CMD_READ, _) => vec![self.data(true, 0, len)],
            (proto::CMD_BLOCK_STATUS, _) => vec![self.status(how, len)],
            _ => vec![self.chunk(proto::REPLY_TYPE_NONE, true, &[])],
        }
    }

    fn status(&self, how: u8, len: u32) -> Vec<u8> {
        let len = match how % 16 {
            5 => 0,
            6 => u64::MAX,
            _ => u64::from(len),
        };
        let mut payload = 1_u32.to_be_bytes().to_vec();
        if self.framing == 2 {
            payload.extend(1_u32.to_be_bytes());
            payload.extend(len.to_be_bytes());
            payload.extend(0_u64.to_be_bytes());
            return self.chunk(proto::REPLY_TYPE_BLOCK_STATUS_EXT, true, &payload);
        }
        payload.extend((len as u32).to_be_bytes());
        payload.extend(0_u32.to_be_bytes());
        self.chunk(proto::REPLY_TYPE_BLOCK_STATUS, true, &payload)
    }
}
