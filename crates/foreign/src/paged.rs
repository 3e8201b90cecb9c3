//! [`PagedTables`]: the mapping tables of one file, in pages that come and go under a budget.
//!
//! Formats whose tables may be large (as large as an image says) read single entries through it,
//! and change them in memory until the device takes what was changed.
//!
//! ```text
//!   get    page in memory? -> entry     (else the device has it loaded and asks again)
//!   set    patch, and the page if it is in memory
//!   take   patches -> runs of bytes, written by whoever took them
//! ```
//!
//! Invariants:
//! - A page in memory is what the file has with all patches put on it, so a page may be dropped
//!   at any time; patches are kept until they are in the file.
//! - A page that was read while patches were being written is read again: it may be older than both.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Result, Storage};
use vellum_io::finish_all;

use crate::fields::{array, read_at, write_at};

/// What is read of a table at once, at most.
const PAGE_BYTES: u64 = 32 << 10;
/// Runs of changed entries that are written side by side.
const WRITES_AT_ONCE: usize = 16;
/// What one changed entry takes in memory, about, with what the tree has around it.
const PATCH_BYTES: u64 = 64;

/// How an entry is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Width {
    Le32,
    Le64,
    Be64,
}

impl Width {
    const fn bytes(self) -> u64 {
        match self {
            Width::Le32 => 4,
            Width::Le64 | Width::Be64 => 8,
        }
    }

    pub(crate) fn decode(self, bytes: &[u8]) -> Vec<u64> {
        let entries = bytes.chunks_exact(self.bytes() as usize);
        entries.map(|entry| self.decode_one(entry)).collect()
    }

    fn decode_one(self, entry: &[u8]) -> u64 {
        let value = match self {
            Width::Le32 => array(entry, 0).map(|raw| u32::from_le_bytes(raw).into()),
            Width::Le64 => array(entry, 0).map(u64::from_le_bytes),
            Width::Be64 => array(entry, 0).map(u64::from_be_bytes),
        };
        value.unwrap_or(0)
    }

    fn encode(self, value: u64, into: &mut Vec<u8>) {
        match self {
            // Whoever sets an entry has seen to it that it fits.
            Width::Le32 => into.extend((value as u32).to_le_bytes()),
            Width::Le64 => into.extend(value.to_le_bytes()),
            Width::Be64 => into.extend(value.to_be_bytes()),
        }
    }
}

/// Where a table lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Table {
    /// In the file, in bytes.
    pub(crate) start_bytes: u64,
    /// How many entries it has.
    pub(crate) len: u64,
}

/// Runs of changed entries, as bytes.
#[derive(Debug)]
pub(crate) struct Patches(Vec<(u64, Vec<u8>)>);

/// The tables of a file.
#[derive(Debug)]
pub(crate) struct PagedTables {
    file: Arc<dyn Storage>,
    width: Width,
    most_pages: usize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct Page {
    entries: Vec<u64>,
    used: u64,
}

#[derive(Debug, Default)]
struct State {
    /// By the table and the page's number in it. So no entry lies in two pages, and tables that a damaged
    /// image has begin in one place have pages of their own lengths.
    pages: HashMap<(Table, u64), Page>,
    uses: u64,
    /// By the offset of the entry in the file.
    pending: BTreeMap<u64, u64>,
    /// Taken, and maybe not in the file yet.
    in_flight: BTreeMap<u64, u64>,
    /// How often patches were written.
    writes: u64,
}

impl PagedTables {
    /// Tables of a file, of which about so many bytes are kept in memory.
    pub(crate) fn new(file: Arc<dyn Storage>, width: Width, budget_bytes: u64) -> PagedTables {
        let entry_bytes = 8 * PAGE_BYTES / width.bytes();
        PagedTables {
            file,
            width,
            most_pages: (budget_bytes / entry_bytes).max(8) as usize,
            state: Mutex::default(),
        }
    }

    fn page_len(&self) -> u64 {
        PAGE_BYTES / self.width.bytes()
    }

    /// The offset of an entry in the file; wrong, but no worse, where a table does not fit in one.
    fn offset_bytes(&self, table: Table, index: u64) -> u64 {
        let from_start = index.saturating_mul(self.width.bytes());
        table.start_bytes.saturating_add(from_start)
    }

    /// An entry; `None` if it has to be loaded first. Beyond the table all entries are 0.
    pub(crate) fn get(&self, table: Table, index: u64) -> Option<u64> {
        let mut value = None;
        self.visit(table, index, |entry| {
            value = Some(entry);
            false
        });
        match index < table.len {
            true => value,
            false => Some(0),
        }
    }

    /// Calls `visit` for the entries from `index` on until it says `false`, the table ends, or a page
    /// is not in memory.
    pub(crate) fn visit(&self, table: Table, index: u64, mut visit: impl FnMut(u64) -> bool) {
        let mut state = self.state.lock();
        state.uses += 1;
        let uses = state.uses;
        let mut index = index;
        while index < table.len {
            let key = (table, index / self.page_len());
            let Some(page) = state.pages.get_mut(&key) else {
                return;
            };
            page.used = uses;
            let from = (index % self.page_len()) as usize;
            let entries = page.entries.get(from..).unwrap_or_default();
            if entries.is_empty() {
                return;
            }
            for &entry in entries {
                if !visit(entry) {
                    return;
                }
                index += 1;
            }
        }
    }

    /// Reads the page of an entry, if it is not in memory.
    pub(crate) async fn load(&self, table: Table, index: u64) -> Result<()> {
        let number = index / self.page_len();
        let key = (table, number);
        let first = number * self.page_len();
        let len = self.page_len().min(table.len.saturating_sub(first));
        let start = self.offset_bytes(table, first);
        let end = start.saturating_add(len * self.width.bytes());
        loop {
            let writes = {
                let state = self.state.lock();
                if len == 0 || state.pages.contains_key(&key) {
                    return Ok(());
                }
                state.writes
            };
            let bytes = read_at(&*self.file, start, (len * self.width.bytes()) as usize).await?;
            let mut entries = self.width.decode(&bytes);
            let mut state = self.state.lock();
            if state.writes != writes {
                continue;
            }
            for patches in [&state.in_flight, &state.pending] {
                for (&at, &value) in patches.range(start..end) {
                    let place = entries.get_mut(((at - start) / self.width.bytes()) as usize);
                    place.into_iter().for_each(|entry| *entry = value);
                }
            }
            state.make_room(self.most_pages);
            let used = state.uses;
            state.pages.insert(key, Page { entries, used });
            return Ok(());
        }
    }

    /// An entry that is loaded if need be.
    pub(crate) async fn fetch(&self, table: Table, index: u64) -> Result<u64> {
        loop {
            if let Some(value) = self.get(table, index) {
                return Ok(value);
            }
            self.load(table, index).await?;
        }
    }

    /// Changes an entry; an index beyond the table changes nothing.
    pub(crate) fn set(&self, table: Table, index: u64, value: u64) {
        if index >= table.len {
            return;
        }
        let mut state = self.state.lock();
        let offset = self.offset_bytes(table, index);
        state.pending.insert(offset, value);
        let key = (table, index / self.page_len());
        let page = state.pages.get_mut(&key);
        let place = page.and_then(|page| {
            let at = (index % self.page_len()) as usize;
            page.entries.get_mut(at)
        });
        place.into_iter().for_each(|entry| *entry = value);
    }

    /// About how much memory changed entries take, in bytes.
    pub(crate) fn changed_bytes(&self) -> u64 {
        self.state.lock().pending.len() as u64 * PATCH_BYTES
    }

    /// Takes the entries that were changed; `None` if none were.
    pub(crate) fn take(&self) -> Option<Patches> {
        let mut state = self.state.lock();
        let taken = std::mem::take(&mut state.pending);
        if taken.is_empty() {
            return None;
        }
        let mut runs: Vec<(u64, Vec<u8>)> = Vec::new();
        for (&at, &value) in &taken {
            match runs.last_mut() {
                Some((start, bytes)) if *start + bytes.len() as u64 == at => {
                    self.width.encode(value, bytes);
                }
                _ => {
                    let mut bytes = Vec::new();
                    self.width.encode(value, &mut bytes);
                    runs.push((at, bytes));
                }
            }
        }
        state.in_flight.extend(taken);
        Some(Patches(runs))
    }

    /// Forgets the entries in memory: all tables are changed on disk.
    pub(crate) fn forget(&self) {
        let mut state = self.state.lock();
        state.pages.clear();
        state.pending.clear();
        state.writes += 1;
    }

    /// Writes what was taken.
    pub(crate) async fn write(&self, patches: &Patches) -> Result<()> {
        let runs = patches.0.iter();
        let writes = runs.map(|(at, bytes)| write_at(&*self.file, *at, bytes));
        finish_all(WRITES_AT_ONCE, writes).await?;
        let mut state = self.state.lock();
        state.in_flight.clear();
        state.writes += 1;
        Ok(())
    }
}

impl State {
    /// Drops the half of the pages that was not used for longest, where there are too many.
    fn make_room(&mut self, most_pages: usize) {
        if self.pages.len() < most_pages {
            return;
        }
        let mut uses: Vec<u64> = self.pages.values().map(|page| page.used).collect();
        let middle = uses.len() / 2;
        let (_, &mut middle, _) = uses.select_nth_unstable(middle);
        let before = self.pages.len();
        self.pages.retain(|_, page| page.used > middle);
        if self.pages.len() == before {
            self.pages.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vellum::io::lane;
    use vellum::storage::MemStorage;

    fn entries(bytes: Vec<u8>, budget_bytes: u64) -> (Arc<MemStorage>, PagedTables) {
        let file = Arc::new(MemStorage::with_bytes(bytes));
        let entries = PagedTables::new(file.clone(), Width::Be64, budget_bytes);
        (file, entries)
    }

    #[test]
    fn pages_are_read_patched_and_dropped() {
        lane::block_on(async {
            let len = 100 * PAGE_BYTES / 8;
            let bytes = (0..len).flat_map(u64::to_be_bytes).collect();
            let (file, entries) = entries(bytes, 1);
            let table = Table {
                start_bytes: 0,
                len,
            };
            assert_eq!(entries.get(table, 5), None);
            for index in (0..len).step_by(1000) {
                assert_eq!(entries.fetch(table, index).await?, index);
                entries.set(table, index, index + 1);
                assert!(entries.state.lock().pages.len() <= 9);
            }
            // Pages that were dropped meanwhile come back with what was set.
            for index in (0..len).step_by(1000) {
                assert_eq!(entries.fetch(table, index).await?, index + 1);
            }
            assert_eq!(entries.get(table, len), Some(0));
            let patches = entries.take().expect("changes");
            entries.set(table, 0, 77);
            entries.write(&patches).await?;
            assert_eq!(entries.fetch(table, 0).await?, 77);
            assert_eq!(&file.snapshot()[8000..8008], &1001u64.to_be_bytes());
            assert!(entries.take().is_some());
            assert!(entries.take().is_none());
            Ok::<(), vellum::Error>(())
        })
        .unwrap();
    }

    #[test]
    fn tables_in_one_place_may_have_several_lengths() {
        lane::block_on(async {
            let (_, entries) = entries(vec![0; 8192], 1 << 20);
            for len in [5, 700] {
                let start_bytes = 8;
                let table = Table { start_bytes, len };
                assert_eq!(entries.fetch(table, len - 1).await?, 0);
            }
            Ok::<(), vellum::Error>(())
        })
        .unwrap();
    }

    #[test]
    fn tables_at_any_offset_may_be_asked_for() {
        lane::block_on(async {
            let (_, entries) = entries(vec![1; 100], 1 << 20);
            for start_bytes in [3, 99, 1 << 40] {
                let table = Table {
                    start_bytes,
                    len: u64::MAX,
                };
                entries.fetch(table, 0).await?;
                entries.set(table, u64::MAX - 1, 1);
            }
            Ok::<(), vellum::Error>(())
        })
        .unwrap();
    }
}
