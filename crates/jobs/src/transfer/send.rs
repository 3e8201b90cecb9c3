//! Makes a stream of a disk: pieces are read and compressed side by side, and written in order.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vellum::{BlockDevice, Buffer, Error};
use vellum_format::FormatError;
use vellum_format::stream::{HEAD_BYTES, Header, Record, Writer};
use vellum_io::lane;

use super::pack::{Packed, pack};
use super::walk::{Piece, Walk};
use crate::rate::{RateLimit, Speed};

/// A receiver that is killed does again what came since the last checkpoint: so many bytes of the
/// disk, so many of the stream, or so long at most.
const CHECKPOINT_DISK_BYTES: u64 = 256 << 20;
const CHECKPOINT_STREAM_BYTES: u64 = 64 << 20;
const CHECKPOINT_TIME: Duration = Duration::from_secs(5);

/// How a disk is sent.
#[derive(Debug, Clone)]
pub struct SendOptions {
    /// Pieces in flight, of up to 1 MiB each.
    pub parallel: usize,
    /// The level of zstd; 0 compresses nothing.
    pub level: i32,
    /// How many bytes of the stream may be written in a second.
    pub speed: Arc<Speed>,
}

/// What was sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sent {
    /// Bytes of the stream.
    pub stream_bytes: u64,
    /// Bytes of the disk that it holds as data.
    pub data_bytes: u64,
}

/// Why a disk was not sent.
#[derive(Debug)]
pub enum SendError<E> {
    /// The source could not be read here.
    Read {
        /// Where, in bytes.
        offset_bytes: u64,
        /// Why.
        cause: Error,
    },
    /// The stream could not be written.
    Write(E),
    /// The source is no disk that can be sent.
    Format(FormatError),
}

impl<E> From<FormatError> for SendError<E> {
    fn from(error: FormatError) -> Self {
        SendError::Format(error)
    }
}

/// Sends what `ranges` (in order, apart, of whole sectors) hold, from the header's start on.
/// `write` gets the stream's bytes in order, `progress` up to where the disk is sent.
///
/// # Errors
/// If the source cannot be read, or `write` fails.
pub async fn send<E>(
    source: &Arc<dyn BlockDevice>,
    header: &Header,
    ranges: impl Iterator<Item = Range<u64>>,
    options: &SendOptions,
    write: impl FnMut(&[u8]) -> Result<(), E>,
    mut progress: impl FnMut(u64),
) -> Result<Sent, SendError<E>> {
    let mut out = Output::new(header, options, write)?;
    let mut walk = Walk::new(source, ranges, header.start_bytes);
    let mut running: VecDeque<(Piece, Running)> = VecDeque::new();
    let mut at_end = false;
    loop {
        while !at_end && running.len() < options.parallel.max(1) {
            let found = walk.next().await;
            let piece = found.map_err(|cause| SendError::Read {
                offset_bytes: walk.position_bytes(),
                cause,
            })?;
            match piece {
                None => at_end = true,
                // What a whole disk's stream does not tell of is zeroes.
                Some(piece) if !piece.is_data && !header.incremental => {}
                Some(piece) => running.push_back((piece, start(source, piece, options.level))),
            }
        }
        let Some((piece, work)) = running.pop_front() else {
            break;
        };
        let packed = match work {
            Running::Zeroes => Packed::Zeroes,
            Running::Data(work) => work.await.map_err(|cause| SendError::Read {
                offset_bytes: piece.offset_bytes,
                cause,
            })?,
        };
        out.put(piece, packed, header.incremental).await?;
        progress(piece.offset_bytes + piece.len_bytes);
    }
    out.finish()
}

/// A piece on its way.
enum Running {
    Zeroes,
    Data(vellum_io::JoinHandle<vellum::Result<Packed>>),
}

fn start(source: &Arc<dyn BlockDevice>, piece: Piece, level: i32) -> Running {
    if !piece.is_data {
        return Running::Zeroes;
    }
    let source = source.clone();
    Running::Data(lane::spawn(async move {
        let buffer = Buffer::for_read(piece.len_bytes as usize);
        let bytes = source.read(piece.offset_bytes, buffer).await?;
        Ok(lane::compute(move || pack(bytes, level)).await)
    }))
}

/// The stream as it is written.
struct Output<W> {
    writer: Writer,
    write: W,
    limit: RateLimit,
    sent: Sent,
    /// What came since the last checkpoint: bytes of the disk, of the stream, and since when.
    disk_bytes: u64,
    stream_bytes: u64,
    since: Instant,
}

impl<E, W: FnMut(&[u8]) -> Result<(), E>> Output<W> {
    fn new(header: &Header, options: &SendOptions, write: W) -> Result<Self, SendError<E>> {
        let mut out = Output {
            writer: Writer::new(header)?,
            write,
            limit: RateLimit::new(options.speed.clone()),
            sent: Sent::default(),
            disk_bytes: 0,
            stream_bytes: 0,
            since: Instant::now(),
        };
        out.bytes(&header.encode()?)?;
        Ok(out)
    }

    async fn put(
        &mut self,
        piece: Piece,
        packed: Packed,
        tell_zeroes: bool,
    ) -> Result<(), SendError<E>> {
        let (payload, hash): (&[u8], _) = match &packed {
            Packed::Zeroes => (&[], [0; 32]),
            Packed::Plain(bytes, hash) => (bytes, *hash),
            Packed::Frame(frame, hash) => (frame, *hash),
        };
        let Piece {
            offset_bytes,
            len_bytes,
            ..
        } = piece;
        if !payload.is_empty() {
            self.sent.data_bytes += len_bytes;
            self.record(&Record::Data {
                offset_bytes,
                // Pieces of data are no longer than a record may be.
                len_bytes: len_bytes as u32,
                payload_bytes: payload.len() as u32,
                hash,
            })?;
            self.bytes(payload)?;
        } else if tell_zeroes {
            self.record(&Record::Zeroes {
                offset_bytes,
                len_bytes,
            })?;
        }
        self.disk_bytes += len_bytes;
        self.limit
            .spend(payload.len() as u64 + HEAD_BYTES as u64)
            .await;
        let is_due = self.disk_bytes >= CHECKPOINT_DISK_BYTES
            || self.stream_bytes >= CHECKPOINT_STREAM_BYTES
            || self.since.elapsed() >= CHECKPOINT_TIME;
        if is_due {
            let offset_bytes = offset_bytes + len_bytes;
            self.record(&Record::Checkpoint { offset_bytes })?;
            (self.disk_bytes, self.stream_bytes) = (0, 0);
            self.since = Instant::now();
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Sent, SendError<E>> {
        let records = self.writer.records();
        self.record(&Record::End { records })?;
        Ok(self.sent)
    }

    fn record(&mut self, record: &Record) -> Result<(), SendError<E>> {
        let head = self.writer.head(record)?;
        self.bytes(&head)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), SendError<E>> {
        self.sent.stream_bytes += bytes.len() as u64;
        self.stream_bytes += bytes.len() as u64;
        (self.write)(bytes).map_err(SendError::Write)
    }
}
