//! The refcounts on disk, read once into memory.

use vellum_format::refcount::{self, RefcountTableEntry};

use super::counts::Counts;
use super::{Image, tables};
use crate::qcow2::load;
use crate::{Buffer, Result};

/// The refcount table and all refcounts of the file's clusters.
pub(super) struct Stored {
    table: Buffer,
    counts: Counts,
    /// Numbers of the refcount blocks that are nowhere, in ascending order.
    unreadable: Vec<u64>,
    /// `cluster >> block_shift` is the number of its refcount block.
    block_shift: u32,
}

impl Stored {
    pub(super) async fn load(image: &Image) -> Result<Stored> {
        let geometry = &image.geometry;
        let header = &image.header;
        let table_size = u64::from(header.refcount_table_clusters) << geometry.cluster_bits;
        let table_offset = header.refcount_table_offset.0;
        let table = load::read_bytes(&image.storage, table_offset, table_size).await?;
        let mut stored = Stored {
            table,
            counts: Counts::default(),
            unreadable: Vec::new(),
            block_shift: geometry.refcount_block_entries().trailing_zeros(),
        };
        let (mut numbers, mut offsets, mut unreadable) = (Vec::new(), Vec::new(), Vec::new());
        for (number, entry) in stored.entries() {
            let offset = entry.raw_offset();
            if !geometry.is_cluster_aligned(offset) {
                unreadable.push(number);
            } else if offset != 0 && offset < image.len_bytes {
                numbers.push(number);
                offsets.push(offset);
            }
        }
        stored.unreadable = unreadable;
        stored.read_blocks(image, &numbers, &offsets).await?;
        Ok(stored)
    }

    async fn read_blocks(&mut self, image: &Image, numbers: &[u64], offsets: &[u64]) -> Result<()> {
        let (order, shift) = (image.geometry.refcount_order, self.block_shift);
        let clusters = image.file_clusters();
        let counts = &mut self.counts;
        let block_size = image.geometry.cluster_size_bytes();
        tables::for_each_table(&image.storage, offsets, block_size, |index, block| {
            let first = numbers[index] << shift;
            let used = clusters.saturating_sub(first).min(1 << shift);
            for index in 0..used {
                match refcount::get(block, order, index as usize) {
                    0 => {}
                    count => counts.set(first + index, count),
                }
            }
            Ok(())
        })
        .await
    }

    /// The entries of the refcount table with their numbers.
    pub(super) fn entries(&self) -> impl Iterator<Item = (u64, RefcountTableEntry)> {
        let entries = self.table.len() / 8;
        (0..entries)
            .filter_map(|index| Some((index as u64, RefcountTableEntry::read(&self.table, index)?)))
            .filter(|(_, entry)| *entry != RefcountTableEntry::UNALLOCATED)
    }

    /// The refcount of a cluster; `None` if it cannot be read.
    pub(super) fn get(&self, cluster: u64) -> Option<u64> {
        match self.is_readable(cluster) {
            true => Some(self.counts.get(cluster)),
            false => None,
        }
    }

    pub(super) fn is_readable(&self, cluster: u64) -> bool {
        self.unreadable.is_empty()
            || self
                .unreadable
                .binary_search(&(cluster >> self.block_shift))
                .is_err()
    }

    pub(super) fn all_readable(&self) -> bool {
        self.unreadable.is_empty()
    }

    pub(super) fn counts(&self) -> &Counts {
        &self.counts
    }
}
