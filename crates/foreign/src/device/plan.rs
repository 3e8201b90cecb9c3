//! What a write does to the files: a plan, and its execution.

use std::ops::Range;

use vellum::{Buffer, Buffers, Result};
use vellum_io::finish_all;
use vellum_storage::{Event, WriteFlags, ZeroFlags};

use super::Core;
use crate::layout::{Layout, NewBlock};

/// Requests of one plan that run side by side.
const AT_ONCE: usize = 16;
/// What is copied around a write into a large block is copied in pieces of this size.
const COPY_BYTES: u64 = 1 << 20;

/// What a buffer is to the one who asked for the write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// His own; he gets it back.
    Guest,
    /// What stands around it.
    Around,
}

/// What goes to one place of one file.
#[derive(Debug)]
struct HostWrite {
    file: usize,
    offset_bytes: u64,
    len_bytes: u64,
    buffers: Vec<(Buffer, Owner)>,
}

/// The rest of a large block: from the guest's view, or zeroes.
#[derive(Debug)]
struct Rest {
    file: usize,
    offset_bytes: u64,
    len_bytes: u64,
    /// Where the bytes are that are copied; `None` are zeroes.
    guest_bytes: Option<u64>,
}

/// What is to be written, none of it overlapping, and what is linked then.
#[derive(Debug, Default)]
pub(super) struct Plan {
    writes: Vec<HostWrite>,
    rests: Vec<Rest>,
    pub(super) links: Vec<(u64, NewBlock)>,
}

impl Plan {
    /// Adds a write; one that goes on where the last one ends becomes a part of it.
    pub(super) fn add(&mut self, file: usize, offset_bytes: u64, buffer: Buffer, owner: Owner) {
        let len_bytes = buffer.len() as u64;
        if len_bytes == 0 {
            return;
        }
        match self.writes.last_mut() {
            Some(last)
                if last.file == file && last.offset_bytes + last.len_bytes == offset_bytes =>
            {
                last.buffers.push((buffer, owner));
                last.len_bytes += len_bytes;
            }
            _ => self.writes.push(HostWrite {
                file,
                offset_bytes,
                len_bytes,
                buffers: vec![(buffer, owner)],
            }),
        }
    }

    /// Adds what is copied from where the guest sees it now.
    pub(super) fn copy(&mut self, file: usize, offset_bytes: u64, guest: Range<u64>) {
        let mut at = guest.start;
        while at < guest.end {
            let end = guest.end.min(at + COPY_BYTES);
            self.rests.push(Rest {
                file,
                offset_bytes: offset_bytes + (at - guest.start),
                len_bytes: end - at,
                guest_bytes: Some(at),
            });
            at = end;
        }
    }

    pub(super) fn zero(&mut self, file: usize, offset_bytes: u64, len_bytes: u64) {
        if len_bytes > 0 {
            self.rests.push(Rest {
                file,
                offset_bytes,
                len_bytes,
                guest_bytes: None,
            });
        }
    }
}

impl<L: Layout> Core<L> {
    /// Writes all of a plan, and gives the guest's buffer back.
    pub(super) async fn carry_out(&self, plan: Plan) -> Result<Buffer> {
        let rests = plan.rests.into_iter().map(|rest| self.write_rest(rest));
        finish_all(AT_ONCE, rests).await?;
        let writes = plan.writes.into_iter().map(|write| self.write_host(write));
        let written = finish_all(AT_ONCE, writes).await?;
        Ok(Buffer::join_all(written.into_iter().flatten()))
    }

    /// Gives back which of the buffers are the guest's.
    async fn write_host(&self, write: HostWrite) -> Result<Vec<Buffer>> {
        let (buffers, owners): (Buffers, Vec<Owner>) = write.buffers.into_iter().unzip();
        self.tell(Event::WriteAio).await;
        let file = self.file(write.file)?;
        let written = file.write(write.offset_bytes, buffers, WriteFlags::default());
        let written = written.await?.into_iter().zip(owners);
        let own = written.filter(|(_, owner)| *owner == Owner::Guest);
        Ok(own.map(|(buffer, _)| buffer).collect())
    }

    async fn write_rest(&self, rest: Rest) -> Result<()> {
        let file = self.file(rest.file)?;
        let Some(guest_bytes) = rest.guest_bytes else {
            let flags = ZeroFlags::default();
            return file
                .write_zeroes(rest.offset_bytes, rest.len_bytes, flags)
                .await;
        };
        let buffer = Buffer::for_read(rest.len_bytes as usize);
        let buffer = self.read(guest_bytes, buffer).await?;
        let written = file.write(
            rest.offset_bytes,
            Buffers::from_buf([buffer]),
            WriteFlags::default(),
        );
        written.await.map(drop)
    }
}
