//! Where blocks lie: a map in memory, and the next place for a block.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};

use super::header::{ALLOCATED_AT, BLOCK_BYTES, HEADER_BYTES, Header, UNALLOCATED, allocated};
use crate::device::MappedDevice;
use crate::entries::{ChangedEntries, Endian, Entries};
use crate::fields::{barrier, read_at, write_at};
use crate::layout::{Layout, NewBlock, Place, Run};

/// A VDI image for [`MappedDevice`].
#[derive(Debug)]
pub struct VdiLayout {
    file: [Arc<dyn Storage>; 1],
    header: Header,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    map: Entries,
    /// Blocks that have a place: the next one gets this number.
    end: u32,
    /// Places below the end that no entry leads to.
    free: BTreeSet<u32>,
    /// The count on disk.
    counted: u32,
}

/// What a flush writes.
#[derive(Debug)]
pub struct VdiChanges {
    /// The count of allocated blocks, where it has changed.
    count: Option<u32>,
    map: ChangedEntries,
}

/// Opens an image.
///
/// # Errors
/// As [`Header::decode`]; what the storage says.
pub async fn open(file: Arc<dyn Storage>, read_only: bool) -> Result<Arc<MappedDevice<VdiLayout>>> {
    let target = |error: Error| error.target(file.name());
    let (header, map) = read(&*file).await.map_err(target)?;
    let (end, free) = places(&map, header.allocated_blocks);
    let layout = VdiLayout {
        state: Mutex::new(State {
            map,
            end,
            free,
            counted: header.allocated_blocks,
        }),
        header,
        file: [file.clone()],
    };
    Ok(MappedDevice::new(layout, None, read_only))
}

/// Reads the header and the map of an image.
pub(super) async fn read(file: &dyn Storage) -> Result<(Header, Entries)> {
    let header = Header::decode(&read_at(file, 0, HEADER_BYTES).await?)?;
    // A map has to be there to be read into memory.
    let map_end = header.map_bytes + u64::from(header.blocks) * 4;
    if map_end > file.len_bytes()?.next_multiple_of(512) {
        let message = "the block map is cut off";
        return Err(Error::new(ErrorKind::InvalidImage, "open", message).at(header.map_bytes));
    }
    let count = header.blocks as usize;
    let map = Entries::read(file, header.map_bytes, count, Endian::Little).await?;
    Ok((header, map))
}

/// Behind which place all blocks are, and which places before it are free. An entry that leads beyond the
/// image does not count: nothing is read or written there.
fn places(map: &Entries, counted: u32) -> (u32, BTreeSet<u32>) {
    let blocks = map.values().len() as u32;
    let used = map.values().iter();
    let used = used.filter_map(|&entry| allocated(entry).filter(|&place| place < blocks));
    let end = used.clone().max().map_or(0, |last| last + 1);
    let end = end.max(counted.min(blocks));
    let mut is_used = vec![false; end as usize];
    for place in used {
        if let Some(is_used) = is_used.get_mut(place as usize) {
            *is_used = true;
        }
    }
    let free = (0..end).zip(&is_used);
    (
        end,
        free.filter(|(_, is_used)| !**is_used)
            .map(|(place, _)| place)
            .collect(),
    )
}

impl VdiLayout {
    fn host_bytes(&self, place: u32) -> u64 {
        self.header.data_bytes + u64::from(place) * BLOCK_BYTES
    }

    fn index(offset_bytes: u64) -> usize {
        (offset_bytes / BLOCK_BYTES) as usize
    }
}

impl Layout for VdiLayout {
    type Changes = VdiChanges;

    fn format(&self) -> &'static str {
        "vdi"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.file
    }

    fn size_bytes(&self) -> u64 {
        self.header.size_bytes
    }

    fn block_bytes(&self) -> u64 {
        BLOCK_BYTES
    }

    fn has_backing_files(&self) -> bool {
        false
    }

    fn is_preallocated(&self) -> bool {
        self.header.is_static
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let state = self.state.lock();
        let in_block = offset_bytes % BLOCK_BYTES;
        let index = Self::index(offset_bytes);
        let first = state.map.get(index).unwrap_or(UNALLOCATED);
        if allocated(first).is_some_and(|place| place >= self.header.blocks) {
            let message = "an entry of the block map leads beyond the image";
            return Err(Error::new(ErrorKind::Corrupt, "read", message).at(offset_bytes));
        }
        let mut run_bytes = BLOCK_BYTES - in_block;
        let rest = state.map.values().get(index + 1..).unwrap_or_default();
        let next_place = |blocks: u32| allocated(first).and_then(|place| place.checked_add(blocks));
        for (blocks, &entry) in (1..).zip(rest) {
            let goes_on = match allocated(first) {
                Some(_) => allocated(entry).is_some() && allocated(entry) == next_place(blocks),
                None => allocated(entry).is_none(),
            };
            if run_bytes >= len_bytes || !goes_on {
                break;
            }
            run_bytes += BLOCK_BYTES;
        }
        let place = match allocated(first) {
            Some(place) => Place::Data {
                file: 0,
                offset_bytes: self.host_bytes(place) + in_block,
            },
            None => Place::Absent,
        };
        Ok(Some(Run {
            len_bytes: run_bytes.min(len_bytes),
            place,
        }))
    }

    async fn allocate(&self, _offset_bytes: u64) -> Result<NewBlock> {
        let mut state = self.state.lock();
        let (place, is_fresh) = match state.free.pop_first() {
            Some(place) => (place, false),
            None => {
                let place = state.end;
                if place >= self.header.blocks {
                    let message = "the block map leads to more blocks than there are";
                    return Err(Error::new(ErrorKind::Corrupt, "write", message));
                }
                state.end += 1;
                (place, true)
            }
        };
        let offset_bytes = self.host_bytes(place);
        // Behind the file's end nothing was ever written.
        let is_beyond = self.file[0].len_bytes()? <= offset_bytes;
        Ok(NewBlock {
            file: 0,
            offset_bytes,
            reads_as_zeroes: is_fresh && is_beyond && self.file[0].capabilities().has_zero_init,
        })
    }

    fn link(&self, offset_bytes: u64, block: NewBlock) -> Result<()> {
        let place = (block.offset_bytes - self.header.data_bytes) / BLOCK_BYTES;
        self.state
            .lock()
            .map
            .set(Self::index(offset_bytes), place as u32);
        Ok(())
    }

    fn give_back(&self, _offset_bytes: u64, block: NewBlock) {
        let place = (block.offset_bytes - self.header.data_bytes) / BLOCK_BYTES;
        let mut state = self.state.lock();
        state.free.insert(place as u32);
        // So that the header counts what there is.
        while let Some(last) = state.end.checked_sub(1)
            && state.free.remove(&last)
        {
            state.end = last;
        }
    }

    fn take_changes(&self) -> Option<VdiChanges> {
        let mut state = self.state.lock();
        let count = (state.end != state.counted).then_some(state.end);
        if count.is_none() && !state.map.has_changed() {
            return None;
        }
        state.counted = state.end;
        Some(VdiChanges {
            count,
            map: state.map.take_changed(),
        })
    }

    fn changed_bytes(&self) -> u64 {
        self.state.lock().map.changed_bytes()
    }

    async fn write_changes(&self, changes: &VdiChanges) -> Result<()> {
        let [file] = &self.file;
        if let Some(count) = changes.count {
            write_at(&**file, ALLOCATED_AT as u64, &count.to_le_bytes()).await?;
            // Whoever opens the image next puts a block where the count says.
            barrier(&**file).await?;
        }
        changes.map.write(&**file).await
    }

    async fn end_changes(&self) -> Result<()> {
        // The last block may have been written in part.
        let end_bytes = self.host_bytes(self.state.lock().end);
        let [file] = &self.file;
        match file.len_bytes()? < end_bytes && file.capabilities().growable {
            true => file.truncate(end_bytes).await,
            false => Ok(()),
        }
    }
}
