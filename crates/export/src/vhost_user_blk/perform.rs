//! Carrying out requests on the device.
//!
//! A guest may change its memory while a request runs. Where the device only hands bytes on, the kernel
//! moves them between disk and guest by itself ([`BlockDevice::read_into`], [`BlockDevice::write_from`]).
//! Everywhere else what is written is copied first, and what was read is copied last: who looks at
//! bytes sees memory that is nobody else's. What is kept in a log until it is flushed is copied, too, so
//! that the log has what the disk has.

use std::rc::Rc;

use futures_util::FutureExt;
use vellum::{BlockDevice, RequestFlags, ZeroRequest};
use vellum_io::{Buffer, Io, Result, lane, spawn};

use super::memory::{Pieces, total_len};
use super::queue::Queue;
use super::request::{DiskRange, Request, Status, StatusPlace, Work};
use super::unflushed::{Log, Unflushed};
use crate::accounting::{Operation, StartedRequest};
use crate::room;

/// Longer discards and zeroes are done in pieces, between which others have their turn.
const PIECE_BYTES: u64 = 128 << 20;

/// A request that was begun.
struct Begun {
    queue: Rc<Queue>,
    head: u16,
    status: StatusPlace,
    /// Where it is counted.
    started: Option<StartedRequest>,
}

impl Begun {
    /// Answers: `written_bytes` of data were written for the guest.
    fn end(self, ended: Result<usize>) {
        if matches!(&ended, Err(error) if room::is_given_up(error)) {
            // The next server, or session, finds it in flight.
            return self.queue.leave();
        }
        if let Some(started) = &self.started {
            let accounting = &self.queue.disk.accounting;
            match &ended {
                Ok(_) => accounting.succeed(started),
                Err(error) => accounting.fail(started, error.errno(), error.message()),
            }
        }
        let (status, written_bytes) = match ended {
            Ok(written_bytes) => (Status::Ok, written_bytes),
            Err(_) => (Status::IoError, 0),
        };
        self.status.write(status);
        // The status is written, too. Requests are far shorter than 4 GiB.
        let written = u32::try_from(written_bytes).unwrap_or(u32::MAX - 1) + 1;
        self.queue.end(self.head, written);
    }
}

/// Starts a request; it answers by itself.
pub(super) fn start(queue: Rc<Queue>, head: u16, request: Request) {
    let status = request.status;
    let work = match request.work {
        Ok(work) => work,
        Err(with) => return queue.refuse(head, &status, with),
    };
    let begun = Begun {
        started: account(&queue, &work),
        queue,
        head,
        status,
    };
    match work {
        Work::Read { offset_bytes, into } => read(begun, offset_bytes, into),
        Work::Write { offset_bytes, from } => write(begun, offset_bytes, &from),
        Work::Flush => {
            let covered = begun.queue.log.as_ref().map(|(_, all)| all.begin_flush());
            let io = begun.queue.device.flush();
            when_done(begun, io, move |begun, done| {
                if let (Ok(()), Some((_, all)), Some(covered)) = (&done, &begun.queue.log, covered)
                {
                    all.end_flush(covered);
                }
                begun.end(done.map(|()| 0));
            });
        }
        Work::GetId { into } => {
            let serial = begun.queue.disk.serial;
            let len = total_len(&into).min(serial.len());
            scatter(&serial[..len], &into);
            begun.end(Ok(len));
        }
        Work::Discard(ranges) => {
            let cut = ranges.into_iter().map(|range| (range, None)).collect();
            drop(spawn(in_pieces(begun, cut)));
        }
        Work::WriteZeroes(ranges) => {
            let zeroed = |(range, unmap)| (range, Some(unmap));
            let cut = ranges.into_iter().map(zeroed).collect();
            drop(spawn(in_pieces(begun, cut)));
        }
    }
}

/// Notes the beginning of what moves bytes or makes them durable.
fn account(queue: &Queue, work: &Work) -> Option<StartedRequest> {
    let span = |ranges: &mut dyn Iterator<Item = &DiskRange>| {
        ranges.fold((0, 0), |(first, sum), range| match sum {
            0 => (range.offset_bytes, range.len_bytes),
            _ => (first, sum + range.len_bytes),
        })
    };
    let (operation, range) = match work {
        Work::Read { offset_bytes, into } => {
            (Operation::Read, (*offset_bytes, total_len(into) as u64))
        }
        Work::Write { offset_bytes, from } => {
            (Operation::Write, (*offset_bytes, total_len(from) as u64))
        }
        Work::Flush => (Operation::Flush, (0, 0)),
        Work::Discard(ranges) => (Operation::Discard, span(&mut ranges.iter())),
        Work::WriteZeroes(ranges) => {
            let mut ranges = ranges.iter().map(|(range, _)| range);
            (Operation::Write, span(&mut ranges))
        }
        Work::GetId { .. } => return None,
    };
    let accounting = &queue.disk.accounting;
    Some(accounting.start(operation, range, &queue.in_flight))
}

/// Has `answer` called when `io` is complete: at once if it is already.
fn when_done<T: 'static>(begun: Begun, io: Io<T>, answer: impl FnOnce(Begun, Result<T>) + 'static) {
    if io.is_ready() {
        // Ready means that the first poll yields the result.
        if let Some(result) = io.now_or_never() {
            answer(begun, result);
        }
    } else {
        drop(spawn(io.map(move |result| answer(begun, result))));
    }
}

fn read(begun: Begun, offset_bytes: u64, into: Pieces) {
    let len = total_len(&into);
    begun.queue.take_memory(len);
    let device = &begun.queue.disk.device;
    if let Some(io) = device.read_into(offset_bytes, &into) {
        return when_done(begun, io, move |begun, read| {
            begun.queue.give_memory(len);
            begun.end(read.map(|()| len));
        });
    }
    let io = device.read(offset_bytes, Buffer::for_read(len));
    when_done(begun, io, move |begun, read| {
        begun.queue.give_memory(len);
        begun.end(read.map(|data| {
            scatter(&data, &into);
            len
        }));
    });
}

fn write(begun: Begun, offset_bytes: u64, from: &Pieces) {
    let len = total_len(from);
    begun.queue.take_memory(len);
    let device = &begun.queue.device;
    let flags = RequestFlags::default().fua(begun.queue.writes_through());
    let is_kept = begun.queue.log.is_some();
    if !is_kept && let Some(io) = device.write_from(offset_bytes, from, flags) {
        return when_done(begun, io, move |begun, written| {
            begun.queue.give_memory(len);
            begun.end(written.map(|()| 0));
        });
    }
    let io = device.write(offset_bytes, gather(from), flags);
    when_done(begun, io, move |begun, written| match written {
        Ok(data) => keep(begun, offset_bytes, data),
        Err(error) => {
            begun.queue.give_memory(len);
            begun.end(Err(error));
        }
    });
}

/// Ends a write, whose data are kept where the server's death does not take them.
fn keep(begun: Begun, offset_bytes: u64, data: Buffer) {
    let len = data.len();
    let append = move |log: &mut Log, all: &Unflushed| log.append_data(all, offset_bytes, &data);
    let finish = move |begun: Begun, done: Result<()>| {
        begun.queue.give_memory(len);
        begun.end(done.map(|()| 0));
    };
    if append_now(&begun.queue, &append) {
        return finish(begun, Ok(()));
    }
    drop(spawn(async move {
        let done = append_after_flush(&begun.queue, &append).await;
        finish(begun, done);
    }));
}

/// Notes something in the log, if there is one; `false` if it has no room.
fn append_now(queue: &Queue, append: &impl Fn(&mut Log, &Unflushed) -> bool) -> bool {
    match &queue.log {
        Some((log, all)) => append(&mut log.borrow_mut(), all),
        None => true,
    }
}

/// Flushes until there is room.
async fn append_after_flush(
    queue: &Queue,
    append: &impl Fn(&mut Log, &Unflushed) -> bool,
) -> Result<()> {
    while let Some((_, all)) = &queue.log
        && !append_now(queue, append)
    {
        all.flush(&*queue.device).await?;
    }
    Ok(())
}

/// A copy of what the guest's memory holds now.
fn gather(pieces: &Pieces) -> Buffer {
    let mut data = Buffer::for_read(total_len(pieces));
    let mut at = 0;
    for piece in pieces {
        piece.copy_to(0, &mut data[at..at + piece.len()]);
        at += piece.len();
    }
    data
}

/// Copies into the guest's memory, as far as there is any.
fn scatter(data: &[u8], pieces: &Pieces) {
    let mut rest = data;
    for piece in pieces {
        let (part, after) = rest.split_at(piece.len().min(rest.len()));
        piece.copy_from(0, part);
        rest = after;
    }
}

/// Discards ranges, or makes them zeroes (that may give back their space or not), one after the
/// other, piece by piece.
async fn in_pieces(begun: Begun, ranges: Vec<(DiskRange, Option<bool>)>) {
    let queue = begun.queue.clone();
    for (range, zeroes) in ranges {
        let (mut at, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
        while at < end {
            if queue.is_abandoned() {
                return queue.leave();
            }
            let len_bytes = (PIECE_BYTES - at % PIECE_BYTES).min(end - at);
            let device = &*queue.device;
            let done = match zeroes {
                None => device.discard(at, len_bytes).await,
                Some(unmap) => zero(&queue, device, at, len_bytes, unmap).await,
            };
            if let Err(error) = done {
                return begun.end(Err(error));
            }
            at += len_bytes;
            if at < end {
                lane::yield_now().await;
            }
        }
        if let Some(unmap) = zeroes {
            let (offset_bytes, len_bytes) = (range.offset_bytes, range.len_bytes);
            let append = move |log: &mut Log, all: &Unflushed| {
                log.append_zeroes(all, offset_bytes, len_bytes, unmap)
            };
            if let Err(error) = append_after_flush(&queue, &append).await {
                return begun.end(Err(error));
            }
        }
    }
    begun.end(Ok(0));
}

fn zero(queue: &Queue, device: &dyn BlockDevice, at: u64, len_bytes: u64, unmap: bool) -> Io<()> {
    let fua = queue.writes_through();
    let request = ZeroRequest::default().may_unmap(unmap).fua(fua);
    device.write_zeroes(at, len_bytes, request)
}
