//! A small qcow2 engine that keeps the rules of ordering, or breaks one of them.
//!
//! It knows standard clusters in one refcount block, keeps all metadata in memory
//! and writes it at a flush:
//!
//! 1. refcounts and new L2 tables; 2. a barrier; 3. L1 and L2 entries; 4. a
//!    barrier; 5. what the mapping has dropped is free once nobody uses it.

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use vellum::{BlockDevice, DeviceInfo, Extent, ExtentKind, RequestFlags, ZeroRequest};
use vellum_io::{Buffer, Buffers, Io, Result, spawn};
use vellum_sim::image_engine::{Files, Findings, ImageEngine};
use vellum_sim::layout::{COPIED, Layout, ZERO};
use vellum_sim::scenario::ImageOptions;
use vellum_sim::sparse_bytes::SparseBytes;
use vellum_storage::{Storage, WriteFlags};

/// The toy's cluster size.
pub const CLUSTER_BITS: u32 = 12;
const CLUSTER: u64 = 1 << CLUSTER_BITS;
const ENTRIES: usize = CLUSTER as usize / 8;
const COUNTS: usize = CLUSTER as usize / 2;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// A rule of ordering to break.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Break {
    /// None.
    Nothing,
    /// Refcounts go up only together with what points there.
    RefcountsWithMapping,
    /// Data is not durable before the L2 entry.
    DataWithMapping,
    /// A new L2 table is written together with its L1 entry.
    L2WithL1,
    /// Refcounts go down before the mapping has changed on disk.
    RefcountsDownEarly,
    /// A dropped cluster is used again before the mapping has changed on disk.
    ReuseEarly,
    /// A dropped cluster is punched before the mapping has changed on disk.
    PunchEarly,
    /// A dropped cluster is used again while a request still reads or writes it.
    ReuseWhileUsed,
    /// A flush ends without the last barrier.
    NoLastBarrier,
}

/// Makes toys.
#[derive(Debug)]
pub struct ToySubject(pub Break);

impl ImageEngine for ToySubject {
    fn create(&self, files: Files, options: &ImageOptions) -> Io<()> {
        let mut header = SparseBytes::new();
        header.put_be64(0, 0x5146_49fb_0000_0003);
        header.put_be64(16, u64::from(CLUSTER_BITS));
        header.put_be64(24, options.size_bytes);
        header.put_be64(32, options.size_bytes.div_ceil(CLUSTER * ENTRIES as u64));
        header.put_be64(40, 3 * CLUSTER);
        header.put_be64(48, CLUSTER);
        header.put_be64(56, 1 << 32);
        header.put_be64(96, 4 << 32 | 104);
        header.put_be64(CLUSTER, 2 * CLUSTER);
        header.write(2 * CLUSTER, &[0, 1, 0, 1, 0, 1, 0, 1]);
        header.set_len(4 * CLUSTER);
        Io::boxed(async move { put(&*files.image, 0, &header.bytes(0, 4 * CLUSTER)).await })
    }

    fn open(&self, files: Files, _options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        let broken = self.0;
        Io::boxed(async move {
            let toy = Toy::load(files.image, broken).await?;
            Ok(Arc::new(toy) as Arc<dyn BlockDevice>)
        })
    }

    fn open_backing(&self, files: Files, options: &ImageOptions) -> Io<Arc<dyn BlockDevice>> {
        self.open(files, options)
    }

    fn check(&self, _files: Files) -> Io<Findings> {
        Io::ready(Ok(Findings::default()))
    }
}

async fn put(storage: &dyn Storage, at: u64, bytes: &[u8]) -> Result<()> {
    let buffers = Buffers::from_iter([Buffer::copy_of(bytes)]);
    storage
        .write(at, buffers, WriteFlags::default())
        .await
        .map(drop)
}

async fn get(storage: &dyn Storage, at: u64, len: u64) -> Result<Vec<u8>> {
    let buffers = Buffers::from_iter([Buffer::zeroed(len as usize)]);
    Ok(storage.read(at, buffers).await?[0].to_vec())
}

struct Table {
    host: u64,
    entries: Vec<u64>,
    new: bool,
    dirty: bool,
}

struct State {
    l1: Vec<u64>,
    tables: Vec<Option<Table>>,
    counts: Vec<u16>,
    free: Vec<u64>,
    /// Dropped in memory; dropped on disk but perhaps in use.
    dropped: Vec<u64>,
    quiescing: Vec<u64>,
    users: usize,
    end: u64,
}

struct Inner {
    storage: Arc<dyn Storage>,
    broken: Break,
    size: u64,
    l1_offset: u64,
    block: u64,
    changes: async_lock::Mutex<()>,
    state: Mutex<State>,
}

/// The toy engine.
#[derive(Clone)]
pub struct Toy(Arc<Inner>);

impl std::fmt::Debug for Toy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Toy")
    }
}

impl Toy {
    async fn load(storage: Arc<dyn Storage>, broken: Break) -> Result<Toy> {
        let len = storage.len_bytes()?;
        let mut pages = SparseBytes::new();
        pages.write(0, &get(&*storage, 0, len).await?);
        let layout = Layout::parse(&pages).expect("the simulator's own audit comes first");
        let mut l1 = vec![0; layout.l1_entries as usize];
        let mut tables: Vec<Option<Table>> = l1.iter().map(|_| None).collect();
        for &(index, entry) in &layout.l1 {
            l1[index as usize] = entry;
            let host = entry & OFFSET;
            let entries = (0..ENTRIES as u64)
                .map(|slot| pages.be64(host + slot * 8))
                .collect();
            tables[index as usize] = Some(Table {
                host,
                entries,
                new: false,
                dirty: false,
            });
        }
        let count = |cluster| layout.refcount(&pages, cluster as u64) as u16;
        let state = State {
            l1,
            tables,
            counts: (0..COUNTS).map(count).collect(),
            free: Vec::new(),
            dropped: Vec::new(),
            quiescing: Vec::new(),
            users: 0,
            end: len.div_ceil(CLUSTER),
        };
        Ok(Toy(Arc::new(Inner {
            storage,
            broken,
            size: layout.size_bytes,
            l1_offset: layout.l1_offset,
            block: layout.blocks[0].1,
            changes: async_lock::Mutex::new(()),
            state: Mutex::new(state),
        })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock()
    }

    fn entry(&self, cluster: u64) -> u64 {
        let (index, slot) = (cluster as usize / ENTRIES, cluster as usize % ENTRIES);
        self.lock().tables[index]
            .as_ref()
            .map_or(0, |table| table.entries[slot])
    }

    fn allocate(&self) -> u64 {
        let mut state = self.lock();
        if state.users == 0 || self.0.broken == Break::ReuseWhileUsed {
            let mut ready = std::mem::take(&mut state.quiescing);
            state.free.append(&mut ready);
        }
        let cluster = state.free.pop().unwrap_or_else(|| {
            state.end += 1;
            state.end - 1
        });
        state.counts[cluster as usize] = 1;
        cluster * CLUSTER
    }

    async fn drop_cluster(&self, entry: u64) -> Result<()> {
        let cluster = (entry & OFFSET) / CLUSTER;
        if cluster == 0 {
            return Ok(());
        }
        if self.0.broken == Break::PunchEarly {
            self.0.storage.discard(cluster * CLUSTER, CLUSTER).await?;
        }
        let mut state = self.lock();
        match self.0.broken {
            Break::RefcountsDownEarly => state.counts[cluster as usize] -= 1,
            Break::ReuseEarly if entry & COPIED != 0 => state.free.push(cluster),
            _ => state.dropped.push(cluster),
        }
        Ok(())
    }

    /// Gives the image an L2 table of its own.
    fn replace_table(&self, index: usize) {
        let host = self.allocate();
        let mut state = self.lock();
        let old = state.tables[index].take();
        let entries = old.map_or_else(|| vec![0; ENTRIES], |table| table.entries);
        state.tables[index] = Some(Table {
            host,
            entries,
            new: true,
            dirty: true,
        });
        state.l1[index] = host | COPIED;
    }

    /// Points a guest cluster at `entry`; gives what it pointed at before.
    async fn link(&self, cluster: u64, entry: u64) -> Result<u64> {
        let (index, slot) = (cluster as usize / ENTRIES, cluster as usize % ENTRIES);
        let l1_entry = self.lock().l1[index];
        if l1_entry & COPIED == 0 {
            self.replace_table(index);
            self.drop_cluster(l1_entry).await?;
        }
        let mut state = self.lock();
        let table = state.tables[index].as_mut().expect("made above");
        table.dirty = true;
        Ok(std::mem::replace(&mut table.entries[slot], entry))
    }

    async fn read_cluster(&self, entry: u64, inside: u64, len: u64) -> Result<Vec<u8>> {
        match entry & OFFSET {
            host if host != 0 && entry & ZERO == 0 => {
                get(&*self.0.storage, host + inside, len).await
            }
            _ => Ok(vec![0; len as usize]),
        }
    }

    async fn write_cluster(&self, cluster: u64, inside: u64, bytes: &[u8]) -> Result<()> {
        let guard = self.0.changes.lock().await;
        let entry = self.entry(cluster);
        if entry & COPIED != 0 && entry & ZERO == 0 {
            // In place: others may go on, but the cluster must stay ours.
            self.lock().users += 1;
            drop(guard);
            let written = put(&*self.0.storage, (entry & OFFSET) + inside, bytes).await;
            self.lock().users -= 1;
            return written;
        }
        let mut whole = self.read_cluster(entry, 0, CLUSTER).await?;
        whole[inside as usize..inside as usize + bytes.len()].copy_from_slice(bytes);
        let host = self.allocate();
        if self.0.broken == Break::DataWithMapping {
            self.write_refcounts().await?;
            self.0.storage.flush().await?;
        }
        put(&*self.0.storage, host, &whole).await?;
        let old = self.link(cluster, host | COPIED).await?;
        self.drop_cluster(old).await?;
        if self.0.broken == Break::DataWithMapping {
            self.write_tables(true).await?;
            self.write_mapping().await?;
        }
        Ok(())
    }

    async fn write_refcounts(&self) -> Result<()> {
        let bytes: Vec<u8> = self
            .lock()
            .counts
            .iter()
            .flat_map(|n| n.to_be_bytes())
            .collect();
        put(&*self.0.storage, self.0.block, &bytes).await
    }

    async fn write_tables(&self, new: bool) -> Result<()> {
        let mut writes = Vec::new();
        for table in self.lock().tables.iter_mut().flatten() {
            if table.dirty && table.new == new {
                let bytes: Vec<u8> = table.entries.iter().flat_map(|e| e.to_be_bytes()).collect();
                writes.push((table.host, bytes));
                (table.dirty, table.new) = (false, false);
            }
        }
        for (host, bytes) in writes {
            put(&*self.0.storage, host, &bytes).await?;
        }
        Ok(())
    }

    async fn write_mapping(&self) -> Result<()> {
        let l1: Vec<u8> = self
            .lock()
            .l1
            .iter()
            .flat_map(|entry| entry.to_be_bytes())
            .collect();
        let storage = self.0.storage.clone();
        let (at, toy) = (self.0.l1_offset, self.clone());
        // Both at once: between two barriers the order is the disk's.
        let l1 = spawn(async move { put(&*storage, at, &l1).await });
        toy.write_tables(false).await?;
        l1.await
    }

    async fn commit(&self) -> Result<()> {
        let _guard = self.0.changes.lock().await;
        let broken = self.0.broken;
        let dropped = std::mem::take(&mut self.lock().dropped);
        if broken != Break::RefcountsWithMapping {
            self.write_refcounts().await?;
        }
        if broken != Break::L2WithL1 {
            self.write_tables(true).await?;
        }
        self.0.storage.flush().await?;
        if broken == Break::RefcountsWithMapping {
            self.write_refcounts().await?;
        }
        if broken == Break::L2WithL1 {
            let tables = self.clone();
            let new = spawn(async move { tables.write_tables(true).await });
            self.write_mapping().await?;
            new.await?;
        }
        self.write_mapping().await?;
        if broken != Break::NoLastBarrier {
            self.0.storage.flush().await?;
        }
        let mut state = self.lock();
        for cluster in dropped {
            state.counts[cluster as usize] -= 1;
            if state.counts[cluster as usize] == 0 {
                state.quiescing.push(cluster);
            }
        }
        Ok(())
    }

    async fn read_all(self, offset: u64, mut buffer: Buffer) -> Result<Buffer> {
        let mut at = offset;
        let end = offset + buffer.len() as u64;
        while at < end {
            let len = (CLUSTER - at % CLUSTER).min(end - at);
            let entry = {
                let _guard = self.0.changes.lock().await;
                self.lock().users += 1;
                self.entry(at / CLUSTER)
            };
            let bytes = self.read_cluster(entry, at % CLUSTER, len).await;
            self.lock().users -= 1;
            buffer[(at - offset) as usize..][..len as usize].copy_from_slice(&bytes?);
            at += len;
        }
        Ok(buffer)
    }

    async fn write_all(self, offset: u64, buffer: Buffer, fua: bool) -> Result<Buffer> {
        let mut at = offset;
        let end = offset + buffer.len() as u64;
        while at < end {
            let len = (CLUSTER - at % CLUSTER).min(end - at);
            let bytes = &buffer[(at - offset) as usize..][..len as usize];
            self.write_cluster(at / CLUSTER, at % CLUSTER, bytes)
                .await?;
            at += len;
        }
        if fua {
            self.commit().await?;
        }
        Ok(buffer)
    }

    async fn zero_all(self, offset: u64, len: u64, discard: bool, fua: bool) -> Result<()> {
        let mut at = offset;
        let end = (offset + len).min(self.0.size);
        while at < end {
            let len = (CLUSTER - at % CLUSTER).min(end - at);
            if len == CLUSTER {
                let _guard = self.0.changes.lock().await;
                let old = self.link(at / CLUSTER, ZERO).await?;
                self.drop_cluster(old).await?;
            } else if !discard {
                self.write_cluster(at / CLUSTER, at % CLUSTER, &vec![0; len as usize])
                    .await?;
            }
            at += len;
        }
        if fua {
            self.commit().await?;
        }
        Ok(())
    }
}

impl BlockDevice for Toy {
    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            format: "toy",
            name: "toy".to_owned(),
            read_only: false,
            cluster_size_bytes: Some(CLUSTER),
            request_alignment_bytes: 1,
            discard_alignment_bytes: CLUSTER,
            has_zero_init: true,
            growable: false,
        }
    }

    fn size_bytes(&self) -> u64 {
        self.0.size
    }

    fn read(&self, offset: u64, buffer: Buffer) -> Io<Buffer> {
        Io::task(spawn(self.clone().read_all(offset, buffer)))
    }

    fn write(&self, offset: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        Io::task(spawn(self.clone().write_all(offset, buffer, flags.fua)))
    }

    fn write_zeroes(&self, offset: u64, len: u64, request: ZeroRequest) -> Io<()> {
        Io::task(spawn(self.clone().zero_all(
            offset,
            len,
            false,
            request.fua,
        )))
    }

    fn discard(&self, offset: u64, len: u64) -> Io<()> {
        Io::task(spawn(self.clone().zero_all(offset, len, true, false)))
    }

    fn flush(&self) -> Io<()> {
        let toy = self.clone();
        Io::task(spawn(async move { toy.commit().await }))
    }

    fn block_status(&self, _offset: u64, len_bytes: u64, _max_depth: u32) -> Io<Extent> {
        Io::ready(Ok(Extent::new(len_bytes, ExtentKind::Data)))
    }

    fn truncate(&self, _size_bytes: u64) -> Io<()> {
        Io::ready(Ok(()))
    }

    fn close(&self) -> Io<()> {
        self.flush()
    }
}
