//! An image as one stream of bytes, for a pipe: its metadata first, then its data, with no
//! way back. What is to be stored has to be known before the first byte is written.
//!
//! The stream is a sound image in every respect: each cluster of it is counted once, its
//! entries have the copied flag, and the data lies in the order of the guest.

use std::ops::Range;

use vellum_format::{Geometry, L1Entry, Mapping};
use vellum_io::bits::Bits;

use super::layout::Layout;
use super::options::{CreateOptions, refuse, too_large};
use super::write;
use crate::Preallocation;
use crate::{Buffer, Result};

/// Bytes of metadata that are made at once, about.
const PIECE_BYTES: u64 = 1 << 20;

/// Guest clusters, one bit each: 20 MiB for 10 TiB of 64 KiB clusters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClusterSet {
    clusters: Bits,
    cluster_bytes: u64,
}

impl ClusterSet {
    /// No cluster of a disk.
    pub fn new(size_bytes: u64, cluster_bytes: u64) -> ClusterSet {
        ClusterSet {
            clusters: Bits::none(size_bytes.div_ceil(cluster_bytes)),
            cluster_bytes,
        }
    }

    /// Adds every cluster that a range of the disk touches.
    pub fn add(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let end = range.end.div_ceil(self.cluster_bytes);
        for cluster in range.start / self.cluster_bytes..end.min(self.clusters.end()) {
            self.clusters.insert(cluster);
        }
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.clusters.count()
    }
}

/// The plan of a stream.
#[derive(Debug)]
pub struct ImageStream {
    layout: Layout,
    header: Vec<u8>,
    data: ClusterSet,
    /// Which L1 entries have an L2 table, in order.
    tables: Vec<u64>,
}

impl CreateOptions {
    /// Plans an image that stores the clusters of `data` and nothing else.
    ///
    /// # Errors
    /// As [`CreateOptions::validate`]; and where there is more than one file, encryption,
    /// a backing file, or preallocation.
    pub fn stream(&self, data: ClusterSet) -> Result<ImageStream> {
        let layout = self.layout()?;
        let obstacles = [
            (self.encryption.is_some(), "encryption"),
            (self.data_file.is_some(), "an external data file"),
            (self.backing_file.is_some(), "a backing file"),
            (self.preallocation != Preallocation::Off, "preallocation"),
        ];
        if let Some((_, what)) = obstacles.into_iter().find(|(is_set, _)| *is_set) {
            return Err(refuse(format!("an image with {what} cannot be streamed")));
        }
        let per_table = layout.geometry.l2_entries();
        let from = |cluster: u64| data.clusters.find(cluster..data.clusters.end(), true);
        let table_from = |cluster| from(cluster).map(|found| found / per_table);
        let next = |table: &u64| table_from((table + 1) * per_table);
        let tables: Vec<u64> = std::iter::successors(table_from(0), next).collect();
        let layout = layout
            .holding(tables.len() as u64, data.count())
            .ok_or_else(too_large)?;
        Ok(ImageStream {
            header: self.encoded_header(&layout, None)?,
            layout,
            data,
            tables,
        })
    }
}

impl ImageStream {
    /// Bytes of the whole stream.
    pub fn len_bytes(&self) -> u64 {
        self.layout.file_size_bytes()
    }

    /// Bytes of a cluster; the data of the last one is filled up with zeroes.
    pub fn cluster_bytes(&self) -> u64 {
        self.layout.geometry.cluster_size_bytes()
    }

    /// Everything before the data, piece by piece.
    pub fn metadata(&self) -> impl Iterator<Item = Buffer> + '_ {
        let layout = &self.layout;
        let cluster = self.cluster_bytes();
        let mut header = Buffer::zeroed(cluster as usize);
        header[..self.header.len()].copy_from_slice(&self.header);
        let table = layout.refcount_table_clusters * cluster;
        let blocks = layout.refcount_blocks * cluster;
        let l1 = match layout.is_bare() {
            true => layout.l1_entries * 8,
            false => layout.geometry.clusters_for(layout.l1_entries * 8) * cluster,
        };
        std::iter::once(header)
            .chain(pieces(table, |at, bytes| {
                write::fill_refcount_table(layout, at, bytes);
            }))
            .chain(pieces(blocks, |at, bytes| {
                write::fill_refcounts(layout, at, bytes);
            }))
            .chain(pieces(l1, |at, bytes| self.fill_l1(at, bytes)))
            .chain(self.l2_tables())
    }

    fn fill_l1(&self, at: u64, bytes: &mut [u8]) {
        let first = self.layout.l2_tables_offset();
        bytes.fill(0);
        let numbers = at / 8..(at + bytes.len() as u64) / 8;
        let start = self.tables.partition_point(|table| *table < numbers.start);
        let tables = self.tables[start..].iter().enumerate();
        for (index, table) in tables.take_while(|(_, table)| numbers.contains(table)) {
            let place = (start + index) as u64 * self.cluster_bytes();
            if let Some(offset) = first.checked_add(place) {
                let entry = L1Entry::new(offset, true);
                let written = entry.write(bytes, (table - numbers.start) as usize);
                debug_assert!(written, "the entry is inside the piece");
            }
        }
    }

    fn l2_tables(&self) -> impl Iterator<Item = Buffer> + '_ {
        let mut stored = 0;
        self.tables.iter().map(move |table| {
            let mut bytes = Buffer::zeroed(self.cluster_bytes() as usize);
            stored += self.fill_l2(*table, stored, &mut bytes);
            bytes
        })
    }

    /// Fills an L2 table, before which `stored` clusters are mapped; says how many it maps.
    fn fill_l2(&self, table: u64, stored: u64, bytes: &mut [u8]) -> u64 {
        let geometry: &Geometry = &self.layout.geometry;
        let first = table * geometry.l2_entries();
        let mut count = 0;
        for index in 0..geometry.l2_entries() {
            if !self.data.clusters.contains(first + index) {
                continue;
            }
            let host = self.layout.stored_offset(stored + count);
            let mapping = Mapping::Data { host, copied: true };
            let written = mapping
                .encode(geometry)
                .write(bytes, index as usize, geometry);
            debug_assert!(written, "the entry is inside the table");
            count += 1;
        }
        count
    }

    /// The ranges of the disk that follow the metadata, in order, of at most `most_bytes`
    /// (whole clusters). The last may go beyond the end of the disk: zeroes there.
    pub fn data(&self, most_bytes: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        let cluster = self.cluster_bytes();
        let (most, clusters) = ((most_bytes / cluster).max(1), &self.data.clusters);
        let mut next = 0;
        std::iter::from_fn(move || {
            let start = clusters.find(next..clusters.end(), true)?;
            let end = clusters.run_end(start, clusters.end());
            next = end.min(start + most);
            Some(start * cluster..next * cluster)
        })
    }
}

/// A region of `len_bytes` in pieces.
fn pieces<'a>(
    len_bytes: u64,
    fill: impl Fn(u64, &mut [u8]) + 'a,
) -> impl Iterator<Item = Buffer> + 'a {
    let starts = (0..len_bytes).step_by(PIECE_BYTES as usize);
    starts.map(move |at| {
        let len = (len_bytes - at).min(PIECE_BYTES);
        let mut bytes = Buffer::zeroed(len as usize);
        fill(at, &mut bytes);
        bytes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sets_give_their_runs() {
        let mut set = ClusterSet::new(200 * 512, 512);
        set.add(0..1);
        set.add(10 * 512 + 5..130 * 512);
        set.add(199 * 512..1 << 40);
        set.add(5..5);
        assert_eq!(set.count(), 1 + 120 + 1);
        assert_eq!(set.clusters.find(0..200, true), Some(0));
        assert_eq!(set.clusters.find(1..200, true), Some(10));
        assert_eq!(set.clusters.find(10..200, false), Some(130));
        assert_eq!(set.clusters.find(130..200, true), Some(199));
        assert_eq!(set.clusters.find(199..200, false), None);
    }

    fn stream(size_bytes: u64, ranges: &[Range<u64>], options: CreateOptions) -> ImageStream {
        let options = CreateOptions {
            size_bytes,
            ..options
        };
        let mut set = ClusterSet::new(size_bytes, options.cluster_size_bytes);
        ranges.iter().for_each(|range| set.add(range.clone()));
        options.stream(set).expect("a plan")
    }

    #[test]
    fn a_stream_is_as_long_as_it_says() {
        for cluster_size_bytes in [512, 4096, 65536, 1 << 21] {
            for ranges in [
                &[][..],
                &[0..1],
                &[0..10 << 20, 20 << 20..(64 << 20) - 1],
                &[0..(64 << 20) + 512],
            ] {
                let options = CreateOptions {
                    cluster_size_bytes,
                    ..CreateOptions::default()
                };
                let stream = stream((64 << 20) + 512, ranges, options);
                let metadata: u64 = stream.metadata().map(|piece| piece.len() as u64).sum();
                let data: u64 = stream.data(1 << 20).map(|part| part.end - part.start).sum();
                assert_eq!(metadata + data, stream.len_bytes());
            }
        }
    }

    #[test]
    fn what_needs_more_than_a_stream_is_refused() {
        let options = CreateOptions {
            size_bytes: 1 << 20,
            backing_file: Some("base".into()),
            ..CreateOptions::default()
        };
        let error = options.stream(ClusterSet::new(1 << 20, 65536)).unwrap_err();
        assert_eq!(
            error.message(),
            "an image with a backing file cannot be streamed"
        );
    }
}
