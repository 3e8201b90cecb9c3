//! [`ParallelsLayout`]: where the clusters of a Parallels image lie.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use super::Header;
use super::header::{
    ENTRIES_AT, HEADER_BYTES, IN_USE, IN_USE_AT, MOST_ENTRIES, SECTOR_BYTES, first_data_sector,
};
use crate::clusters::Clusters;
use crate::facts::StoredBitmap;
use crate::fields::{barrier, read_at, write_at};
use crate::paged::{PagedTables, Patches, Width};
use crate::places::FreePlaces;
use crate::{Layout, NewBlock, Place, Run};

/// The table is kept in memory up to this size.
const BUDGET_BYTES: u64 = 16 << 20;
/// The table is read in pieces of this size.
pub(super) const PIECE_BYTES: u64 = 1 << 20;

/// Which clusters of the file are in use, for whoever writes.
#[derive(Debug, Default)]
pub(super) struct Used {
    clusters: Clusters,
    /// How many clusters there are up to the last one in use.
    count: u64,
    /// Where to look for a cluster that is not in use: all before it are.
    cursor: u64,
    /// Clusters that were taken and are not in use.
    free: FreePlaces,
    /// Entries lead out of the file, or two to one place.
    pub(super) is_damaged: bool,
}

impl Used {
    /// Looks through the table.
    pub(super) async fn read(file: &dyn Storage, header: &Header) -> Result<Used> {
        let end_bytes = file.len_bytes()?.next_multiple_of(SECTOR_BYTES);
        let mut used = Used::default();
        let table_bytes = header.table_bytes(file.len_bytes()?);
        let mut is_aligned = true;
        let mut at = 0;
        while at < table_bytes {
            let len = PIECE_BYTES.min(table_bytes - at);
            let bytes = read_at(file, HEADER_BYTES as u64 + at, len as usize).await?;
            for entry in Width::Le32.decode(&bytes) {
                let offset = header.offset_bytes(entry);
                let cluster = header.cluster_at(offset);
                if entry == 0 {
                    continue;
                }
                if !header.is_place(offset, end_bytes) || !used.clusters.insert(cluster) {
                    used.is_damaged = true;
                    continue;
                }
                let from_data = offset - header.data_bytes();
                let end = (from_data + header.cluster_bytes()).div_ceil(header.cluster_bytes());
                used.count = used.count.max(end);
                is_aligned &= from_data.is_multiple_of(header.cluster_bytes());
            }
            at += len;
        }
        if !is_aligned {
            // Clusters reach into what seem to be others.
            used.cursor = used.count;
        }
        if header.extension_sectors != 0 {
            // What is not in the table may be the extension's.
            let clusters = end_bytes.saturating_sub(header.data_bytes());
            used.count = clusters.div_ceil(header.cluster_bytes());
            used.cursor = used.count;
        }
        Ok(used)
    }

    /// Takes a cluster that nothing leads to since the image was opened, and whether nobody took it before.
    fn take(&mut self) -> (u64, bool) {
        if let Some(cluster) = self.free.take() {
            return (cluster, false);
        }
        while self.cursor < self.count && self.clusters.contains(self.cursor) {
            self.cursor += 1;
        }
        let cluster = self.cursor;
        self.clusters.insert(cluster);
        self.cursor += 1;
        self.count = self.count.max(self.cursor);
        (cluster, true)
    }
}

/// Where the clusters of an image lie.
#[derive(Debug)]
pub struct ParallelsLayout {
    files: [Arc<dyn Storage>; 1],
    table: PagedTables,
    state: Mutex<State>,
    bitmaps: Vec<StoredBitmap>,
    cluster_bytes: u64,
    /// Behind it nothing was ever written.
    len_bytes: u64,
}

#[derive(Debug)]
struct State {
    header: Header,
    /// `None` for an image that is only read.
    used: Option<Used>,
    /// Where clusters may end, in bytes of the file.
    end_bytes: u64,
    /// Clusters were given back, maybe the last ones.
    has_freed: bool,
}

/// Entries that a flush writes.
#[derive(Debug)]
pub struct ParallelsChanges(Patches);

impl ParallelsLayout {
    pub(super) fn new(
        file: Arc<dyn Storage>,
        header: Header,
        used: Option<Used>,
    ) -> Result<ParallelsLayout> {
        let len_bytes = file.len_bytes()?.next_multiple_of(SECTOR_BYTES);
        Ok(ParallelsLayout {
            table: PagedTables::new(file.clone(), Width::Le32, BUDGET_BYTES),
            files: [file],
            state: Mutex::new(State {
                header,
                used,
                end_bytes: len_bytes,
                has_freed: false,
            }),
            bitmaps: Vec::new(),
            cluster_bytes: header.cluster_bytes(),
            len_bytes,
        })
    }

    /// The layout of an image that has dirty bitmaps.
    pub(super) fn with_bitmaps(self, bitmaps: Vec<StoredBitmap>) -> ParallelsLayout {
        ParallelsLayout { bitmaps, ..self }
    }

    fn header(&self) -> Header {
        self.state.lock().header
    }

    /// Takes the place of a cluster away; `false` if it has none.
    async fn unmap(&self, offset_bytes: u64) -> Result<bool> {
        let header = self.header();
        let index = offset_bytes / self.cluster_bytes;
        let host = header.offset_bytes(self.table.fetch(header.table(), index).await?);
        if !header.is_place(host, self.state.lock().end_bytes) {
            return Ok(false);
        }
        self.table.set(header.table(), index, 0);
        self.state.lock().has_freed = true;
        // Until the entry is durable it leads to zeroes, which is what it says afterwards.
        let flags = ZeroFlags {
            may_unmap: true,
            ..ZeroFlags::default()
        };
        let [file] = &self.files;
        file.write_zeroes(host, self.cluster_bytes, flags).await?;
        Ok(true)
    }

    async fn set_in_use(&self, value: u32) -> Result<()> {
        let [file] = &self.files;
        write_at(&**file, IN_USE_AT, &value.to_le_bytes()).await?;
        barrier(&**file).await
    }
}

impl Layout for ParallelsLayout {
    type Changes = ParallelsChanges;

    fn format(&self) -> &'static str {
        "parallels"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    fn facts(&self) -> crate::Facts {
        crate::Facts {
            is_dirty: self.header().is_in_use,
            bitmaps: self.bitmaps.clone(),
            ..crate::Facts::default()
        }
    }

    fn size_bytes(&self) -> u64 {
        self.header().size_bytes
    }

    fn block_bytes(&self) -> u64 {
        self.cluster_bytes
    }

    fn cluster_size_bytes(&self) -> Option<u64> {
        // As QEMU, which tells none of this format.
        None
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let state = self.state.lock();
        let header = &state.header;
        let in_cluster = offset_bytes % self.cluster_bytes;
        let index = offset_bytes / self.cluster_bytes;
        let mut first = None;
        let mut run_bytes = 0;
        self.table.visit(header.table(), index, |entry| {
            let host = header.offset_bytes(entry);
            // An entry that leads out of the file is as none at all, as in QEMU.
            let here = header.is_place(host, state.end_bytes).then_some(host);
            let wanted = first.map_or(here, |first: Option<u64>| {
                first.map(|host| host + run_bytes)
            });
            if here != wanted {
                return false;
            }
            first.get_or_insert(here);
            run_bytes += self.cluster_bytes;
            run_bytes - in_cluster < len_bytes
        });
        Ok(first.map(|first| Run {
            len_bytes: (run_bytes - in_cluster).min(len_bytes),
            place: match first {
                Some(host) => Place::Data {
                    file: 0,
                    offset_bytes: host + in_cluster,
                },
                None => Place::Absent,
            },
        }))
    }

    async fn load(&self, offset_bytes: u64) -> Result<()> {
        let index = offset_bytes / self.cluster_bytes;
        self.table.load(self.header().table(), index).await
    }

    async fn begin_changes(&self) -> Result<()> {
        self.set_in_use(IN_USE).await
    }

    async fn allocate(&self, _offset_bytes: u64) -> Result<NewBlock> {
        let mut state = self.state.lock();
        let State { header, used, .. } = &mut *state;
        let message = "the image has no place for another cluster";
        let full = || Error::new(ErrorKind::NoSpace, "write", message);
        let (cluster, is_new) = used.as_mut().ok_or_else(full)?.take();
        let host = header.cluster_offset_bytes(cluster);
        if header.entry(host).is_none() {
            return Err(full());
        }
        state.end_bytes = state.end_bytes.max(host.saturating_add(self.cluster_bytes));
        let has_zero_init = self.files[0].capabilities().has_zero_init;
        Ok(NewBlock {
            file: 0,
            offset_bytes: host,
            reads_as_zeroes: has_zero_init && is_new && host >= self.len_bytes,
        })
    }

    fn give_back(&self, _offset_bytes: u64, block: NewBlock) {
        let mut state = self.state.lock();
        let cluster = state.header.cluster_at(block.offset_bytes);
        if let Some(used) = &mut state.used {
            used.free.give_back(cluster);
        }
        state.has_freed = true;
    }

    fn link(&self, offset_bytes: u64, block: NewBlock) -> Result<()> {
        let header = self.header();
        let entry = header.entry(block.offset_bytes).unwrap_or(0);
        let index = offset_bytes / self.cluster_bytes;
        self.table.set(header.table(), index, entry.into());
        Ok(())
    }

    async fn zero(&self, offset_bytes: u64, _shows_backing: bool, _unmap: bool) -> Result<bool> {
        // As in QEMU: the format has no other way to say it.
        self.unmap(offset_bytes).await
    }

    fn can_discard(&self) -> bool {
        true
    }

    async fn discard(&self, offset_bytes: u64, _shows_backing: bool) -> Result<bool> {
        self.unmap(offset_bytes).await
    }

    fn take_changes(&self) -> Option<ParallelsChanges> {
        self.table.take().map(ParallelsChanges)
    }

    fn changed_bytes(&self) -> u64 {
        self.table.changed_bytes()
    }

    async fn write_changes(&self, changes: &ParallelsChanges) -> Result<()> {
        self.table.write(&changes.0).await
    }

    async fn end_changes(&self) -> Result<()> {
        let [file] = &self.files;
        let (header, mut end_bytes, has_freed) = {
            let state = self.state.lock();
            (state.header, state.end_bytes, state.has_freed)
        };
        if has_freed {
            let used = Used::read(&**file, &header).await?;
            end_bytes = header.cluster_offset_bytes(used.count).min(end_bytes);
        }
        // The last cluster may have been written in part, or is not there any more.
        let len_bytes = file.len_bytes()?;
        let has_end = len_bytes == end_bytes || len_bytes > end_bytes && !has_freed;
        if file.capabilities().growable && !has_end {
            file.truncate(end_bytes).await?;
            barrier(&**file).await?;
        }
        self.set_in_use(0).await
    }

    fn can_resize(&self) -> bool {
        true
    }

    async fn resize(&self, size_bytes: u64) -> Result<()> {
        let refused = |message| Err(Error::new(ErrorKind::Unsupported, "resize", message));
        let old = self.header();
        if size_bytes < old.size_bytes {
            return refused("Shrinking images is currently not supported");
        }
        let sectors = size_bytes / SECTOR_BYTES;
        let entries = u32::try_from(size_bytes.div_ceil(self.cluster_bytes));
        let entries = entries.ok().filter(|&entries| entries <= MOST_ENTRIES);
        let Some(entries) = entries.filter(|_| !old.is_old || u32::try_from(sectors).is_ok())
        else {
            return refused("Image size is too large for this cluster size");
        };
        let entries = entries.max(old.entries);
        let least = first_data_sector(entries, old.cluster_sectors, old.is_old);
        if least > old.data_sectors.into() {
            return refused("the block allocation table has no room for more clusters");
        }
        let [file] = &self.files;
        let table_end = |entries: u32| HEADER_BYTES as u64 + 4 * u64::from(entries);
        let (start, end) = (table_end(old.entries), table_end(entries));
        let zeroes = file.write_zeroes(start, end - start, ZeroFlags::default());
        zeroes.await?;
        barrier(&**file).await?;
        let mut fields = entries.to_le_bytes().to_vec();
        fields.extend(sectors.to_le_bytes());
        fields.extend(IN_USE.to_le_bytes());
        fields.extend(old.data_sectors.to_le_bytes());
        write_at(&**file, ENTRIES_AT, &fields).await?;
        barrier(&**file).await?;
        let header = &mut self.state.lock().header;
        header.entries = entries;
        header.size_bytes = size_bytes;
        Ok(())
    }
}
