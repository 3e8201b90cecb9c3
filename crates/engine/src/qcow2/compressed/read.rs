//! Reading compressed clusters.
//!
//! Their data lies end to end in the file, in the order in which it was written,
//! aligned to nothing. Whole clusters of one request that lie side by side are read
//! with one I/O. For a part of a cluster only the beginning of its data that the
//! part probably needs is read and inflated, or the cluster is found in, or put
//! into, the cache (see `cache`).
//!
//! What takes longer than a change of threads is decompressed on all cores; a
//! request that is alone is served where it is.
//!
//! Invariant: however many requests wait, only a fixed number of reads has memory
//! for input and output.
//!
//! Damage behind the bytes that a request asks for goes unnoticed, where QEMU, which decompresses
//! whole clusters, reports an error.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use futures_util::stream::{FuturesUnordered, StreamExt};
use smallvec::SmallVec;
use vellum_format::compressed::CompressedDescriptor;
use vellum_format::geometry::Geometry;
use vellum_format::header::CompressionType;
use vellum_format::limits::COMPRESSED_SECTOR_BYTES;
use vellum_io::lane::compute;
use vellum_io::{Buffer, Buffers, Result};
use vellum_storage::Event;

use super::cache::Lookup;
use super::decompress::decompress;
use super::read_state::MAX_BATCH_BYTES;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{MappingRun, RunKind};

/// A run and the buffer that it is read into.
pub(crate) struct Piece {
    pub(crate) run: MappingRun,
    pub(crate) buffer: Buffer,
}

/// Pieces that are read together: one of any kind, or several whole compressed
/// clusters that lie side by side.
pub(crate) type Batch = SmallVec<[Piece; 1]>;

/// Sorts the pieces of a request into batches.
pub(crate) fn batches(geometry: &Geometry, pieces: Vec<Piece>) -> Vec<Batch> {
    let mut packed = Vec::new();
    let mut batches = Vec::with_capacity(pieces.len());
    for piece in pieces {
        match piece.run.kind {
            RunKind::Compressed(descriptor)
                if piece.run.len_bytes == geometry.cluster_size_bytes() =>
            {
                packed.push((descriptor, piece));
            }
            _ => batches.push(Batch::from_iter([piece])),
        }
    }
    packed.sort_by_key(|(descriptor, _)| descriptor.host_offset.bytes());
    // Host bytes of the last batch, once it is one of packed clusters.
    let mut covered: Option<Range<u64>> = None;
    for (descriptor, piece) in packed {
        let (start, end) = (descriptor.host_offset.bytes(), descriptor.end().bytes());
        match (&mut covered, batches.last_mut()) {
            (Some(covered), Some(last)) if may_join(covered, start, end) => {
                last.push(piece);
                covered.end = covered.end.max(end);
            }
            _ => {
                batches.push(Batch::from_iter([piece]));
                covered = Some(start..end);
            }
        }
    }
    batches
}

/// Whether data in `start..end`, which begins no sooner than `covered`, lies beside it
/// and is not too much for one read.
fn may_join(covered: &Range<u64>, start: u64, end: u64) -> bool {
    // Data ends somewhere in its last sector, and there the next begins.
    start <= covered.end
        && covered.end - start <= COMPRESSED_SECTOR_BYTES
        && end.max(covered.end) - covered.start <= MAX_BATCH_BYTES
}

/// Bytes of the file, and where in the buffer they begin.
struct Span {
    bytes: Buffer,
    skip: usize,
}

/// One decompression.
struct Work {
    kind: CompressionType,
    cluster_bytes: usize,
    input: Arc<Span>,
    /// Where in the span's buffer the compressed data lies.
    range: Range<usize>,
    piece: Buffer,
    /// Where the piece begins in the cluster.
    inside: usize,
    /// Room for the whole cluster, if it is to be cached. It comes from the lane: what
    /// is allocated in one thread and freed in others is memory that grows holes.
    keep: Option<Buffer>,
}

/// All that work leaves behind. The input goes back to the lane that made it, for
/// its next read.
struct Done {
    _input: Arc<Span>,
    piece: Buffer,
    cached: Option<Buffer>,
    result: Result<()>,
    out_bytes: usize,
    ns: u64,
}

impl Work {
    /// Bytes of the cluster that have to be decompressed.
    fn out_bytes(&self) -> usize {
        match self.keep {
            Some(_) => self.cluster_bytes,
            None => self.inside + self.piece.len(),
        }
    }

    fn run(mut self) -> Done {
        let start = Instant::now();
        let out_bytes = self.out_bytes();
        let input = &self.input.bytes[self.range];
        let direct = out_bytes == self.piece.len() && self.keep.is_none();
        let result = if direct {
            decompress(self.kind, input, &mut self.piece, self.cluster_bytes)
        } else {
            let mut scratch = Buffer::for_read(if self.keep.is_some() { 0 } else { out_bytes });
            let cluster = self.keep.as_mut().unwrap_or(&mut scratch);
            let result = decompress(self.kind, input, cluster, self.cluster_bytes);
            if result.is_ok() {
                let end = self.inside + self.piece.len();
                self.piece.copy_from_slice(&cluster[self.inside..end]);
            }
            result
        };
        Done {
            _input: self.input,
            piece: self.piece,
            cached: self.keep,
            result,
            out_bytes,
            ns: start.elapsed().as_nanos() as u64,
        }
    }
}

impl Image {
    /// Reads a run of one compressed cluster.
    pub(crate) async fn read_compressed(
        &self,
        run: &MappingRun,
        descriptor: &CompressedDescriptor,
        mut piece: Buffer,
    ) -> Result<Buffer> {
        let inside = run.guest.in_cluster(&self.geometry) as usize;
        let loader = loop {
            match self.compressed_reads.cache.lookup(descriptor) {
                Lookup::Hit(cluster) => {
                    let end = inside + piece.len();
                    piece.copy_from_slice(&cluster[inside..end]);
                    return Ok(piece);
                }
                Lookup::Loading(ended) => ended.await,
                Lookup::Miss(loader) => break loader,
            }
        };
        let _reading = self.compressed_reads.begin(1).await;
        let host = descriptor.host_offset.bytes();
        let max_len = descriptor.max_len_bytes();
        let mut len = match loader.wants_whole() {
            true => max_len,
            false => self.likely_len(descriptor, inside + piece.len()),
        };
        loop {
            let span = self.read_span(host..host + len, max_len).await?;
            let keep = loader.wants_whole();
            if keep && len < max_len {
                // Others have joined meanwhile, and need more of it.
                len = max_len;
                continue;
            }
            let cluster_bytes = self.geometry.cluster_size_bytes() as usize;
            let done = self
                .decompress(Work {
                    range: span.skip..span.skip + len as usize,
                    keep: keep.then(|| Buffer::for_read(cluster_bytes)),
                    ..self.work(Arc::new(span), inside, piece)
                })
                .await;
            match done.result {
                Ok(()) => {
                    if let Some(cluster) = done.cached {
                        loader.keep(cluster);
                    }
                    return Ok(done.piece);
                }
                // The beginning of the data was not enough, or all of it is broken.
                Err(_) if len < max_len => {
                    len = max_len;
                    piece = done.piece;
                }
                Err(error) => return Err(self.name_error(error).at(host)),
            }
        }
    }

    /// Reads whole compressed clusters that lie side by side.
    pub(crate) async fn read_packed(&self, batch: Batch) -> Result<Vec<(u64, Buffer)>> {
        let reading = self.compressed_reads.begin(batch.len()).await;
        let packed = |piece: &Piece| match piece.run.kind {
            RunKind::Compressed(descriptor) => {
                descriptor.host_offset.bytes()..descriptor.end().bytes()
            }
            _ => 0..0,
        };
        let start = batch.iter().map(|piece| packed(piece).start).min();
        let start = start.unwrap_or_default();
        let end = batch.iter().map(|piece| packed(piece).end).max();
        let host = start..end.unwrap_or(start);
        let span = Arc::new(self.read_span(host, 0).await?);
        let mut done = Vec::with_capacity(batch.len());
        let mut running = FuturesUnordered::new();
        for piece in batch {
            let host = packed(&piece);
            let at = |host: u64| (host - start) as usize + span.skip;
            let work = Work {
                range: at(host.start)..at(host.end),
                ..self.work(span.clone(), 0, piece.buffer)
            };
            let guest = piece.run.guest.bytes();
            running.push(async move {
                let done = self.decompress(work).await;
                match done.result {
                    Ok(()) => Ok((guest, done.piece)),
                    Err(error) => Err(self.name_error(error).at(host.start)),
                }
            });
        }
        while let Some(finished) = running.next().await {
            done.push(finished?);
        }
        drop(reading);
        Ok(done)
    }

    fn work(&self, input: Arc<Span>, inside: usize, piece: Buffer) -> Work {
        Work {
            kind: self.header().compression_type,
            cluster_bytes: self.geometry.cluster_size_bytes() as usize,
            range: 0..0,
            input,
            piece,
            inside,
            keep: None,
        }
    }

    async fn decompress(&self, work: Work) -> Done {
        let done = if self.compressed_reads.needs_thread(work.out_bytes()) {
            compute(move || work.run()).await
        } else {
            work.run()
        };
        self.compressed_reads.note_cost(done.out_bytes, done.ns);
        done
    }

    /// How much of the compressed data probably holds the first `out_bytes` bytes.
    fn likely_len(&self, descriptor: &CompressedDescriptor, out_bytes: usize) -> u64 {
        let max_len = descriptor.max_len_bytes();
        if self.header().compression_type == CompressionType::Zstd {
            // A cluster is one block, of which nothing can be had before its end.
            return max_len;
        }
        let even = max_len * out_bytes as u64 / self.geometry.cluster_size_bytes();
        let likely = even + even / 8 + 1024;
        // Nearly all is no saving.
        if likely < max_len / 8 * 7 {
            likely
        } else {
            max_len
        }
    }

    /// Reads a range of the file, aligned as it likes it, into a buffer of at least
    /// `hold_bytes`: buffers of one size are used again and again.
    async fn read_span(&self, host: Range<u64>, hold_bytes: u64) -> Result<Span> {
        let unit = u64::from(self.file.capabilities().request_alignment_bytes);
        let start = host.start / unit * unit;
        let len_bytes = host.end.next_multiple_of(unit) - start;
        let mut buffer = Buffer::for_read((len_bytes.max(hold_bytes)) as usize);
        buffer.truncate(len_bytes as usize);
        self.emit(Event::ReadCompressed).await;
        let bytes = self.file.read(start, Buffers::from_iter([buffer])).await?;
        Ok(Span {
            bytes: Buffer::join_all(bytes),
            skip: (host.start - start) as usize,
        })
    }
}
