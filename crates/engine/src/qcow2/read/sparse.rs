//! A guess that block status makes, as QEMU makes it: an image with many more
//! clusters than its file takes space for has had its metadata preallocated.
//! What lies in a hole of such a file is told to read as zeroes.

use std::ops::Range;

use vellum_format::refcount;
use vellum_format::types::HostCluster;
use vellum_io::Result;

use crate::qcow2::alloc::refcounts::Refcounts;
use crate::qcow2::image::Image;
use crate::qcow2::open::read_refcount_table;

impl Image {
    /// Whether data may lie in holes of the file; found out once.
    pub(crate) async fn looks_preallocated(&self) -> Result<bool> {
        if let Some(&known) = self.preallocated.get() {
            return Ok(known);
        }
        let guess = self.guess_preallocated().await?;
        Ok(*self.preallocated.get_or_init(|| guess))
    }

    async fn guess_preallocated(&self) -> Result<bool> {
        let Some(taken_bytes) = self.file.allocated_bytes()? else {
            return Ok(false);
        };
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let taken = taken_bytes / cluster_bytes;
        let threshold = (taken * 10 / 9).max(taken + 2);
        let clusters = self.file.len_bytes()?.div_ceil(cluster_bytes);
        self.require_refcount_table().await?;
        let refcounts = &self.allocator.refcounts;
        let per_slice = refcounts.entries_per_slice();
        let (mut counted, mut start) = (0, 0);
        while start < clusters && counted < threshold {
            let end = (start / per_slice + 1)
                .saturating_mul(per_slice)
                .min(clusters);
            counted += refcounts.count_used(start..end).await?;
            start = end;
        }
        Ok(counted >= threshold)
    }

    /// An image that is only read is opened without its refcount table.
    async fn require_refcount_table(&self) -> Result<()> {
        let refcounts = &self.allocator.refcounts;
        if refcounts.table().clusters == 0 {
            let header = self.header();
            let table = read_refcount_table(&self.file, &header, &self.geometry).await?;
            *refcounts.table() = table;
        }
        Ok(())
    }
}

impl Refcounts {
    /// How many clusters of a range, which lies in one slice, are in use.
    pub(crate) async fn count_used(&self, clusters: Range<u64>) -> Result<u64> {
        let Some(place) = self.place(HostCluster(clusters.start))? else {
            return Ok(0);
        };
        let order = self.geometry.refcount_order;
        let end = place.index + (clusters.end - clusters.start) as usize;
        loop {
            let used = self.cache.with(place.key, |block| {
                let counts = (place.index..end).map(|index| refcount::get(block, order, index));
                counts.filter(|&count| count != 0).count() as u64
            });
            match used {
                Some(used) => return Ok(used),
                None => self.load(place.key).await?,
            }
        }
    }
}
