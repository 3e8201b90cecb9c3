//! Drains the data cache: writes a cluster's pieces, with what has to be copied
//! around them, to their place on disk, and links it.
//!
//! Drains run in the background as soon as no more bytes of a cluster are expected,
//! many at a time, and in the way of whoever needs the mapping to be complete:
//! flushes, and requests that change the mapping of the same cluster.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_storage::{Buffer, Buffers, Event, Result, WriteFlags, lane, spawn, spawn_lingering};

use super::buffer::{Kept, Place};
use crate::qcow2::commit::coalesce::RunningTurn;
use crate::qcow2::commit::order::Reach;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{Run, RunKind};
use crate::qcow2::write::data::Placed;
use crate::qcow2::write::plan::{self, Step};
use crate::range_lock::Mode;

/// Clusters that are drained at the same time at most.
const MAX_DRAINS: usize = 64;
/// Memory that they may fill together; at least two drains run at a time.
const MAX_FILL_BYTES: u64 = 2 << 20;
/// Longer pieces of a cluster are written at once.
const MAX_KEPT_BYTES: u64 = 32 << 10;
/// How long a cluster waits for more bytes at least, and twice that at most.
const PATIENCE: Duration = Duration::from_millis(20);

impl Image {
    /// A drain of scattered bytes fills one subcluster, which is the cluster itself
    /// without extended L2 entries; longer ones have their bytes in the cache's budget.
    fn max_drains(&self) -> usize {
        let by_memory = MAX_FILL_BYTES / self.geometry.subcluster_size_bytes();
        (by_memory as usize).clamp(2, MAX_DRAINS)
    }

    /// How many bytes at the start of `run`, which is not the cluster's own data,
    /// should go to the data cache: those of the first cluster, if they do not make
    /// it whole and the rest has to be copied from somewhere.
    pub(crate) fn bytes_to_keep(&self, run: &Run) -> Option<u64> {
        if self.has_external_data() || !self.data_cache.takes_writes() {
            return None;
        }
        let needs_copy = match run.kind {
            RunKind::Data { .. } | RunKind::Compressed(_) => true,
            RunKind::Unallocated { .. } => self
                .backing
                .as_ref()
                .is_some_and(|backing| backing.size_bytes() > run.guest.bytes()),
            RunKind::Zero { .. } => false,
        };
        let inside = run.guest.in_cluster(&self.geometry);
        let to_end = self.geometry.cluster_size_bytes() - inside;
        let len_bytes = run.len_bytes.min(to_end);
        let whole = inside == 0 && len_bytes == to_end;
        (needs_copy && !whole && len_bytes <= MAX_KEPT_BYTES).then_some(len_bytes)
    }

    fn place_in_cache(&self, guest: u64) -> Place {
        let cluster_start = self.geometry.cluster_start(guest);
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let left = self.size_bytes().saturating_sub(cluster_start);
        Place {
            cluster_start,
            inside: guest - cluster_start,
            cluster_len_bytes: cluster_bytes.min(left),
        }
    }

    /// Puts bytes of one cluster into the data cache, and starts what has to be
    /// drained; `false` if there is no room. The caller holds their range shared.
    pub(crate) fn keep(self: &Arc<Self>, guest: u64, bytes: &[u8]) -> bool {
        let kept = self.data_cache.put(&self.place_in_cache(guest), bytes);
        if kept == Some(Kept::Waiting) {
            self.start_sweeper();
        } else {
            self.start_drains();
        }
        kept.is_some()
    }

    fn start_drains(self: &Arc<Self>) {
        loop {
            let batch = self.clusters_per_batch();
            let clusters = self.data_cache.next_to_drain(self.max_drains(), batch);
            if clusters.is_empty() {
                return;
            }
            let turn = Turn {
                image: self.clone(),
                clusters,
                result: Err(RunningTurn::abandoned()),
            };
            drop(spawn_lingering(turn.drain()));
        }
    }

    /// Drains what waits for bytes that do not come.
    fn start_sweeper(self: &Arc<Self>) {
        if !self.data_cache.begin_sweeping() {
            return;
        }
        let sweeper = Sweeper(Arc::downgrade(self));
        drop(spawn(sweeper.sweep()));
    }

    /// Waits until there may be room in the data cache, or it takes no writes.
    pub(crate) async fn wait_for_room(self: &Arc<Self>, guest: u64, len_bytes: u64) {
        let changed = self.data_cache.listen();
        if self
            .data_cache
            .is_full(&self.place_in_cache(guest), len_bytes)
        {
            changed.await;
        }
    }

    /// Drains everything that is in the data cache when this is called.
    pub(crate) async fn drain_all(self: &Arc<Self>) -> Result<()> {
        if self.data_cache.is_empty() {
            return Ok(());
        }
        let until = self.data_cache.enqueue_all();
        self.start_drains();
        loop {
            let changed = self.data_cache.listen();
            if let Some(result) = self.data_cache.is_drained(until) {
                return result;
            }
            changed.await;
        }
    }

    /// Drains the clusters that a guest range touches; the caller holds none of them.
    pub(crate) async fn drain_range(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        let clusters = self.kept_clusters(range);
        let mut drains = stream::iter(clusters.into_iter().map(|cluster| self.drain(cluster)))
            .buffer_unordered(self.max_drains());
        let mut result = Ok(());
        while let Some(drained) = drains.next().await {
            result = result.and(drained);
        }
        result
    }

    /// As [`Image::drain_range`], for a caller that holds whole clusters around the
    /// range exclusive and is going to replace all bytes of the range: clusters of which
    /// only such bytes are kept stay as they are, for [`Image::forget_replaced`].
    pub(crate) async fn drain_beside(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        for cluster in self.kept_clusters(range.clone()) {
            if !self.data_cache.is_inside(cluster, &range) {
                self.drain_held(cluster).await?;
            }
        }
        Ok(())
    }

    /// Forgets kept bytes of a range that the mapping leads to newer ones of; call it
    /// with the range still held.
    pub(crate) fn forget_replaced(&self, range: &Range<u64>) {
        for cluster in self.kept_clusters(range.clone()) {
            let start = range.start.saturating_sub(cluster);
            self.data_cache.remove(cluster, start..range.end - cluster);
        }
    }

    /// As [`Image::drain_range`], for a caller that holds whole clusters around the
    /// range exclusive.
    pub(crate) async fn drain_held_range(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        for cluster in self.kept_clusters(range) {
            self.drain_held(cluster).await?;
        }
        Ok(())
    }

    /// Forgets what is kept of clusters from the guest offset `start` on; the caller
    /// holds them exclusive.
    pub(crate) fn forget_kept(&self, start: u64) {
        for cluster in self.kept_clusters(start..u64::MAX) {
            self.data_cache.remove(cluster, 0..u64::MAX);
        }
    }

    pub(crate) fn kept_clusters(&self, range: Range<u64>) -> Vec<u64> {
        if self.data_cache.is_empty() {
            return Vec::new();
        }
        let cluster_bytes = self.geometry.cluster_size_bytes();
        self.data_cache.clusters_in(range, cluster_bytes)
    }

    async fn drain(self: &Arc<Self>, cluster: u64) -> Result<()> {
        let end = cluster + self.geometry.cluster_size_bytes();
        let _exclusive = self
            .guest_ranges
            .acquire(cluster..end, Mode::Exclusive)
            .await;
        self.drain_held(cluster).await
    }

    /// Drains one cluster, which the caller holds exclusive.
    async fn drain_held(self: &Arc<Self>, cluster: u64) -> Result<()> {
        while let Some(piece) = self.data_cache.piece_after(cluster, 0) {
            self.check_latch()?;
            self.ensure_l2_table(GuestOffset(cluster)).await?;
            let mapping = self.mapping(GuestOffset(cluster)).await?;
            let step = plan::first_step(&self.geometry, &[mapping]);
            let end = self.group_end(cluster, &step, &mapping, piece.end);
            let (start, end) = (cluster + piece.start, cluster + end);
            let placed = self.place_step(&step, vec![mapping], start, end).await?;
            let written = self.write_group(&placed).await;
            self.give_back_unless(written.is_ok(), placed.allocation)
                .await;
            written?;
            self.link(&placed, Reach::AfterBarrier).await?;
            let inside = placed.fill_start - cluster..placed.fill_end - cluster;
            self.data_cache.remove(cluster, inside);
        }
        Ok(())
    }

    /// Where the pieces end that must be written together with the one that ends at
    /// `end`, since its fill reaches them.
    fn group_end(
        &self,
        cluster: u64,
        step: &Step,
        mapping: &vellum_format::l2::Mapping,
        mut end: u64,
    ) -> u64 {
        loop {
            let fill_end = plan::fill_end(&self.geometry, step, mapping, cluster + end) - cluster;
            match self.data_cache.piece_after(cluster, end) {
                Some(next) if next.start <= fill_end => end = next.end,
                _ => return end,
            }
        }
    }

    /// Writes the pieces of a step and the fill around and between them.
    async fn write_group(self: &Arc<Self>, placed: &Placed) -> Result<()> {
        let cluster = self.geometry.cluster_start(placed.start);
        let (start, end) = (placed.fill_start, placed.fill_end);
        let inside = start - cluster..end - cluster;
        let guest = placed.start - cluster..placed.end - cluster;
        let in_parts = !self.data_cache.covers(cluster, inside)
            && (self.maps_to_zeroes(start, end - start).await?
                || self.data_cache.covers(cluster, guest) && self.shares_fill(placed).await?);
        if in_parts {
            let mut piece = Buffer::zeroed((placed.end - placed.start) as usize);
            self.overlay(placed.start, &mut piece);
            return self.write_placed(placed, piece).await.map(drop);
        }
        let whole = self.content(start..end).await?;
        self.note_writing(placed);
        let host = HostOffset(placed.host.bytes() + (start - cluster));
        self.reached(Event::WriteAio).await;
        let (buffers, flags) = (Buffers::from_iter([whole]), WriteFlags::default());
        let written = self.write_data(start, host.bytes(), buffers, flags).await;
        written.map(drop)
    }

    /// What a range of one cluster holds, kept bytes included; the caller holds it.
    pub(crate) async fn content(self: &Arc<Self>, range: Range<u64>) -> Result<Buffer> {
        let cluster = self.geometry.cluster_start(range.start);
        let len_bytes = range.end - range.start;
        let inside = range.start - cluster..range.end - cluster;
        let mut content = if self.data_cache.covers(cluster, inside) {
            Buffer::for_read(len_bytes as usize)
        } else {
            // One read of the whole is cheaper than one before and one after.
            self.reached(Event::CowRead).await;
            self.read_old(range.start, len_bytes).await?
        };
        self.overlay(range.start, &mut content);
        Ok(content)
    }

    fn overlay(&self, guest: u64, bytes: &mut [u8]) {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        self.data_cache.copy_over(guest, bytes, cluster_bytes);
    }
}

/// A drain in the background. Its end counts even if its lane ends first.
struct Turn {
    image: Arc<Image>,
    clusters: Vec<u64>,
    result: Result<()>,
}

impl Turn {
    async fn drain(mut self) {
        if let Err(error) = self.drain_clusters().await {
            self.result = Err(self.image.mark_corrupt(error).await);
        } else {
            self.result = Ok(());
        }
        let image = self.image.clone();
        drop(self);
        image.start_drains();
        // A failure latches the image or meets the next flush.
        drop(image.relieve_cache().await);
    }

    async fn drain_clusters(&self) -> Result<()> {
        if self.clusters.len() > 1 {
            self.image.drain_batch(&self.clusters).await?;
        }
        for &cluster in &self.clusters {
            self.image.drain(cluster).await?;
        }
        Ok(())
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let result = std::mem::replace(&mut self.result, Ok(()));
        self.image.data_cache.drained(&self.clusters, result);
    }
}

/// Queues clusters that wait for bytes that do not come.
struct Sweeper(Weak<Image>);

impl Sweeper {
    async fn sweep(self) {
        loop {
            lane::sleep(PATIENCE).await;
            let Some(image) = self.0.upgrade() else {
                return;
            };
            let more = image.data_cache.sweep();
            image.start_drains();
            if !more {
                return;
            }
        }
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        if let Some(image) = self.0.upgrade() {
            image.data_cache.end_sweeping();
        }
    }
}
