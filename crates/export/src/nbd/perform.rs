//! Carrying out requests on the device.

use std::time::Duration;

use futures_util::FutureExt;
use vellum::{Extent, ExtentKind, RequestFlags, ZeroRequest};
use vellum_io::{Buffer, Error, Io, Result, lane, spawn};

use super::connection::Request;
use super::export::MetaContext;
use super::pieces;
use crate::accounting::Operation;
use crate::room;
use vellum_nbd::proto;
use vellum_nbd::request::{Command, ContextSelection, Framing, Range};

/// Reads from this length on ask the device where its holes are.
const SPARSE_READ_BYTES: u64 = 64 << 10;
/// Most extents in one answer to a block status request.
const MAX_EXTENTS: usize = 16 << 10;
/// How long an answer to a block status request is gathered: it may be shorter than what was
/// asked for.
const STATUS_LIMIT: Duration = Duration::from_millis(250);

/// Starts a request that was checked; it answers by itself.
pub(super) fn start(mut request: Request, command: Command, payload: Option<Buffer>) {
    account(&mut request, &command);
    let device = request.device().clone();
    match command {
        Command::Read { range, whole } => start_read(request, range, whole),
        Command::Write { range, fua } => match payload {
            Some(data) => {
                let io = device.write(range.offset_bytes, data, RequestFlags::default().fua(fua));
                when_done(request, io, |request, data| {
                    request.connection.pool.give(data);
                    request.done();
                });
            }
            None => request.done(),
        },
        Command::Flush => when_done(request, device.flush(), |request, ()| request.done()),
        Command::Trim { range, fua } => {
            let io = pieces::trim(&request, range, fua);
            when_done(request, io, |request, ()| request.done());
        }
        Command::WriteZeroes { range, .. } if range.len_bytes == 0 => request.done(),
        Command::WriteZeroes {
            range,
            fua,
            may_unmap,
            fast,
        } => {
            let flags = ZeroRequest::default()
                .may_unmap(may_unmap)
                .no_fallback(fast)
                .fua(fua);
            let io = pieces::zero(&request, range, flags);
            when_done(request, io, |request, ()| request.done());
        }
        Command::Cache { range } => {
            let io = pieces::cache(&request, range);
            when_done(request, io, |request, ()| request.done());
        }
        Command::BlockStatus {
            range,
            one,
            selected,
        } => {
            start_block_status(request, range, one, selected.then_some(payload).flatten());
        }
        // The reader has left already.
        Command::Disconnect => request.done(),
    }
}

/// Has what moves bytes or makes them durable be counted.
fn account(request: &mut Request, command: &Command) {
    let (operation, range) = match command {
        Command::Read { range, .. } => (Operation::Read, *range),
        Command::Write { range, .. } | Command::WriteZeroes { range, .. } => {
            (Operation::Write, *range)
        }
        Command::Trim { range, .. } => (Operation::Discard, *range),
        Command::Flush => return request.account(Operation::Flush, 0, 0),
        Command::Cache { .. } | Command::BlockStatus { .. } | Command::Disconnect => return,
    };
    request.account(operation, range.offset_bytes, range.len_bytes);
}

/// Answers when `io` is complete: at once if it is already.
fn when_done<T: 'static>(request: Request, io: Io<T>, answer: impl FnOnce(Request, T) + 'static) {
    let finish = move |result: Result<T>| match result {
        Ok(value) => answer(request, value),
        Err(error) => fail(request, &error),
    };
    if io.is_ready() {
        // Ready means that the first poll yields the result.
        if let Some(result) = io.now_or_never() {
            finish(result);
        }
    } else {
        drop(spawn(io.map(finish)));
    }
}

fn fail(request: Request, error: &Error) {
    if room::is_given_up(error) {
        // A client that connects again asks for it once more.
        return request.abandon();
    }
    request.fail(proto::error_number(error.errno()), &error.to_string());
}

fn start_read(request: Request, range: Range, whole: bool) {
    let framing = request.address.framing;
    if range.len_bytes == 0 {
        let head = match framing {
            Framing::Simple => request.address.simple(0),
            _ => request.address.end_of_chunks(),
        };
        return request.finish(head, None);
    }
    if framing > Framing::Simple && !whole && range.len_bytes >= SPARSE_READ_BYTES {
        drop(spawn(read_sparse(request, range)));
        return;
    }
    let io = start_data(&request, range);
    when_done(request, io, move |request, data| {
        finish_data(request, range.offset_bytes, data)
    });
}

/// Lengths here are those of reads, so at most [`proto::MAX_PAYLOAD_BYTES`].
fn start_data(request: &Request, range: Range) -> Io<Buffer> {
    let buffer = request.connection.pool.take(range.len_bytes as usize);
    request.export().device.read(range.offset_bytes, buffer)
}

fn finish_data(request: Request, offset_bytes: u64, data: Buffer) {
    let head = request.address.data(offset_bytes, data.len() as u32, true);
    request.finish(head, Some(data));
}

/// Reads a range in chunks of data and holes.
async fn read_sparse(request: Request, range: Range) {
    let (mut at, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
    while at < end {
        if !request.connection.goes_on() {
            return fail(request, &pieces::broken_off());
        }
        let (run, zero) = match next_run(&request, at, end).await {
            Ok(run) => run,
            Err(error) => return fail(request, &error),
        };
        let last = at + run.len_bytes == end;
        let (head, data) = if zero {
            (request.address.hole(at, run.len_bytes as u32, last), None)
        } else {
            match start_data(&request, run).await {
                Ok(data) => (
                    request.address.data(at, data.len() as u32, last),
                    Some(data),
                ),
                Err(error) => return fail(request, &error),
            }
        };
        if last {
            return request.finish(head, data);
        }
        request.send(head, data);
        at += run.len_bytes;
    }
}

/// The run of zeroes, or of anything else, that begins at `at`.
async fn next_run(request: &Request, at: u64, end: u64) -> Result<(Range, bool)> {
    let device = &request.export().device;
    let mut len_bytes = 0;
    let mut zero = None;
    let mut turns = pieces::Yielder::default();
    while at + len_bytes < end {
        turns.pass().await;
        let from = at + len_bytes;
        if !request.connection.goes_on() {
            return Err(pieces::broken_off());
        }
        let extent = device.block_status(from, end - from, u32::MAX).await?;
        if *zero.get_or_insert(extent.kind.is_zero()) != extent.kind.is_zero() {
            break;
        }
        len_bytes += extent.len_bytes.clamp(1, end - from);
    }
    Ok((
        Range {
            offset_bytes: at,
            len_bytes,
        },
        zero.unwrap_or(false),
    ))
}

fn start_block_status(request: Request, range: Range, one: bool, selection: Option<Buffer>) {
    let mut contexts = request.connection.agreement.contexts.clone();
    let mut range = range;
    if let Some(bytes) = selection {
        let Some(selection) = ContextSelection::decode(&bytes) else {
            return request.fail(proto::EINVAL, "malformed selection of contexts");
        };
        let known = |id: &u32| contexts.iter().any(|context| context.id() == *id);
        if !selection.contexts.iter().all(known) {
            return request.fail(proto::EINVAL, "a context that was not negotiated");
        }
        contexts.retain(|context| selection.contexts.contains(&context.id()));
        range.len_bytes = selection.len_bytes;
        if !range.fits(request.export().device.size_bytes()) {
            return request.fail(
                proto::EINVAL,
                "the request goes beyond the end of the export",
            );
        }
    }
    drop(spawn(report_status(request, range, one, contexts)));
}

async fn report_status(request: Request, range: Range, one: bool, contexts: Vec<MetaContext>) {
    let (mut bitmaps, mut lists): (Vec<_>, Vec<_>) = contexts
        .into_iter()
        .map(ExtentList::new)
        .partition(|list| matches!(list.context, MetaContext::Bitmap(_)));
    for list in &mut bitmaps {
        list.ask_bitmap(&request, range, one);
    }
    let (mut at, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
    let begun = lane::now();
    let mut turns = pieces::Yielder::default();
    while at < end && !lists.is_empty() {
        turns.pass().await;
        if !request.connection.goes_on() {
            return fail(request, &pieces::broken_off());
        }
        let status = request.export().device.block_status(at, end - at, u32::MAX);
        let extent = match status.await {
            Ok(extent) => extent,
            Err(error) => return fail(request, &error),
        };
        let len_bytes = extent.len_bytes.clamp(1, end - at);
        at += len_bytes;
        for list in &mut lists {
            list.push(&extent, len_bytes);
        }
        let satisfied = |list: &ExtentList| list.extents.len() > if one { 1 } else { MAX_EXTENTS };
        if lists.iter().all(satisfied)
            || lists.iter().any(|list| list.is_full())
            || lane::now().duration_since(begun) > STATUS_LIMIT
        {
            break;
        }
    }
    lists.extend(bitmaps);
    finish_status(request, lists, one);
}

fn finish_status(request: Request, lists: Vec<ExtentList>, one: bool) {
    let count = lists.len();
    let address = request.address;
    let mut last = None;
    for (place, mut list) in lists.into_iter().enumerate() {
        list.extents.truncate(if one { 1 } else { MAX_EXTENTS });
        let payload = list.encode(address.framing);
        let is_last = place + 1 == count;
        let extents = list.extents.len() as u32;
        let id = list.context.id();
        let head = address.block_status(id, payload.len() as u32, extents, is_last);
        if is_last {
            last = Some((head, payload));
        } else {
            request.send(head, Some(payload));
        }
    }
    match last {
        Some((head, payload)) => request.finish(head, Some(payload)),
        None => request.fail(proto::EINVAL, "block status without a metadata context"),
    }
}

/// The extents of one context, neighbours of one state merged.
struct ExtentList {
    context: MetaContext,
    extents: Vec<(u64, u32)>,
}

impl ExtentList {
    fn new(context: MetaContext) -> Self {
        ExtentList {
            context,
            extents: Vec::new(),
        }
    }

    fn push(&mut self, extent: &Extent, len_bytes: u64) {
        let state = match self.context {
            MetaContext::Allocation => allocation_state(extent.kind),
            MetaContext::Depth if extent.kind.is_present() => extent.depth.saturating_add(1),
            MetaContext::Depth | MetaContext::Bitmap(_) => 0,
        };
        self.push_state(state, len_bytes);
    }

    /// Asks the bitmap that the list is about.
    fn ask_bitmap(&mut self, request: &Request, range: Range, one: bool) {
        let MetaContext::Bitmap(index) = self.context else {
            return;
        };
        let Some((_, bitmap)) = request.export().bitmaps.get(index) else {
            return;
        };
        let (mut at, end) = (range.offset_bytes, range.offset_bytes + range.len_bytes);
        while at < end && self.extents.len() <= if one { 1 } else { MAX_EXTENTS } {
            let (dirty, len_bytes) = bitmap.status(at, end - at);
            let len_bytes = len_bytes.clamp(1, end - at);
            let state = if dirty { proto::STATE_DIRTY } else { 0 };
            self.push_state(state, len_bytes);
            at += len_bytes;
        }
    }

    fn push_state(&mut self, state: u32, len_bytes: u64) {
        match self.extents.last_mut() {
            Some((len, last)) if *last == state => *len += len_bytes,
            _ => self.extents.push((len_bytes, state)),
        }
    }

    /// One extent beyond the limit: the last that is kept is complete.
    fn is_full(&self) -> bool {
        self.extents.len() > MAX_EXTENTS
    }

    fn encode(&self, framing: Framing) -> Buffer {
        let mut bytes = Vec::with_capacity(self.extents.len() * 16);
        for &(len_bytes, state) in &self.extents {
            if framing == Framing::Extended {
                bytes.extend(len_bytes.to_be_bytes());
                bytes.extend(u64::from(state).to_be_bytes());
            } else {
                // A compact request spans less than 4 GiB.
                bytes.extend((len_bytes as u32).to_be_bytes());
                bytes.extend(state.to_be_bytes());
            }
        }
        Buffer::copy_of(&bytes)
    }
}

fn allocation_state(kind: ExtentKind) -> u32 {
    match kind {
        ExtentKind::Data | ExtentKind::Compressed => 0,
        ExtentKind::ZeroData => proto::STATE_ZERO,
        ExtentKind::Zero | ExtentKind::AbsentZero => proto::STATE_HOLE | proto::STATE_ZERO,
        ExtentKind::Absent => proto::STATE_HOLE,
    }
}
