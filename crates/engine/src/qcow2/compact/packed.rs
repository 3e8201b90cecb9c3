//! Compressed clusters in new places: their bytes as they are, behind those of others that were
//! moved, as if the guest had just written them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use vellum_format::compressed::CompressedDescriptor;
use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::lane::compute;
use vellum_io::range_lock::Mode;
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::WriteFlags;

use crate::qcow2::commit::write_order::{DropReason, WriteOrder};
use crate::qcow2::compressed::appending::Batch;
use crate::qcow2::compressed::decompress::exact_len;
use crate::qcow2::image::Image;
use crate::qcow2::write::plan;

/// There is no place below the limit.
struct NoRoom;

/// A cluster with a new place that nothing leads to yet.
#[derive(Debug, Clone, Copy)]
struct Placed {
    guest: u64,
    old: Mapping,
    new: Mapping,
}

/// What gets new places together.
#[derive(Default)]
struct Anew {
    placed: VecDeque<Placed>,
    /// What the bytes go out with.
    appended: Vec<Arc<Batch>>,
}

impl Image {
    /// Moves those of some compressed guest clusters below the limit that lie above it. Tells how many bytes
    /// of the file these are; `None`: there is no room for all of them.
    pub(super) async fn move_packed(
        self: &Arc<Self>,
        start: GuestOffset,
        end: u64,
        limit: HostCluster,
    ) -> Result<Option<u64>> {
        let start = start.bytes();
        // In this order, as a write: see `compressed/placing.rs`.
        let turn = self.compressed_writes.turns.take();
        turn.wait().await;
        let _placing = self.compressed_writes.placing.read().await;
        let _exclusive = self.guest_ranges.acquire(start..end, Mode::Exclusive).await;
        let Some(end) = self.end_inside(start, end) else {
            return Ok(Some(0));
        };
        if self.mapper().owned_table(GuestOffset(start))?.is_none() {
            return Ok(Some(0));
        }
        self.write_back_locked_range(start..end).await?;
        let mut anew = Anew::default();
        let placed = self.place_all(start..end, limit, &mut anew).await;
        // Also where that has failed: else these bytes would go out with those of others, to places that
        // are somebody else's by then.
        let appender = &self.compressed_writes.appender;
        let written = appender.write(&anew.appended).await;
        let moved = match placed.and_then(|has_room| written.map(|()| has_room)) {
            Ok(has_room) => self
                .link_anew(&mut anew)
                .await
                .map(|bytes| (has_room, bytes)),
            Err(error) => Err(error),
        };
        for unused in anew.placed {
            // If even that fails they are leaked.
            drop(self.unplace_anew(unused.new).await);
        }
        let (has_room, moved_bytes) = moved?;
        self.relieve_l2_cache().await?;
        Ok(has_room.then_some(moved_bytes))
    }

    /// Finds places below the limit for the compressed clusters of a range; `false`: not for all.
    async fn place_all(
        self: &Arc<Self>,
        range: Range<u64>,
        limit: HostCluster,
        anew: &mut Anew,
    ) -> Result<bool> {
        for guest in range.step_by(self.geometry.cluster_size_bytes() as usize) {
            let old = self.mapping(GuestOffset(guest)).await?;
            let Mapping::Compressed(data) = old else {
                continue;
            };
            if self.is_above(&old, limit) != Some(true) {
                continue;
            }
            let placed = match self.place_anew(&data, limit, anew).await? {
                None => self.unpack_below(guest, limit).await?,
                Some(Ok(place)) => Some(Mapping::Compressed(place)),
                Some(Err(NoRoom)) => None,
            };
            let Some(new) = placed else {
                return Ok(false);
            };
            anew.placed.push_back(Placed { guest, old, new });
        }
        Ok(true)
    }

    async fn link_anew(self: &Arc<Self>, anew: &mut Anew) -> Result<u64> {
        let mut moved_bytes = 0;
        while let Some(Placed { guest, old, new }) = anew.placed.front().copied() {
            self.set_mapping(GuestOffset(guest), new, WriteOrder::AfterBarrier)
                .await?;
            anew.placed.pop_front();
            self.defer_free_replaced(&old, &new, DropReason::Replaced);
            if let Mapping::Compressed(data) = old {
                moved_bytes += data.max_len_bytes();
            }
        }
        Ok(moved_bytes)
    }

    /// A place below the limit for compressed data, whose bytes are going to be written there. `None`: it
    /// is no smaller than a cluster that is not compressed, for all that is known.
    async fn place_anew(
        &self,
        data: &CompressedDescriptor,
        limit: HostCluster,
        anew: &mut Anew,
    ) -> Result<Option<std::result::Result<CompressedDescriptor, NoRoom>>> {
        let cluster = self.geometry.cluster_size_bytes();
        let bytes = self.packed_bytes(data).await?;
        let len_bytes = bytes.len() as u64;
        if len_bytes >= cluster {
            return Ok(None);
        }
        let Some(place) = self.place_packed(len_bytes).await? else {
            return Ok(None);
        };
        if place.end().bytes() > limit.index() * cluster {
            self.unplace_packed(&place).await?;
            // No bytes go there, and what is packed next must not leave a hole.
            self.seal_packed().await?;
            return Ok(Some(Err(NoRoom)));
        }
        let appender = &self.compressed_writes.appender;
        let batch = appender.append(place.host_offset.bytes(), &bytes);
        anew.appended.push(batch);
        anew.appended.dedup_by(|next, last| Arc::ptr_eq(next, last));
        Ok(Some(Ok(place)))
    }

    /// The bytes of compressed data; up to the end of its last sector, where its length cannot be told.
    async fn packed_bytes(&self, data: &CompressedDescriptor) -> Result<Vec<u8>> {
        let from = data.host_offset.bytes();
        // The last sector may be cut short by the end of the file.
        let there = data.end().bytes().min(self.data.len_bytes()?);
        let buffer = Buffer::for_read(there.saturating_sub(from) as usize);
        let buffers = Buffers::from_iter([buffer]);
        let read = self.data.read(from, buffers).into_single().await?;
        let mut bytes = read.to_vec();
        bytes.resize(data.max_len_bytes() as usize, 0);
        let kind = self.header().compression_type;
        let cluster_bytes = self.geometry.cluster_size_bytes() as usize;
        Ok(compute(move || {
            let len = exact_len(kind, &bytes, cluster_bytes);
            bytes.truncate(len.unwrap_or(bytes.len()));
            bytes
        })
        .await)
    }

    /// Writes a cluster as it is to a place below the limit.
    async fn unpack_below(
        self: &Arc<Self>,
        guest: u64,
        limit: HostCluster,
    ) -> Result<Option<Mapping>> {
        self.begin_allocation().await?;
        let Some(new) = self.allocator.allocate_below(limit, 1).await? else {
            return Ok(None);
        };
        let first = new.start.cluster(&self.geometry).index();
        self.unwritten.forget(first..first + 1);
        let written = self.write_unpacked(guest, new.start).await;
        self.free_unless(&written, Some(new)).await;
        written?;
        let nothing = Mapping::Unallocated;
        let all = u32::MAX;
        Ok(Some(plan::written(
            &self.geometry,
            &nothing,
            new.start,
            all,
        )))
    }

    async fn write_unpacked(self: &Arc<Self>, guest: u64, to: HostOffset) -> Result<()> {
        let cluster = self.geometry.cluster_size_bytes();
        let bytes = Buffers::from_iter([self.read_old(guest, cluster).await?]);
        let flags = WriteFlags::default();
        self.write_data(guest, to.bytes(), bytes, flags)
            .await
            .map(drop)
    }

    /// Gives a place back that nothing leads to.
    async fn unplace_anew(&self, new: Mapping) -> Result<()> {
        match (new, new.host()) {
            (Mapping::Compressed(place), _) => self.unplace_packed(&place).await,
            (_, Some(host)) => {
                self.allocator
                    .release(host.cluster(&self.geometry), 1)
                    .await
            }
            _ => Ok(()),
        }
    }
}
