//! Writes whose bytes lie in a file already: the file system shares their blocks with it
//! (`BlockDevice::write_shared`), and none of them moves.
//!
//! A request is a write like any other: in place where the clusters are the image's
//! own, into new clusters that are linked afterwards elsewhere. What would need
//! copy-on-write, or is not made of whole blocks, is refused; the caller copies it.

use std::sync::Arc;

use vellum_format::types::GuestOffset;
use vellum_io::{Error, ErrorKind, Result};

use super::data::{MAX_STEP_CLUSTERS, PlacedStep};
use super::plan;
use crate::qcow2::commit::room::RoomSearch;
use crate::qcow2::commit::write_order::WriteOrder;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::RunKind;
use crate::qcow2::read::chain::Located;
use vellum_io::range_lock::Mode;

impl Image {
    /// Makes the guest's bytes at `offset_bytes` those of `source`; the range was checked.
    pub(crate) async fn write_shared(
        self: &Arc<Self>,
        offset_bytes: u64,
        mut source: Located,
    ) -> Result<()> {
        let may_share = self.reads_as_stored() && self.data.may_clone_from(&*source.storage);
        if self.header().bitmaps().is_some() || !may_share {
            return Err(refused("the blocks cannot be shared"));
        }
        self.begin_change("write").await?;
        let mut at = offset_bytes;
        let mut search = RoomSearch::default();
        while source.len_bytes > 0 {
            let written_bytes = match self.share_in_place(at, &source).await? {
                Some(written_bytes) => written_bytes,
                None => match self.share_to_new_place(at, &source).await {
                    Ok(written_bytes) => written_bytes,
                    Err(error) if self.make_room(&mut search, &error).await => continue,
                    Err(error) => return Err(error),
                },
            };
            at += written_bytes;
            source.offset_bytes += written_bytes;
            source.len_bytes -= written_bytes;
        }
        Ok(())
    }

    /// Shares the first bytes that have a place of this image alone; `None`: they
    /// have none.
    async fn share_in_place(self: &Arc<Self>, at: u64, source: &Located) -> Result<Option<u64>> {
        let end = at + source.len_bytes;
        let _shared = self.guest_ranges.acquire(at..end, Mode::Shared).await;
        self.check_still_inside(at..end)?;
        let first = self.view(GuestOffset(at), source.len_bytes).await?[0];
        let RunKind::Data { host, copied: true } = first.kind else {
            return Ok(None);
        };
        // One may have been added since the request began.
        if self.bitmaps.is_tracking() {
            self.mark_dirty(at..at + first.len_bytes).await?;
        }
        self.share_from(source, host.bytes(), first.len_bytes)
            .await?;
        Ok(Some(first.len_bytes))
    }

    /// Shares the first bytes with new clusters, and links these.
    async fn share_to_new_place(self: &Arc<Self>, at: u64, source: &Located) -> Result<u64> {
        let table_bytes = self.geometry.bytes_per_l2_table();
        let most = MAX_STEP_CLUSTERS * self.geometry.cluster_size_bytes();
        let table_end = (at / table_bytes + 1).saturating_mul(table_bytes);
        let end = (at + source.len_bytes)
            .min(table_end)
            .min(self.geometry.cluster_start(at) + most);
        let _exclusive = self.begin_mapping_change(at..end).await?;
        self.ensure_l2_table(GuestOffset(at)).await?;
        let mappings = self.mappings(at, end).await?;
        let step = plan::first_step(&self.geometry, &mappings);
        let after = self.end_of_data_before(self.geometry.cluster_start(at));
        let placed = self.place_step(&step, mappings, at..end, after).await?;
        let shared = self.share_placed(&placed, source).await;
        self.free_unless(&shared, placed.allocation).await;
        shared?;
        self.link(&placed, WriteOrder::AfterBarrier).await?;
        self.end_mapping_change(&(placed.start..placed.end)).await?;
        Ok(placed.end - placed.start)
    }

    async fn share_placed(&self, placed: &PlacedStep, source: &Located) -> Result<()> {
        if placed.fill_start != placed.start || placed.fill_end != placed.end {
            return Err(refused("a part of a cluster has to be copied"));
        }
        self.note_writing(placed);
        let inside = placed.start - self.geometry.cluster_start(placed.start);
        let host = placed.host.bytes() + inside;
        self.share_from(source, host, placed.end - placed.start)
            .await
    }

    async fn share_from(&self, source: &Located, host: u64, len_bytes: u64) -> Result<()> {
        self.data
            .clone_range(&*source.storage, source.offset_bytes, host, len_bytes)
            .await
    }
}

fn refused(message: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "write shared", message)
}
