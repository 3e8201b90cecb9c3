//! The L2 tables of an image, slice by slice, for the tree over its mapping.

use std::ops::Range;

use vellum_format::L1Entry;
use vellum_format::seal::{Hash, mapping_hash};
use vellum_io::lane::compute;
use vellum_io::{Error, Result};

use super::area::{slice_bytes, slices_per_table};
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::image::Image;

/// Which slices there are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Slices {
    /// In a table.
    pub(super) per_table: u64,
    /// Guest bytes that one maps.
    guest_bytes: u64,
    /// L1 entries.
    pub(super) tables: u64,
}

impl Slices {
    pub(super) fn of(image: &Image) -> Slices {
        let header = image.header();
        let per_table = u64::from(slices_per_table(&header));
        Slices {
            per_table,
            guest_bytes: image.geometry.bytes_per_l2_table() / per_table,
            tables: header.l1_entries.into(),
        }
    }

    /// The slices of the table that L1 entry `index` leads to.
    pub(super) fn of_table(&self, index: u64) -> Range<u64> {
        index * self.per_table..(index + 1) * self.per_table
    }

    /// The guest bytes that slices map, which may lie behind the end of the disk.
    pub(super) fn guest(&self, slices: &Range<u64>) -> Range<u64> {
        let edge = |slice: u64| slice.saturating_mul(self.guest_bytes);
        edge(slices.start)..edge(slices.end)
    }
}

impl Image {
    /// Whether L1 entry `index` leads anywhere.
    pub(super) fn has_l1_entry(&self, index: u64) -> bool {
        self.l1.get(index) != L1Entry::UNALLOCATED
    }

    /// The hashes of the slices of the table that L1 entry `index` leads to; `None`: the entry
    /// is 0.
    pub(super) async fn slice_hashes(&self, index: u64) -> Result<Option<Vec<Hash>>> {
        let L1Entry(raw) = self.l1.get(index);
        if raw == 0 {
            return Ok(None);
        }
        let decoded = L1Entry(raw).decode(&self.geometry);
        let place = decoded.map_err(|error| {
            let message = error.to_string();
            Error::new(vellum_io::ErrorKind::Corrupt, "verify", message)
        })?;
        let slice = slice_bytes(&self.header()) as usize;
        let table = match place {
            Some(place) => {
                let len = self.geometry.cluster_size_bytes();
                read_bytes(&self.file, place.bytes(), len).await?
            }
            // Reserved bits alone: no table is there.
            None => vellum_io::Buffer::zeroed(self.geometry.cluster_size_bytes() as usize),
        };
        let hashing = compute(move || {
            let slices = table.chunks(slice).map(|slice| mapping_hash(raw, slice));
            slices.collect()
        });
        Ok(Some(hashing.await))
    }
}
