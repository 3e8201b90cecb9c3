//! Entries that lead beyond the end of the file, as a file has them that was cut off: nothing
//! new goes where they lead, and what is written there stays in the file.
//!
//! The guest reads zeroes there, and may write there. The refcounts of such clusters may be
//! zero, and nothing else tells of them. So each slice of an L2 table is looked at as it is
//! loaded. What no request has led to is not known: a check tells of it, and a repair counts it.

use std::ops::Range;

use vellum_format::l2::{L2Entry, Mapping};
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::{Buffer, Result};

use super::errors::corrupt;
use crate::qcow2::alloc::allocator::{Allocator, Blocker, State};
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::Lookup;

impl Image {
    /// Reads slices of L2 tables that lie side by side, from host offset `key` on.
    pub(crate) async fn read_slices(&self, key: u64, len_bytes: u64) -> Result<Buffer> {
        let bytes = read_bytes(&self.file, key, len_bytes).await?;
        if !self.read_only && !self.has_external_data() {
            self.note_beyond(&bytes).await;
        }
        Ok(bytes)
    }

    async fn note_beyond(&self, slices: &[u8]) {
        let entries = slices.len() / self.geometry.l2_entry_size_bytes() as usize;
        let entry = |index| L2Entry::read(slices, index, &self.geometry).unwrap_or_default();
        let ends = (0..entries).map(|index| self.end_of(entry(index)));
        let Some(tail) = self.allocator.tail_before(ends.max().unwrap_or(0)) else {
            return;
        };
        let found = (0..entries).filter_map(|index| {
            let end = self.end_of(entry(index));
            let clusters = self.clusters_of(entry(index))?;
            (end > tail * self.geometry.cluster_size_bytes()).then_some(clusters)
        });
        self.allocator.keep_away(found.collect()).await;
    }

    /// Where a cluster's bytes end in the file, or later; quick, for there are many.
    fn end_of(&self, entry: L2Entry) -> u64 {
        match entry.is_compressed() {
            true => match entry.decode(&self.geometry) {
                Ok(Mapping::Compressed(data)) => data.end().bytes(),
                _ => 0,
            },
            false if entry.raw_offset() == 0 => 0,
            false => entry.raw_offset() + self.geometry.cluster_size_bytes(),
        }
    }

    fn clusters_of(&self, entry: L2Entry) -> Option<Range<u64>> {
        let (start, end) = match entry.decode(&self.geometry).ok()? {
            Mapping::Compressed(data) => (data.host_offset, data.end()),
            other => {
                let host = other.host()?;
                let size = self.geometry.cluster_size_bytes();
                (host, HostOffset(host.bytes() + size))
            }
        };
        let first = start.cluster(&self.geometry).index();
        Some(first..self.geometry.clusters_for(end.bytes()))
    }
}

impl Allocator {
    /// The tail, if it is before the host offset `end_bytes`, and the file can grow.
    fn tail_before(&self, end_bytes: u64) -> Option<u64> {
        let tail = self.state().tail;
        let growable = self.refcounts.file.capabilities().growable;
        (growable && end_bytes > tail * self.cluster_bytes()).then_some(tail)
    }

    /// Keeps clusters free that lie beyond the tail, and what is written there in the file.
    async fn keep_away(&self, found: Vec<Range<u64>>) {
        let is_extending = {
            let mut state = self.state();
            for clusters in found {
                let beyond = clusters.start.max(state.tail)..clusters.end;
                // Those come from the free ones, and are counted.
                let beyond = beyond.filter(|&cluster| !state.was_used_beyond(cluster));
                for cluster in beyond.collect::<Vec<_>>() {
                    let end_bytes = (cluster + 1) * self.cluster_bytes();
                    state.length.note_mapped(end_bytes);
                    state
                        .beyond
                        .get_or_insert_default()
                        .note(cluster..cluster + 1);
                }
            }
            state.length.is_extending()
        };
        if is_extending {
            // That might cut off what is written there next.
            drop(self.growing.lock().await);
        }
    }

    /// Leaves `clusters` out at the tail, which are in one slice of refcounts, `key`, and have
    /// counts of zero. They are counted, so that later openings leave them out as well.
    pub(crate) fn leave_out(
        &self,
        state: &mut State,
        clusters: &Range<u64>,
        key: u64,
    ) -> Result<Option<Blocker>> {
        let Some(place) = self.refcounts.place(HostCluster(clusters.start))? else {
            return Ok(Some(Blocker::NoBlock(HostCluster(clusters.start))));
        };
        let count = (clusters.end - clusters.start) as usize;
        if !self
            .refcounts
            .take(place.key, place.index..place.index + count)
        {
            return Ok(Some(Blocker::Load(key)));
        }
        state.tail = clusters.end;
        Ok(None)
    }

    /// Refuses a place that cannot be had elsewhere.
    pub(crate) fn refuse_beyond(&self, clusters: &Range<u64>) -> Result<()> {
        match self.state().first_mapped_in(clusters)? {
            None => Ok(()),
            Some(_) => Err(corrupt(
                "allocate",
                "an entry leads to where refcounts must go beyond the end of the file",
            )),
        }
    }

    /// Counts those that the file has got by what was written there, as far as the refcount
    /// table reaches. Before the file is cut.
    ///
    /// # Errors
    /// When the refcounts cannot be read or made.
    pub(crate) async fn count_beyond(&self) -> Result<()> {
        let geometry = self.refcounts.geometry;
        let end = geometry.clusters_for(self.refcounts.file.len_bytes()?);
        let clusters: Vec<u64> = {
            let state = self.state();
            let extents = state.beyond.iter().flat_map(|beyond| beyond.extents.iter());
            let inside = extents.map(|extent| extent.start..extent.end.min(end));
            inside.flatten().collect()
        };
        for cluster in clusters.into_iter().map(HostCluster) {
            loop {
                match self.refcounts.place(cluster)? {
                    None if !self.refcounts.has_entry_for(cluster) => break,
                    None => self.add_refcount_block(cluster).await?,
                    Some(place) => match self.refcounts.get(cluster)? {
                        Lookup::Hit(0) => {
                            let index = place.index;
                            if self.refcounts.take(place.key, index..index + 1) {
                                break;
                            }
                        }
                        Lookup::Hit(_) => break,
                        Lookup::Miss(slice) => self.refcounts.load(slice.key).await?,
                    },
                }
            }
        }
        Ok(())
    }
}
