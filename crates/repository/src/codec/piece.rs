//! A piece of a disk's map: where the chunks of 1 GiB of it are, in runs.

use vellum_io::Result;

use super::segment::{Footer, index_bytes};
use super::{Hash, PIECE_CHUNKS, PushId, SEGMENT_CHUNKS, array, be32, damaged};

const MAGIC: &[u8; 8] = b"VELLMAP1";
/// Magic, number of segments, number of runs.
const HEAD_BYTES: usize = 16;
/// Push, number, chunks, bytes of chunks, hash of the index.
const SEGMENT_BYTES: usize = 60;
/// Chunks, segment, first chunk there.
const RUN_BYTES: usize = 12;
/// The segment of a run that reads as zeroes.
const ZEROES: u32 = u32::MAX;
/// More bytes than a piece can have.
pub const MOST_PIECE_BYTES: u64 =
    HEAD_BYTES as u64 + PIECE_CHUNKS * (SEGMENT_BYTES + RUN_BYTES) as u64;

/// What leads to a segment, and tells whether it is the right one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentRef {
    /// Whose it is.
    pub push: PushId,
    /// Its number among those.
    pub number: u32,
    /// What its end says.
    pub footer: Footer,
}

/// Where chunks are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Source {
    /// Nowhere: they read as zeroes.
    Zeroes,
    /// In a segment of the piece's list, from this chunk of it on.
    Segment {
        /// Its place in the list.
        segment: u32,
        /// The first chunk.
        first: u32,
    },
}

/// Neighbours on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// How many chunks.
    pub chunks: u32,
    /// Where they are.
    pub source: Source,
}

/// Where the chunks of a piece are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    segments: Vec<SegmentRef>,
    runs: Vec<Run>,
    /// Where each run ends, in chunks from the piece's start.
    ends: Vec<u32>,
}

impl Piece {
    /// A piece of `chunks` chunks.
    ///
    /// # Errors
    /// If the runs are not as long together, or lead beyond a segment.
    pub fn new(segments: Vec<SegmentRef>, runs: Vec<Run>, chunks: u64) -> Result<Self> {
        let mut end = 0_u64;
        let mut ends = Vec::with_capacity(runs.len());
        for run in &runs {
            end += u64::from(run.chunks);
            let inside = match run.source {
                Source::Zeroes => true,
                Source::Segment { segment, first } => {
                    let segment = segments.get(segment as usize);
                    let has = segment.map_or(0, |segment| segment.footer.chunks);
                    first.checked_add(run.chunks).is_some_and(|end| end <= has)
                }
            };
            if run.chunks == 0 || end > chunks || !inside {
                return Err(damaged("a map leads to chunks that are not there"));
            }
            ends.push(end as u32);
        }
        if end != chunks || chunks > PIECE_CHUNKS {
            return Err(damaged(format!("a map of {end} chunks, not {chunks}")));
        }
        Ok(Piece {
            segments,
            runs,
            ends,
        })
    }

    /// Reads a piece of `chunks` chunks.
    ///
    /// # Errors
    /// If the bytes are none.
    pub fn decode(bytes: &[u8], chunks: u64) -> Result<Self> {
        let wrong = || damaged("no piece of a map");
        let counts = be32(bytes, 8).zip(be32(bytes, 12));
        let (segments, runs) = counts
            .filter(|_| bytes.starts_with(MAGIC))
            .ok_or_else(wrong)?;
        let segments_bytes = segments as usize * SEGMENT_BYTES;
        let runs_bytes = runs as usize * RUN_BYTES;
        let most = PIECE_CHUNKS as u32;
        if segments > most || runs > most || bytes.len() != HEAD_BYTES + segments_bytes + runs_bytes
        {
            return Err(wrong());
        }
        let (listed, run_list) = bytes[HEAD_BYTES..].split_at(segments_bytes);
        let listed = listed.chunks_exact(SEGMENT_BYTES).map(decode_segment);
        let listed = listed.collect::<Option<Vec<_>>>().ok_or_else(wrong)?;
        let run_list = run_list.chunks_exact(RUN_BYTES).map(decode_run);
        let run_list = run_list.collect::<Option<Vec<_>>>().ok_or_else(wrong)?;
        Piece::new(listed, run_list, chunks)
    }

    /// As [`Piece::decode`] reads it.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend((self.segments.len() as u32).to_be_bytes());
        bytes.extend((self.runs.len() as u32).to_be_bytes());
        for segment in &self.segments {
            bytes.extend(segment.push.0);
            bytes.extend(segment.number.to_be_bytes());
            bytes.extend(segment.footer.chunks.to_be_bytes());
            bytes.extend(segment.footer.data_bytes.to_be_bytes());
            bytes.extend(segment.footer.index_hash);
        }
        for run in &self.runs {
            let (segment, first) = match run.source {
                Source::Zeroes => (ZEROES, 0),
                Source::Segment { segment, first } => (segment, first),
            };
            bytes.extend([run.chunks, segment, first].map(u32::to_be_bytes).concat());
        }
        bytes
    }

    /// The segments that chunks are in.
    pub fn segments(&self) -> &[SegmentRef] {
        &self.segments
    }

    /// The runs, in the order of the disk.
    pub fn runs(&self) -> &[Run] {
        &self.runs
    }

    /// How many chunks from `chunk` on are neighbours where they are, and where; `None` beyond the end.
    pub fn find(&self, chunk: u32) -> Option<Run> {
        let at = self.ends.partition_point(|&end| end <= chunk);
        let run = self.runs.get(at)?;
        let left = self.ends.get(at)? - chunk;
        let skipped = run.chunks - left;
        let source = match run.source {
            Source::Zeroes => Source::Zeroes,
            Source::Segment { segment, first } => Source::Segment {
                segment,
                first: first + skipped,
            },
        };
        Some(Run {
            chunks: left,
            source,
        })
    }
}

fn decode_segment(bytes: &[u8]) -> Option<SegmentRef> {
    let footer = Footer {
        chunks: be32(bytes, 20)?,
        data_bytes: be32(bytes, 24)?,
        index_hash: array::<32>(bytes, 28)? as Hash,
    };
    let possible = footer.chunks <= SEGMENT_CHUNKS && index_bytes(footer.chunks) > 0;
    Some(SegmentRef {
        push: PushId(array(bytes, 0)?),
        number: be32(bytes, 16)?,
        footer,
    })
    .filter(|_| possible)
}

fn decode_run(bytes: &[u8]) -> Option<Run> {
    let source = match be32(bytes, 4)? {
        ZEROES if be32(bytes, 8)? != 0 => return None,
        ZEROES => Source::Zeroes,
        segment => Source::Segment {
            segment,
            first: be32(bytes, 8)?,
        },
    };
    Some(Run {
        chunks: be32(bytes, 0)?,
        source,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn segment(number: u32, chunks: u32) -> SegmentRef {
        SegmentRef {
            push: PushId([3; 16]),
            number,
            footer: Footer {
                chunks,
                data_bytes: 100,
                index_hash: [9; 32],
            },
        }
    }

    fn run(chunks: u32, at: Option<(u32, u32)>) -> Run {
        let source = at.map_or(Source::Zeroes, |(segment, first)| Source::Segment {
            segment,
            first,
        });
        Run { chunks, source }
    }

    #[test]
    fn chunks_are_found_in_runs() {
        let runs = vec![run(5, None), run(3, Some((1, 2))), run(1, Some((0, 0)))];
        let piece = Piece::new(vec![segment(0, 1), segment(7, 5)], runs, 9).unwrap();
        assert_eq!(piece.find(0), Some(run(5, None)));
        assert_eq!(piece.find(4), Some(run(1, None)));
        assert_eq!(piece.find(6), Some(run(2, Some((1, 3)))));
        assert_eq!(piece.find(8), Some(run(1, Some((0, 0)))));
        assert_eq!(piece.find(9), None);
        assert_eq!(Piece::decode(&piece.encode(), 9).unwrap(), piece);
        assert!(Piece::decode(&piece.encode(), 8).is_err());
    }

    #[test]
    fn maps_that_lead_nowhere_are_refused() {
        let wrong = [
            vec![run(1, Some((0, 0)))],
            vec![run(3, Some((0, 0)))],
            vec![run(2, Some((0, 1)))],
            vec![run(2, Some((1, 0)))],
            vec![run(2, Some((0, u32::MAX)))],
            vec![run(0, None), run(2, None)],
        ];
        for runs in wrong {
            assert!(
                Piece::new(vec![segment(0, 2)], runs.clone(), 2).is_err(),
                "{runs:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_piece_or_an_error(
            body in proptest::collection::vec(any::<u8>(), 0..200),
            counts in (0..3_u32, 0..12_u32),
            chunks in 0..20_u64,
        ) {
            let mut bytes = MAGIC.to_vec();
            bytes.extend(counts.0.to_be_bytes());
            bytes.extend(counts.1.to_be_bytes());
            bytes.extend(body);
            if let Ok(piece) = Piece::decode(&bytes, chunks) {
                prop_assert_eq!(piece.encode(), bytes);
            }
        }
    }
}
