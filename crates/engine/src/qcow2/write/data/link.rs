//! The last step of a write: the mapping changes, and what it replaced is dropped.

use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_storage::Result;

use super::Placed;
use crate::qcow2::commit::order::{Dropped, Reach, Reason};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::corrupt;
use crate::qcow2::mapping::lookup::EntryPlace;
use crate::qcow2::write::plan;

impl Image {
    /// Points the mapping at what was written. If that fails on the way, the new clusters
    /// that nothing points at yet are given back.
    pub(crate) async fn link(&self, placed: &Placed, reach: Reach) -> Result<()> {
        self.note_blanks(placed);
        for index in 0..placed.old.len() {
            let linked = self.link_cluster(placed, index, reach).await;
            if let Err(error) = linked {
                let unused = placed
                    .allocation
                    .map(|new| new.skip(index as u64, &self.geometry));
                self.give_back_unless(false, unused).await;
                return Err(error);
            }
        }
        Ok(())
    }

    pub(super) async fn link_cluster(
        &self,
        placed: &Placed,
        index: usize,
        reach: Reach,
    ) -> Result<()> {
        let old = &placed.old[index];
        let inside = index as u64 * self.geometry.cluster_size_bytes();
        let guest = self.geometry.cluster_start(placed.start) + inside;
        let host = HostOffset(placed.host.bytes() + inside);
        let (start, end) = (placed.fill_start, placed.fill_end);
        let bits = plan::touched_bits(&self.geometry, guest, start, end);
        let new = plan::written(&self.geometry, old, host, bits);
        if new != *old {
            self.set_mapping(GuestOffset(guest), new, reach).await?;
            self.drop_replaced(old, &new, Reason::Replaced);
        }
        Ok(())
    }

    /// Changes the mapping of the cluster at `guest`; its L2 table exists.
    pub(crate) async fn set_mapping(
        &self,
        guest: GuestOffset,
        mapping: Mapping,
        reach: Reach,
    ) -> Result<()> {
        let entry = mapping.encode(&self.geometry);
        let place = self.mapper().place(guest)?;
        let EntryPlace { slice, index } =
            place.ok_or_else(|| corrupt("write", "the L2 table has gone"))?;
        loop {
            let change = self.order.change(reach);
            let set = self
                .l2
                .update(slice.key, |slice| entry.write(slice, index, &self.geometry));
            drop(change);
            match set {
                Some(true) => return Ok(()),
                Some(false) => return Err(corrupt("write", "L2 entry outside its slice")),
                None => self.load_slice(slice).await?,
            }
        }
    }

    /// Notes the clusters that `old` used and `new` does not. Call it after the
    /// mapping has changed.
    pub(crate) fn drop_replaced(&self, old: &Mapping, new: &Mapping, reason: Reason) {
        if self.has_external_data() {
            return;
        }
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let (start, end) = match old {
            Mapping::Compressed(descriptor) => {
                (descriptor.host_offset.bytes(), descriptor.end().bytes())
            }
            _ => match old.host() {
                Some(host) if new.host() != Some(host) => {
                    (host.bytes(), host.bytes() + cluster_bytes)
                }
                _ => return,
            },
        };
        let first = HostOffset(start).cluster(&self.geometry);
        let count = end.div_ceil(cluster_bytes) - first.index();
        self.blanks.forget(first.index()..first.index() + count);
        self.order.note_dropped(Dropped {
            start: first,
            count,
            reason,
        });
    }
}
