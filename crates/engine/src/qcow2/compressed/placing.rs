//! Where compressed data goes: end to end, one cluster's data after the other's,
//! so that several share a host cluster and some reach into the next.
//!
//! The host cluster in which the last data ended is *open*: the packer holds a
//! reference to it, one more than its refcount says of data, until it is full or
//! something else takes the cluster after it. So an open cluster is nobody else's,
//! whatever becomes of the data in it, and a crash leaks it at worst. What is
//! opened again is a new cluster: nothing is ever added to one of an earlier time,
//! of which nobody knows what lies behind its data.
//!
//! Invariants:
//! - A host cluster's refcount covers all data placed in it before the mapping can
//!   point at that data.
//! - Whoever compares refcounts with the mapping of an open image seals the open cluster first
//!   (`Image::seal_packed`).
//! - Places are handed out and their bytes appended in the order of the tickets, so
//!   the bytes of the open cluster lie in memory or on disk without a hole.

use vellum_format::compressed::CompressedDescriptor;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_io::Result;

use super::write_state::OpenCluster;
use crate::qcow2::image::Image;

/// Where data is going to lie.
struct Spot {
    at: u64,
    /// The host cluster in which it ends: one that the packer holds.
    last: HostCluster,
    /// The one in which it begins, if that is another.
    first: Option<HostCluster>,
}

impl Image {
    /// Finds and counts a place for `len_bytes` bytes, fewer than a cluster has; it
    /// must be its ticket's turn. `None`: the format cannot express any.
    pub(crate) async fn place_packed(
        &self,
        len_bytes: u64,
    ) -> Result<Option<CompressedDescriptor>> {
        self.begin_lazy_refcounts().await?;
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let mut open = self.compressed_writes.open.lock().await;
        let spot = self.find_spot(&mut open, len_bytes).await?;
        let bits = self.geometry.cluster_bits;
        let descriptor = CompressedDescriptor::new(HostOffset(spot.at), len_bytes, bits);
        let end = spot.at + len_bytes;
        let kept = match &descriptor {
            Ok(_) if !end.is_multiple_of(cluster_bytes) => self.raise_packed(spot.last).await,
            _ => Ok(false),
        };
        if let (Ok(descriptor), Ok(kept)) = (&descriptor, &kept) {
            // Without a reference of its own, the data has taken the packer's.
            *open = kept.then(|| OpenCluster {
                cluster: spot.last,
                used_bytes: end - spot.last.index() * cluster_bytes,
            });
            return Ok(Some(*descriptor));
        }
        for cluster in spot.first.into_iter().chain([spot.last]) {
            self.release_packed(cluster, 1).await?;
        }
        kept.map(|_| None)
    }

    /// Takes the open cluster, and another one if it has not enough room. On failure
    /// nothing has changed.
    async fn find_spot(&self, open: &mut Option<OpenCluster>, len_bytes: u64) -> Result<Spot> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let end_of = |old: &OpenCluster| HostOffset((old.cluster.index() + 1) * cluster_bytes);
        let used_to = |old: &OpenCluster| old.cluster.index() * cluster_bytes + old.used_bytes;
        if let Some(old) = open.take_if(|old| old.used_bytes + len_bytes <= cluster_bytes) {
            return Ok(Spot {
                at: used_to(&old),
                last: old.cluster,
                first: None,
            });
        }
        let end = open.as_ref().map(end_of);
        let new = self.allocate_for("compressed cluster", end).await?.start;
        let mut spot = Spot {
            at: new.bytes(),
            last: new.cluster(&self.geometry),
            first: None,
        };
        match open.take() {
            Some(old) if end == Some(new) => {
                spot.at = used_to(&old);
                spot.first = Some(old.cluster);
            }
            Some(old) => self.release_packed(old.cluster, 1).await?,
            None => {}
        }
        Ok(spot)
    }

    /// Raises a count by one; `false` if it has no room for more.
    async fn raise_packed(&self, cluster: HostCluster) -> Result<bool> {
        match self.allocator.refcounts.raise(cluster, 1).await {
            Ok(raised) => Ok(raised.is_some()),
            Err(error) => Err(self.mark_corrupt(error).await),
        }
    }

    /// Gives back what data at `descriptor` has counted: nothing points there.
    pub(crate) async fn unplace_packed(&self, descriptor: &CompressedDescriptor) -> Result<()> {
        let first = descriptor.host_offset.cluster(&self.geometry);
        let end = descriptor.end().bytes();
        let count = end.div_ceil(self.geometry.cluster_size_bytes()) - first.index();
        self.release_packed(first, count).await
    }

    /// Lets the open cluster go: from now on its refcount counts data alone.
    ///
    /// Must have happened before refcounts are compared with the mapping.
    pub(crate) async fn seal_packed(&self) -> Result<()> {
        match self.compressed_writes.open.lock().await.take() {
            Some(old) => self.release_packed(old.cluster, 1).await,
            None => Ok(()),
        }
    }

    async fn release_packed(&self, start: HostCluster, count: u64) -> Result<()> {
        match self.allocator.release(start, count).await {
            Ok(()) => Ok(()),
            Err(error) => Err(self.mark_corrupt(error).await),
        }
    }
}
