//! [`Writer`]: who changes headers and writes through the log.
//!
//! ```text
//!   begin    headers: new identities of the file and of what the guest sees
//!   write    log entry -> barrier -> (the first: headers with the log's identity) -> in place
//!   end      headers: no log
//! ```
//!
//! Each entry is a sequence of its own: what the ones before it told is in place, durably, before it is written.
//! When the log's end is reached, entries go on at its beginning under a new identity, as QEMU replays what
//! it finds behind an entry without a look at its number. The last entry that counts is never
//! written over: an entry takes no more than a third of the log.

use std::sync::Arc;

use vellum::{Error, ErrorKind, Result, Storage};
use vellum_io::finish_all;

use super::guid::Guid;
use super::header::{self, Header};
use super::log::{self, EntryHeader, SECTOR_BYTES};
use crate::fields;

/// Sectors of an entry at most, whatever the log has room for.
const MAX_ENTRY_SECTORS: usize = 1024;
const WRITES_AT_ONCE: usize = 16;
const MIB: u64 = 1 << 20;

/// Sectors of tables as they are to be, and where.
pub(super) type Pages = Vec<(u64, Vec<u8>)>;

/// See the module's head.
#[derive(Debug)]
pub(super) struct Writer {
    file: Arc<dyn Storage>,
    header: Header,
    /// In which slot the header lies that counts.
    slot: usize,
    /// Where the next entry goes, in bytes of the log, if the log is in use.
    next_bytes: Option<u64>,
    /// The number of the entry that was written last.
    sequence: u64,
    /// The log of the last entry, if the headers may not name it yet. They have to before another entry is
    /// written: a header that was not written whole may count for all that.
    uncounted: Option<Guid>,
}

impl Writer {
    pub(super) fn new(file: Arc<dyn Storage>, slot: usize, header: Header) -> Writer {
        Writer {
            file,
            header,
            slot,
            next_bytes: None,
            sequence: 0,
            uncounted: None,
        }
    }

    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Before the first change of an image: whoever knows it by an identity has to see a new one, unless images
    /// on top are to go on knowing this one.
    pub(super) async fn begin(&mut self, keeps_identity: bool) -> Result<()> {
        // Before anything is promised: tables are changed by way of the log.
        self.pages_per_entry()?;
        if !self.header.log_len_bytes.is_multiple_of(1 << 20) {
            let message = "the log of the VHDX image has a length that it cannot have";
            return Err(
                Error::new(ErrorKind::Unsupported, "write", message).target(self.file.name())
            );
        }
        let (file_write, data_write) = (Guid::random()?, Guid::random()?);
        self.update_headers(|header| {
            header.file_write = file_write;
            if !keeps_identity {
                header.data_write = data_write;
            }
            header.log = Guid::NIL;
        })
        .await
    }

    /// Gives the image another identity for those on top. Pages that were written are durable in place.
    pub(super) async fn change_identity(&mut self) -> Result<()> {
        let data_write = Guid::random()?;
        self.update_headers(|header| header.data_write = data_write)
            .await
    }

    /// After the last change, when everything is in place durably.
    pub(super) async fn end(&mut self) -> Result<()> {
        self.next_bytes = None;
        match self.header.log.is_nil() {
            true => Ok(()),
            false => self.update_headers(|header| header.log = Guid::NIL).await,
        }
    }

    /// After the log was replayed.
    pub(super) async fn forget_log(&mut self) -> Result<()> {
        let file_write = Guid::random()?;
        self.update_headers(|header| {
            header.file_write = file_write;
            header.log = Guid::NIL;
        })
        .await
    }

    /// Writes both headers, one after the other: the one that does not count first.
    async fn update_headers(&mut self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let mut changed = self.header.clone();
        change(&mut changed);
        for _ in 0..2 {
            let next = self.header.sequence.checked_add(1);
            changed.sequence = next.ok_or_else(|| {
                let message = "the VHDX headers have no more numbers";
                Error::new(ErrorKind::Corrupt, "write", message).target(self.file.name())
            })?;
            let slot = 1 - self.slot.min(1);
            let offset_bytes = header::OFFSETS_BYTES[slot];
            fields::write_at(&*self.file, offset_bytes, &changed.encode()).await?;
            fields::barrier(&*self.file).await?;
            self.slot = slot;
            self.header = changed.clone();
        }
        Ok(())
    }

    /// Writes pages by way of the log. Those of the call before are durable in place.
    /// `flushed_file_bytes`: the file is so long, durably.
    ///
    /// If there was no room, the same pages may be written once more. An entry that counts then, with some of its
    /// pages not in place, gives way to another one: all these pages lead to durable data.
    pub(super) async fn write(
        &mut self,
        pages: &[(u64, Vec<u8>)],
        flushed_file_bytes: u64,
    ) -> Result<()> {
        let per_entry = self.pages_per_entry()?;
        let count = pages.len().div_ceil(per_entry);
        for (index, some) in pages.chunks(per_entry).enumerate() {
            self.write_entry(some, flushed_file_bytes).await?;
            let writes = some
                .iter()
                .map(|(at_bytes, page)| fields::write_at(&*self.file, *at_bytes, page));
            finish_all(WRITES_AT_ONCE, writes).await?;
            if index + 1 < count {
                fields::barrier(&*self.file).await?;
            }
        }
        Ok(())
    }

    fn pages_per_entry(&self) -> Result<usize> {
        let sectors = self.header.log_len_bytes as usize / SECTOR_BYTES / 3;
        let sectors = sectors.min(MAX_ENTRY_SECTORS);
        let pages = sectors.saturating_sub(log::descriptor_sectors(sectors));
        match pages {
            0 => {
                let message = "the VHDX image has no log to write through";
                Err(Error::new(ErrorKind::Unsupported, "write", message).target(self.file.name()))
            }
            _ => Ok(pages),
        }
    }

    /// Makes an entry durable, and has the headers say that it counts.
    async fn write_entry(
        &mut self,
        pages: &[(u64, Vec<u8>)],
        flushed_file_bytes: u64,
    ) -> Result<()> {
        self.count_entry().await?;
        let sectors = log::descriptor_sectors(pages.len()) + pages.len();
        let len_bytes = (sectors * SECTOR_BYTES) as u64;
        let room = self
            .next_bytes
            .filter(|at| at + len_bytes <= u64::from(self.header.log_len_bytes));
        let (at_bytes, log) = match room {
            Some(at_bytes) => (at_bytes, self.header.log),
            None => (0, Guid::random()?),
        };
        let sequence = self.sequence + 1;
        let header = EntryHeader {
            len_bytes: 0,
            tail_bytes: at_bytes as u32,
            sequence,
            descriptors: 0,
            log,
            flushed_file_bytes: flushed_file_bytes / MIB * MIB,
            last_file_bytes: self.file.len_bytes()?.next_multiple_of(MIB),
        };
        let place = self.header.log_offset_bytes + at_bytes;
        fields::write_at(&*self.file, place, &log::encode(header, pages)).await?;
        fields::barrier(&*self.file).await?;
        self.sequence = sequence;
        self.next_bytes = Some(at_bytes + len_bytes);
        self.uncounted = room.is_none().then_some(log);
        self.count_entry().await
    }

    /// Has the headers say that the first entry of a log counts, which is durable.
    async fn count_entry(&mut self) -> Result<()> {
        if let Some(log) = self.uncounted {
            self.update_headers(|header| header.log = log).await?;
            self.uncounted = None;
        }
        Ok(())
    }
}
