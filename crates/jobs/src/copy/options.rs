//! How a copy is done.

use std::sync::Arc;

use vellum::BlockDevice;

use crate::piece::CHUNK_BYTES;
use crate::rate::Speed;
use crate::scan::{Scan, TargetBacking};
use crate::scope::Scope;
use crate::sparse::Sparse;

/// How a copy is done.
#[derive(Debug, Clone)]
pub struct CopyOptions {
    /// How many pieces are in flight at once.
    pub parallel: usize,
    /// Writes may start in any order.
    pub out_of_order: bool,
    /// The target gives the pieces places in the order of their offsets, whichever is read
    /// or written first; not with `out_of_order`.
    pub laid_out_in_order: bool,
    /// Runs of zeroes from this length on are not written as data; `None`
    /// writes everything, known zeroes too.
    pub min_sparse_bytes: Option<u64>,
    /// The target reads as zeroes where nothing is written.
    pub target_is_zero: bool,
    /// The target's backing file, which shows what the source does not hold itself.
    pub target_backing: Option<TargetBacking>,
    /// Which parts of the sources are copied.
    pub scope: Scope,
    /// Search the data for zeroes; otherwise only what is known to be zero without
    /// reading it is.
    pub detect_zeroes: bool,
    /// Take unreadable sectors as zeroes instead of failing.
    pub salvage: bool,
    /// How fast it may be done.
    pub speed: Arc<Speed>,
    /// Where in the sources to end, where that is not their end.
    pub len_bytes: Option<u64>,
    /// Bytes of the sources to leave out at the beginning.
    pub skip_bytes: u64,
    /// Where in the sources to begin, where what lies before is in its place already: what
    /// is copied goes where it would without this. A multiple of 2 MiB.
    pub start_bytes: u64,
    /// Write compressed, in whole clusters of this size.
    pub compressed_clusters_bytes: Option<u64>,
    /// Have the kernel copy where both ends are files; zeroes among the data are not
    /// looked for then.
    pub copy_range: bool,
    /// Where the file system shares blocks, have the target share those of the source
    /// instead of copying them.
    pub share_blocks: bool,
}

impl Default for CopyOptions {
    fn default() -> Self {
        CopyOptions {
            parallel: 8,
            out_of_order: false,
            laid_out_in_order: false,
            min_sparse_bytes: Some(4096),
            target_is_zero: false,
            target_backing: None,
            scope: Scope::Everything,
            detect_zeroes: true,
            salvage: false,
            speed: Arc::default(),
            len_bytes: None,
            skip_bytes: 0,
            start_bytes: 0,
            compressed_clusters_bytes: None,
            copy_range: false,
            share_blocks: false,
        }
    }
}

impl CopyOptions {
    /// Bytes of one data request.
    pub(super) fn chunk_bytes(&self) -> u64 {
        let chunk_bytes = self.scope.chunk_bytes(CHUNK_BYTES);
        chunk_bytes.max(self.compressed_clusters_bytes.unwrap_or(0))
    }

    /// Which zeroes are left out of the data. Compressed clusters are written as a
    /// whole, so of these only whole ones.
    pub(super) fn sparse(&self, target_alignment_bytes: u64) -> Option<Sparse> {
        let min_bytes = self.min_sparse_bytes?;
        Some(match self.compressed_clusters_bytes {
            Some(unit_bytes) => Sparse {
                unit_bytes,
                min_bytes: 0,
            },
            None => Sparse::new(min_bytes, target_alignment_bytes),
        })
    }

    /// The walk over the sources up to `end_bytes`.
    pub(super) fn scan<'a>(
        &'a self,
        sources: &'a [Arc<dyn BlockDevice>],
        target: &'a Arc<dyn BlockDevice>,
        end_bytes: u64,
    ) -> Scan<'a> {
        let range = self.skip_bytes..end_bytes;
        Scan::new(sources, self.target_backing, (&self.scope, target), range)
            .starting_at(self.start_bytes)
            .in_clusters(self.compressed_clusters_bytes)
            .salvaging(self.salvage)
    }
}
