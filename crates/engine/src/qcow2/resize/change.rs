//! Resizing an open image, while requests run.
//!
//! Invariants:
//! - The size in the header changes in one write. A crash leaves the image with the
//!   old or with the new size, and every byte below both as it was.
//! - Growing makes everything first (tables, zeroes, space), makes it durable, then
//!   changes the header, and only then lets requests beyond the old end in.
//! - Shrinking first keeps requests out, waits for those that run, changes the
//!   header, and only then gives up what lies beyond the new end. A crash in between
//!   leaves that mapped: wasted space, not damage. Growing clears it.
//! - A raw data file is cut, or zeroed where its size is fixed, before the header changes: what it holds beyond
//!   the end of the disk is the disk's as soon as that grows (somebody may have made it longer first). After a
//!   crash in between the disk has its old size, and zeroes where it was to end.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::header::field;
use vellum_format::l1::L1Entry;
use vellum_format::l2::Mapping;
use vellum_format::types::{GuestOffset, HostOffset};
use vellum_format::{Geometry, limits};
use vellum_io::buffer::is_zero;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::{WriteFlags, ZeroFlags};

use crate::Preallocation;
use crate::ZeroRequest;
use crate::qcow2::commit::write_order::WriteOrder;
use crate::qcow2::create::write::{region, space as space_in};
use crate::qcow2::image::Image;
use vellum_io::range_lock::Mode;

const SECTOR_BYTES: u64 = 512;
const EFBIG: i32 = 27;
const ENOTSUP: i32 = 95;

/// What becomes of guest clusters that come into being.
#[derive(Debug, Clone, Copy)]
struct NewSpace {
    preallocation: Preallocation,
    /// They must hide what the backing file has there.
    zero: bool,
}

impl NewSpace {
    fn is_mapped(self) -> bool {
        self.zero || self.is_allocated()
    }

    fn is_allocated(self) -> bool {
        self.preallocation != Preallocation::Off
    }

    fn mapping(self, geometry: &Geometry, host: Option<HostOffset>) -> Mapping {
        let copied = host.is_some();
        match host {
            _ if geometry.extended_l2 => Mapping::Subclusters {
                host,
                copied,
                allocated: 0,
                zero: if self.zero { u32::MAX } else { 0 },
            },
            Some(host) if !self.zero => Mapping::Data { host, copied },
            host => Mapping::Zero { host, copied },
        }
    }
}

/// New guest clusters, and where they and their L2 tables lie.
struct Placed {
    space: NewSpace,
    guest: Range<u64>,
    /// Where the first cluster lies, if the clusters have places.
    data: Option<HostOffset>,
    tables: HostOffset,
    /// L1 indexes of the tables that are new.
    indexes: Range<u64>,
}

impl Placed {
    fn mapping(&self, geometry: &Geometry, guest: u64) -> Mapping {
        let inside = guest - self.guest.start;
        let host = self.data.map(|data| HostOffset(data.bytes() + inside));
        self.space.mapping(geometry, host)
    }
}

fn refuse(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, "resize", message)
}

impl Image {
    /// Changes the virtual size.
    pub(crate) async fn resize(
        self: &Arc<Self>,
        size_bytes: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        self.begin_change("resize").await?;
        let _one = self.resizing.lock().await;
        let old_bytes = self.size.visible_bytes();
        if !size_bytes.is_multiple_of(SECTOR_BYTES) {
            let message = format!("The new size must be a multiple of {SECTOR_BYTES}");
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        if i64::try_from(size_bytes).is_err() {
            let message = "Image size cannot be negative";
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        if self.geometry.version < 3 && self.header().snapshot_count > 0 {
            let message = "Can't resize a v2 image which has snapshots";
            return Err(refuse(ErrorKind::Unsupported, message));
        }
        if size_bytes < old_bytes && preallocation != Preallocation::Off {
            let message = "Preallocation can't be used for shrinking an image";
            return Err(refuse(ErrorKind::InvalidArgument, message));
        }
        self.bitmaps_before_resize(size_bytes).await?;
        let result = if size_bytes < old_bytes {
            self.shrink(size_bytes).await
        } else {
            self.size.set_addressable(size_bytes);
            self.grow(old_bytes, size_bytes, preallocation).await
        };
        if result.is_err() {
            // What the header says, whichever step failed.
            self.size.set(self.header().size_bytes);
        }
        let result = result.and(self.bitmaps_after_resize().await);
        let cache_options = *self.cache_options.lock();
        // The caches stay as they are if the options do not fit the new size.
        drop(self.set_cache_sizes(&cache_options));
        result
    }

    async fn grow(
        self: &Arc<Self>,
        old_bytes: u64,
        new_bytes: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let backing = self.backing.as_ref();
        let asked = NewSpace {
            preallocation,
            zero: new_bytes > old_bytes
                && (backing.is_some_and(|b| b.size_bytes() > old_bytes)
                    || self.hides_new_space(preallocation)),
        };
        let new_start = self.cluster_end(old_bytes);
        if asked.zero && new_start < new_bytes && self.geometry.version < 3 {
            let message = "Failed to zero out new clusters: Operation not supported";
            return Err(refuse(ErrorKind::Unsupported, message).with_errno(ENOTSUP));
        }
        let l1_entries = self.geometry.l1_entries_for(new_bytes);
        if new_bytes > self.geometry.max_size_bytes() || new_bytes > limits::MAX_SIZE_BYTES {
            let message = "Failed to grow the L1 table: File too large";
            return Err(refuse(ErrorKind::InvalidArgument, message).with_errno(EFBIG));
        }
        if self.cut_mapping(new_start).await? {
            self.commit().await?;
        }
        self.grow_l1(l1_entries).await?;
        let made = self.make_new_part(old_bytes..new_bytes, asked).await;
        if let Err(error) = made {
            // What was made for nothing. Where that fails, too, growing gives it up later.
            drop(self.cut_mapping(new_start).await);
            return Err(error);
        }
        self.write_size(new_bytes).await?;
        self.size.set(new_bytes);
        Ok(())
    }

    /// Makes what comes into being with another size, durably: zeroes, space, tables. Nothing is mapped
    /// behind the old end.
    async fn make_new_part(self: &Arc<Self>, part: Range<u64>, asked: NewSpace) -> Result<()> {
        let (old_bytes, new_bytes) = (part.start, part.end);
        let preallocation = asked.preallocation;
        let new_start = self.cluster_end(old_bytes);
        let mut space = asked;
        if self.has_external_data() {
            self.grow_data_file(old_bytes, new_bytes, preallocation)
                .await?;
            if self.data_is_raw() && preallocation == Preallocation::Off {
                space.preallocation = Preallocation::Metadata;
            }
        }
        let in_old_cluster = old_bytes..new_start.min(new_bytes);
        self.zero_rest_of_cluster(in_old_cluster.clone(), asked)
            .await?;
        // The zeroes may be kept in memory.
        self.write_back_range(in_old_cluster).await?;
        if space.is_mapped() && new_start < new_bytes {
            self.map_new_space(new_start..self.cluster_end(new_bytes), space)
                .await?;
        }
        self.commit().await
    }

    /// Whether new clusters get places that would not read as zeroes.
    fn hides_new_space(&self, preallocation: Preallocation) -> bool {
        let has_places = preallocation != Preallocation::Off || self.data_is_raw();
        self.is_encrypted() && has_places
    }

    fn cluster_end(&self, offset_bytes: u64) -> u64 {
        offset_bytes.next_multiple_of(self.geometry.cluster_size_bytes())
    }

    async fn write_size(&self, size_bytes: u64) -> Result<()> {
        self.write_header_field(field::SIZE, &size_bytes.to_be_bytes())
            .await
            .inspect_err(|error| self.stop_changes(error.clone()))?;
        self.change_header(|header| header.size_bytes = size_bytes);
        Ok(())
    }

    async fn grow_data_file(
        &self,
        old_bytes: u64,
        new_bytes: u64,
        preallocation: Preallocation,
    ) -> Result<()> {
        let len_bytes = self.data.len_bytes()?;
        let is_raw = self.data_is_raw();
        if !is_raw && preallocation != Preallocation::Off && old_bytes < len_bytes.min(new_bytes) {
            // The file was longer than the disk: what it holds there is not the guest's. A raw one
            // is the disk itself, and somebody may have made it longer first.
            let there = len_bytes.min(new_bytes) - old_bytes;
            self.zero_data(old_bytes, old_bytes, there).await?;
        }
        let exact = is_raw && self.data.capabilities().growable;
        if len_bytes < new_bytes || (exact && len_bytes != new_bytes) {
            self.data.truncate(new_bytes).await.map_err(no_room)?;
        }
        let from = match is_raw {
            true => len_bytes.clamp(old_bytes, new_bytes),
            false => old_bytes,
        };
        space_in(&self.data, from..new_bytes, preallocation)
            .await
            .map_err(no_room)
    }

    /// Makes the part of the last old cluster that comes into being read as zeroes:
    /// the cluster may hold what was there before the image was shrunk, or what
    /// copying on write took from a longer backing file.
    async fn zero_rest_of_cluster(
        self: &Arc<Self>,
        range: Range<u64>,
        space: NewSpace,
    ) -> Result<()> {
        if range.is_empty() {
            return Ok(());
        }
        if space.is_allocated() {
            return self.write_zero_bytes(range).await;
        }
        let unit = self.geometry.subcluster_size_bytes();
        let whole = range.start.next_multiple_of(unit).min(range.end);
        if !space.zero {
            let rest = self.read_old(range.start, range.end - range.start).await?;
            if is_zero(&rest) {
                return Ok(());
            }
        }
        if range.start < whole {
            self.write_zero_bytes(range.start..whole).await?;
        }
        match whole < range.end {
            true => {
                let request = ZeroRequest::default();
                self.zero(whole, range.end - whole, request).await
            }
            false => Ok(()),
        }
    }

    /// Maps clusters of which nothing is mapped yet. `guest` is made of whole
    /// clusters.
    async fn map_new_space(self: &Arc<Self>, guest: Range<u64>, space: NewSpace) -> Result<()> {
        let table_bytes = self.geometry.bytes_per_l2_table();
        let first_index = guest.start.div_ceil(table_bytes);
        let indexes = first_index..guest.end.div_ceil(table_bytes).max(first_index);
        let tables = indexes.end - indexes.start;
        let inside = space.is_allocated() && !self.has_external_data();
        let clusters = self.geometry.clusters_for(guest.end - guest.start);
        let wanted = tables + if inside { clusters } else { 0 };
        let start = match wanted {
            0 => HostOffset::ZERO,
            wanted => self.allocator.allocate_at_end(wanted).await?,
        };
        let in_image = HostOffset(start.bytes() + tables * self.geometry.cluster_size_bytes());
        let data = match space.is_allocated() {
            true if inside => Some(in_image),
            true => Some(HostOffset(guest.start)),
            false => None,
        };
        let placed = Placed {
            space,
            guest,
            data,
            tables: start,
            indexes,
        };
        if inside {
            let len_bytes = placed.guest.end - placed.guest.start;
            let range = in_image.bytes()..in_image.bytes() + len_bytes;
            if let Err(error) = self.make_space(range, space).await {
                // Nothing points at any of it.
                let first = start.cluster(&self.geometry);
                drop(self.allocator.release(first, wanted).await);
                return Err(no_room(error));
            }
        }
        let mut mapped_to = placed.guest.start;
        let mapped = async {
            self.map_into_old_table(&placed, &mut mapped_to).await?;
            self.write_new_tables(&placed).await
        };
        let mapped = mapped.await;
        if mapped.is_err() {
            self.release_unmapped(&placed, mapped_to).await;
        }
        mapped
    }

    /// Gives back what was allocated for new clusters and nothing points at: all of the new tables, and
    /// the clusters of the guest from `mapped_to` on.
    async fn release_unmapped(&self, placed: &Placed, mapped_to: u64) {
        let cluster = |host: HostOffset| host.cluster(&self.geometry);
        let tables = placed.indexes.end - placed.indexes.start;
        if tables > 0 {
            drop(self.allocator.release(cluster(placed.tables), tables).await);
        }
        let data = placed.data.filter(|_| !self.has_external_data());
        if let Some(data) = data
            && mapped_to < placed.guest.end
        {
            let first = HostOffset(data.bytes() + mapped_to - placed.guest.start);
            let count = self.geometry.clusters_for(placed.guest.end - mapped_to);
            drop(self.allocator.release(cluster(first), count).await);
        }
    }

    /// Has a range at the end of the image file read as zeroes, with the space that
    /// was asked for.
    async fn make_space(&self, range: Range<u64>, space: NewSpace) -> Result<()> {
        let capabilities = self.file.capabilities();
        let reads_as_zeroes = capabilities.growable && capabilities.has_zero_init;
        if !reads_as_zeroes && !space.zero {
            let len_bytes = range.end - range.start;
            return self
                .file
                .write_zeroes(range.start, len_bytes, ZeroFlags::default())
                .await;
        }
        space_in(&self.file, range.clone(), space.preallocation).await?;
        if self.file.len_bytes()? < range.end {
            // A write, not a truncation: that could cut off what others write
            // beyond it at the same moment.
            let sector = Buffers::from_iter([Buffer::zeroed(SECTOR_BYTES as usize)]);
            self.file
                .write(range.end - SECTOR_BYTES, sector, WriteFlags::default())
                .await?;
        }
        Ok(())
    }

    /// Maps the new clusters that belong to the last L2 table there was; `mapped_to`: as far as it has
    /// come.
    async fn map_into_old_table(
        self: &Arc<Self>,
        placed: &Placed,
        mapped_to: &mut u64,
    ) -> Result<()> {
        let table_bytes = self.geometry.bytes_per_l2_table();
        let end = placed
            .guest
            .end
            .min(placed.guest.start.next_multiple_of(table_bytes));
        let mut at = placed.guest.start;
        while at < end {
            self.ensure_l2_table(GuestOffset(at)).await?;
            let mapping = placed.mapping(&self.geometry, at);
            self.set_mapping(GuestOffset(at), mapping, WriteOrder::AfterBarrier)
                .await?;
            at += self.geometry.cluster_size_bytes();
            *mapped_to = at;
            self.relieve_l2_cache().await?;
        }
        Ok(())
    }

    /// Writes the L2 tables that are new as a whole, and has the L1 table point at
    /// them. Their content and their counts become durable before those entries.
    async fn write_new_tables(&self, placed: &Placed) -> Result<()> {
        let geometry = &self.geometry;
        let cluster_bytes = geometry.cluster_size_bytes();
        let count = placed.indexes.end - placed.indexes.start;
        let start = placed.tables.bytes();
        let first_guest = placed.indexes.start * geometry.bytes_per_l2_table();
        let entry_bytes = geometry.l2_entry_size_bytes();
        region(
            &self.file,
            start..start + count * cluster_bytes,
            |at, bytes| {
                let first = first_guest + at / entry_bytes * cluster_bytes;
                for index in 0..bytes.len() / entry_bytes as usize {
                    let guest = first + index as u64 * cluster_bytes;
                    let mapping = match guest < placed.guest.end {
                        true => placed.mapping(geometry, guest),
                        false => Mapping::Unallocated,
                    };
                    let written = mapping.encode(geometry).write(bytes, index, geometry);
                    debug_assert!(written, "the entry is inside the write");
                }
            },
        )
        .await?;
        let _one = self
            .l1_entries
            .acquire(placed.indexes.clone(), Mode::Exclusive)
            .await;
        for (number, index) in placed.indexes.clone().enumerate() {
            let table = HostOffset(start + number as u64 * cluster_bytes);
            self.forget_slices(table);
            let change = self.commits.begin_change(WriteOrder::AfterBarrier);
            let set = self.l1.set(index, L1Entry::new(table, true));
            drop(change);
            debug_assert!(set, "the L1 table has grown");
        }
        Ok(())
    }

    async fn shrink(self: &Arc<Self>, new_bytes: u64) -> Result<()> {
        // No request begins beyond the new end any more. The engine reaches there until
        // those that have begun are over.
        self.size.set_visible(new_bytes);
        let end = self.cluster_end(new_bytes);
        {
            let first = self.geometry.cluster_start(new_bytes);
            let _beyond = self
                .guest_ranges
                .acquire(first..u64::MAX, Mode::Exclusive)
                .await;
            self.write_back_locked_range(first..end).await?;
            self.commit().await?;
            if self.data_is_raw() {
                // Rule 4: a crash may leave the old size.
                let given_up = new_bytes..self.header().size_bytes;
                self.mark_dirty(given_up).await?;
                self.give_up_raw_data(new_bytes).await?;
            }
            self.write_size(new_bytes).await?;
            self.size.set(new_bytes);
            self.discard_buffered(end);
            self.cut_mapping(end).await?;
        }
        // Twice: the first commit makes it durable that clusters were dropped, the
        // second writes their counts.
        self.commit().await?;
        self.commit().await?;
        if self.has_external_data() && self.data.capabilities().growable {
            self.data.truncate(new_bytes).await?;
        }
        self.cut_tail().await
    }

    /// Makes sure that what a raw data file holds beyond the new end of the disk is not there when the disk grows
    /// again. A file of a fixed size (a block device) keeps its length: there it is zeroed, and so is one whose
    /// missing end would be decrypted.
    async fn give_up_raw_data(&self, new_bytes: u64) -> Result<()> {
        if self.data.capabilities().growable && self.reads_as_stored() {
            self.data.truncate(new_bytes).await?;
        } else {
            let end = self.header().size_bytes.min(self.data.len_bytes()?);
            let flags = ZeroFlags {
                may_unmap: true,
                ..ZeroFlags::default()
            };
            self.zero_raw_data(new_bytes..end.max(new_bytes), flags)
                .await?;
        }
        self.data.flush().await
    }
}

fn no_room(error: Error) -> Error {
    let message = format!("Failed to resize underlying file: {}", error.message());
    error.context("resize", message)
}
