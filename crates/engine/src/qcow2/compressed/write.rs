//! Writing compressed clusters.
//!
//! A request is cut into batches. The clusters of a batch are compressed on all
//! cores, while the requests before it are still at work; then it waits for its
//! turn and places its data behind theirs, so that the file holds the clusters in
//! the order in which they were asked for; the bytes are written together with
//! those of others; and then the mapping changes, as for any other write. What
//! becomes no smaller is written as it is.
//!
//! Until a mapping is set nothing points at the new data, so a step that fails
//! gives its places back, and the clusters are what they were.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::compressed::CompressedDescriptor;
use vellum_format::crypto::CryptMethod;
use vellum_format::l2::Mapping;
use vellum_format::types::GuestOffset;
use vellum_io::lane::{compute, compute_threads};
use vellum_io::{Buffer, Error, ErrorKind, Io, Result, spawn_to_completion};
use vellum_storage::Event;

use super::appending::Batch;
use super::compress::{Codec, compress};
use crate::RequestFlags;
use crate::qcow2::commit::room::RoomSearch;
use crate::qcow2::commit::write_order::{DropReason, WriteOrder};
use crate::qcow2::image::Image;
use vellum_io::range_lock::Mode;
use vellum_io::turns::{Turn, Turns};

/// Guest bytes that one batch has, if that is a whole cluster for each core.
const BATCH_BYTES: u64 = 1 << 20;
/// Guest bytes that one thread gets at a time, if that is a whole cluster.
const JOB_BYTES: u64 = 64 << 10;

/// A compressed cluster on its way to the disk.
struct Placed {
    guest: u64,
    descriptor: CompressedDescriptor,
}

/// A batch whose clusters have places.
#[derive(Default)]
struct PlacedBatch {
    packed: Vec<Placed>,
    /// What the bytes of these go out with.
    appended: Vec<Arc<Batch>>,
    content: Content,
}

/// The guest's bytes, in their order, as far as they are not being written any more.
#[derive(Default)]
struct Content(Vec<Io<Buffer>>);

impl Content {
    fn extend(&mut self, more: Option<Io<Buffer>>) {
        self.0.extend(more);
    }

    /// Waits until all is written.
    async fn end(self) -> Result<Buffer> {
        let mut done = Vec::with_capacity(self.0.len());
        let mut result = Ok(());
        for piece in self.0 {
            match piece.await {
                Ok(piece) => done.push(piece),
                Err(error) => result = result.and(Err(error)),
            }
        }
        result.map(|()| Buffer::join_all(done))
    }
}

/// Clusters side by side that are written as they are.
struct Uncompressed<'a> {
    image: &'a Arc<Image>,
    start: u64,
    pieces: Vec<Buffer>,
}

impl<'a> Uncompressed<'a> {
    fn new(image: &'a Arc<Image>) -> Self {
        Uncompressed {
            image,
            start: 0,
            pieces: Vec::new(),
        }
    }

    fn add(&mut self, guest: u64, piece: Buffer) {
        if self.pieces.is_empty() {
            self.start = guest;
        }
        self.pieces.push(piece);
    }

    /// Begins to write them; returns when all of them have places.
    async fn have_places(&mut self) -> Option<Io<Buffer>> {
        if self.pieces.is_empty() {
            return None;
        }
        let bytes = Buffer::join_all(std::mem::take(&mut self.pieces));
        let order = Arc::new(Turns::default());
        let (turn, behind) = (order.take(), order.take());
        let (image, start) = (self.image.clone(), self.start);
        let write = async move { image.write_in_order(start, bytes, turn).await };
        let write = Io::task(spawn_to_completion(write));
        behind.wait().await;
        Some(write)
    }
}

/// Clusters of a batch that one thread compresses.
struct Job {
    codec: Codec,
    cluster_bytes: usize,
    piece: Buffer,
}

/// A cluster's data; `None` where that is no smaller.
type Packed = Option<Box<[u8]>>;

impl Job {
    fn run(self) -> (Buffer, Vec<Packed>) {
        let clusters = self.piece.chunks(self.cluster_bytes).map(|cluster| {
            if cluster.len() == self.cluster_bytes {
                return compress(self.codec, cluster);
            }
            // The last cluster of the device is as long as the others on disk.
            let mut whole = cluster.to_vec();
            whole.resize(self.cluster_bytes, 0);
            compress(self.codec, &whole).filter(|packed| packed.len() < cluster.len())
        });
        let packed = clusters.collect();
        (self.piece, packed)
    }
}

impl Image {
    /// Writes whole clusters, compressed where that makes them smaller; the range was
    /// checked to lie inside the device.
    pub(crate) async fn write_compressed(
        self: &Arc<Self>,
        offset_bytes: u64,
        mut buffer: Buffer,
        flags: RequestFlags,
        mut turn: Turn,
    ) -> Result<Buffer> {
        let mut search = RoomSearch::default();
        loop {
            let (lent, loan) = buffer.lend();
            let written = self.write_compressed_once(offset_bytes, lent, flags, turn);
            let error = match written.await {
                Ok(lent) => return Ok(loan.end(lent)),
                Err(error) => error,
            };
            match loan.take_back() {
                Some(whole) if self.make_room(&mut search, &error).await => buffer = whole,
                _ => return Err(error),
            }
            turn = self.compressed_writes.turns.take();
        }
    }

    async fn write_compressed_once(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
        turn: Turn,
    ) -> Result<Buffer> {
        let end_bytes = offset_bytes + buffer.len() as u64;
        self.check_compressible(offset_bytes, end_bytes)?;
        self.begin_change("write compressed").await?;
        let cluster = self.geometry.cluster_size_bytes();
        let batch_bytes = BATCH_BYTES.max(cluster * compute_threads() as u64) as usize;
        let mut turn = Some(turn);
        let mut at = offset_bytes;
        let mut rest = buffer;
        let mut done = Vec::new();
        while !rest.is_empty() {
            let len = rest.len().min(batch_bytes);
            let batch = rest.split_to(len);
            let (batch, packed) = self.compress_batch(batch).await;
            if let Some(turn) = &turn {
                turn.wait().await;
            }
            self.free_before_growth((len as u64).div_ceil(cluster))
                .await;
            let placing = self.compressed_writes.placing.read().await;
            self.make_tables(at..at + len as u64).await?;
            let (placed, result) = self.place_batch(at, batch, packed).await;
            if rest.is_empty() || result.is_err() {
                turn = None;
            }
            let linked = self
                .write_and_link(at..at + len as u64, placed.packed, &placed.appended)
                .await;
            drop(placing);
            // What was begun ends, whatever else has failed.
            let written = placed.content.end().await;
            result.and(linked)?;
            done.push(written?);
            at += len as u64;
        }
        if flags.fua {
            self.write_back_range(offset_bytes..end_bytes).await?;
            self.commit().await?;
        }
        Ok(Buffer::join_all(done))
    }

    /// Makes the L2 tables for a range first, so that they lie before its data, as everywhere.
    async fn make_tables(self: &Arc<Self>, range: Range<u64>) -> Result<()> {
        let _held = self.lock_clusters(range.clone(), Mode::Shared).await?;
        let table_bytes = self.geometry.bytes_per_l2_table();
        let mut at = range.start;
        while at < range.end {
            self.ensure_l2_table(GuestOffset(at)).await?;
            at = (at / table_bytes + 1).saturating_mul(table_bytes);
        }
        Ok(())
    }

    /// Refuses what cannot be written compressed.
    fn check_compressible(&self, start: u64, end: u64) -> Result<()> {
        let refuse = |kind, message: &str| {
            let error = Error::new(kind, "write compressed", message.to_owned());
            Err(error.target(self.name.clone()).at(start))
        };
        if self.has_external_data() {
            let message = "images with an external data file have no compressed clusters";
            return refuse(ErrorKind::Unsupported, message);
        }
        if self.header().crypt_method != CryptMethod::None {
            let message = "encrypted images have no compressed clusters";
            return refuse(ErrorKind::Unsupported, message);
        }
        let cluster = self.geometry.cluster_size_bytes();
        let ends_whole = end.is_multiple_of(cluster) || end == self.size.visible_bytes();
        if !start.is_multiple_of(cluster) || !ends_whole {
            let message = "compressed writes must cover whole clusters";
            return refuse(ErrorKind::InvalidArgument, message);
        }
        Ok(())
    }

    /// Compresses the clusters of a batch on all cores.
    async fn compress_batch(&self, mut batch: Buffer) -> (Buffer, Vec<Packed>) {
        let cluster_bytes = self.geometry.cluster_size_bytes();
        let job_bytes = JOB_BYTES.max(cluster_bytes) as usize;
        let mut jobs = Vec::new();
        while !batch.is_empty() {
            let job = Job {
                codec: self.compressed_writes.codec,
                cluster_bytes: cluster_bytes as usize,
                piece: batch.split_to(batch.len().min(job_bytes)),
            };
            jobs.push(compute(move || job.run()));
        }
        let mut pieces = Vec::with_capacity(jobs.len());
        let mut packed = Vec::new();
        for job in jobs {
            let (piece, clusters) = job.await;
            pieces.push(piece);
            packed.extend(clusters);
        }
        (Buffer::join_all(pieces), packed)
    }

    /// Finds places for the clusters of a batch from `start` on, in their order: appends
    /// the bytes of compressed ones to what is to be written, and begins to write those as
    /// they are that compression makes no smaller. What was placed before a failure is as
    /// good as without it.
    async fn place_batch(
        self: &Arc<Self>,
        start: u64,
        mut batch: Buffer,
        packed: Vec<Packed>,
    ) -> (PlacedBatch, Result<()>) {
        let cluster = self.geometry.cluster_size_bytes();
        let mut placed = PlacedBatch::default();
        let mut plain = Uncompressed::new(self);
        for (guest, packed) in (start..).step_by(cluster as usize).zip(packed) {
            let piece = batch.split_to(batch.len().min(cluster as usize));
            let place = match &packed {
                None => Ok(None),
                Some(bytes) => {
                    placed.content.extend(plain.have_places().await);
                    self.emit(Event::ClusterAllocBytes).await;
                    self.place_packed(bytes.len() as u64).await
                }
            };
            match (place, packed) {
                (Ok(Some(descriptor)), Some(bytes)) => {
                    let host = descriptor.host_offset.bytes();
                    let appended = self.compressed_writes.appender.append(host, &bytes);
                    placed.appended.push(appended);
                    placed
                        .appended
                        .dedup_by(|next, last| Arc::ptr_eq(next, last));
                    placed.packed.push(Placed { guest, descriptor });
                    placed.content.0.push(Io::ready(Ok(piece)));
                }
                (Err(error), _) => return (placed, Err(error)),
                (Ok(_), _) => plain.add(guest, piece),
            }
        }
        placed.content.extend(plain.have_places().await);
        (placed, Ok(()))
    }

    /// Has the bytes of placed clusters written, and points the mapping at them.
    async fn write_and_link(
        self: &Arc<Self>,
        range: Range<u64>,
        placed: Vec<Placed>,
        appended: &[Arc<Batch>],
    ) -> Result<()> {
        if placed.is_empty() {
            return Ok(());
        }
        let mut linked = 0;
        self.emit(Event::WriteCompressed).await;
        let result = match self.compressed_writes.appender.write(appended).await {
            Ok(()) => self.link_packed(range, &placed, &mut linked).await,
            Err(error) => Err(error),
        };
        for unused in &placed[linked..] {
            // If even that fails they are leaked.
            drop(self.unplace_packed(&unused.descriptor).await);
        }
        result
    }

    async fn link_packed(
        self: &Arc<Self>,
        range: Range<u64>,
        placed: &[Placed],
        linked: &mut usize,
    ) -> Result<()> {
        let _exclusive = self.begin_mapping_change(range).await?;
        let cluster = self.geometry.cluster_size_bytes();
        for Placed { guest, descriptor } in placed {
            self.ensure_l2_table(GuestOffset(*guest)).await?;
            let old = self.mapping(GuestOffset(*guest)).await?;
            let new = Mapping::Compressed(*descriptor);
            self.emit(Event::L2UpdateCompressed).await;
            self.set_mapping(GuestOffset(*guest), new, WriteOrder::AfterBarrier)
                .await?;
            *linked += 1;
            self.defer_free_replaced(&old, &new, DropReason::Replaced);
            self.discard_replaced(&(*guest..(guest + cluster).min(self.size_bytes())));
        }
        self.relieve_l2_cache().await
    }
}
