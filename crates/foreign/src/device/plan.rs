//! What a write does to the files: a plan, and its execution.

use vellum::{Buffer, Buffers, Io, Result, Storage};
use vellum_io::finish_all;
use vellum_storage::{Event, WriteFlags, ZeroFlags};

use super::core::Core;
use crate::layout::{Layout, NewBlock, Place};

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

/// Where bytes of the guest lie in the image's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Spot {
    pub(super) file: usize,
    pub(super) host_bytes: u64,
    pub(super) guest_bytes: u64,
}

impl Spot {
    /// Where the guest's byte at an offset lies, if its place is one of data.
    pub(super) fn of(place: Place, guest_bytes: u64) -> Option<Spot> {
        let Place::Data { file, offset_bytes } = place else {
            return None;
        };
        Some(Spot {
            file,
            host_bytes: offset_bytes,
            guest_bytes,
        })
    }

    /// Where the guest's byte at an offset lies in a new block, whose first byte is at `block_bytes`.
    pub(super) fn in_new(new: &NewBlock, block_bytes: u64, guest_bytes: u64) -> Spot {
        Spot {
            file: new.file,
            host_bytes: new.offset_bytes + (guest_bytes - block_bytes),
            guest_bytes,
        }
    }

    /// So many bytes further on in the same run.
    pub(super) fn plus(self, bytes: u64) -> Spot {
        Spot {
            host_bytes: self.host_bytes + bytes,
            guest_bytes: self.guest_bytes + bytes,
            ..self
        }
    }
}

/// What goes to one place of one file.
#[derive(Debug)]
struct HostWrite {
    spot: Spot,
    len_bytes: u64,
    buffers: Vec<(Buffer, Owner)>,
}

/// The rest of a large block: from the guest's view, or zeroes.
#[derive(Debug)]
struct Rest {
    spot: Spot,
    len_bytes: u64,
    is_copied: bool,
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
    pub(super) fn add(&mut self, spot: Spot, buffer: Buffer, owner: Owner) {
        let len_bytes = buffer.len() as u64;
        if len_bytes == 0 {
            return;
        }
        match self.writes.last_mut() {
            Some(last) if last.spot.plus(last.len_bytes) == spot => {
                last.buffers.push((buffer, owner));
                last.len_bytes += len_bytes;
            }
            _ => self.writes.push(HostWrite {
                spot,
                len_bytes,
                buffers: vec![(buffer, owner)],
            }),
        }
    }

    /// Adds what is copied from where the guest sees it now.
    pub(super) fn copy(&mut self, mut spot: Spot, len_bytes: u64) {
        let end = spot.guest_bytes + len_bytes;
        while spot.guest_bytes < end {
            let len_bytes = COPY_BYTES.min(end - spot.guest_bytes);
            self.rests.push(Rest {
                spot,
                len_bytes,
                is_copied: true,
            });
            spot = spot.plus(len_bytes);
        }
    }

    pub(super) fn zero(&mut self, spot: Spot, len_bytes: u64) {
        if len_bytes > 0 {
            self.rests.push(Rest {
                spot,
                len_bytes,
                is_copied: false,
            });
        }
    }
}

impl<L: Layout> Core<L> {
    /// Makes a request of the guest's bytes at a place; see [`GuestEncryption::at`].
    ///
    /// [`GuestEncryption::at`]: vellum::luks::GuestEncryption::at
    pub(super) fn request<T>(
        &self,
        spot: Spot,
        request: impl FnOnce(&dyn Storage, u64) -> Io<T>,
    ) -> Io<T> {
        let made = self.file(spot.file).and_then(|file| {
            let encryption = self.layout.encryption();
            encryption.at(&**file, spot.guest_bytes, spot.host_bytes, request)
        });
        made.unwrap_or_else(|error| Io::ready(Err(error)))
    }

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
        let written = self.request(write.spot, |file, at| {
            file.write(at, buffers, WriteFlags::default())
        });
        let written = written.await?.into_iter().zip(owners);
        let own = written.filter(|(_, owner)| *owner == Owner::Guest);
        Ok(own.map(|(buffer, _)| buffer).collect())
    }

    async fn write_rest(&self, rest: Rest) -> Result<()> {
        if !rest.is_copied {
            let zeroed = self.request(rest.spot, |file, at| {
                file.write_zeroes(at, rest.len_bytes, ZeroFlags::default())
            });
            return zeroed.await;
        }
        let buffer = Buffer::for_read(rest.len_bytes as usize);
        let buffer = self.read(rest.spot.guest_bytes, buffer).await?;
        let written = self.request(rest.spot, |file, at| {
            file.write(at, Buffers::from_buf([buffer]), WriteFlags::default())
        });
        written.await.map(drop)
    }
}
