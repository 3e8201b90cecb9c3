//! [`VmdkLayout`]: where the guest's bytes lie in a VMDK image.
//!
//! Invariants:
//! - New grains and compressed ones lie behind everything that the file had when it was opened.
//! - Of an extent's two sets of tables both are written; reads trust the first one.
//! - A compressed grain that has a place keeps it: streams cannot be changed, only continued.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_io::finish_all;

use super::descriptor::{Descriptor, EMBEDDED_BYTES};
use super::extent::Extent;
use super::header::SECTOR_BYTES;
use super::info;
use super::sesparse::Grain;
use super::sparse::Sparse;
use super::tables::{Key, Tables};
use crate::facts::Facts;
use crate::fields::{barrier, write_at};
use crate::layout::{Layout, NewBlock, Place, Run};

/// The unit of a device that is flat everywhere.
const FLAT_BLOCK_BYTES: u64 = 65536;

/// Larger grains can be read, and not written.
const MAX_WRITABLE_GRAIN_BYTES: u64 = 64 << 20;

/// Writes of tables that run side by side.
const WRITES_AT_ONCE: usize = 16;

/// Neighbouring tables are written together up to this size.
const MAX_WRITE_BYTES: usize = 1 << 20;

/// What is known of the parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Parent {
    None,
    Matches,
    /// It has changed since the image was made, or is no VMDK image.
    Differs,
}

/// A VMDK image for [`MappedDevice`](crate::MappedDevice).
#[derive(Debug)]
pub struct VmdkLayout {
    files: Vec<Arc<dyn Storage>>,
    pub(super) extents: Vec<Extent>,
    pub(super) tables: Tables,
    descriptor: Mutex<Descriptor>,
    parent: Parent,
    size_bytes: u64,
    block_bytes: u64,
    /// Why the image cannot be changed.
    unchangeable: Option<&'static str>,
    keeps_identity: AtomicBool,
}

/// Tables that are to be written.
#[derive(Debug)]
pub struct VmdkChanges {
    keys: Vec<Key>,
    /// File, offset, bytes.
    writes: Vec<(usize, u64, Vec<u8>)>,
}

fn corrupt(message: &'static str, offset_bytes: u64) -> Error {
    Error::new(ErrorKind::Corrupt, "write", message).at(offset_bytes)
}

/// In QEMU's words.
fn already_allocated(offset_bytes: u64) -> Error {
    let message = "Could not write to allocated cluster for streamOptimized";
    Error::new(ErrorKind::Io, "write", message).at(offset_bytes)
}

impl VmdkLayout {
    pub(super) fn new(
        files: Vec<Arc<dyn Storage>>,
        descriptor: Descriptor,
        extents: Vec<Extent>,
        parent: Parent,
        tables_bytes: usize,
    ) -> Result<VmdkLayout> {
        let size_bytes = extents
            .last()
            .map_or(0, |last| last.start_bytes + last.len_bytes);
        let grains = extents.iter().filter_map(Extent::cluster_size_bytes);
        let block_bytes = grains.max().unwrap_or(FLAT_BLOCK_BYTES);
        let is_regular = extents.iter().all(|extent| {
            let end_bytes = extent.start_bytes + extent.len_bytes;
            extent.cluster_size_bytes().is_none_or(|grain_bytes| {
                grain_bytes == block_bytes
                    && extent.start_bytes.is_multiple_of(block_bytes)
                    && (end_bytes.is_multiple_of(block_bytes) || end_bytes == size_bytes)
            })
        });
        if !is_regular && extents.iter().any(Extent::is_compressed) {
            let message = "compressed extents do not begin at multiples of their grains";
            return Err(Error::new(ErrorKind::Unsupported, "open", message));
        }
        let read_only = extents.iter().find_map(|extent| extent.sparse()?.read_only);
        let has_grains = extents.iter().any(|extent| !extent.is_flat());
        let unchangeable = match read_only {
            Some(read_only) => Some(read_only.reason),
            None if !is_regular => Some("extents do not begin at multiples of their grains"),
            None if has_grains && block_bytes > MAX_WRITABLE_GRAIN_BYTES => {
                Some("grains are too large to be written")
            }
            None => None,
        };
        Ok(VmdkLayout {
            files,
            extents,
            tables: Tables::new(tables_bytes),
            descriptor: Mutex::new(descriptor),
            parent,
            size_bytes,
            block_bytes,
            unchangeable,
            keeps_identity: AtomicBool::new(false),
        })
    }

    /// The descriptor, as it is now.
    pub fn descriptor(&self) -> Descriptor {
        self.descriptor.lock().clone()
    }

    /// The extent that an offset is in, and its number.
    pub(super) fn extent_at(&self, offset_bytes: u64) -> Result<(u32, &Extent)> {
        let ends_before = |extent: &Extent| extent.start_bytes + extent.len_bytes <= offset_bytes;
        let number = self.extents.partition_point(ends_before);
        let extent = self.extents.get(number).ok_or_else(|| {
            let message = "no extent holds this place";
            Error::new(ErrorKind::OutOfRange, "read", message).at(offset_bytes)
        })?;
        Ok((u32::try_from(number).unwrap_or(u32::MAX), extent))
    }

    /// The sparse extent of a block that is to change, its table and its entry there.
    fn entry_of(&self, offset_bytes: u64) -> Result<(&Extent, &Sparse, Key, usize)> {
        let (number, extent) = self.extent_at(offset_bytes)?;
        let Some(sparse) = extent.sparse() else {
            return Err(corrupt("a flat extent has no entries", offset_bytes));
        };
        let (table, index) = sparse.indices(offset_bytes - extent.start_bytes);
        let key = Key {
            extent: number,
            table,
        };
        Ok((extent, sparse, key, index))
    }

    pub(super) fn storage(&self, file: usize) -> Result<&Arc<dyn Storage>> {
        let message = "the image has no such file";
        let file = self.files.get(file);
        file.ok_or_else(|| Error::new(ErrorKind::Corrupt, "open", message))
    }

    /// What the entry of a grain says, whose table is kept until it is unpinned.
    async fn pin_grain(&self, offset_bytes: u64) -> Result<Grain> {
        let (extent, sparse, key, index) = self.entry_of(offset_bytes)?;
        sparse.check_table(key.table, offset_bytes - extent.start_bytes)?;
        while !self.tables.pin(key) {
            self.load(offset_bytes).await?;
        }
        let grain = self.tables.read(key, |table| sparse.grain(table, index));
        grain.flatten().ok_or_else(|| {
            self.tables.unpin(key);
            corrupt("an entry of the grain tables leads nowhere", offset_bytes)
        })
    }

    /// Sets an entry whose table was pinned.
    fn set_pinned(&self, offset_bytes: u64, entry: u32) -> Result<()> {
        let (_, _, key, index) = self.entry_of(offset_bytes)?;
        let was_set = self.tables.set(key, index, entry);
        self.tables.unpin(key);
        match was_set {
            true => Ok(()),
            false => Err(corrupt("the grain table has gone", offset_bytes)),
        }
    }
}

impl Layout for VmdkLayout {
    type Changes = VmdkChanges;

    fn format(&self) -> &'static str {
        "vmdk"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    fn facts(&self) -> Facts {
        info::facts(&self.descriptor.lock(), &self.extents, &self.files)
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn block_bytes(&self) -> u64 {
        self.block_bytes
    }

    fn cluster_size_bytes(&self) -> Option<u64> {
        info::common_cluster_size_bytes(&self.extents)
    }

    fn has_zero_init(&self) -> bool {
        let mut flat = self.extents.iter().filter(|extent| extent.is_flat());
        flat.all(|extent| {
            let file = self.files.get(extent.file);
            file.is_some_and(|file| file.capabilities().has_zero_init)
        })
    }

    fn is_preallocated(&self) -> bool {
        self.extents.iter().any(Extent::is_flat)
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let (number, extent) = self.extent_at(offset_bytes)?;
        let run = extent.lookup(&self.tables, number, offset_bytes, len_bytes)?;
        if self.parent == Parent::Differs && run.is_some_and(|run| run.place == Place::Absent) {
            let message = "the parent has changed since the image was made: \
                its CID is not the image's parentCID";
            let error = Error::new(ErrorKind::InvalidArgument, "read", message);
            return Err(error.at(offset_bytes));
        }
        Ok(run)
    }

    async fn load(&self, offset_bytes: u64) -> Result<()> {
        let (number, extent) = self.extent_at(offset_bytes)?;
        extent
            .load(&self.files, &self.tables, number, offset_bytes)
            .await
    }

    async fn inflate(&self, offset_bytes: u64) -> Result<Vec<u8>> {
        let (extent, sparse, key, index) = self.entry_of(offset_bytes)?;
        let grain = loop {
            match self.tables.read(key, |table| sparse.grain(table, index)) {
                Some(grain) => break grain,
                None => self.load(offset_bytes).await?,
            }
        };
        let fail = |message| Error::new(ErrorKind::Corrupt, "read", message).at(offset_bytes);
        let Some(Grain::Sector(sector)) = grain else {
            return Err(fail("the block is not compressed"));
        };
        let file = self.storage(extent.file)?;
        let content = sparse.read_compressed(&**file, sector).await;
        let content = content.map_err(|error| error.at(offset_bytes))?;
        let end_bytes = extent.start_bytes + extent.len_bytes;
        let needed = (end_bytes - offset_bytes).min(sparse.geometry.grain_bytes());
        match (content.len() as u64) < needed {
            true => Err(fail("a compressed grain is too short")),
            false => Ok(content),
        }
    }

    async fn begin_changes(&self) -> Result<()> {
        if let Some(reason) = self.unchangeable {
            return Err(Error::new(ErrorKind::Unsupported, "write", reason));
        }
        for extent in &self.extents {
            if let Some(sparse) = extent.sparse() {
                sparse.find_end(&**self.storage(extent.file)?).await?;
            }
        }
        match self.keeps_identity.load(Ordering::Acquire) {
            true => Ok(()),
            false => self.change_identity().await,
        }
    }

    fn keep_identity(&self, keep: bool) -> bool {
        self.keeps_identity.swap(keep, Ordering::AcqRel)
    }

    async fn change_identity(&self) -> Result<()> {
        let random = getrandom::u32().map_err(|error| {
            let message = format!("no random number for the image's identity: {error}");
            Error::new(ErrorKind::Io, "write", message)
        })?;
        let old = self.descriptor();
        let (next, changed) = old.with_cid(random);
        let room = old.embedded_at().map_or(usize::MAX, |_| EMBEDDED_BYTES);
        let bytes = next.text().get(changed.clone()).unwrap_or_default();
        if next.text().len() > room {
            let message = "the descriptor has no room for a new CID";
            return Err(Error::new(ErrorKind::NoSpace, "write", message));
        }
        let file = self.storage(0)?;
        let at_bytes = old.embedded_at().unwrap_or(0) + changed.start as u64;
        write_at(&**file, at_bytes, bytes).await?;
        barrier(&**file).await?;
        *self.descriptor.lock() = next;
        Ok(())
    }

    async fn allocate(&self, offset_bytes: u64) -> Result<NewBlock> {
        let (extent, sparse, key, _) = self.entry_of(offset_bytes)?;
        if sparse.compressed {
            let message = "streamOptimized images take only compressed writes of whole clusters";
            return Err(Error::new(ErrorKind::InvalidArgument, "write", message).at(offset_bytes));
        }
        let file = self.storage(extent.file)?;
        self.pin_grain(offset_bytes).await?;
        let taken = sparse.take_grain(&**file);
        let (sector, reads_as_zeroes) = taken.inspect_err(|_| self.tables.unpin(key))?;
        Ok(NewBlock {
            file: extent.file,
            offset_bytes: sector * SECTOR_BYTES,
            reads_as_zeroes,
        })
    }

    fn link(&self, offset_bytes: u64, block: NewBlock) -> Result<()> {
        let sector = u32::try_from(block.offset_bytes / SECTOR_BYTES);
        let sector = sector.map_err(|_| corrupt("no entry leads there", offset_bytes))?;
        self.set_pinned(offset_bytes, sector)
    }

    fn give_back(&self, offset_bytes: u64, block: NewBlock) {
        if let Ok((_, sparse, key, _)) = self.entry_of(offset_bytes) {
            self.tables.unpin(key);
            sparse.give_back(block.offset_bytes / SECTOR_BYTES);
        }
    }

    async fn zero(
        &self,
        offset_bytes: u64,
        _shows_backing: bool,
        _may_unmap: bool,
    ) -> Result<bool> {
        let (_, extent) = self.extent_at(offset_bytes)?;
        let Some(sparse) = extent.sparse().filter(|sparse| sparse.has_zero_grains()) else {
            return Ok(false);
        };
        match self.pin_grain(offset_bytes).await? {
            Grain::Sector(_) if sparse.compressed => {
                let (_, _, key, _) = self.entry_of(offset_bytes)?;
                self.tables.unpin(key);
                Err(already_allocated(offset_bytes))
            }
            _ => self.set_pinned(offset_bytes, 1).map(|()| true),
        }
    }

    async fn write_compressed(&self, offset_bytes: u64, content: &[u8]) -> Result<Option<bool>> {
        let (_, extent) = self.extent_at(offset_bytes)?;
        let Some(sparse) = extent.sparse().filter(|sparse| sparse.compressed) else {
            // As QEMU: what cannot be compressed is stored as it is.
            return Ok(Some(false));
        };
        let (_, _, key, _) = self.entry_of(offset_bytes)?;
        if let Grain::Sector(_) = self.pin_grain(offset_bytes).await? {
            self.tables.unpin(key);
            return Err(already_allocated(offset_bytes));
        }
        let file = self.storage(extent.file)?;
        let appended = sparse.append_compressed(&**file, offset_bytes, content);
        let entry = appended.await.map_err(|error| {
            self.tables.unpin(key);
            error.at(offset_bytes)
        })?;
        self.set_pinned(offset_bytes, entry)?;
        Ok(Some(true))
    }

    fn never_compresses(&self) -> bool {
        !self.extents.iter().any(Extent::is_compressed)
    }

    fn compresses_writes(&self) -> bool {
        !self.extents.is_empty() && self.extents.iter().all(Extent::is_compressed)
    }

    fn take_changes(&self) -> Option<VmdkChanges> {
        let taken = self.tables.take();
        if taken.is_empty() {
            return None;
        }
        let mut pieces = Vec::new();
        for table in &taken {
            let extent = self.extents.get(table.key.extent as usize);
            let Some((extent, sparse)) = extent.and_then(|it| Some((it, it.sparse()?))) else {
                continue;
            };
            for copy_bytes in sparse.copies(table.key.table) {
                for (at, bytes) in &table.pieces {
                    pieces.push((extent.file, copy_bytes + *at as u64, bytes));
                }
            }
        }
        pieces.sort_unstable_by_key(|(file, at_bytes, _)| (*file, *at_bytes));
        let mut writes: Vec<(usize, u64, Vec<u8>)> = Vec::new();
        for (file, at_bytes, bytes) in pieces {
            match writes.last_mut() {
                Some((last_file, last_at, last))
                    if *last_file == file
                        && *last_at + last.len() as u64 == at_bytes
                        && last.len() < MAX_WRITE_BYTES =>
                {
                    last.extend_from_slice(bytes);
                }
                _ => writes.push((file, at_bytes, bytes.clone())),
            }
        }
        Some(VmdkChanges {
            keys: taken.iter().map(|table| table.key).collect(),
            writes,
        })
    }

    fn changed_bytes(&self) -> u64 {
        self.tables.changed_bytes() as u64
    }

    async fn write_changes(&self, changes: &VmdkChanges) -> Result<()> {
        let writes = changes.writes.iter().map(async |(file, at_bytes, bytes)| {
            write_at(&**self.storage(*file)?, *at_bytes, bytes).await
        });
        finish_all(WRITES_AT_ONCE, writes).await?;
        self.tables.written(&changes.keys);
        Ok(())
    }

    async fn end_changes(&self) -> Result<()> {
        for extent in &self.extents {
            if let Some(sparse) = extent.sparse() {
                let file = &**self.storage(extent.file)?;
                match sparse.compressed {
                    true => sparse.end_stream(file).await?,
                    false => sparse.cut(file).await?,
                }
            }
        }
        Ok(())
    }
}
