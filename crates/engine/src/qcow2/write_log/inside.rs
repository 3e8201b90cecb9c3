//! A log in the image's own file: its clusters, taken when the log is taken into use and given back
//! at the close.
//!
//! Invariants (W10):
//! - While the header vouches for the clusters they are counted once, durably, and nothing else
//!   is there.
//! - They are counted, and have a superblock of this log, before the header names them; and it names
//!   them no more, durably, before they are free. So a crash in between leaves clusters that leak.
//! - Clusters without such a superblock are neither used nor freed, whatever the header says.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::header::Header;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_format::write_log::{
    BLOCK_BYTES, LogId, MAX_LEN_BYTES, RING_START_BYTES, Superblock, WriteLogExtension,
};
use vellum_io::{Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{Capabilities, Storage, WriteFlags, ZeroFlags, delegate};

use super::attach::{
    NO_ROOM, batches_of, check_len, check_version, extension_of, is_used_up, name_log, preallocate,
    refuse, use_log,
};
use super::log::write_superblock;
use super::replay::read_superblocks;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::Lookup;
use crate::qcow2::random_id::random_bytes;

/// It makes the image's file longer.
const DEFAULT_LEN_BYTES: u64 = 64 << 20;

/// Bytes of an image's file as a storage of their own. Whoever writes to it stays inside.
#[derive(Debug)]
struct Inside {
    file: Arc<dyn Storage>,
    place: Range<u64>,
}

/// The log in some bytes of the image's file.
pub(super) fn storage(image: &Image, place: &Range<u64>) -> Arc<dyn Storage> {
    Arc::new(Inside {
        file: image.file.clone(),
        place: place.clone(),
    })
}

impl Storage for Inside {
    delegate!(file: name, flush);

    fn capabilities(&self) -> Capabilities {
        let file = self.file.capabilities();
        Capabilities {
            request_alignment_bytes: file.request_alignment_bytes,
            memory_alignment_bytes: file.memory_alignment_bytes,
            read_only: file.read_only,
            ..Capabilities::default()
        }
    }

    fn len_bytes(&self) -> Result<u64> {
        let end = self.place.end.min(self.file.len_bytes()?);
        Ok(end.saturating_sub(self.place.start))
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        self.file.read(self.place.start + offset_bytes, buffers)
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let at = self.place.start + offset_bytes;
        self.file.write(at, buffers, flags)
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let at = self.place.start + offset_bytes;
        self.file.write_zeroes(at, len_bytes, flags)
    }

    fn truncate(&self, _len_bytes: u64) -> Io<()> {
        let message = "a log in an image has a fixed length";
        let error = Error::new(ErrorKind::Unsupported, "truncate", message);
        Io::ready(Err(error.target(self.name())))
    }
}

/// The log that holds writes which the image lacks.
pub(super) async fn holding_writes(image: &Image) -> Result<Arc<dyn Storage>> {
    let Some(place) = image.header().write_log_inside() else {
        let message = "the image has a write log, and does not say where";
        return Err(refuse(ErrorKind::InvalidImage, &image.name, message));
    };
    if !image.read_only && !image.log_clusters_are_counted(&place).await? {
        let message = "the clusters of the write log are not counted as its own, so the image can \
                       only be read: copy it (vellum convert), or give up the writes that the log \
                       holds (vellum check -r drop-log)";
        return Err(refuse(ErrorKind::Corrupt, &image.name, message).at(place.start));
    }
    Ok(storage(image, &place))
}

/// Takes a log into use: in the clusters that one `held` since a crash, or in new ones.
pub(super) async fn attach(
    image: &Arc<Image>,
    len_bytes: Option<u64>,
    held: Option<Range<u64>>,
) -> Result<()> {
    check_version(image)?;
    batches_of(image, &image.file)?;
    let len_bytes = len_bytes.unwrap_or(DEFAULT_LEN_BYTES);
    check_len(len_bytes, &image.name)?;
    let len_bytes = image.log_clusters_bytes(len_bytes).min(MAX_LEN_BYTES);
    image.begin_change("open write log").await?;
    let no_room = |error: Error| error.context("open write log", NO_ROOM);
    let (place, old) = match reusable(image, held, len_bytes).await? {
        Some((place, old)) => (place, Some(old)),
        None => {
            let taken = image.take_log_clusters(len_bytes).await;
            (taken.map_err(no_room)?, None)
        }
    };
    let file = storage(image, &place);
    let id = match old.filter(|old| is_claimed_only(image, old)) {
        // The other superblock has the identity that the header names, and stays until it names this
        // one: without either nobody would know whose the clusters are.
        Some(claimed) => claimed.id,
        None => LogId(random_bytes(&file)?),
    };
    let extension = WriteLogExtension::for_inside(id, &place);
    let claimed = match claim(&file, id, len_bytes, old).await {
        Ok(claimed) => claimed,
        Err(error) => {
            if old.is_none() {
                drop(image.free_log_clusters(&place).await);
            }
            return Err(no_room(error));
        }
    };
    // Named before the rest is written, which takes time: a crash would leak it.
    if let Err(error) = name_log(image, &extension).await {
        // A header that was not written, for want of room in it, names them not; else the image is
        // stopped, and the header on disk may.
        if old.is_none() && image.check_changeable("open write log").is_ok() {
            drop(image.free_log_clusters(&place).await);
        }
        return Err(error);
    }
    let written = match old {
        Some(_) => file.len_bytes()?,
        None => RING_START_BYTES,
    };
    if let Err(error) = preallocate(&file, written, len_bytes).await {
        drop(image.give_up_log_clusters(&place).await);
        return Err(no_room(error));
    }
    use_log(image, &file, &extension, (len_bytes, Some(claimed))).await
}

/// Whether somebody has begun to take the log of this superblock into use, and the header does not name
/// it: a crash or an error has come in between.
fn is_claimed_only(image: &Image, newest: &Superblock) -> bool {
    extension_of(image).is_ok_and(|extension| extension.id != newest.id)
}

/// Writes durably whose log a place is from now on; it holds nothing. What was claimed by the same
/// identity is written once more where it is: it may be in no durable place.
async fn claim(
    file: &Arc<dyn Storage>,
    id: LogId,
    len_bytes: u64,
    old: Option<Superblock>,
) -> Result<Superblock> {
    let superblock = Superblock {
        id,
        len_bytes,
        generation: match old {
            Some(old) if old.id == id => old.generation,
            old => old.map_or(1, |old| old.generation + 1),
        },
        start_bytes: RING_START_BYTES,
        start_sequence: old.map_or(1, |old| old.start_sequence),
        start_batch: old.map_or(1, |old| old.start_batch),
    };
    write_superblock(file, &superblock).await?;
    Ok(superblock)
}

/// The clusters of a log that were not given back, if they can be used as they are; else they are
/// given back now.
async fn reusable(
    image: &Arc<Image>,
    held: Option<Range<u64>>,
    len_bytes: u64,
) -> Result<Option<(Range<u64>, Superblock)>> {
    let Some(place) = held else {
        return Ok(None);
    };
    if place.end - place.start == len_bytes
        && let Some(old) = own_superblock(image, &place).await?
        && !is_used_up(&old)
    {
        return Ok(Some((place, old)));
    }
    give_up_held(image, &place).await?;
    Ok(None)
}

/// Gives back the clusters of a log that a killed program has left. What is not certainly a log's
/// own is only forgotten: a damaged header may lead anywhere.
pub(super) async fn give_up_held(image: &Arc<Image>, place: &Range<u64>) -> Result<()> {
    let is_own = own_superblock(image, place).await?.is_some();
    image.begin_change("open").await?;
    match is_own {
        true => image.give_up_log_clusters(place).await,
        false => image.forget_log_clusters().await,
    }
}

/// The newest superblock of a log in `place`, if the clusters are its own: one of the superblocks
/// there has the image's identity, for that is written first.
async fn own_superblock(image: &Image, place: &Range<u64>) -> Result<Option<Superblock>> {
    let id = extension_of(image)?.id;
    if !image.log_clusters_are_counted(place).await? {
        return Ok(None);
    }
    let found = read_superblocks(&storage(image, place)).await?;
    let is_own = found.iter().flatten().any(|found| found.id == id);
    let newest = found
        .into_iter()
        .flatten()
        .max_by_key(|found| found.generation);
    Ok(newest.filter(|_| is_own))
}

impl Image {
    /// The clusters that the log may have for `len_bytes`, as their length in bytes.
    fn log_clusters_bytes(&self, len_bytes: u64) -> u64 {
        len_bytes.next_multiple_of(self.geometry.cluster_size_bytes().max(BLOCK_BYTES))
    }

    fn log_clusters(&self, place: &Range<u64>) -> Range<u64> {
        let cluster = |bytes| HostOffset(bytes).cluster(&self.geometry).index();
        cluster(place.start)..cluster(place.end)
    }

    /// Whether the clusters of a log are its own: else whoever needs space might take them.
    async fn log_clusters_are_counted(&self, place: &Range<u64>) -> Result<bool> {
        let refcounts = &self.allocator.refcounts;
        for cluster in self.log_clusters(place) {
            let count = loop {
                match refcounts.get(HostCluster(cluster))? {
                    Lookup::Hit(count) => break count,
                    Lookup::Miss(slice) => refcounts.load(slice.key).await?,
                }
            };
            if count != 1 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Takes clusters for a log, durably; nothing names them yet.
    async fn take_log_clusters(self: &Arc<Self>, len_bytes: u64) -> Result<Range<u64>> {
        let count = self.geometry.clusters_for(len_bytes);
        let start = self.allocator.allocate_at_end(count).await?.bytes();
        let end = start + len_bytes;
        match self.make_file_reach(end).await {
            Ok(()) => Ok(start..end),
            Err(error) => {
                drop(self.free_log_clusters(&(start..end)).await);
                Err(error)
            }
        }
    }

    /// Makes durable what is counted, and a file that reaches to `end`: what is named beyond its end
    /// would be damage.
    async fn make_file_reach(self: &Arc<Self>, end: u64) -> Result<()> {
        self.commit().await?;
        if self.file.len_bytes()? < end {
            self.file.truncate(end).await?;
        }
        self.file.flush().await
    }

    /// Gives the clusters of a log back that holds nothing.
    pub(super) async fn give_up_log_clusters(self: &Arc<Self>, place: &Range<u64>) -> Result<()> {
        self.forget_log_clusters().await?;
        self.free_log_clusters(place).await
    }

    /// Names no log any more, durably; it holds nothing.
    async fn forget_log_clusters(self: &Arc<Self>) -> Result<()> {
        self.update_header(Header::forget_write_log).await
    }

    /// Frees clusters that the header does not name (any more).
    async fn free_log_clusters(self: &Arc<Self>, place: &Range<u64>) -> Result<()> {
        // A hint: without it the space is used again.
        drop(
            self.file
                .discard(place.start, place.end - place.start)
                .await,
        );
        let clusters = self.log_clusters(place);
        let count = clusters.end - clusters.start;
        let first = HostCluster(clusters.start);
        self.allocator.release(first, count).await?;
        self.commit().await?;
        let ends_file = self.allocator.state().tail == clusters.end;
        match ends_file {
            true => self.cut_tail().await,
            false => Ok(()),
        }
    }
}
