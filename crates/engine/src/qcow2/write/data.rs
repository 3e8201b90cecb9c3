//! Writing guest data.
//!
//! Bytes that lie in clusters of this image alone are overwritten in place, many
//! requests at a time. Everything else goes step by step under an exclusive hold
//! of its clusters: allocate, write data and COW in one go, then link. A step
//! that fails before the link changes nothing that anybody can see.

mod link;

use std::ops::Range;
use std::sync::Arc;

use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostCluster, HostOffset};
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::{Event, WriteFlags};

use super::failed::take_back;
use super::plan::{self, Step, Target};
use super::reflink::MIN_SHARED_BYTES;
use crate::RequestFlags;
use crate::qcow2::alloc::allocator::Allocation;
use crate::qcow2::commit::room::RoomSearch;
use crate::qcow2::commit::write_order::WriteOrder;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{Lookup, MappingRun, RunKind};
use vellum_io::range_lock::Mode;
use vellum_io::turns::Turn;

/// Clusters that one step handles at most.
pub(crate) const MAX_STEP_CLUSTERS: u64 = 4096;
/// What a disk writes as a whole.
const SECTOR_BYTES: u64 = 512;
/// Longer runs of zeroes are not written out beside the data.
const MAX_ZERO_FILL_BYTES: u64 = 32 << 10;

/// What became of bytes while their range was held shared.
enum InPlace {
    /// They are written.
    Written {
        piece: Buffer,
        /// The mapping on disk leads to them.
        is_in_place: bool,
        /// They are durable.
        durable: bool,
    },
    /// They are in the write buffer.
    Buffered { piece: Buffer },
    /// The write buffer has no room for that many.
    NoRoom { len_bytes: u64 },
    /// The mapping has to change.
    NeedsStep,
}

/// A write that has succeeded.
pub(crate) struct Written {
    /// The request's buffer.
    pub(crate) buffer: Buffer,
    /// All bytes are where the mapping on disk leads to.
    pub(crate) is_in_place: bool,
}

/// A step with everything known that it needs.
pub(crate) struct PlacedStep {
    /// The old mappings of the clusters.
    pub(crate) old: Vec<Mapping>,
    /// Where the first cluster lies.
    pub(crate) host: HostOffset,
    /// What is to be written reads as zeroes on disk.
    pub(crate) reads_as_zeroes: bool,
    /// The clusters' refcounts are durable.
    pub(crate) refcount_durable: bool,
    pub(crate) allocation: Option<Allocation>,
    /// Guest range that the request covers in these clusters.
    pub(crate) start: u64,
    pub(crate) end: u64,
    /// Guest range that is written.
    pub(crate) fill_start: u64,
    pub(crate) fill_end: u64,
}

impl Image {
    /// Writes `buffer` at `offset_bytes`; the range was checked.
    pub(crate) async fn write(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Result<Buffer> {
        let written = self
            .write_telling_place(offset_bytes, buffer, flags)
            .await?;
        Ok(written.buffer)
    }

    /// As [`Image::write`]; tells whether all bytes went where the mapping on disk leads to.
    pub(crate) async fn write_telling_place(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
    ) -> Result<Written> {
        self.write_pieces(offset_bytes, buffer, flags, true, &mut None)
            .await
    }

    /// As [`Image::write`], past the write buffer: all of it is allocated in its order.
    pub(crate) async fn write_at_once(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
    ) -> Result<Buffer> {
        let flags = RequestFlags::default();
        let mut turn = None;
        let written = self.write_pieces(offset_bytes, buffer, flags, false, &mut turn);
        Ok(written.await?.buffer)
    }

    /// As [`Image::write_at_once`], but its clusters are allocated in the turn `turn`,
    /// which ends as soon as all of them have a place. It waits for its turn before it
    /// holds anything, so nobody whose turn it is waits for it.
    pub(crate) async fn write_in_order(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
        turn: Turn,
    ) -> Result<Buffer> {
        turn.wait().await;
        let flags = RequestFlags::default();
        let mut turn = Some(turn);
        let written = self.write_pieces(offset_bytes, buffer, flags, false, &mut turn);
        Ok(written.await?.buffer)
    }

    async fn write_pieces(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
        flags: RequestFlags,
        may_buffer: bool,
        turn: &mut Option<Turn>,
    ) -> Result<Written> {
        self.begin_change("write").await?;
        let mut at = offset_bytes;
        let end = at + buffer.len() as u64;
        let mut rest = buffer;
        let mut done = Vec::new();
        let (mut commit, mut is_in_place) = (false, true);
        let mut search = RoomSearch::default();
        while !rest.is_empty() {
            let held = self
                .write_in_place(at, &mut rest, flags.fua, may_buffer, turn)
                .await;
            let held = match held {
                Ok(held) => held,
                Err(error) => {
                    let clusters = (end - at).div_ceil(self.geometry.cluster_size_bytes());
                    search.note_in_place(clusters);
                    self.try_again(&mut search, error, &rest, at..end).await?;
                    continue;
                }
            };
            let piece = match held {
                InPlace::Written {
                    piece,
                    is_in_place: leads_there,
                    durable,
                } => {
                    commit |= flags.fua && !durable;
                    is_in_place &= leads_there;
                    piece
                }
                InPlace::Buffered { piece } => {
                    (commit, is_in_place) = (commit || flags.fua, false);
                    piece
                }
                InPlace::NoRoom { len_bytes } => {
                    self.wait_for_room(at, len_bytes).await;
                    continue;
                }
                InPlace::NeedsStep => {
                    (commit, is_in_place) = (commit || flags.fua, false);
                    // Boxed, as the commit is: a write in place would carry the room.
                    match Box::pin(self.write_step(at, &mut rest, turn)).await {
                        Ok(Some(piece)) => piece,
                        Ok(None) => continue,
                        Err(error) => {
                            search.note_in_place(0);
                            self.try_again(&mut search, error, &rest, at..end).await?;
                            continue;
                        }
                    }
                }
            };
            at += piece.len() as u64;
            done.push(piece);
        }
        if commit {
            Box::pin(self.commit()).await?;
        }
        Ok(Written {
            buffer: Buffer::join_all(done),
            is_in_place,
        })
    }

    /// Writes the first bytes of `rest` in place or into the write buffer, if that is
    /// where they belong.
    async fn write_in_place(
        self: &Arc<Self>,
        at: u64,
        rest: &mut Buffer,
        fua: bool,
        may_buffer: bool,
        turn: &mut Option<Turn>,
    ) -> Result<InPlace> {
        let len_bytes = rest.len() as u64;
        let _shared = self
            .guest_ranges
            .acquire(at..at + len_bytes, Mode::Shared)
            .await;
        self.check_still_inside(at..at + len_bytes)?;
        if self.bitmaps.is_tracking() {
            self.mark_dirty(at..at + len_bytes).await?;
        }
        let view = self.view_to_write(GuestOffset(at), len_bytes).await?;
        let first = view[0];
        if goes_on_in_place(&view) {
            return Ok(InPlace::NeedsStep);
        }
        let RunKind::Data { host, copied: true } = first.kind else {
            if !may_buffer || fua {
                return Ok(InPlace::NeedsStep);
            }
            let Some(len_bytes) = self.bytes_to_buffer(&first) else {
                return Ok(InPlace::NeedsStep);
            };
            if !self.takes_small_writes().await {
                return Ok(InPlace::NeedsStep);
            }
            if !self.buffer_write(at, &rest[..len_bytes as usize]) {
                return Ok(InPlace::NoRoom { len_bytes });
            }
            let piece = rest.split_to(len_bytes as usize);
            return Ok(InPlace::Buffered { piece });
        };
        // A durable byte is one that the mapping on disk leads to. Only now, with the
        // range held, can no other request change that mapping any more.
        let is_in_place = self.mapping_is_durable();
        let flags = WriteFlags {
            fua: fua && is_in_place,
        };
        let piece = rest.split_to(first.len_bytes as usize);
        if rest.is_empty() {
            // Nothing more needs a place.
            *turn = None;
        }
        self.emit(Event::WriteAio).await;
        // Its place may be a hole, for which there is no room.
        let (piece, loan) = match self.allocator.may_have_holes() {
            true => {
                let (piece, loan) = piece.lend();
                (piece, Some(loan))
            }
            false => (piece, None),
        };
        let buffers = Buffers::from_iter([piece]);
        let written = self.write_data(at, host.bytes(), buffers, flags).await;
        let written = written.map(Buffer::join_all);
        Ok(InPlace::Written {
            piece: take_back(written, loan, rest)?,
            is_in_place,
            durable: flags.fua,
        })
    }

    /// Writes the first bytes of `rest` with a change of the mapping. `None`: their
    /// clusters have a place now, and they are to be written there.
    async fn write_step(
        self: &Arc<Self>,
        at: u64,
        rest: &mut Buffer,
        turn: &mut Option<Turn>,
    ) -> Result<Option<Buffer>> {
        let table_bytes = self.geometry.bytes_per_l2_table();
        let most = MAX_STEP_CLUSTERS * self.geometry.cluster_size_bytes();
        let table_end = (at / table_bytes + 1).saturating_mul(table_bytes);
        let end = (at + rest.len() as u64)
            .min(table_end)
            .min(self.geometry.cluster_start(at) + most);
        self.let_buffered_go_first().await?;
        let clusters = (end - at).div_ceil(self.geometry.cluster_size_bytes());
        self.free_before_growth(clusters).await;
        let _exclusive = self.begin_mapping_change(at..end).await?;
        self.ensure_l2_table(GuestOffset(at)).await?;
        let mappings = self.mappings(at, end).await?;
        let step = plan::first_step(&self.geometry, &mappings);
        let after = match turn {
            // What others have linked so far depends on time, and where these clusters go must not:
            // those before have taken theirs, so the next free one goes on behind them.
            Some(_) => None,
            None => self.end_of_data_before(self.geometry.cluster_start(at)),
        };
        let placed = self.place_step(&step, mappings, at..end, after).await?;
        if placed.end == at + rest.len() as u64 {
            *turn = None;
        }
        let before = self.order_before_data(&placed).await;
        self.free_unless(&before, placed.allocation).await;
        let before = before?;
        // Rule 1: the data comes before the link, unless the guest sees no difference.
        let piece = if before.is_some() {
            None
        } else {
            let (piece, loan) = rest.split_to((placed.end - placed.start) as usize).lend();
            let written = self.write_placed(&placed, piece).await;
            self.free_unless(&written, placed.allocation).await;
            Some(take_back(written, Some(loan), rest)?)
        };
        let order = before.unwrap_or(WriteOrder::AfterBarrier);
        self.link(&placed, order).await?;
        self.end_mapping_change(&(placed.start..placed.end)).await?;
        Ok(piece)
    }

    /// When a mapping may reach the disk that comes before its data, so that requests
    /// for the same clusters go side by side; `None`: it must come after. It may come
    /// before where the guest sees no difference between the old content and places
    /// that nothing was written to.
    async fn order_before_data(&self, placed: &PlacedStep) -> Result<Option<WriteOrder>> {
        let (start, end) = (placed.fill_start, placed.fill_end);
        if !placed.reads_as_zeroes
            || !self.write_buffer.is_empty() && !self.buffered_clusters(start..end).is_empty()
            || self.host_end(placed) > self.file.len_bytes()?
            || !self.maps_to_zeroes(start, end - start).await?
        {
            return Ok(None);
        }
        Ok(Some(WriteOrder::of_new_clusters(placed.refcount_durable)))
    }

    /// Where the last cluster of a step ends on disk.
    fn host_end(&self, placed: &PlacedStep) -> u64 {
        placed.host.bytes() + placed.old.len() as u64 * self.geometry.cluster_size_bytes()
    }

    /// The host clusters of a step, and the subclusters of each that it writes.
    fn written_bits<'a>(
        &'a self,
        placed: &'a PlacedStep,
    ) -> impl Iterator<Item = (HostCluster, u32)> + 'a {
        let first_guest = self.geometry.cluster_start(placed.start);
        let first_host = placed.host.cluster(&self.geometry).index();
        (0..placed.old.len() as u64).map(move |index| {
            let guest = first_guest + index * self.geometry.cluster_size_bytes();
            let (start, end) = (placed.fill_start, placed.fill_end);
            let bits = plan::touched_bits(&self.geometry, guest, start, end);
            (HostCluster(first_host + index), bits)
        })
    }

    /// Finds out whether the subclusters of a step in places that exist were never
    /// written.
    fn look_for_unwritten(&self, placed: &mut PlacedStep) {
        if !self.geometry.extended_l2 || self.has_external_data() || placed.allocation.is_some() {
            return;
        }
        let known = self
            .written_bits(placed)
            .try_fold(true, |durable, (cluster, bits)| {
                Some(durable & self.unwritten.find(cluster, bits)?)
            });
        placed.reads_as_zeroes = known.is_some();
        placed.refcount_durable = known.unwrap_or(false);
    }

    /// Notes, before a step writes into places that exist, that it may have.
    pub(crate) fn note_writing(&self, placed: &PlacedStep) {
        if placed.allocation.is_none() {
            self.note_unwritten(placed);
        }
    }

    pub(crate) fn note_unwritten(&self, placed: &PlacedStep) {
        if !self.geometry.extended_l2 || self.has_external_data() {
            return;
        }
        for (cluster, bits) in self.written_bits(placed) {
            match placed.allocation {
                Some(allocation) if allocation.reads_as_zeroes => {
                    self.unwritten
                        .note_allocated(cluster, bits, allocation.refcount_durable);
                }
                _ => self.unwritten.note_written(cluster, bits),
            }
        }
    }

    /// Whether new clusters lie inside the file and read as zeroes there.
    pub(crate) fn reads_as_zeroes(&self, allocation: &Allocation) -> Result<bool> {
        let len_bytes = allocation.clusters * self.geometry.cluster_size_bytes();
        let end = allocation.start.bytes() + len_bytes;
        Ok(allocation.reads_as_zeroes && end <= self.file.len_bytes()?)
    }

    /// The mappings of all clusters that `start..end` touches.
    pub(crate) async fn mappings(&self, start: u64, end: u64) -> Result<Vec<Mapping>> {
        let cluster = self.geometry.cluster_size_bytes();
        let mut mappings = Vec::new();
        let mut at = self.geometry.cluster_start(start);
        while at < end {
            mappings.push(self.mapping(GuestOffset(at)).await?);
            at += cluster;
        }
        Ok(mappings)
    }

    /// The mapping of the cluster at `guest`.
    pub(crate) async fn mapping(&self, guest: GuestOffset) -> Result<Mapping> {
        loop {
            match self.mapper().cluster(guest) {
                Ok(Lookup::Hit(mapping)) => return Ok(mapping),
                Ok(Lookup::Miss(slice)) => self.load_slice_at(guest, slice).await?,
                Err(error) => return Err(self.mark_corrupt(error).await),
            }
        }
    }

    /// Finds room for a step that writes a guest range, behind the host offset `after` if it can be
    /// there, and what has to be written around the guest's bytes.
    pub(crate) async fn place_step(
        &self,
        step: &Step,
        mut mappings: Vec<Mapping>,
        Range { start, end }: Range<u64>,
        after: Option<HostOffset>,
    ) -> Result<PlacedStep> {
        let cluster_start = self.geometry.cluster_start(start);
        let (host, allocation, clusters) = match step.target {
            Target::Own(host) => (host, None, step.clusters),
            Target::New if self.has_external_data() => {
                (HostOffset(cluster_start), None, step.clusters)
            }
            Target::New => {
                let allocation = self.allocate_for_data(step.clusters as u64, after).await?;
                let clusters = allocation.clusters as usize;
                (allocation.start, Some(allocation), clusters)
            }
        };
        mappings.truncate(clusters);
        let stop = cluster_start + clusters as u64 * self.geometry.cluster_size_bytes();
        let end = end.min(stop);
        let (first, last) = (mappings[0], mappings[mappings.len() - 1]);
        let mut placed = PlacedStep {
            old: mappings,
            host,
            reads_as_zeroes: allocation.is_some_and(|new| new.reads_as_zeroes),
            refcount_durable: allocation.is_some_and(|new| new.refcount_durable),
            allocation,
            start,
            end,
            fill_start: plan::fill_start(&self.geometry, step, &first, start),
            fill_end: plan::fill_end(&self.geometry, step, &last, end),
        };
        self.look_for_unwritten(&mut placed);
        Ok(placed)
    }

    /// Writes the guest's bytes and the fill around them.
    pub(crate) async fn write_placed(
        self: &Arc<Self>,
        placed: &PlacedStep,
        piece: Buffer,
    ) -> Result<Buffer> {
        self.note_writing(placed);
        let (head, tail) = self.fill_around(placed).await?;
        let first = placed.start - head.as_ref().map_or(0, |head| head.len() as u64);
        let mut buffers = Buffers::new();
        let skipped = usize::from(head.is_some());
        buffers.extend(head);
        buffers.push(piece);
        buffers.extend(tail);
        let host = placed.host.bytes() + (first - self.geometry.cluster_start(placed.start));
        self.emit(Event::WriteAio).await;
        if buffers.len() > 1 {
            self.emit(Event::CowWrite).await;
        }
        let flags = WriteFlags::default();
        let mut written = self.write_data(first, host, buffers, flags).await?;
        Ok(written.swap_remove(skipped))
    }

    /// Prepares what is written around the guest's bytes: before and after them.
    async fn fill_around(
        self: &Arc<Self>,
        placed: &PlacedStep,
    ) -> Result<(Option<Buffer>, Option<Buffer>)> {
        // Before the fill, which may share blocks up to the same end.
        self.reach_end(placed).await?;
        let head = self.fill(placed, placed.fill_start, placed.start);
        let tail = self.fill(placed, placed.end, placed.fill_end);
        #[cfg(feature = "mutants")]
        if vellum_storage::mutants::is(vellum_storage::mutants::Mutant::TellTheFirstError) {
            #[expect(clippy::disallowed_methods, reason = "this is what is wrong with it")]
            return futures_util::future::try_join(head, tail).await;
        }
        // All of them end: after an error the clusters that they write to are given back.
        let (head, tail) = futures_util::join!(head, tail);
        Ok((head?, tail?))
    }

    /// Lets the file reach to the end of new clusters that are not written to their
    /// end: a later write in place that ended inside a sector would else end the file
    /// there, and half a sector of the next write could be cut off by a power cut.
    async fn reach_end(&self, placed: &PlacedStep) -> Result<()> {
        let end = self.host_end(placed);
        let cluster_end = self.geometry.cluster_start(placed.start) + end - placed.host.bytes();
        // What the fill writes of it ends with the sector of the guest's last byte.
        let written_end = placed.end.next_multiple_of(SECTOR_BYTES);
        if !placed.reads_as_zeroes || written_end >= cluster_end || end <= self.data.len_bytes()? {
            return Ok(());
        }
        let zeroes = Buffers::from_iter([Buffer::zeroed(SECTOR_BYTES as usize)]);
        self.data
            .write(end - SECTOR_BYTES, zeroes, WriteFlags::default())
            .await
            .map(drop)
    }

    /// What has to be written to `start..end` beside the guest's bytes, if
    /// anything; long runs of zeroes are dealt with here.
    async fn fill(
        self: &Arc<Self>,
        placed: &PlacedStep,
        start: u64,
        end: u64,
    ) -> Result<Option<Buffer>> {
        let len_bytes = end - start;
        if len_bytes == 0 {
            return Ok(None);
        }
        if !self.maps_to_zeroes(start, len_bytes).await? {
            self.emit(Event::CowRead).await;
            let rest = match len_bytes >= MIN_SHARED_BYTES {
                true => self.share(placed, start..end).await?,
                false => start..end,
            };
            let rest_bytes = rest.end - rest.start;
            return match rest_bytes {
                0 => Ok(None),
                _ => self.read_old(rest.start, rest_bytes).await.map(Some),
            };
        }
        if len_bytes <= MAX_ZERO_FILL_BYTES && !placed.reads_as_zeroes {
            return Ok(Some(Buffer::zeroed(len_bytes as usize)));
        }
        let whole = whole_sectors(start, end);
        let whole_bytes = whole.end - whole.start;
        if whole_bytes > 0 && !placed.reads_as_zeroes {
            let inside = whole.start - self.geometry.cluster_start(placed.start);
            let host = placed.host.bytes() + inside;
            self.zero_data(whole.start, host, whole_bytes).await?;
        }
        let rest = (len_bytes - whole_bytes) as usize;
        Ok((rest > 0).then(|| Buffer::zeroed(rest)))
    }
}

/// Whether the bytes behind the first run have places of their own that follow its place, so that all of
/// it can be written at once.
fn goes_on_in_place(view: &[MappingRun]) -> bool {
    let [first, next, ..] = view else {
        return false;
    };
    let (RunKind::Data { host, copied: true }, RunKind::Zero { host: Some(behind) }) =
        (&first.kind, &next.kind)
    else {
        return false;
    };
    host.bytes() + first.len_bytes == behind.bytes()
}

/// The whole sectors of `start..end`, of which one end is a sector's.
///
/// The sector that a fill shares with the guest's bytes is written with them: split
/// between two requests, or cut by the end of the file, it could survive a power cut
/// as neither what it was nor what it becomes.
fn whole_sectors(start: u64, end: u64) -> Range<u64> {
    let first = start.next_multiple_of(SECTOR_BYTES).min(end);
    first..(end / SECTOR_BYTES * SECTOR_BYTES).max(first)
}

#[cfg(test)]
mod tests;
