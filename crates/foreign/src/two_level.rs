//! [`TwoLevel`]: a table of tables of clusters, as qcow and QED have it.
//!
//! An entry of the first table leads to a table of the second level, a leaf, whose entries lead to clusters.
//! Clusters and leaves are put at the end of the file and never move.
//!
//! Invariants:
//! - A leaf's zeroes are written when it is made, so they are durable before the entry that leads to it,
//!   as with the data of clusters. So entries of both levels can be written in any order.
//! - What was at the end of the file when it was opened stays where it is.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_storage::ZeroFlags;

use crate::fields::barrier;
use crate::joined::Joined;
use crate::layout::{Place, Run};
use crate::paged::{PagedTables, Patches, Table, Width};
use crate::places::{FreePlaces, NewPlace};

/// Tables are kept in memory up to this size.
const BUDGET_BYTES: u64 = 16 << 20;

/// A run has at most so many clusters: a write asks again for each cluster that it makes.
const MOST_CLUSTERS: u64 = 512;

/// How the tables of a format are made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) width: Width,
    /// The first table.
    pub(crate) l1: Table,
    /// Entries of a leaf.
    pub(crate) leaf_len: u64,
    pub(crate) cluster_bytes: u64,
    /// Leaves are whole clusters of the file from here on; `None` if they may be anywhere.
    pub(crate) leaves_from_bytes: Option<u64>,
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct TwoLevel {
    file: Arc<dyn Storage>,
    shape: Shape,
    tables: PagedTables,
    space: Mutex<Space>,
    /// Leaves that are being made, by the index of the entry that leads to them.
    making: Joined<u64, u64>,
    /// Leaves of the blocks that have host space and are not linked yet.
    leaves: Mutex<HashMap<u64, u64>>,
    /// Where the file ended when all was given up.
    cleared_end_bytes: Mutex<Option<u64>>,
}

/// What of the file is given out.
#[derive(Debug)]
struct Space {
    /// Where the next thing is put, in bytes of the file.
    end_bytes: u64,
    /// Clusters before it that are not in use.
    free: FreePlaces,
}

/// What leads nowhere.
pub(crate) fn corrupt(operation: &'static str, message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Corrupt, operation, message)
}

impl TwoLevel {
    /// Tables of a file that ends at `end_bytes`.
    pub(crate) fn new(file: Arc<dyn Storage>, shape: Shape, end_bytes: u64) -> TwoLevel {
        TwoLevel {
            tables: PagedTables::new(file.clone(), shape.width, BUDGET_BYTES),
            file,
            shape,
            space: Mutex::new(Space {
                end_bytes,
                free: FreePlaces::default(),
            }),
            making: Joined::default(),
            leaves: Mutex::default(),
            cleared_end_bytes: Mutex::default(),
        }
    }

    /// The indices in the first table and in the leaf.
    fn indices(&self, offset_bytes: u64) -> (u64, u64) {
        let cluster = offset_bytes / self.shape.cluster_bytes;
        (cluster / self.shape.leaf_len, cluster % self.shape.leaf_len)
    }

    /// The leaf that an entry of the first table leads to.
    fn leaf(&self, start_bytes: u64) -> Result<Table> {
        let end = start_bytes.checked_add(self.shape.leaf_len * 8);
        let is_good = match self.shape.leaves_from_bytes {
            Some(from_bytes) => {
                start_bytes >= from_bytes
                    && start_bytes.is_multiple_of(self.shape.cluster_bytes)
                    && end.is_some_and(|end| end <= self.end_bytes())
            }
            None => end.is_some_and(|end| i64::try_from(end).is_ok()),
        };
        if !is_good {
            let message = format!("L2 table offset {start_bytes:#x} is invalid");
            return Err(corrupt("read", message));
        }
        Ok(Table {
            start_bytes,
            len: self.shape.leaf_len,
        })
    }

    /// Where the next thing would be put.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.space.lock().end_bytes
    }

    /// The run at an offset. `place` gives the place of a cluster with an entry. `None` if something has to
    /// be loaded first.
    pub(crate) fn lookup(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
        place: impl Fn(u64) -> Result<Place>,
    ) -> Result<Option<Run>> {
        let cluster_bytes = self.shape.cluster_bytes;
        let (l1_index, leaf_index) = self.indices(offset_bytes);
        let in_cluster = offset_bytes % cluster_bytes;
        let Some(leaf) = self.tables.get(self.shape.l1, l1_index) else {
            return Ok(None);
        };
        if leaf == 0 {
            let clusters = self.shape.leaf_len - leaf_index;
            let rest_bytes = clusters.saturating_mul(cluster_bytes) - in_cluster;
            return Ok(Some(Run {
                len_bytes: rest_bytes.min(len_bytes),
                place: Place::Absent,
            }));
        }
        let leaf = self.leaf(leaf).map_err(|error| error.at(offset_bytes))?;
        let mut first = None;
        let mut run_bytes = 0;
        let mut failed = None;
        self.tables.visit(leaf, leaf_index, |entry| {
            let here = match place(entry) {
                Ok(here) => here,
                Err(error) => {
                    failed = first.is_none().then_some(error);
                    return false;
                }
            };
            let wanted = first.map_or(here, |first| advanced(first, run_bytes));
            if here != wanted {
                return false;
            }
            first.get_or_insert(here);
            run_bytes += cluster_bytes;
            run_bytes - in_cluster < len_bytes && run_bytes / cluster_bytes < MOST_CLUSTERS
        });
        if let Some(error) = failed {
            return Err(error.at(offset_bytes));
        }
        Ok(first.map(|first| Run {
            len_bytes: (run_bytes - in_cluster).min(len_bytes),
            place: advanced(first, in_cluster),
        }))
    }

    /// Loads what a lookup at an offset needs.
    pub(crate) async fn load(&self, offset_bytes: u64) -> Result<()> {
        let (l1_index, leaf_index) = self.indices(offset_bytes);
        match self.tables.fetch(self.shape.l1, l1_index).await? {
            0 => Ok(()),
            leaf => self.tables.load(self.leaf(leaf)?, leaf_index).await,
        }
    }

    /// A cluster's entry; 0 where there is no leaf.
    pub(crate) async fn entry(&self, offset_bytes: u64) -> Result<u64> {
        let (l1_index, leaf_index) = self.indices(offset_bytes);
        match self.tables.fetch(self.shape.l1, l1_index).await? {
            0 => Ok(0),
            leaf => self.tables.fetch(self.leaf(leaf)?, leaf_index).await,
        }
    }

    /// Takes space at the end of the file.
    pub(crate) fn reserve(&self, len_bytes: u64, align_bytes: u64) -> Result<u64> {
        let end = &mut self.space.lock().end_bytes;
        let start = end.checked_next_multiple_of(align_bytes);
        let next = start.and_then(|start| start.checked_add(len_bytes));
        match (start, next) {
            (Some(start), Some(next)) if i64::try_from(next).is_ok() => {
                *end = next;
                Ok(start)
            }
            _ => {
                let message = "the file cannot become larger";
                Err(Error::new(ErrorKind::NoSpace, "write", message))
            }
        }
    }

    /// The leaf of a cluster, which is made if need be: once, beside others.
    async fn leaf_of(&self, offset_bytes: u64) -> Result<u64> {
        let (l1_index, _) = self.indices(offset_bytes);
        match self.tables.fetch(self.shape.l1, l1_index).await? {
            0 => self.making.join(l1_index, self.make_leaf(l1_index)).await,
            leaf => Ok(leaf),
        }
    }

    async fn make_leaf(&self, l1_index: u64) -> Result<u64> {
        // Whoever made it may have ended before this one has joined.
        let leaf = self.tables.fetch(self.shape.l1, l1_index).await?;
        if leaf != 0 {
            return Ok(leaf);
        }
        let len_bytes = self.shape.leaf_len * 8;
        let leaf = self.reserve(len_bytes, self.shape.cluster_bytes)?;
        let zeroes = self
            .file
            .write_zeroes(leaf, len_bytes, ZeroFlags::default());
        if let Err(error) = zeroes.await {
            let clusters = len_bytes / self.shape.cluster_bytes;
            let free = &mut self.space.lock().free;
            (0..clusters)
                .for_each(|cluster| free.give_back(leaf + cluster * self.shape.cluster_bytes));
            return Err(error);
        }
        self.tables.set(self.shape.l1, l1_index, leaf);
        Ok(leaf)
    }

    /// Finds space for the cluster at an offset, and what leads to it.
    pub(crate) async fn allocate(&self, offset_bytes: u64) -> Result<NewPlace> {
        let leaf = self.leaf_of(offset_bytes).await?;
        let cluster_bytes = self.shape.cluster_bytes;
        let free = self.space.lock().free.take();
        let place = NewPlace {
            is_new: free.is_none(),
            start_bytes: match free {
                Some(start_bytes) => start_bytes,
                None => self.reserve(cluster_bytes, cluster_bytes)?,
            },
        };
        self.leaves.lock().insert(offset_bytes, leaf);
        Ok(place)
    }

    /// Sets the entry of a cluster that was given space.
    pub(crate) fn link(&self, offset_bytes: u64, entry: u64) -> Result<()> {
        let leaf = self.leaves.lock().remove(&offset_bytes);
        let message = "a cluster without space is linked";
        let leaf = leaf.ok_or_else(|| corrupt("write", message).at(offset_bytes))?;
        let (_, leaf_index) = self.indices(offset_bytes);
        self.tables.set(self.leaf(leaf)?, leaf_index, entry);
        Ok(())
    }

    /// The cluster at an offset gets no entry for the space that was found for it.
    pub(crate) fn give_back(&self, offset_bytes: u64, start_bytes: u64) {
        self.leaves.lock().remove(&offset_bytes);
        self.space.lock().free.give_back(start_bytes);
    }

    /// Sets the entry of any cluster.
    pub(crate) async fn set(&self, offset_bytes: u64, entry: u64) -> Result<()> {
        let leaf = self.leaf_of(offset_bytes).await?;
        let (_, leaf_index) = self.indices(offset_bytes);
        self.tables.set(self.leaf(leaf)?, leaf_index, entry);
        Ok(())
    }

    pub(crate) fn take(&self) -> Option<Patches> {
        self.tables.take()
    }

    pub(crate) fn changed_bytes(&self) -> u64 {
        self.tables.changed_bytes()
    }

    pub(crate) async fn write(&self, patches: &Patches) -> Result<()> {
        self.tables.write(patches).await
    }

    /// Gives all clusters up, durably. Nothing else is changed meanwhile, and what was changed before
    /// is durable.
    pub(crate) async fn clear(&self) -> Result<()> {
        let Table { start_bytes, len } = self.shape.l1;
        let zeroes = self
            .file
            .write_zeroes(start_bytes, len * 8, ZeroFlags::default());
        zeroes.await?;
        barrier(&*self.file).await?;
        self.tables.forget();
        // Whoever still reads what was given up finds it.
        let mut space = self.space.lock();
        space.free.clear();
        *self.cleared_end_bytes.lock() = Some(space.end_bytes);
        Ok(())
    }

    /// Has the file be as long as what is in it: the last cluster may have been written in part, was given back,
    /// or nothing is in it any more.
    pub(crate) async fn fill_up(&self) -> Result<()> {
        if !self.file.capabilities().growable {
            return Ok(());
        }
        let cleared = self.cleared_end_bytes.lock().take();
        let (end_bytes, is_cut) = {
            let mut space = self.space.lock();
            let before_bytes = space.end_bytes;
            space.end_bytes = match cleared == Some(before_bytes) {
                true => {
                    let l1 = self.shape.l1;
                    l1.start_bytes + (l1.len * 8).next_multiple_of(512)
                }
                false => space.free.cut(before_bytes, self.shape.cluster_bytes),
            };
            (space.end_bytes, space.end_bytes < before_bytes)
        };
        match self.file.len_bytes()? {
            len_bytes if len_bytes < end_bytes || is_cut => self.file.truncate(end_bytes).await,
            _ => Ok(()),
        }
    }
}

/// The place so many bytes behind another one, in the same run.
fn advanced(place: Place, by_bytes: u64) -> Place {
    match place {
        Place::Data { file, offset_bytes } => Place::Data {
            file,
            offset_bytes: offset_bytes.saturating_add(by_bytes),
        },
        other => other,
    }
}
