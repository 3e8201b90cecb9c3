//! Writes the write buffer back: a cluster's pieces, with what has to be copied
//! around them, to their place on disk, and links it.
//!
//! Writebacks run in the background as soon as no more bytes of a cluster are expected,
//! many at a time, and in the way of whoever needs the mapping to be complete:
//! flushes, and requests that change the mapping of the same cluster.

use std::ops::Range;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::stream::{self, StreamExt};
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_io::{Buffer, Buffers, ErrorKind, Result, lane, spawn, spawn_to_completion};
use vellum_storage::{Event, WriteFlags};

use super::buffer::{Buffered, Place};
use crate::qcow2::commit::coalesce::Leader;
use crate::qcow2::commit::room::RoomSearch;
use crate::qcow2::commit::write_order::WriteOrder;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{MappingRun, RunKind};
use crate::qcow2::write::data::PlacedStep;
use crate::qcow2::write::plan::{self, Step};
use vellum_io::range_lock::Mode;

/// Clusters that are written back at the same time at most.
const MAX_WRITEBACKS: usize = 64;
/// Memory that they may fill together; at least two writebacks run at a time.
const MAX_FILL_BYTES: u64 = 2 << 20;
/// Longer pieces of a cluster are written at once.
const MAX_BUFFERED_BYTES: u64 = 32 << 10;
/// How long a cluster waits for more bytes at least, and twice that at most.
const IDLE_SWEEP_INTERVAL: Duration = Duration::from_millis(20);

impl Image {
    /// A writeback of scattered bytes fills one subcluster, which is the cluster itself
    /// without extended L2 entries; longer ones have their bytes in the cache's budget.
    fn max_writebacks(&self) -> usize {
        let by_memory = MAX_FILL_BYTES / self.geometry.subcluster_size_bytes();
        (by_memory as usize).clamp(2, MAX_WRITEBACKS)
    }

    /// How many bytes at the start of `run`, which is not the cluster's own data,
    /// should go to the write buffer: those of the first cluster, if they do not make
    /// it whole and the rest has to be copied from somewhere, or flushes do not wait for them.
    pub(crate) fn bytes_to_buffer(&self, run: &MappingRun) -> Option<u64> {
        if self.has_external_data() || !self.write_buffer.has_budget() {
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
        let waits = needs_copy || self.write_buffer.is_deferring();
        (waits && !whole && len_bytes <= MAX_BUFFERED_BYTES).then_some(len_bytes)
    }

    /// Whether small writes should wait in the write buffer at the moment, which the host is asked
    /// for now and then.
    pub(crate) async fn takes_small_writes(self: &Arc<Self>) -> bool {
        let buffer = &self.write_buffer;
        if buffer.has_budget() && buffer.room_below.wants_look() {
            // Boxed: a write in place would carry the room.
            Box::pin(self.look_for_room_below()).await;
        }
        buffer.takes_writes()
    }

    async fn look_for_room_below(self: &Arc<Self>) {
        // Who cannot say has said nothing.
        let told = self.file.free_bytes().await.unwrap_or(None);
        self.write_buffer.room_below.note_free(told);
        self.hurry_if_short();
    }

    /// Has what waits written back while there is room, if there is little.
    pub(crate) fn hurry_if_short(self: &Arc<Self>) {
        let buffer = &self.write_buffer;
        if buffer.room_below.is_short() && !buffer.is_empty() && !buffer.has_failed() {
            buffer.enqueue_all();
            self.start_writeback();
        }
    }

    /// Before a request takes room: those that were acknowledged before get theirs first, if there
    /// is little. The caller holds no range.
    ///
    /// # Errors
    /// If there is none for them.
    pub(crate) async fn let_buffered_go_first(self: &Arc<Self>) -> Result<()> {
        if !self.write_buffer.room_below.is_short() {
            return Ok(());
        }
        match self.write_back_all().await {
            Err(error) if error.kind() == ErrorKind::NoSpace => Err(error),
            // Whatever else is wrong with others meets the next flush.
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Shows bytes over an image that is only read: nothing writes them back.
    pub(crate) fn overlay(&self, guest: u64, bytes: &[u8]) {
        let (mut at, mut rest) = (guest, bytes);
        while !rest.is_empty() {
            let to_end =
                self.geometry.cluster_size_bytes() - GuestOffset(at).in_cluster(&self.geometry);
            let (piece, others) = rest.split_at(rest.len().min(to_end as usize));
            self.write_buffer.put(&self.place_in_buffer(at), piece);
            at += piece.len() as u64;
            rest = others;
        }
    }

    fn place_in_buffer(&self, guest: u64) -> Place {
        let cluster_start = self.geometry.cluster_start(guest);
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let left = self.size_bytes().saturating_sub(cluster_start);
        Place {
            cluster_start,
            inside: guest - cluster_start,
            cluster_len_bytes: cluster_bytes.min(left),
        }
    }

    /// Puts bytes of one cluster into the write buffer, and starts what has to be
    /// written back; `false` if there is no room. The caller holds their range shared.
    pub(crate) fn buffer_write(self: &Arc<Self>, guest: u64, bytes: &[u8]) -> bool {
        let buffered = self.write_buffer.put(&self.place_in_buffer(guest), bytes);
        if buffered == Some(Buffered::Waiting) {
            self.start_sweeper();
        } else {
            self.start_writeback();
        }
        buffered.is_some()
    }

    fn start_writeback(self: &Arc<Self>) {
        loop {
            let batch = self.clusters_per_batch();
            let clusters = self
                .write_buffer
                .next_for_writeback(self.max_writebacks(), batch);
            if clusters.is_empty() {
                return;
            }
            let writeback = BackgroundWriteback {
                image: self.clone(),
                clusters,
                result: Err(Leader::abandoned()),
            };
            drop(spawn_to_completion(writeback.run()));
        }
    }

    /// Writes back what waits for bytes that do not come.
    fn start_sweeper(self: &Arc<Self>) {
        if !self.write_buffer.begin_sweeping() {
            return;
        }
        let sweeper = Sweeper(Arc::downgrade(self));
        drop(spawn(sweeper.sweep()));
    }

    /// Waits until there may be room in the write buffer, or it takes no writes.
    pub(crate) async fn wait_for_room(self: &Arc<Self>, guest: u64, len_bytes: u64) {
        let changed = self.write_buffer.listen();
        if self
            .write_buffer
            .is_full(&self.place_in_buffer(guest), len_bytes)
        {
            changed.await;
        }
    }

    /// Writes back everything that is in the write buffer when this is called.
    pub(crate) async fn write_back_all(self: &Arc<Self>) -> Result<()> {
        if self.write_buffer.is_empty() {
            return Ok(());
        }
        let until = self.write_buffer.enqueue_all();
        self.start_writeback();
        loop {
            let changed = self.write_buffer.listen();
            if let Some(result) = self.write_buffer.is_written_back(until) {
                return result;
            }
            changed.await;
        }
    }

    /// Writes back the clusters that a guest range touches; the caller holds none of them.
    pub(crate) async fn write_back_range(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        let clusters = self.buffered_clusters(range);
        let mut writebacks = stream::iter(
            clusters
                .into_iter()
                .map(|cluster| self.write_back_cluster(cluster)),
        )
        .buffer_unordered(self.max_writebacks());
        let mut result = Ok(());
        while let Some(written) = writebacks.next().await {
            result = result.and(written);
        }
        result
    }

    /// As [`Image::write_back_range`], for a caller that holds whole clusters around the
    /// range exclusive and is going to replace all bytes of the range: clusters of which
    /// only such bytes are buffered stay as they are, for [`Image::discard_replaced`].
    pub(crate) async fn write_back_beside(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        for cluster in self.buffered_clusters(range.clone()) {
            if !self.write_buffer.is_inside(cluster, &range) {
                self.write_back_locked(cluster).await?;
            }
        }
        Ok(())
    }

    /// Forgets buffered bytes of a range for which the mapping leads to newer ones; call it
    /// with the range still held.
    pub(crate) fn discard_replaced(&self, range: &Range<u64>) {
        for cluster in self.buffered_clusters(range.clone()) {
            let start = range.start.saturating_sub(cluster);
            self.write_buffer
                .remove(cluster, start..range.end - cluster);
        }
    }

    /// As [`Image::write_back_range`], for a caller that holds whole clusters around the
    /// range exclusive.
    pub(crate) async fn write_back_locked_range(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        for cluster in self.buffered_clusters(range) {
            self.write_back_locked(cluster).await?;
        }
        Ok(())
    }

    /// Forgets what is buffered of clusters from the guest offset `start` on; the caller
    /// holds them exclusive.
    pub(crate) fn discard_buffered(&self, start: u64) {
        for cluster in self.buffered_clusters(start..u64::MAX) {
            self.write_buffer.remove(cluster, 0..u64::MAX);
        }
    }

    pub(crate) fn buffered_clusters(&self, range: Range<u64>) -> Vec<u64> {
        if self.write_buffer.is_empty() {
            return Vec::new();
        }
        let cluster_bytes = self.geometry.cluster_size_bytes();
        self.write_buffer.clusters_in(range, cluster_bytes)
    }

    async fn write_back_cluster(self: &Arc<Self>, cluster: u64) -> Result<()> {
        let end = cluster + self.geometry.cluster_size_bytes();
        let _exclusive = self
            .guest_ranges
            .acquire(cluster..end, Mode::Exclusive)
            .await;
        self.write_back_locked(cluster).await
    }

    /// Writes back one cluster, which the caller holds exclusive.
    async fn write_back_locked(self: &Arc<Self>, cluster: u64) -> Result<()> {
        while let Some(piece) = self.write_buffer.piece_after(cluster, 0) {
            self.fail_stop.check("write", &self.name)?;
            self.ensure_l2_table(GuestOffset(cluster)).await?;
            let mapping = self.mapping(GuestOffset(cluster)).await?;
            let step = plan::first_step(&self.geometry, &[mapping]);
            let end = self.step_end(cluster, &step, &mapping, piece.end);
            let (start, end) = (cluster + piece.start, cluster + end);
            let after = self.end_of_data_before(cluster);
            let placed = self.place_step(&step, vec![mapping], start..end, after);
            let placed = placed.await?;
            let written = self.write_step_content(&placed).await;
            self.free_unless(&written, placed.allocation).await;
            written?;
            self.link(&placed, WriteOrder::AfterBarrier).await?;
            let inside = placed.fill_start - cluster..placed.fill_end - cluster;
            self.write_buffer.remove(cluster, inside);
        }
        Ok(())
    }

    /// Where the pieces end that must be written together with the one that ends at
    /// `end`, since its fill reaches them.
    fn step_end(
        &self,
        cluster: u64,
        step: &Step,
        mapping: &vellum_format::l2::Mapping,
        mut end: u64,
    ) -> u64 {
        loop {
            let fill_end = plan::fill_end(&self.geometry, step, mapping, cluster + end) - cluster;
            match self.write_buffer.piece_after(cluster, end) {
                Some(next) if next.start <= fill_end => end = next.end,
                _ => return end,
            }
        }
    }

    /// Writes the pieces of a step and the fill around and between them.
    async fn write_step_content(self: &Arc<Self>, placed: &PlacedStep) -> Result<()> {
        let cluster = self.geometry.cluster_start(placed.start);
        let (start, end) = (placed.fill_start, placed.fill_end);
        let inside = start - cluster..end - cluster;
        let guest = placed.start - cluster..placed.end - cluster;
        let in_parts = !self.write_buffer.covers(cluster, inside)
            && (self.maps_to_zeroes(start, end - start).await?
                || self.write_buffer.covers(cluster, guest) && self.shares_fill(placed).await?);
        if in_parts {
            let mut piece = Buffer::zeroed((placed.end - placed.start) as usize);
            self.copy_buffered_over(placed.start, &mut piece);
            return self.write_placed(placed, piece).await.map(drop);
        }
        let whole = self.read_with_buffered(start..end).await?;
        self.note_writing(placed);
        let host = HostOffset(placed.host.bytes() + (start - cluster));
        self.emit(Event::WriteAio).await;
        let (buffers, flags) = (Buffers::from_iter([whole]), WriteFlags::default());
        let written = self.write_data(start, host.bytes(), buffers, flags).await;
        written.map(drop)
    }

    /// What a range of one cluster holds, buffered bytes included; the caller holds it.
    pub(crate) async fn read_with_buffered(self: &Arc<Self>, range: Range<u64>) -> Result<Buffer> {
        let cluster = self.geometry.cluster_start(range.start);
        let len_bytes = range.end - range.start;
        let inside = range.start - cluster..range.end - cluster;
        let mut content = if self.write_buffer.covers(cluster, inside) {
            Buffer::for_read(len_bytes as usize)
        } else {
            // One read of the whole is cheaper than one before and one after.
            self.emit(Event::CowRead).await;
            self.read_old(range.start, len_bytes).await?
        };
        self.copy_buffered_over(range.start, &mut content);
        Ok(content)
    }

    fn copy_buffered_over(&self, guest: u64, bytes: &mut [u8]) {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        self.write_buffer.copy_over(guest, bytes, cluster_bytes);
    }
}

/// A writeback in the background. Its end counts even if its lane ends first.
struct BackgroundWriteback {
    image: Arc<Image>,
    clusters: Vec<u64>,
    result: Result<()>,
}

impl BackgroundWriteback {
    async fn run(mut self) {
        if let Err(error) = self.write_back().await {
            self.result = Err(self.image.mark_corrupt(error).await);
        } else {
            self.result = Ok(());
        }
        let image = self.image.clone();
        drop(self);
        image.start_writeback();
        // A failure stops changes to the image or meets the next flush.
        drop(image.relieve_l2_cache().await);
    }

    async fn write_back(&self) -> Result<()> {
        let mut search = RoomSearch::default();
        loop {
            self.image
                .free_before_growth(self.clusters.len() as u64)
                .await;
            match self.write_back_once().await {
                Err(error) if self.image.make_room(&mut search, &error).await => {}
                written => return written,
            }
        }
    }

    async fn write_back_once(&self) -> Result<()> {
        if self.clusters.len() > 1 {
            self.image.write_back_batch(&self.clusters).await?;
        }
        for &cluster in &self.clusters {
            self.image.write_back_cluster(cluster).await?;
        }
        Ok(())
    }
}

impl Drop for BackgroundWriteback {
    fn drop(&mut self) {
        let result = std::mem::replace(&mut self.result, Ok(()));
        self.image
            .write_buffer
            .writeback_ended(&self.clusters, result);
    }
}

/// Queues clusters that wait for bytes that do not come.
struct Sweeper(Weak<Image>);

impl Sweeper {
    async fn sweep(self) {
        loop {
            lane::sleep(IDLE_SWEEP_INTERVAL).await;
            let Some(image) = self.0.upgrade() else {
                return;
            };
            let more = image.write_buffer.sweep();
            image.start_writeback();
            if !more {
                return;
            }
        }
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        if let Some(image) = self.0.upgrade() {
            image.write_buffer.end_sweeping();
        }
    }
}
