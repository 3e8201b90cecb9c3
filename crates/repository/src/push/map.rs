//! The map of a push: its pieces go to the store when all segments are complete that they lead to.

use std::collections::{BTreeMap, HashMap, VecDeque};

use vellum_io::{Error, ErrorKind, Result};

use super::upload::Uploads;
use crate::codec::manifest::{Manifest, PieceRef, UsedSegments, piece_chunks};
use crate::codec::piece::{Piece, Run, SegmentRef, Source};
use crate::codec::{HexHash, PushId};
use crate::known::{Place, SegmentNumber, Segments};
use crate::names;
use crate::runs::Runs;

/// Bytes of pieces that become one object.
const PART_BYTES: usize = 4 << 20;

/// Neighbours on the disk; `None`: zeroes.
type PlacedRun = (u32, Option<Place>);

/// The map as far as it is known.
#[derive(Debug)]
pub(crate) struct MapWriter {
    push: PushId,
    disk_bytes: u64,
    /// The piece that is being made.
    runs: Vec<PlacedRun>,
    /// Those that wait for their segments, and for each where the base's piece is.
    waiting: VecDeque<(Vec<PlacedRun>, Option<PieceRef>)>,
    pieces: Vec<Option<PieceRef>>,
    used: BTreeMap<PushId, Runs>,
    part: u32,
    bytes: Vec<u8>,
}

impl MapWriter {
    pub(crate) fn new(push: PushId, disk_bytes: u64) -> Self {
        MapWriter {
            push,
            disk_bytes,
            runs: Vec::new(),
            waiting: VecDeque::new(),
            pieces: Vec::new(),
            used: BTreeMap::new(),
            part: 0,
            bytes: Vec::new(),
        }
    }

    /// The next chunks, which are neighbours where they are.
    pub(crate) fn add(&mut self, chunks: u32, place: Option<Place>) {
        if let Some((before, last)) = self.runs.last_mut() {
            let joins = match (*last, place) {
                (None, None) => true,
                (Some(last), Some(place)) => {
                    last.segment == place.segment && last.chunk + *before == place.chunk
                }
                _ => false,
            };
            if joins {
                *before += chunks;
                return;
            }
        }
        self.runs.push((chunks, place));
    }

    /// The piece is complete. `base`: where the piece of the disk is that this one was compared with, and
    /// which was found to be whole; it is used again if it is the same.
    pub(crate) fn end_piece(&mut self, base: Option<PieceRef>) {
        self.waiting
            .push_back((std::mem::take(&mut self.runs), base));
    }

    /// Sends pieces whose segments are complete.
    pub(crate) async fn settle(
        &mut self,
        segments: &Segments,
        uploads: &mut Uploads,
    ) -> Result<()> {
        while let Some((runs, base)) = self.waiting.front() {
            let base = *base;
            let Some(piece) = self.resolve(runs, segments)? else {
                return Ok(());
            };
            self.waiting.pop_front();
            for segment in piece.segments() {
                let runs = self.used.entry(segment.push).or_default();
                runs.add(segment.number, segment.number);
            }
            let placed = self.place(&piece, base);
            self.pieces.push(placed);
            if self.bytes.len() >= PART_BYTES {
                self.send(uploads).await?;
            }
        }
        Ok(())
    }

    /// The piece of runs; `None` if a segment is not complete.
    fn resolve(&self, runs: &[PlacedRun], segments: &Segments) -> Result<Option<Piece>> {
        let mut listed = Vec::<SegmentRef>::new();
        let mut numbers = HashMap::<SegmentNumber, u32>::new();
        let mut resolved = Vec::with_capacity(runs.len());
        for &(chunks, place) in runs {
            let source = match place {
                None => Source::Zeroes,
                Some(Place { segment, chunk }) => {
                    let Some(found) = segments.get(segment) else {
                        return Ok(None);
                    };
                    let number = *numbers.entry(segment).or_insert_with(|| {
                        listed.push(found);
                        listed.len() as u32 - 1
                    });
                    Source::Segment {
                        segment: number,
                        first: chunk,
                    }
                }
            };
            resolved.push(Run { chunks, source });
        }
        let chunks = piece_chunks(self.disk_bytes, self.pieces.len() as u64);
        Piece::new(listed, resolved, chunks).map(Some)
    }

    fn place(&mut self, piece: &Piece, base: Option<PieceRef>) -> Option<PieceRef> {
        if piece.segments().is_empty() {
            return None;
        }
        let bytes = piece.encode();
        let hash = HexHash(*blake3::hash(&bytes).as_bytes());
        if let Some(same) = base.filter(|base| base.hash == hash) {
            return Some(same);
        }
        let placed = PieceRef {
            push: self.push,
            part: self.part,
            offset_bytes: self.bytes.len() as u64,
            len_bytes: bytes.len() as u64,
            hash,
        };
        self.bytes.extend(bytes);
        Some(placed)
    }

    async fn send(&mut self, uploads: &mut Uploads) -> Result<()> {
        let key = names::part(names::MAPS, self.push, self.part);
        self.part += 1;
        uploads.send(key, std::mem::take(&mut self.bytes)).await
    }

    /// All segments are complete: the rest goes to the store, and the manifest gets the map.
    pub(crate) async fn finish(
        mut self,
        segments: &Segments,
        uploads: &mut Uploads,
        manifest: &mut Manifest,
    ) -> Result<()> {
        self.settle(segments, uploads).await?;
        if !self.waiting.is_empty() {
            let message = "a map leads to a segment that was not made";
            return Err(Error::new(ErrorKind::Corrupt, "push", message));
        }
        if !self.bytes.is_empty() {
            self.send(uploads).await?;
        }
        manifest.pieces = self.pieces;
        let used = self.used.into_iter();
        let used = used.map(|(push, runs)| UsedSegments {
            push,
            numbers: runs.iter().collect(),
        });
        manifest.segments = used.collect();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_become_one_run() {
        let mut map = MapWriter::new(PushId([0; 16]), 1 << 30);
        let at = |segment, chunk| {
            let segment = SegmentNumber(segment);
            Some(Place { segment, chunk })
        };
        map.add(3, None);
        map.add(2, None);
        map.add(1, at(0, 4));
        map.add(2, at(0, 5));
        map.add(1, at(0, 9));
        map.add(1, at(1, 10));
        let expected = [(5, None), (3, at(0, 4)), (1, at(0, 9)), (1, at(1, 10))];
        assert_eq!(map.runs, expected);
    }
}
