//! Applies a stream to a disk: payloads are compared with their hashes and unpacked side by side,
//! and written in order.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;

use vellum::{BlockDevice, Buffer, Error, ErrorKind, Io, ZeroRequest};
use vellum_format::FormatError;
use vellum_format::stream::{HEAD_BYTES, Header, Reader, Record};
use vellum_io::lane;

use super::pack::unpack;
use crate::sparse::{Sparse, zero_runs};

/// Zeroes in data that are left out of a target that shows zeroes there.
const SPARSE_BYTES: u64 = 4096;

/// Where a stream comes from.
pub trait Input {
    /// Why it cannot be read.
    type Error;

    /// Fills the buffer; fewer bytes only at the stream's end.
    fn fill(
        &mut self,
        buffer: &mut [u8],
    ) -> impl Future<Output = std::result::Result<usize, Self::Error>>;
}

/// How a stream is applied.
#[derive(Debug, Clone, Copy)]
pub struct ReceiveOptions {
    /// Pieces in flight, of up to 1 MiB each.
    pub parallel: usize,
    /// The target shows zeroes wherever nothing of this disk was written.
    pub target_is_zero: bool,
}

/// Why a stream was not applied to its end. What was told of as durable stays.
#[derive(Debug)]
pub enum ReceiveError<E, T> {
    /// The stream ends before its end.
    Cut,
    /// The stream cannot be read.
    Read(E),
    /// A record is not what was sent, or none that can be.
    Damaged(FormatError),
    /// What a record of data holds is not what was sent.
    DamagedData {
        /// Where in the disk it belongs, in bytes.
        offset_bytes: u64,
    },
    /// The target could not be written.
    Write(Error),
    /// The one who is told how far it is wants it to end.
    Told(T),
}

/// Applies the records behind a header, which was read already. `durable` hears up to where
/// everything is in its place durably, `progress` up to where the stream has been read. When the
/// stream turns out to be cut off or damaged, what came before is made durable, and told of.
///
/// # Errors
/// If the stream is not whole, the target has another size or cannot be written, or `durable` fails.
pub async fn receive<I: Input, T>(
    header: &Header,
    input: &mut I,
    target: &Arc<dyn BlockDevice>,
    options: &ReceiveOptions,
    mut durable: impl FnMut(u64) -> Result<(), T>,
    mut progress: impl FnMut(u64),
) -> Result<(), ReceiveError<I::Error, T>> {
    let mut reader = Reader::new(header).map_err(ReceiveError::Damaged)?;
    if target.size_bytes() != header.size_bytes {
        return Err(ReceiveError::Write(other_size(target, header)));
    }
    let mut applier = Applier::new(header, target, *options);
    loop {
        let next = next(&mut reader, input, &mut applier).await;
        progress(reader.position_bytes());
        let (is_over, failed) = match next {
            Ok(Next::Piece) => continue,
            Ok(Next::Checkpoint) => (false, None),
            Ok(Next::End) => (true, None),
            // Nothing that was written can be relied on.
            Err(ReceiveError::Write(cause)) => return Err(ReceiveError::Write(cause)),
            Err(error) => (true, Some(error)),
        };
        let settled = applier.settle(reader.position_bytes()).await;
        let (position_bytes, late) = settled.map_err(ReceiveError::Write)?;
        durable(position_bytes).map_err(ReceiveError::Told)?;
        let late = late.map(|offset_bytes| ReceiveError::DamagedData { offset_bytes });
        match late.or(failed) {
            Some(error) => return Err(error),
            None if is_over => return Ok(()),
            None => {}
        }
    }
}

fn other_size(target: &Arc<dyn BlockDevice>, header: &Header) -> Error {
    let (size_bytes, wanted_bytes) = (target.size_bytes(), header.size_bytes);
    let message = format!("the stream is of {wanted_bytes} bytes, and the target has {size_bytes}");
    Error::new(ErrorKind::OutOfRange, "receive", message).target(target.info().name)
}

enum Next {
    Piece,
    Checkpoint,
    End,
}

/// Reads a record, and begins to apply it.
async fn next<I: Input, T>(
    reader: &mut Reader,
    input: &mut I,
    applier: &mut Applier,
) -> Result<Next, ReceiveError<I::Error, T>> {
    let mut head = [0; HEAD_BYTES];
    fill(input, &mut head).await?;
    // Not known to the reader before the payload is here: the position would lie behind it.
    let mut ahead = reader.clone();
    let record = ahead.head(&head).map_err(ReceiveError::Damaged)?;
    let applied = match record {
        Record::Data {
            offset_bytes,
            len_bytes,
            hash,
            ..
        } => {
            let mut payload = Buffer::for_read(record.payload_bytes());
            fill(input, &mut payload).await?;
            let piece = (offset_bytes, u64::from(len_bytes));
            applier.data(piece, payload, hash).await
        }
        Record::Zeroes {
            offset_bytes,
            len_bytes,
        } => applier.zeroes(offset_bytes, len_bytes).await,
        Record::Checkpoint { .. } | Record::End { .. } => Ok(()),
    };
    *reader = ahead;
    match applied {
        Ok(()) => {}
        Err(Failed::Write(cause)) => return Err(ReceiveError::Write(cause)),
        Err(Failed::Damaged(offset_bytes)) => {
            return Err(ReceiveError::DamagedData { offset_bytes });
        }
    }
    Ok(match record {
        Record::Checkpoint { .. } => Next::Checkpoint,
        Record::End { .. } => Next::End,
        _ => Next::Piece,
    })
}

async fn fill<I: Input, T>(
    input: &mut I,
    buffer: &mut [u8],
) -> Result<(), ReceiveError<I::Error, T>> {
    match input.fill(buffer).await {
        Ok(len) if len == buffer.len() => Ok(()),
        Ok(_) => Err(ReceiveError::Cut),
        Err(error) => Err(ReceiveError::Read(error)),
    }
}

enum Failed {
    Write(Error),
    /// The data of the piece there are not what was sent.
    Damaged(u64),
}

/// What happens to the disk where a piece of the stream says something of it.
enum Work {
    Zeroes,
    Data(lane::Computation<Option<Buffer>>),
}

struct Piece {
    offset_bytes: u64,
    len_bytes: u64,
    work: Work,
}

/// Writes pieces in their order.
struct Applier {
    target: Arc<dyn BlockDevice>,
    options: ReceiveOptions,
    sparse: Sparse,
    /// What the stream does not tell of reads as zeroes, and the target may show something else.
    clears_gaps: bool,
    /// Up to where the target holds, or is about to hold, what the stream says.
    begun_bytes: u64,
    unpacking: VecDeque<Piece>,
    writing: VecDeque<Io<()>>,
    /// A piece that was damaged: nothing behind it is written any more.
    damaged: Option<u64>,
}

impl Applier {
    fn new(header: &Header, target: &Arc<dyn BlockDevice>, options: ReceiveOptions) -> Applier {
        let alignment_bytes = target.info().request_alignment_bytes;
        Applier {
            target: target.clone(),
            options,
            sparse: Sparse::new(SPARSE_BYTES, alignment_bytes.into()),
            clears_gaps: !header.incremental && !options.target_is_zero,
            begun_bytes: header.start_bytes,
            unpacking: VecDeque::new(),
            writing: VecDeque::new(),
            damaged: None,
        }
    }

    async fn data(
        &mut self,
        (offset_bytes, len_bytes): (u64, u64),
        payload: Buffer,
        hash: [u8; 32],
    ) -> Result<(), Failed> {
        // A record holds 1 MiB at most.
        let len = len_bytes as usize;
        let work = Work::Data(lane::compute(move || unpack(payload, &hash, len)));
        self.piece(Piece {
            offset_bytes,
            len_bytes,
            work,
        })
        .await
    }

    async fn zeroes(&mut self, offset_bytes: u64, len_bytes: u64) -> Result<(), Failed> {
        let work = Work::Zeroes;
        self.piece(Piece {
            offset_bytes,
            len_bytes,
            work,
        })
        .await
    }

    async fn piece(&mut self, piece: Piece) -> Result<(), Failed> {
        self.unpacking.push_back(piece);
        while self.unpacking.len() > self.options.parallel.max(1) {
            self.write_next().await?;
        }
        Ok(())
    }

    /// Writes the first piece that is not written.
    async fn write_next(&mut self) -> Result<(), Failed> {
        if let Some(offset_bytes) = self.damaged {
            return Err(Failed::Damaged(offset_bytes));
        }
        let Some(piece) = self.unpacking.pop_front() else {
            return Ok(());
        };
        let Piece {
            offset_bytes,
            len_bytes,
            work,
        } = piece;
        match work {
            Work::Zeroes => {
                self.clear_gap(offset_bytes).await?;
                self.write_zeroes(offset_bytes, len_bytes).await?;
            }
            Work::Data(unpacked) => {
                let Some(bytes) = unpacked.await else {
                    self.damaged = Some(offset_bytes);
                    return Err(Failed::Damaged(offset_bytes));
                };
                self.clear_gap(offset_bytes).await?;
                self.write_data(offset_bytes, bytes).await?;
            }
        }
        self.begun_bytes = offset_bytes + len_bytes;
        Ok(())
    }

    async fn clear_gap(&mut self, end_bytes: u64) -> Result<(), Failed> {
        let len_bytes = end_bytes.saturating_sub(self.begun_bytes);
        match len_bytes > 0 && self.clears_gaps {
            true => self.write_zeroes(self.begun_bytes, len_bytes).await,
            false => Ok(()),
        }
    }

    async fn write_zeroes(&mut self, offset_bytes: u64, len_bytes: u64) -> Result<(), Failed> {
        let request = ZeroRequest::default().may_unmap(true);
        let target = &self.target;
        self.start(target.write_zeroes_in_order(offset_bytes, len_bytes, request))
            .await
    }

    async fn write_data(&mut self, offset_bytes: u64, mut bytes: Buffer) -> Result<(), Failed> {
        let runs = match self.options.target_is_zero {
            true => zero_runs(&bytes, offset_bytes, self.sparse),
            false => Vec::new(),
        };
        if runs.len() <= 1 {
            // A piece that was sent holds something.
            return self.write(offset_bytes, bytes).await;
        }
        let mut at = offset_bytes;
        for run in runs {
            let part = bytes.split_to(run.len_bytes);
            let len_bytes = part.len() as u64;
            if !run.zero {
                self.write(at, part).await?;
            }
            at += len_bytes;
        }
        Ok(())
    }

    async fn write(&mut self, offset_bytes: u64, bytes: Buffer) -> Result<(), Failed> {
        let write = self.target.write_in_order(offset_bytes, bytes);
        self.start(Io::boxed(async move { write.await.map(drop) }))
            .await
    }

    async fn start(&mut self, write: Io<()>) -> Result<(), Failed> {
        self.writing.push_back(write);
        self.drain(self.options.parallel.max(1))
            .await
            .map_err(Failed::Write)
    }

    /// Waits until only so many writes run.
    async fn drain(&mut self, most: usize) -> vellum::Result<()> {
        while self.writing.len() > most
            && let Some(write) = self.writing.pop_front()
        {
            write.await?;
        }
        Ok(())
    }

    /// Makes everything durable that the stream says of the disk before `end_bytes`, or before the
    /// first piece that was damaged; says up to where that is, and where the damaged piece belongs.
    async fn settle(&mut self, end_bytes: u64) -> Result<(u64, Option<u64>), Error> {
        while !self.unpacking.is_empty() {
            match self.write_next().await {
                Ok(()) => {}
                Err(Failed::Write(cause)) => return Err(cause),
                Err(Failed::Damaged(_)) => break,
            }
        }
        let position_bytes = match self.damaged {
            // What no record tells of before the damaged piece will be told of again.
            Some(_) => self.begun_bytes,
            None => {
                match self.clear_gap(end_bytes).await {
                    Err(Failed::Write(cause)) => return Err(cause),
                    Err(Failed::Damaged(_)) | Ok(()) => {}
                }
                end_bytes
            }
        };
        self.drain(0).await?;
        self.target.flush().await?;
        self.begun_bytes = position_bytes;
        Ok((position_bytes, self.damaged))
    }
}
