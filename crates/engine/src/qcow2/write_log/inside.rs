//! A log in the image's own file: its clusters, taken when the log is taken into use and given back
//! at the close.
//!
//! Invariants (W10):
//! - While the header vouches for the clusters they are counted once, durably, and nothing else
//!   is there.
//! - They are counted and written before the header names them, and it names them no more, durably,
//!   before they are free. So a crash in between leaves clusters that leak.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::extension::kind;
use vellum_format::features::Autoclear;
use vellum_format::types::{HostCluster, HostOffset};
use vellum_format::write_log::BLOCK_BYTES;
use vellum_io::{Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{Capabilities, Storage, WriteFlags, ZeroFlags, delegate};

use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::Lookup;

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

impl Image {
    /// The clusters that the log may have for `len_bytes`, as their length in bytes.
    pub(super) fn log_clusters_bytes(&self, len_bytes: u64) -> u64 {
        len_bytes.next_multiple_of(self.geometry.cluster_size_bytes().max(BLOCK_BYTES))
    }

    fn log_clusters(&self, place: &Range<u64>) -> Range<u64> {
        let cluster = |bytes| HostOffset(bytes).cluster(&self.geometry).index();
        cluster(place.start)..cluster(place.end)
    }

    /// Refuses clusters of a log that are not its own: whoever needs space might take them.
    pub(super) async fn check_log_clusters(&self, place: &Range<u64>) -> Result<()> {
        let refcounts = &self.allocator.refcounts;
        for cluster in self.log_clusters(place) {
            let count = loop {
                match refcounts.get(HostCluster(cluster))? {
                    Lookup::Hit(count) => break count,
                    Lookup::Miss(slice) => refcounts.load(slice.key).await?,
                }
            };
            if count != 1 {
                let message = "the clusters of the write log are not counted as its own; 'vellum \
                               check -r drop-log' gives up the writes that it holds";
                let error = Error::new(ErrorKind::Corrupt, "open write log", message);
                return Err(self.name_error(error).at(place.start));
            }
        }
        Ok(())
    }

    /// Takes clusters for a log, durably; nothing names them yet.
    pub(super) async fn take_log_clusters(self: &Arc<Self>, len_bytes: u64) -> Result<Range<u64>> {
        let count = self.geometry.clusters_for(len_bytes);
        let start = self.allocator.allocate_at_end(count).await?.bytes();
        self.commit().await?;
        Ok(start..start + len_bytes)
    }

    /// Gives the clusters of a log back that holds nothing.
    pub(super) async fn give_up_log_clusters(self: &Arc<Self>, place: &Range<u64>) -> Result<()> {
        self.update_header(|header| {
            header.remove_extension(kind::WRITE_LOG);
            header.autoclear = header.autoclear.without(Autoclear::WRITE_LOG_INSIDE);
        })
        .await?;
        self.free_log_clusters(place).await
    }

    /// Frees clusters that the header does not name (any more).
    pub(super) async fn free_log_clusters(self: &Arc<Self>, place: &Range<u64>) -> Result<()> {
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
