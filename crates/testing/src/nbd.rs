//! A small client of the NBD protocol: one connection, requests in a row, answers as they
//! come. It shares no code with what it tests.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const SIMPLE_MAGIC: u32 = 0x6744_6698;
const CHUNK_MAGIC: u32 = 0x668e_33ef;
const OPT_GO: u32 = 7;
const OPT_STRUCTURED: u32 = 8;
const REP_ACK: u32 = 1;
const REP_INFO: u32 = 3;
const INFO_EXPORT: u16 = 0;
/// The flag of an export that keeps a flush's promise for all connections.
const CAN_MULTI_CONN: u16 = 1 << 8;
/// A server that says nothing for so long has failed.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest answer in bytes that is believed.
const MOST_BYTES: usize = 64 << 20;

/// What a request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Read.
    Read = 0,
    /// Write; a payload follows.
    Write = 1,
    /// Flush.
    Flush = 3,
    /// Discard.
    Trim = 4,
    /// Write zeroes.
    Zeroes = 6,
}

/// Durable when it is answered.
pub const FUA: u16 = 1;
/// Zeroes keep their room.
pub const NO_HOLE: u16 = 2;

/// A connection to the export without a name.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    structured: bool,
    /// Bytes of the export.
    pub size_bytes: u64,
    /// Whether a flush on one connection counts for all.
    pub several: bool,
    input: Vec<u8>,
    at: usize,
    /// Answers of which not every chunk has come yet.
    begun: HashMap<u64, Answer>,
}

/// The answer to a request: its number, an error number, the data of a read.
#[derive(Debug)]
pub struct Answer {
    /// The number that the request was given.
    pub cookie: u64,
    /// 0, or what went wrong.
    pub error: u32,
    /// Pieces of data, with their offsets in bytes; holes are not among them.
    pub data: Vec<(u64, Vec<u8>)>,
}

impl Connection {
    /// Connects and negotiates.
    pub fn open(socket: &Path, structured: bool) -> Result<Self> {
        let stream = UnixStream::connect(socket).context("cannot connect")?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let mut connection = Connection {
            stream,
            structured: false,
            size_bytes: 0,
            several: false,
            input: Vec::new(),
            at: 0,
            begun: HashMap::new(),
        };
        connection.greet()?;
        if structured {
            connection.option(OPT_STRUCTURED, &[])?;
            let (kind, _) = connection.option_reply()?;
            ensure!(kind == REP_ACK, "structured replies are refused");
            connection.structured = true;
        }
        connection.go()?;
        Ok(connection)
    }

    fn greet(&mut self) -> Result<()> {
        self.take(18)?;
        // Fixed newstyle, no padding.
        self.stream.write_all(&3_u32.to_be_bytes())?;
        Ok(())
    }

    fn option(&mut self, option: u32, data: &[u8]) -> Result<()> {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        self.stream.write_all(&bytes)?;
        Ok(())
    }

    fn option_reply(&mut self) -> Result<(u32, Vec<u8>)> {
        let magic = self.number::<8>()?;
        ensure!(magic == OPTION_REPLY_MAGIC, "no reply to an option");
        self.take(4)?;
        let kind = self.number::<4>()? as u32;
        let len = self.number::<4>()? as usize;
        Ok((kind, self.take(len)?))
    }

    fn go(&mut self) -> Result<()> {
        self.option(OPT_GO, &[0; 6])?;
        loop {
            match self.option_reply()? {
                (REP_ACK, _) => return Ok(()),
                (REP_INFO, data) => self.note_info(&data),
                (kind, text) => bail!(
                    "the export is refused ({kind:#x}): {}",
                    String::from_utf8_lossy(&text)
                ),
            }
        }
    }

    fn note_info(&mut self, data: &[u8]) {
        let Some((kind, rest)) = data.split_first_chunk::<2>() else {
            return;
        };
        if let (INFO_EXPORT, Some((size, flags))) =
            (u16::from_be_bytes(*kind), rest.split_first_chunk::<8>())
        {
            self.size_bytes = u64::from_be_bytes(*size);
            let flags = flags.first_chunk::<2>().copied().unwrap_or_default();
            self.several = u16::from_be_bytes(flags) & CAN_MULTI_CONN != 0;
        }
    }

    /// Sends a request.
    pub fn send(
        &mut self,
        command: Command,
        flags: u16,
        cookie: u64,
        (offset_bytes, len_bytes): (u64, u32),
        payload: &[u8],
    ) -> Result<()> {
        let mut bytes = Vec::with_capacity(28 + payload.len());
        bytes.extend(REQUEST_MAGIC.to_be_bytes());
        bytes.extend(flags.to_be_bytes());
        bytes.extend((command as u16).to_be_bytes());
        bytes.extend(cookie.to_be_bytes());
        bytes.extend(offset_bytes.to_be_bytes());
        bytes.extend(len_bytes.to_be_bytes());
        bytes.extend(payload);
        self.stream.write_all(&bytes)?;
        Ok(())
    }

    /// Writes, and waits for the answer.
    pub fn write(&mut self, offset_bytes: u64, bytes: &[u8]) -> Result<()> {
        let range = (offset_bytes, u32::try_from(bytes.len())?);
        self.send(Command::Write, 0, 7, range, bytes)?;
        let answer = self.receive(|_| None)?;
        ensure!(answer.error == 0, "the write fails: error {}", answer.error);
        Ok(())
    }

    /// The next answer. `wanted` says how much a read with this number asked for, if it is one.
    pub fn receive(&mut self, wanted: impl Fn(u64) -> Option<(u64, usize)>) -> Result<Answer> {
        loop {
            let magic = self.number::<4>()? as u32;
            // What is no read may be answered so even where structured replies were agreed on.
            if magic == SIMPLE_MAGIC {
                return self.receive_simple(wanted);
            }
            let chunk = self.structured && magic == CHUNK_MAGIC;
            ensure!(chunk, "no reply: {magic:#x}");
            let flags = self.number::<2>()? as u16;
            let kind = self.number::<2>()? as u16;
            let cookie = self.number::<8>()?;
            let len = self.number::<4>()? as usize;
            ensure!(len <= MOST_BYTES, "a chunk of {len} bytes");
            let payload = self.take(len)?;
            let mut answer = self.begun.remove(&cookie).unwrap_or_else(|| Answer {
                cookie,
                error: 0,
                data: Vec::new(),
            });
            match kind {
                0 | 2 => {}
                1 => {
                    let (offset, data) = payload.split_first_chunk::<8>().context("no offset")?;
                    answer
                        .data
                        .push((u64::from_be_bytes(*offset), data.to_vec()));
                }
                kind if kind & 1 << 15 != 0 => {
                    let error = payload.first_chunk::<4>().context("no error")?;
                    answer.error = u32::from_be_bytes(*error);
                }
                kind => bail!("a chunk of type {kind}"),
            }
            if flags & 1 != 0 {
                return Ok(answer);
            }
            self.begun.insert(cookie, answer);
        }
    }

    fn receive_simple(&mut self, wanted: impl Fn(u64) -> Option<(u64, usize)>) -> Result<Answer> {
        let error = self.number::<4>()? as u32;
        let cookie = self.number::<8>()?;
        let mut data = Vec::new();
        if error == 0
            && let Some((offset, len)) = wanted(cookie)
        {
            ensure!(!self.structured, "a simple reply to a read");
            data.push((offset, self.take(len)?));
        }
        Ok(Answer {
            cookie,
            error,
            data,
        })
    }

    fn number<const N: usize>(&mut self) -> Result<u64> {
        let bytes = self.take(N)?;
        Ok(bytes
            .iter()
            .fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    }

    fn take(&mut self, len: usize) -> Result<Vec<u8>> {
        while self.input.len() - self.at < len {
            if self.at > 0 {
                self.input.drain(..self.at);
                self.at = 0;
            }
            let have = self.input.len();
            self.input.resize(have + len.max(64 << 10), 0);
            let read = self.stream.read(&mut self.input[have..]);
            let count = match read {
                Ok(count) => count,
                Err(error) => {
                    self.input.truncate(have);
                    return Err(error.into());
                }
            };
            self.input.truncate(have + count);
            ensure!(count > 0, "the server has hung up");
        }
        let taken = self.input[self.at..self.at + len].to_vec();
        self.at += len;
        Ok(taken)
    }
}
