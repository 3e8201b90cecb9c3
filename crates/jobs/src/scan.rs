//! Walking over the sources of a copy: which piece comes next and what it holds.

use std::ops::Range;
use std::sync::Arc;

use vellum::{BlockDevice, Error, Extent, ExtentKind, Result};

use crate::piece::{Content, Piece};
use crate::scope::Scope;

const SECTOR_BYTES: u64 = 512;

/// A backing file of the target that shows what the source's own one shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetBacking {
    /// Its size in bytes: beyond it the target shows zeroes.
    pub size_bytes: u64,
}

/// The walk.
#[derive(Debug)]
pub struct Scan<'a> {
    sources: &'a [Arc<dyn BlockDevice>],
    backing: Option<TargetBacking>,
    /// Which parts count, and for which target.
    scope: (&'a Scope, &'a Arc<dyn BlockDevice>),
    skip_bytes: u64,
    end_bytes: u64,
    /// Pieces are made of whole clusters of this size.
    whole_clusters_bytes: Option<u64>,
    at_bytes: u64,
    source: usize,
    source_start_bytes: u64,
    /// The status found last and where it ends.
    known: Option<(Content, u64)>,
    /// Go on where nobody can tell what there is.
    salvage: bool,
    unknown: Vec<UnknownStatus>,
}

/// A sector of which nobody could tell what it holds; it is taken for data.
#[derive(Debug, Clone)]
pub struct UnknownStatus {
    /// Where it lies in its source, in bytes.
    pub source_offset_bytes: u64,
    /// Where in the target, in bytes.
    pub offset_bytes: u64,
    /// Why nobody could.
    pub cause: Error,
}

impl<'a> Scan<'a> {
    /// A walk over a range of the sources, laid end to end.
    pub fn new(
        sources: &'a [Arc<dyn BlockDevice>],
        backing: Option<TargetBacking>,
        scope: (&'a Scope, &'a Arc<dyn BlockDevice>),
        range: Range<u64>,
    ) -> Self {
        Scan {
            sources,
            backing,
            scope,
            skip_bytes: range.start,
            end_bytes: range.end,
            whole_clusters_bytes: None,
            at_bytes: range.start,
            source: 0,
            source_start_bytes: 0,
            known: None,
            salvage: false,
            unknown: Vec::new(),
        }
    }

    /// Leaves out what lies before, without moving what comes.
    #[must_use]
    pub fn starting_at(mut self, start_bytes: u64) -> Self {
        self.at_bytes = self.at_bytes.max(start_bytes).min(self.end_bytes);
        self
    }

    /// The same walk in pieces of whole clusters: what holds data only in a part of a
    /// cluster is data as a whole. Such a piece may reach into the next source.
    pub fn in_clusters(mut self, cluster_bytes: Option<u64>) -> Self {
        self.whole_clusters_bytes = cluster_bytes;
        self
    }

    /// The same walk, which goes on where the status cannot be found out: sectors of
    /// which nobody can tell what they hold are data.
    pub fn salvaging(mut self, salvage: bool) -> Self {
        self.salvage = salvage;
        self
    }

    /// The sectors of unknown status that were met since the last call.
    pub fn take_unknown(&mut self) -> Vec<UnknownStatus> {
        std::mem::take(&mut self.unknown)
    }

    /// Where the next piece begins.
    pub fn offset_bytes(&self) -> u64 {
        self.at_bytes
    }

    /// The next piece; pieces of data are at most `chunk_bytes` long, all
    /// others are as long as what they hold.
    pub async fn next_piece(&mut self, chunk_bytes: u64) -> Result<Option<Piece>> {
        if !self.enter_source() {
            return Ok(None);
        }
        let (content, status_end) = match self.known {
            Some((content, end)) if end > self.at_bytes => (content, end),
            _ => self.look().await?,
        };
        self.known = Some((content, status_end));
        let mut len_bytes = status_end - self.at_bytes;
        if content == Content::Data || (content == Content::Zero && self.scope.0.compares()) {
            // Pieces end at multiples of the chunk size, so that aligned
            // clusters are written whole.
            len_bytes = len_bytes.min(chunk_bytes - self.at_bytes % chunk_bytes);
        }
        let mut content = content;
        if let Some(cluster) = self.whole_clusters_bytes {
            if len_bytes < cluster {
                len_bytes = cluster.min(self.end_bytes - self.at_bytes);
                content = Content::Data;
            } else {
                len_bytes -= len_bytes % cluster;
            }
        }
        let piece = Piece {
            offset_bytes: self.at_bytes - self.skip_bytes,
            len_bytes,
            content,
            source: self.source,
            source_offset_bytes: self.at_bytes - self.source_start_bytes,
            ends_extent: self.at_bytes + len_bytes >= status_end,
        };
        self.at_bytes += len_bytes;
        Ok(Some(piece))
    }

    /// Moves to the source that holds the current offset; `false` at the end.
    fn enter_source(&mut self) -> bool {
        while self.at_bytes < self.end_bytes {
            let Some(source) = self.sources.get(self.source) else {
                return false;
            };
            let source_end = self.source_start_bytes + source.size_bytes();
            if self.at_bytes < source_end {
                return true;
            }
            self.source_start_bytes = source_end;
            self.source += 1;
        }
        false
    }

    /// What the current offset holds, and up to where.
    async fn look(&mut self) -> Result<(Content, u64)> {
        let device = self.sources[self.source].clone();
        let within = self.at_bytes - self.source_start_bytes;
        let source_end = self.source_start_bytes + device.size_bytes();
        let mut end = source_end.min(self.end_bytes);
        let mut beyond_backing = false;
        if let Some(backing) = self.backing {
            beyond_backing = self.at_bytes >= backing.size_bytes;
            if !beyond_backing {
                end = end.min(backing.size_bytes);
            }
        }
        let (scope, target) = self.scope;
        let limit_bytes = end - self.at_bytes;
        if let Some((content, len)) = scope
            .look_below(&device, target, within, limit_bytes)
            .await?
        {
            return Ok((content, self.at_bytes + len));
        }
        let shows_through = self.backing.is_some() && !beyond_backing;
        let depth = if shows_through { 0 } else { u32::MAX };
        let extent = self.status(&*device, within, limit_bytes, depth).await?;
        let content = match extent.kind {
            // Where nothing shows through in the source, it is zeroes.
            ExtentKind::Absent if shows_through => Content::Backing,
            // They are there already.
            kind if kind.is_zero() && beyond_backing => Content::Backing,
            kind if kind.is_zero() => Content::Zero,
            _ => Content::Data,
        };
        let len_bytes = self.aligned_len(within, extent.len_bytes, limit_bytes);
        Ok((content, self.at_bytes + len_bytes))
    }

    /// What a source holds at an offset, as far as it can be found out.
    async fn status(
        &mut self,
        device: &dyn BlockDevice,
        within: u64,
        limit_bytes: u64,
        depth: u32,
    ) -> Result<Extent> {
        let mut len_bytes = limit_bytes;
        loop {
            let cause = match device.block_status(within, len_bytes, depth).await {
                Err(cause) if self.salvage => cause,
                answer => return answer,
            };
            if len_bytes > SECTOR_BYTES {
                len_bytes = len_bytes.div_ceil(4).next_multiple_of(SECTOR_BYTES);
                continue;
            }
            self.unknown.push(UnknownStatus {
                source_offset_bytes: within,
                offset_bytes: self.at_bytes - self.skip_bytes,
                cause,
            });
            return Ok(Extent::new(len_bytes, ExtentKind::Data));
        }
    }

    /// Keeps the end of a status at the source's request alignment, so that no
    /// block is read twice.
    fn aligned_len(&self, within: u64, len_bytes: u64, limit_bytes: u64) -> u64 {
        let alignment = u64::from(
            self.sources[self.source]
                .info()
                .request_alignment_bytes
                .max(512),
        );
        // A file may end inside a sector; what follows reads as zeroes.
        let len_bytes = len_bytes
            .max(1)
            .next_multiple_of(SECTOR_BYTES)
            .min(limit_bytes);
        let tail = (within + len_bytes) % alignment;
        match len_bytes {
            len if len == limit_bytes => len,
            len if len > tail => len - tail,
            _ => (len_bytes + alignment - tail).min(limit_bytes),
        }
    }
}
