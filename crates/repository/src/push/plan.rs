//! What a push reads of a disk, and what it has from the disk that it was compared with.

use std::collections::VecDeque;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use futures_util::stream::{self, LocalBoxStream, StreamExt};
use vellum::BlockDevice;
use vellum_io::Result;

use crate::codec::manifest::{Manifest, PieceRef, chunks_of, piece_chunks, pieces_of};
use crate::codec::piece::{Piece, Run, Source};
use crate::codec::{CHUNK_BYTES, PIECE_CHUNKS};
use crate::pieces;
use crate::repository::{REQUESTS_AT_ONCE, Repository};
use crate::sound::Sound;

/// Chunks that are read with one request at most.
const READ_CHUNKS: u64 = 16;

/// What comes next on the disk.
#[derive(Debug)]
pub(crate) enum Span {
    /// So many chunks that read as zeroes.
    Zeroes(u32),
    /// Chunks that have not changed.
    Kept {
        piece: Rc<Piece>,
        first: u32,
        chunks: u32,
    },
    /// Chunks that are to be read, from this one on.
    Read { chunk: u64, chunks: u32 },
}

/// The chunks that may have changed, ascending, and the disk that all others are as in.
pub(crate) struct Changes {
    pub(crate) base: Manifest,
    pub(crate) chunks: VecDeque<Range<u64>>,
}

impl Changes {
    /// `dirty`: bytes of a disk of `disk_bytes` bytes.
    pub(crate) fn new(base: Manifest, dirty: &[Range<u64>], disk_bytes: u64) -> Self {
        let end = chunks_of(disk_bytes);
        let chunks = |bytes: &Range<u64>| bytes.start / CHUNK_BYTES..chunks_of(bytes.end).min(end);
        let mut all = dirty.iter().map(chunks).collect::<Vec<_>>();
        if base.disk_bytes != disk_bytes {
            // What has come, and the chunk that the shorter one ends in.
            all.push(base.disk_bytes.min(disk_bytes) / CHUNK_BYTES..end);
        }
        all.retain(|range| range.start < range.end);
        all.sort_unstable_by_key(|range| range.start);
        let mut merged = VecDeque::<Range<u64>>::new();
        for range in all {
            match merged.back_mut() {
                Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
                _ => merged.push_back(range),
            }
        }
        Changes {
            base,
            chunks: merged,
        }
    }

    /// Whether the chunk may have changed, and the first chunk from which on that is otherwise. To be
    /// asked for ascending chunks.
    fn look(&mut self, chunk: u64) -> (bool, u64) {
        while self.chunks.front().is_some_and(|range| range.end <= chunk) {
            self.chunks.pop_front();
        }
        match self.chunks.front() {
            None => (false, u64::MAX),
            Some(range) if range.start <= chunk => (true, range.end),
            Some(range) => (false, range.start),
        }
    }
}

/// What the base has where a piece of the disk is.
#[derive(Debug)]
enum Kept {
    Zeroes,
    Piece(PieceRef, Rc<Piece>),
    /// What is damaged, or not there: nobody knows what it led to.
    Lost,
}

/// Says what comes next.
pub(crate) struct Plan<'a> {
    disk: Arc<dyn BlockDevice>,
    disk_bytes: u64,
    changes: Option<Changes>,
    sound: Sound,
    /// The base's pieces, in order.
    base: LocalBoxStream<'a, Kept>,
    /// The number of the current piece, and its chunks.
    piece: u64,
    chunks: Range<u64>,
    /// The base's piece there.
    kept: Kept,
}

impl<'a> Plan<'a> {
    /// `base`: the disk that this one is compared with. Without `changes` all is read, and what the base
    /// has serves for the map alone.
    pub(crate) fn new(
        repository: &'a Repository,
        disk: Arc<dyn BlockDevice>,
        disk_bytes: u64,
        base: Option<Manifest>,
        changes: Option<Changes>,
        sound: Sound,
    ) -> Self {
        let load = move |(at, chunks): (Option<PieceRef>, u64)| async move {
            let Some(at) = at else { return Kept::Zeroes };
            match pieces::load(repository, &at, chunks).await {
                Ok(piece) => Kept::Piece(at, Rc::new(piece)),
                // All of it is read from the disk, whatever is wrong.
                Err(_) => Kept::Lost,
            }
        };
        let pieces = base.into_iter().flat_map(|base| {
            let of = move |(number, at)| (at, piece_chunks(base.disk_bytes, number));
            (0..).zip(base.pieces).map(of)
        });
        let pieces = stream::iter(pieces).map(load).buffered(REQUESTS_AT_ONCE);
        Plan {
            disk,
            disk_bytes,
            changes,
            sound,
            base: pieces.boxed_local(),
            piece: 0,
            chunks: 0..0,
            kept: Kept::Zeroes,
        }
    }

    /// `None`: the disk is at its end.
    pub(crate) async fn next(&mut self) -> Result<Option<Span>> {
        if self.chunks.is_empty() {
            if self.piece >= pieces_of(self.disk_bytes) {
                return Ok(None);
            }
            let first = self.piece * PIECE_CHUNKS;
            self.chunks = first..first + piece_chunks(self.disk_bytes, self.piece);
            self.kept = self.base.next().await.unwrap_or(Kept::Zeroes);
        }
        let look = |changes: &mut Changes| changes.look(self.chunks.start);
        let (changed, until) = self.changes.as_mut().map_or((true, u64::MAX), look);
        let until = until.min(self.chunks.end);
        let (span, chunks) = match &self.kept {
            Kept::Zeroes if !changed => {
                let chunks = (until - self.chunks.start) as u32;
                (Span::Zeroes(chunks), chunks)
            }
            Kept::Piece(_, piece) if !changed => self.keep(piece, until).await?,
            _ => self.look_at_disk(until).await?,
        };
        self.chunks.start += u64::from(chunks);
        Ok(Some(span))
    }

    /// Whether the last span has completed a piece, and if so where the base's piece is, if that is
    /// whole: to be asked once after each, and goes on to the next piece then.
    pub(crate) fn ends_piece(&mut self) -> Option<Option<PieceRef>> {
        if !self.chunks.is_empty() {
            return None;
        }
        self.piece += 1;
        Some(match &self.kept {
            Kept::Piece(at, _) => Some(*at),
            Kept::Zeroes | Kept::Lost => None,
        })
    }

    /// What has not changed is as in the base; but where the disk knows of zeroes there are some,
    /// whatever says that nothing has changed (a disk that was cut off and has grown again, say). What
    /// the base has in segments that are not sound is read again.
    async fn keep(&self, piece: &Rc<Piece>, until: u64) -> Result<(Span, u32)> {
        let (is_zero, chunks) = self.zeroes_or_not(until).await?;
        let chunks = chunks as u32;
        if is_zero {
            return Ok((Span::Zeroes(chunks), chunks));
        }
        let first = (self.chunks.start - self.piece * PIECE_CHUNKS) as u32;
        let (is_sound, chunks) = self.sound_or_not(piece, first, chunks);
        if is_sound {
            let piece = piece.clone();
            let kept = Span::Kept {
                piece,
                first,
                chunks,
            };
            return Ok((kept, chunks));
        }
        let chunks = chunks.min(READ_CHUNKS as u32);
        let chunk = self.chunks.start;
        Ok((Span::Read { chunk, chunks }, chunks))
    }

    /// How many chunks of a piece, of so many from `first` on, lead to sound segments, or else do not.
    fn sound_or_not(&self, piece: &Piece, first: u32, chunks: u32) -> (bool, u32) {
        let end = first + chunks;
        let is_sound = |run: &Run| match run.source {
            Source::Zeroes => true,
            Source::Segment { segment, .. } => {
                let segment = piece.segments().get(segment as usize);
                segment.is_some_and(|segment| self.sound.has(segment))
            }
        };
        let (mut next, mut all) = (first, None);
        while let Some(run) = piece.find(next).filter(|_| next < end) {
            let this = is_sound(&run);
            if *all.get_or_insert(this) != this {
                break;
            }
            next = end.min(next + run.chunks);
        }
        match all {
            Some(is_sound) => (is_sound, next - first),
            // The base ends before: what has come is among the changes.
            None => (false, chunks),
        }
    }

    async fn look_at_disk(&self, until: u64) -> Result<(Span, u32)> {
        let chunk = self.chunks.start;
        let (is_zero, chunks) = self.zeroes_or_not(until).await?;
        if is_zero {
            return Ok((Span::Zeroes(chunks as u32), chunks as u32));
        }
        let chunks = chunks.min(READ_CHUNKS) as u32;
        Ok((Span::Read { chunk, chunks }, chunks))
    }

    /// How many chunks before `until` the disk knows to be zeroes, or else does not.
    async fn zeroes_or_not(&self, until: u64) -> Result<(bool, u64)> {
        let chunk = self.chunks.start;
        let start = chunk * CHUNK_BYTES;
        let len_bytes = (until * CHUNK_BYTES).min(self.disk_bytes) - start;
        let extent = self.disk.block_status(start, len_bytes, u32::MAX).await?;
        let whole = match extent.len_bytes >= len_bytes {
            true => until - chunk,
            false => extent.len_bytes / CHUNK_BYTES,
        };
        Ok(match extent.kind.is_zero() {
            true if whole > 0 => (true, whole),
            // A chunk that begins with zeroes.
            true => (false, 1),
            false => (
                false,
                extent
                    .len_bytes
                    .div_ceil(CHUNK_BYTES)
                    .clamp(1, until - chunk),
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::PushId;
    use crate::names::TagName;

    #[test]
    fn changes_are_chunks() {
        let base = |bytes| Manifest::new(PushId([0; 16]), TagName::default(), 1, bytes);
        let changed = |base_bytes, dirty: &[Range<u64>], disk_bytes| {
            let changes = Changes::new(base(base_bytes), dirty, disk_bytes);
            changes.chunks.into_iter().collect::<Vec<_>>()
        };
        let size = 10 << 16;
        assert_eq!(changed(size, &[], size), []);
        let dirty = [
            (5 << 16)..(5 << 16) + 1,
            0..1,
            65535..65537,
            (9 << 16)..(99 << 16),
        ];
        assert_eq!(changed(size, &dirty, size), [0..2, 5..6, 9..10]);
        assert_eq!(changed(size - 1, &[], size), [9..10]);
        assert_eq!(changed(size, &[], size + (3 << 16)), [10..13]);
        assert_eq!(changed(size, &[], size - 7), [9..10]);
        let mut changes = Changes::new(base(size), &[(2 << 16)..(3 << 16)], size);
        assert_eq!(changes.look(0), (false, 2));
        assert_eq!(changes.look(2), (true, 3));
        assert_eq!(changes.look(3), (false, u64::MAX));
    }
}
