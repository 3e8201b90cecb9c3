//! Requests that come over io_uring, where the kernel has that (Linux 6.14, and a parameter of
//! its module): it has a queue for each processor, into which what runs there puts its requests.
//!
//! Each lane has some of the queues, and a task for each entry of them, which waits for a
//! request, carries it out, and gives the answer and the entry back in one command. Data go
//! straight between the entry's memory and the disk where the device allows that; else there is
//! one copy. What the kernel says without asking (that somebody waits no longer) comes over the
//! descriptor as before, and so does everything where the kernel takes no entry.
//!
//! Invariants:
//! - A mount that was told of queues gets entries for all of them, or one that the kernel
//!   refuses: until then it holds all requests back.
//! - What has begun with an entry's memory has ended before the entry is given back.

use std::fs;
use std::pin::pin;
use std::rc::Rc;

use futures_util::future::{Either, select};
use vellum_io::lane::queue_entry::{HeldEntry, QueueEntry};
use vellum_io::{Buffer, Error, ErrorKind, Io, JoinHandle, Result, spawn};

use super::file::Errno;
use super::proto::{self, Body, HEADER_BYTES, Header, MAX_TRANSFER_BYTES, Operation, Transfer};
use super::session::{Request, Session};
use crate::nbd::Stop;

/// Whether the kernel hands out requests so.
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// The processors that there may be, as the kernel counts them.
const PROCESSORS: &str = "/sys/devices/system/cpu/possible";
/// Most entries of a queue: as many as its processor has requests in flight.
const ENTRIES_MAX: usize = 64;
/// Entries of all queues where that leaves each of them enough.
const ALL_ENTRIES: usize = 1024;
/// Entries of a queue at least.
const ENTRIES_MIN: usize = 4;
/// More than any operation but writes says of itself in bytes.
const OPERATION_BYTES: usize = 128;

/// Whether the kernel offers queues to mounts; `None` if it has no such switch.
pub(super) fn is_switched_on() -> Option<bool> {
    let value = fs::read_to_string(SWITCH).ok()?;
    Some(value.trim() == "Y")
}

/// Why requests cannot come over io_uring.
pub(super) fn no_queues() -> Error {
    let text = match is_switched_on() {
        Some(false) => format!(
            "FUSE over io_uring is switched off in the kernel: root switches it on with \
             'echo Y > {SWITCH}'"
        ),
        Some(true) => "the kernel refuses the rings that FUSE over io_uring takes".to_owned(),
        None => "the kernel has no FUSE over io_uring, which came with Linux 6.14".to_owned(),
    };
    Error::new(ErrorKind::Unsupported, "mount", text)
}

/// The entries of one lane, with the numbers of their queues.
#[derive(Debug, Default)]
pub(super) struct LaneQueues(Vec<(u16, QueueEntry)>);

impl LaneQueues {
    /// How many entries there are.
    pub(super) fn entries(&self) -> usize {
        self.0.len()
    }
}

/// All queues of a mount, dealt out to so many lanes; `None` where nobody knows how many there
/// are, or where there is no room for them.
pub(super) fn deal_out(lanes: usize) -> Option<Vec<LaneQueues>> {
    let queues = processors(fs::read_to_string(PROCESSORS).ok()?.trim())?;
    let count = (ALL_ENTRIES / usize::from(queues)).clamp(ENTRIES_MIN, ENTRIES_MAX);
    let mut dealt: Vec<LaneQueues> = (0..lanes).map(|_| LaneQueues::default()).collect();
    for queue in 0..queues {
        let entries = QueueEntry::several(count, MAX_TRANSFER_BYTES).ok()?;
        let lane = &mut dealt[usize::from(queue) % lanes].0;
        lane.extend(entries.into_iter().map(|entry| (queue, entry)));
    }
    Some(dealt)
}

/// How many numbers there are in ranges such as `0-3,6`.
fn processors(ranges: &str) -> Option<u16> {
    let mut count = 0_u16;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        count = count.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(count)
}

/// What is told of a request that succeeded.
enum Reply {
    Body(Body),
    /// So many bytes in the entry's memory.
    Data(usize),
}

impl Session {
    /// Serves the entries of a lane's queues until `stop` is requested or the mount is gone.
    pub(super) fn serve_queues(
        self: &Rc<Self>,
        queues: LaneQueues,
        stop: &Stop,
    ) -> Vec<JoinHandle<()>> {
        let serve = |(queue, entry)| spawn(self.clone().serve_entry(queue, entry, stop.clone()));
        queues.0.into_iter().map(serve).collect()
    }

    async fn serve_entry(self: Rc<Self>, queue: u16, entry: QueueEntry, stop: Stop) {
        let mut stopped = pin!(stop.wait());
        let mut waiting = entry.register(&self.device, queue);
        loop {
            // One that is left goes with the lane.
            let Either::Left((Ok(held), _)) = select(waiting, stopped.as_mut()).await else {
                return;
            };
            self.wait_until(|| self.has_room()).await;
            waiting = self.perform(held).await;
        }
    }

    /// Carries out the request in an entry, and gives that back with the answer.
    async fn perform(self: &Rc<Self>, held: HeldEntry) -> Io<HeldEntry> {
        let mut bytes = [0; HEADER_BYTES];
        held.copy_header(&mut bytes);
        let header = Header::decode(&bytes).expect("there are as many bytes as it takes");
        let mut body = [0; OPERATION_BYTES];
        held.copy_operation(&mut body);
        let body_bytes = (header.len_bytes as usize).saturating_sub(HEADER_BYTES);
        let operation = header.operation(&body[..body_bytes.min(OPERATION_BYTES)]);
        let request = self.begin(&header, operation);
        let done = match operation {
            _ if header.node != proto::ROOT_ID => Err(libc::ENOENT),
            None => Err(libc::EINVAL),
            Some(Operation::Read(transfer)) => request.read_into(transfer, &held).await,
            Some(Operation::Write(transfer)) => request.write_from(transfer, &held).await,
            Some(operation) => {
                let done = self.file.perform(operation).await;
                done.map(Reply::Body)
            }
        };
        let reply = |errno, len_bytes| proto::reply_header(header.unique, errno, len_bytes);
        match done {
            Ok(Reply::Body(body)) => {
                request.succeed();
                let body = body.bytes();
                held.data(body.len()).copy_from(0, body);
                held.answer(&reply(0, body.len()), body.len())
            }
            Ok(Reply::Data(len_bytes)) => {
                request.succeed();
                held.answer(&reply(0, len_bytes), len_bytes)
            }
            Err(errno) => {
                request.note_failure(errno);
                held.answer(&reply(errno, 0), 0)
            }
        }
    }
}

fn failed<T>(done: Result<T>) -> std::result::Result<T, Errno> {
    done.map_err(|error| error.errno())
}

impl Request {
    async fn read_into(
        &self,
        transfer: Transfer,
        held: &HeldEntry,
    ) -> std::result::Result<Reply, Errno> {
        let len_bytes = transfer.len_bytes as usize;
        if len_bytes > held.room_bytes() {
            return Err(libc::EINVAL);
        }
        if let Some((io, len_bytes)) = self.file().read_into(transfer, held.data(len_bytes)) {
            failed(io.await)?;
            return Ok(Reply::Data(len_bytes));
        }
        let Some(io) = self.file().read(transfer) else {
            return Ok(Reply::Data(0));
        };
        let data = failed(io.await)?;
        held.data(data.len()).copy_from(0, &data);
        Ok(Reply::Data(data.len()))
    }

    async fn write_from(
        &self,
        transfer: Transfer,
        held: &HeldEntry,
    ) -> std::result::Result<Reply, Errno> {
        let len_bytes = transfer.len_bytes as usize;
        if len_bytes != held.data_len_bytes() {
            return Err(libc::EINVAL);
        }
        let from = held.data(len_bytes);
        let written = |len_bytes| Ok(Reply::Body(proto::written(len_bytes)));
        if let Some(io) = self.file().write_from(transfer, from.clone()) {
            failed(io.await)?;
            return written(transfer.len_bytes);
        }
        let mut data = Buffer::for_read(len_bytes);
        from.copy_to(0, &mut data);
        match self.file().write_at_once(transfer, data) {
            Ok(io) => written(failed(io.await)?.len() as u32),
            Err(data) => written(self.file().write(transfer, data).await?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted() {
        for (ranges, count) in [("0", 1), ("0-1", 2), ("0-3,6", 5), ("0,2-3", 3)] {
            assert_eq!(processors(ranges), Some(count), "{ranges}");
        }
        for odd in ["", "x", "3-1", "0-", "0-70000", "0-65535"] {
            assert_eq!(processors(odd), None, "{odd}");
        }
    }

    #[test]
    fn every_queue_has_a_lane_and_entries() {
        let dealt = deal_out(2).expect("the system tells how many there are");
        let mut counts = std::collections::BTreeMap::new();
        for (queue, _) in dealt.iter().flat_map(|lane| &lane.0) {
            *counts.entry(usize::from(*queue)).or_insert(0) += 1;
        }
        assert!(counts.keys().copied().eq(0..counts.len()), "{counts:?}");
        let counts = counts.into_values();
        assert!(
            counts
                .into_iter()
                .all(|count| (ENTRIES_MIN..=ENTRIES_MAX).contains(&count))
        );
        assert!(!dealt[0].0.is_empty());
    }
}
