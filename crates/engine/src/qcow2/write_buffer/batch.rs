//! Writes back several clusters of the write buffer at once: small clusters are copied side
//! by side to a run of new ones, which is written with one request.
//!
//! Only the first cluster's range is waited for. The others are taken if nobody holds
//! them, so that no request holds one range while it waits for another.

use std::sync::Arc;

use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_io::{Buffers, Result, finish_all};
use vellum_storage::{Event, WriteFlags};

use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::commit::write_order::WriteOrder;
use crate::qcow2::image::Image;
use crate::qcow2::write::data::PlacedStep;
use crate::qcow2::write::plan::{self, Target};
use vellum_io::range_lock::{Mode, RangeGuard};

/// What one request writes at most, unless a single cluster is longer.
const BATCH_BYTES: u64 = 128 << 10;

/// A cluster that needs a new place for its whole content.
struct Member {
    cluster: u64,
    mapping: Mapping,
    _exclusive: RangeGuard,
}

impl Image {
    /// How many clusters a writeback should take together.
    pub(crate) fn clusters_per_batch(&self) -> usize {
        if self.geometry.extended_l2 || !self.reads_as_stored() {
            // Subclusters of different clusters never lie side by side; what is encrypted
            // by guest offset is written cluster by cluster.
            return 1;
        }
        (BATCH_BYTES / self.geometry.cluster_size_bytes()).max(1) as usize
    }

    /// Writes back those of `clusters` together that can be; the others stay as they are.
    pub(crate) async fn write_back_batch(self: &Arc<Self>, clusters: &[u64]) -> Result<()> {
        let Some((&first, others)) = clusters.split_first() else {
            return Ok(());
        };
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let exclusive = self
            .guest_ranges
            .acquire(first..first + cluster_bytes, Mode::Exclusive)
            .await;
        let mut held = vec![(first, exclusive)];
        for &cluster in others {
            // Rule 9: while one range is held, no other is waited for.
            let range = cluster..cluster + cluster_bytes;
            let guard = self.guest_ranges.try_acquire(range, Mode::Exclusive);
            held.extend(guard.map(|guard| (cluster, guard)));
        }
        self.fail_stop.check("write", &self.name)?;
        let mut members = Vec::with_capacity(held.len());
        for (cluster, exclusive) in held {
            members.extend(self.member(cluster, exclusive).await?);
        }
        if members.len() < 2 {
            return Ok(());
        }
        // In guest order, so that neighbours stay neighbours.
        members.sort_unstable_by_key(|member| member.cluster);
        self.copy_members(members).await
    }

    /// The cluster as a member of a batch, if its pieces and all around them must go
    /// to a new place.
    async fn member(
        self: &Arc<Self>,
        cluster: u64,
        exclusive: RangeGuard,
    ) -> Result<Option<Member>> {
        if self.write_buffer.piece_after(cluster, 0).is_none() {
            return Ok(None);
        }
        self.ensure_l2_table(GuestOffset(cluster)).await?;
        let mapping = self.mapping(GuestOffset(cluster)).await?;
        let step = plan::first_step(&self.geometry, &[mapping]);
        let zeroes = self
            .maps_to_zeroes(cluster, self.geometry.cluster_size_bytes())
            .await?;
        Ok((step.target == Target::New && !zeroes).then_some(Member {
            cluster,
            mapping,
            _exclusive: exclusive,
        }))
    }

    /// Writes as many of the members as find room side by side, and links them.
    async fn copy_members(self: &Arc<Self>, mut members: Vec<Member>) -> Result<()> {
        let after = self.end_of_data_before(members[0].cluster);
        let allocation = self.allocate_for_data(members.len() as u64, after).await?;
        members.truncate(allocation.clusters as usize);
        let written = self.write_members(&members, allocation.start).await;
        self.free_unless(&written, Some(allocation)).await;
        written?;
        let mut outcome = Ok(());
        for (index, member) in members.iter().enumerate() {
            let place = allocation.part(index as u64, &self.geometry);
            if outcome.is_ok() {
                outcome = self.link_member(member, place).await;
            } else {
                self.free_unless(&outcome, Some(place)).await;
            }
        }
        outcome
    }

    /// Points the mapping of a cluster at its copy, or gives that back.
    async fn link_member(&self, member: &Member, place: Allocation) -> Result<()> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let end = member.cluster + cluster_bytes;
        let placed = PlacedStep {
            old: vec![member.mapping],
            host: place.start,
            reads_as_zeroes: place.reads_as_zeroes,
            refcount_durable: place.refcount_durable,
            allocation: Some(place),
            start: member.cluster,
            end,
            fill_start: member.cluster,
            fill_end: end,
        };
        self.link(&placed, WriteOrder::AfterBarrier).await?;
        self.write_buffer.remove(member.cluster, 0..cluster_bytes);
        Ok(())
    }

    async fn write_members(self: &Arc<Self>, members: &[Member], host: HostOffset) -> Result<()> {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let contents = members
            .iter()
            .map(|member| self.read_with_buffered(member.cluster..member.cluster + cluster_bytes));
        let contents = finish_all(members.len(), contents).await?;
        let buffers: Buffers = contents.into_iter().collect();
        self.emit(Event::WriteAio).await;
        self.data
            .write(host.bytes(), buffers, WriteFlags::default())
            .await
            .map(drop)
    }
}
