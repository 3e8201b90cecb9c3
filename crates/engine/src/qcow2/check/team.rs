//! Counts what L2 tables refer to on all cores.
//!
//! A table in which everything is as it should be is counted here; one about which
//! there is anything to tell is left to the [walk](super::walk), which tells it in
//! order. References are sorted by the chunk of counts that they change before any is
//! counted: each chunk is locked once, and stays in the processor's cache meanwhile.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::{Geometry, L2Entry};

use super::chunk::{CHUNK_CLUSTERS, Chunk, parts};
use super::counts::{Counts, SharedCounts};
use super::l2_tables::Uses;
use super::tables::Batch;
use super::walk::{Kind, compressed_range};
use crate::qcow2::mapping::runs::{self, EntryRun};

/// Counts narrower than this may not hold all references to a cluster, and who of
/// several goes beyond must not depend on who comes first.
const MIN_REFCOUNT_ORDER: u32 = 4;

/// What all threads need to count.
#[derive(Debug)]
pub(super) struct Team {
    geometry: Geometry,
    file_len_bytes: u64,
    /// The refcounts on disk.
    stored: Arc<Counts>,
    references: Arc<SharedCounts>,
}

/// What the tables of a batch came to.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) allocated_clusters: u64,
    pub(super) fragmented_clusters: u64,
    pub(super) compressed_clusters: u64,
    /// Some copied flag is not what the refcount on disk says.
    pub(super) copied_flags_differ: bool,
    /// Clusters with too many references, and by how much.
    pub(super) overflows: Vec<(u64, u64)>,
    /// The numbers of tables that were not counted.
    pub(super) left: Vec<usize>,
}

impl Found {
    fn add(&mut self, table: &Found) {
        self.allocated_clusters += table.allocated_clusters;
        self.fragmented_clusters += table.fragmented_clusters;
        self.compressed_clusters += table.compressed_clusters;
    }
}

/// References to clusters of one chunk.
#[derive(Debug, Clone, Copy)]
struct Reference {
    chunk: u32,
    index: u32,
    len: u32,
    /// The number of its table in the batch.
    table: u32,
    /// The copied flag of the entries, where it means something.
    copied: Option<bool>,
}

impl Team {
    /// `None` where counting has to keep to an order.
    pub(super) fn new(
        geometry: Geometry,
        file_len_bytes: u64,
        stored: Arc<Counts>,
        references: Arc<SharedCounts>,
    ) -> Option<Team> {
        let any_order = geometry.refcount_order >= MIN_REFCOUNT_ORDER && !geometry.external_data;
        any_order.then_some(Team {
            geometry,
            file_len_bytes,
            stored,
            references,
        })
    }

    /// Counts the tables of a batch, of which `uses` tells by number how often they are
    /// led to.
    pub(super) fn count(&self, batch: &Batch, uses: &[Uses]) -> Found {
        let mut found = Found::default();
        let mut references = Vec::new();
        let mut times = Vec::new();
        for (number, table) in batch.tables() {
            let before = references.len();
            let own = uses[number];
            match self.read_table(table, own, times.len() as u32, &mut references) {
                Some(table) => found.add(&table),
                None => {
                    references.truncate(before);
                    found.left.push(number);
                }
            }
            times.push(own.all);
        }
        let sorted = by_chunk(references, self.references.len());
        for references in sorted.chunk_by(|one, next| one.chunk == next.chunk) {
            self.count_in_chunk(references, &times, &mut found);
        }
        found
    }

    fn count_in_chunk(&self, references: &[Reference], times: &[u64], found: &mut Found) {
        let number = references[0].chunk as usize;
        let first = number as u64 * CHUNK_CLUSTERS;
        let max = self.geometry.max_refcount();
        let Some(mut chunk) = self.references.lock(number) else {
            debug_assert!(false, "the file has no cluster of chunk {number}");
            return;
        };
        for reference in references {
            let times = times[reference.table as usize];
            chunk.add(reference.run(), times, max, |index, by| {
                found.overflows.push((first + index as u64, by));
            });
        }
        drop(chunk);
        let stored = self.stored.chunk(number);
        let differs = |reference: &Reference| reference.differs(stored);
        found.copied_flags_differ |= references.iter().any(differs);
    }

    /// Collects what a table refers to; `None` if there is anything to tell about it.
    fn read_table(
        &self,
        table: &[u8],
        uses: Uses,
        number: u32,
        references: &mut Vec<Reference>,
    ) -> Option<Found> {
        let geometry = &self.geometry;
        let (mut found, mut next_offset, mut index) = (Found::default(), 0, 0);
        let mut refer = |clusters: Range<u64>, copied: Option<bool>| {
            let parts = parts(clusters);
            references.extend(parts.map(|(chunk, run)| Reference {
                chunk: chunk as u32,
                index: run.start as u32,
                len: run.len() as u32,
                table: number,
                copied,
            }));
        };
        while let Some(run) = self.next_run(table, index) {
            index += run.entries.max(1);
            if run.entries > 0 && run.offset_bytes == 0 {
                continue;
            }
            let mut whole = run;
            if run.entries == 0 {
                match self.entry(table, index - 1)? {
                    Entry::Nothing => continue,
                    Entry::Compressed(clusters) => {
                        found.compressed_clusters += uses.active;
                        found.allocated_clusters += uses.active;
                        // They share sectors, so that none follows the one before it.
                        found.fragmented_clusters += uses.active;
                        refer(clusters, None);
                        continue;
                    }
                    Entry::Cluster(one) => whole = one,
                }
            }
            let (count, offset) = (whole.entries as u64, whole.offset_bytes);
            found.allocated_clusters += count * uses.active;
            if next_offset != 0 && next_offset != offset {
                found.fragmented_clusters += uses.active;
            }
            next_offset = offset + (count << geometry.cluster_bits);
            let first = offset >> geometry.cluster_bits;
            // Copied flags mean something in the active tables only.
            let copied = (uses.active > 0).then_some(whole.copied);
            refer(first..first + count, copied);
        }
        Some(found)
    }

    /// The run of plain entries at an index, perhaps of none; `None` at the end.
    fn next_run(&self, table: &[u8], index: usize) -> Option<EntryRun> {
        let geometry = &self.geometry;
        if index as u64 >= geometry.l2_entries() {
            return None;
        }
        Some(match geometry.extended_l2 {
            true => EntryRun::NONE,
            false => runs::first_run(&table[index * 8..], geometry, self.file_len_bytes),
        })
    }

    /// What any other entry refers to; `None` if there is anything to tell about it.
    fn entry(&self, table: &[u8], index: usize) -> Option<Entry> {
        let geometry = &self.geometry;
        let entry = L2Entry::read(table, index, geometry)?;
        if entry.reserved_bits() != 0 {
            return None;
        }
        match Kind::of(entry, geometry) {
            Kind::Compressed if entry.copied() || entry.bitmap != 0 => None,
            Kind::Compressed => {
                let (offset, size) = compressed_range(entry.descriptor, geometry.cluster_bits);
                let first = offset >> geometry.cluster_bits;
                let last = (offset + size - 1) >> geometry.cluster_bits;
                // What touches the cluster behind the file makes one more to compare.
                let clusters = geometry.clusters_for(self.file_len_bytes);
                (last < clusters).then(|| Entry::Compressed(first..last + 1))
            }
            Kind::Cluster(offset) => {
                let both = (entry.bitmap >> 32) & entry.bitmap & u64::from(u32::MAX);
                let sound = both == 0
                    && geometry.is_cluster_aligned(offset)
                    && offset < self.file_len_bytes;
                sound.then_some(Entry::Cluster(EntryRun {
                    entries: 1,
                    offset_bytes: offset,
                    copied: entry.copied(),
                }))
            }
            Kind::Nothing => (entry.bitmap as u32 == 0).then_some(Entry::Nothing),
        }
    }
}

/// What an entry that is no part of a run of plain ones refers to.
enum Entry {
    Nothing,
    Compressed(Range<u64>),
    Cluster(EntryRun),
}

impl Reference {
    fn run(&self) -> Range<usize> {
        self.index as usize..(self.index + self.len) as usize
    }

    /// Whether its copied flags are not what the counts on disk say.
    fn differs(&self, stored: &Chunk) -> bool {
        match self.copied {
            None => false,
            Some(true) => !stored.are_ones(self.run()),
            Some(false) => !stored.has_no_one(self.run()),
        }
    }
}

/// Sorts references by chunk, of which there are `chunks`.
fn by_chunk(references: Vec<Reference>, chunks: usize) -> Vec<Reference> {
    if references.is_sorted_by_key(|reference| reference.chunk) {
        return references;
    }
    let mut places = vec![0; chunks + 1];
    for reference in &references {
        places[reference.chunk as usize + 1] += 1;
    }
    for chunk in 0..chunks {
        places[chunk + 1] += places[chunk];
    }
    let mut sorted = references.clone();
    for reference in references {
        let place = &mut places[reference.chunk as usize];
        sorted[*place] = reference;
        *place += 1;
    }
    sorted
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(chunk: u32, index: u32) -> Reference {
        Reference {
            chunk,
            index,
            len: 1,
            table: 0,
            copied: None,
        }
    }

    #[test]
    fn references_are_sorted_by_chunk_and_keep_their_order_there() {
        let pairs = [(2, 0), (0, 1), (2, 2), (1, 3), (0, 4)];
        let references = pairs.map(|(chunk, index)| reference(chunk, index));
        let sorted = by_chunk(references.to_vec(), 3);
        let sorted: Vec<_> = sorted.iter().map(|one| (one.chunk, one.index)).collect();
        assert_eq!(sorted, [(0, 1), (0, 4), (1, 3), (2, 0), (2, 2)]);
    }
}
