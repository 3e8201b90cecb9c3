//! Receiving: one of those who wait for an answer takes all that comes.

use std::ops::Range;
use std::task::Waker;

use super::super::split::cut;
use super::{Connection, InFlight};
use crate::proto;
use crate::receive_buffer::{Disconnect, ReceiveBuffer};
use crate::reply_decode::{
    Chunk, DATA_OFFSET_BYTES, MAGIC_BYTES, MAX_CHUNK_BYTES, ReplyHead, data_range,
};
use crate::request::Framing;
use vellum_io::sync::atomic::Ordering;
use vellum_io::{Buffer, Buffers};

/// One who receives for all; dropped halfway, it ends the connection.
struct Receiver<'a> {
    connection: &'a Connection,
    done: bool,
}

impl Drop for Receiver<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.connection.fail();
        }
    }
}

impl Connection {
    /// Receives until the request `cookie` is answered, or the connection is gone.
    pub(super) async fn lead(&self, cookie: u64, mut input: ReceiveBuffer) {
        let mut leader = Receiver {
            connection: self,
            done: false,
        };
        while !self.is_answered(cookie) {
            if self.take_message(&mut input).await.is_err() {
                // Dropping the leader ends the connection.
                return;
            }
            self.transfers.fetch_add(1, Ordering::Relaxed);
        }
        leader.done = true;
        let mut state = self.lock();
        state.input = Some(input);
        let next = state.next_leader();
        drop(state);
        next.into_iter().for_each(Waker::wake);
    }

    fn is_answered(&self, cookie: u64) -> bool {
        let state = self.lock();
        let waiting = state.waiting.get(&cookie);
        waiting.is_none_or(|waiting| waiting.answered)
    }

    async fn take_message(&self, input: &mut ReceiveBuffer) -> Result<(), Disconnect> {
        let framing = self.session.framing;
        let unknown = Disconnect::Broken("a reply with a wrong magic number");
        input.need(&self.channel, MAGIC_BYTES).await?;
        let magic = *input.available().first_chunk().ok_or(unknown.clone())?;
        let head_bytes = ReplyHead::len_bytes(framing, magic).ok_or(unknown.clone())?;
        input.need(&self.channel, head_bytes).await?;
        let head = ReplyHead::decode(framing, input.available()).ok_or(unknown)?;
        input.consume(head_bytes);
        match head {
            ReplyHead::Simple { error, cookie } => self.take_simple(input, error, cookie).await,
            ReplyHead::Chunk {
                last,
                kind: proto::REPLY_TYPE_OFFSET_DATA,
                cookie,
                len_bytes,
            } => {
                input
                    .need(&self.channel, DATA_OFFSET_BYTES as usize)
                    .await?;
                let range = data_range(input.available(), len_bytes)
                    .ok_or(Disconnect::Broken("a malformed chunk of data"))?;
                input.consume(DATA_OFFSET_BYTES as usize);
                self.fill(input, cookie, range).await?;
                self.end_of_chunk(cookie, last)
            }
            ReplyHead::Chunk {
                last,
                kind,
                cookie,
                len_bytes,
            } => {
                if len_bytes > MAX_CHUNK_BYTES {
                    return Err(Disconnect::Broken("a chunk that is too long"));
                }
                let len_bytes = len_bytes as usize;
                input.need(&self.channel, len_bytes).await?;
                let chunk = Chunk::decode(kind, &input.available()[..len_bytes])
                    .ok_or(Disconnect::Broken("a malformed chunk"))?;
                input.consume(len_bytes);
                self.take_chunk(cookie, chunk)?;
                self.end_of_chunk(cookie, last)
            }
        }
    }

    async fn take_simple(
        &self,
        input: &mut ReceiveBuffer,
        error: u32,
        cookie: u64,
    ) -> Result<(), Disconnect> {
        let (command, range) =
            self.with(cookie, |waiting| (waiting.command, waiting.range.clone()))?;
        match command {
            _ if error != 0 => self.with(cookie, |waiting| waiting.error = Some(error))?,
            proto::CMD_READ if self.session.framing == Framing::Simple => {
                self.fill(input, cookie, range).await?;
            }
            proto::CMD_READ | proto::CMD_BLOCK_STATUS => {
                return Err(Disconnect::Broken(
                    "a simple reply where chunks were agreed on",
                ));
            }
            _ => {}
        }
        self.end_of_chunk(cookie, true)
    }

    /// Looks at a request that an answer names.
    fn with<T>(&self, cookie: u64, look: impl FnOnce(&mut InFlight) -> T) -> Result<T, Disconnect> {
        let mut state = self.lock();
        match state.waiting.get_mut(&cookie) {
            Some(waiting) if !waiting.answered => Ok(look(waiting)),
            _ => Err(Disconnect::Broken("an answer to nothing")),
        }
    }

    fn take_chunk(&self, cookie: u64, chunk: Chunk) -> Result<(), Disconnect> {
        let context = self.session.context;
        self.with(cookie, |waiting| match chunk {
            Chunk::Nothing => Ok(()),
            Chunk::Hole(range) => waiting.zero(range),
            Chunk::Status { context: id, first }
                if waiting.command == proto::CMD_BLOCK_STATUS && context == Some(id) =>
            {
                waiting.status.get_or_insert(first);
                Ok(())
            }
            Chunk::Status { .. } => Err(Disconnect::Broken("a status that nobody asked for")),
            Chunk::Failed { error, .. } => {
                waiting.error.get_or_insert(error);
                Ok(())
            }
        })?
    }

    /// Takes the last chunk of an answer for its end.
    fn end_of_chunk(&self, cookie: u64, last: bool) -> Result<(), Disconnect> {
        if !last {
            return Ok(());
        }
        self.with(cookie, InFlight::finish)??;
        let settled = self.lock().complete(cookie);
        self.announce(settled);
        Ok(())
    }

    /// Receives a part of what a read has asked for.
    async fn fill(
        &self,
        input: &mut ReceiveBuffer,
        cookie: u64,
        range: Range<u64>,
    ) -> Result<(), Disconnect> {
        let (buffers, at) = self.with(cookie, |waiting| waiting.take_for(&range))??;
        let mut cut = cut(buffers, at, (range.end - range.start) as usize);
        for piece in &mut cut.part {
            let empty = std::mem::replace(piece, Buffer::zeroed(0));
            *piece = input.fill(&self.channel, empty).await?;
        }
        self.with(cookie, |waiting| waiting.buffers = Some(cut.rejoin()))
    }
}

impl InFlight {
    /// The buffers, and where in them `range` begins, for a part of a read that comes now.
    fn take_for(&mut self, range: &Range<u64>) -> Result<(Buffers, usize), Disconnect> {
        if self.command != proto::CMD_READ || self.coverage.add(range.clone()).is_none() {
            return Err(Disconnect::Broken("data that was not asked for"));
        }
        let buffers = self
            .buffers
            .take()
            .ok_or(Disconnect::Broken("data for nothing"))?;
        Ok((buffers, (range.start - self.range.start) as usize))
    }

    fn zero(&mut self, range: Range<u64>) -> Result<(), Disconnect> {
        let (buffers, at) = self.take_for(&range)?;
        let mut cut = cut(buffers, at, (range.end - range.start) as usize);
        cut.part.iter_mut().for_each(|piece| piece.fill(0));
        self.buffers = Some(cut.rejoin());
        Ok(())
    }

    /// Ends the request: what it needs must have come.
    fn finish(&mut self) -> Result<(), Disconnect> {
        if self.error.is_none() {
            match self.command {
                proto::CMD_READ if !self.coverage.is_whole() => {
                    return Err(Disconnect::Broken("a read that was answered in part"));
                }
                proto::CMD_BLOCK_STATUS if self.status.is_none() => {
                    self.error = Some(proto::EIO);
                }
                _ => {}
            }
        }
        self.answered = true;
        Ok(())
    }
}
