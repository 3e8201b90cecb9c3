//! [`RepositoryStorage`]: a disk of a repository, read as it is needed.

use std::ops::Range;
use std::sync::Arc;

use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result, lane};
use vellum_storage::{BlockStatus, SourceVersion, Storage, StorageExtent};

use crate::codec::manifest::{Manifest, piece_chunks};
use crate::codec::piece::{Piece, SegmentRef, Source};
use crate::codec::segment::{SegmentIndex, decompress};
use crate::codec::{CHUNK_BYTES, PIECE_CHUNKS, PushId, damaged};
use crate::names::{self, DiskName};
use crate::pieces;
use crate::recent::Recent;
use crate::repository::Repository;

/// What an error of a disk's bytes says was being done ([`Error::operation`]): its message names the object.
pub const READ_DISK: &str = "read a disk of a repository";
/// What to do where pushes see by themselves what is lost.
const PUSH_AGAIN: &str = "push the disk again from its source, which sends what is lost once more";
/// What to do where pushes must be told first.
const VERIFY_AND_PUSH_AGAIN: &str = "'vellum repo verify --read-data' notes all that is damaged; after it, push \
    the disk again from its source, which sends that once more";
/// Pieces in memory: of 100 KiB or so, 1.2 MiB at most.
const KEPT_PIECES: usize = 64;
/// Lists of the chunks of segments in memory: of 9 KiB.
const KEPT_INDEXES: usize = 4096;
/// Chunks in memory, for whoever reads parts of them.
const KEPT_CHUNKS: usize = 512;
/// Chunks that are read with one request at most.
const READ_CHUNKS: u32 = 16;

/// A disk of a repository. It may only be read; each chunk is compared with its hash.
#[derive(Debug)]
pub struct RepositoryStorage(Arc<Disk>);

#[derive(Debug)]
struct Disk {
    repository: Repository,
    manifest: Manifest,
    name: String,
    pieces: Recent<u64, Option<Arc<Piece>>>,
    indexes: Recent<(PushId, u32), Arc<SegmentIndex>>,
    chunks: Recent<u64, Arc<Vec<u8>>>,
}

/// Neighbours on the disk and where they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Found {
    chunks: u32,
    /// `None`: zeroes.
    place: Option<(SegmentRef, u32)>,
}

impl RepositoryStorage {
    /// Opens a disk.
    ///
    /// # Errors
    /// If there is no such disk.
    pub async fn open(repository: &Repository, disk: &DiskName) -> Result<Arc<Self>> {
        let manifest = repository.find(disk).await?;
        Ok(Self::of(repository, manifest))
    }

    /// The disk of a manifest.
    pub fn of(repository: &Repository, manifest: Manifest) -> Arc<Self> {
        let (tag, number) = (&manifest.tag, manifest.number);
        Arc::new(RepositoryStorage(Arc::new(Disk {
            name: format!("{}:{tag}@{number}", repository.name()),
            repository: repository.clone(),
            manifest,
            pieces: Recent::new(KEPT_PIECES),
            indexes: Recent::new(KEPT_INDEXES),
            chunks: Recent::new(KEPT_CHUNKS),
        })))
    }

    /// What the disk is.
    pub fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    fn refuse<T>(&self, operation: &'static str) -> Io<T> {
        let message = "a disk in a repository is read-only: make an overlay on it ('vellum open')";
        let error = Error::new(ErrorKind::ReadOnly, operation, message);
        Io::ready(Err(error.target(self.name())))
    }
}

impl Disk {
    async fn piece(&self, number: u64) -> Result<Option<Arc<Piece>>> {
        let load = async {
            let at = self.manifest.pieces.get(number as usize).copied().flatten();
            let Some(at) = at else {
                return Ok(None);
            };
            let chunks = piece_chunks(self.manifest.disk_bytes, number);
            let piece = pieces::load(&self.repository, &at, chunks).await;
            let piece = piece.map_err(|error| {
                let key = names::part(names::MAPS, at.push, at.part);
                match error.kind() {
                    ErrorKind::NotFound => self.lost(&key, "it is missing", PUSH_AGAIN),
                    ErrorKind::Corrupt => self.lost(&key, error.message(), PUSH_AGAIN),
                    _ => self.failed(&key, &error),
                }
            })?;
            Ok(Some(Arc::new(piece)))
        };
        self.pieces.get(number, load).await
    }

    /// Where the chunks before `end` are, from `chunk` on.
    async fn find(&self, chunk: u64, end: u64) -> Result<Found> {
        let number = chunk / PIECE_CHUNKS;
        let end = end.min((number + 1) * PIECE_CHUNKS);
        let most = (end - chunk) as u32;
        let Some(piece) = self.piece(number).await? else {
            return Ok(Found {
                chunks: most,
                place: None,
            });
        };
        let run = piece.find((chunk % PIECE_CHUNKS) as u32);
        let run = run.ok_or_else(|| damaged("a map ends too early"))?;
        let place = match run.source {
            Source::Zeroes => None,
            Source::Segment { segment, first } => {
                let segment = piece.segments().get(segment as usize);
                segment.map(|&segment| (segment, first))
            }
        };
        Ok(Found {
            chunks: run.chunks.min(most),
            place,
        })
    }

    async fn index(&self, segment: &SegmentRef, key: &str) -> Result<Arc<SegmentIndex>> {
        let load = async {
            let footer = &segment.footer;
            let objects = self.repository.objects();
            let bytes = objects.get_range(key, footer.index_range()).await?;
            match *blake3::hash(&bytes).as_bytes() == footer.index_hash {
                true => SegmentIndex::decode(&bytes, footer.chunks).map(Arc::new),
                false => Err(damaged("a segment that is not what was written")),
            }
        };
        self.indexes.get((segment.push, segment.number), load).await
    }

    /// Reads chunks of a segment; an error names it.
    async fn fetch(&self, segment: &SegmentRef, chunks: Range<u32>) -> Result<Vec<Vec<u8>>> {
        let key = names::part(names::SEGMENTS, segment.push, segment.number);
        match self.fetch_from(segment, &key, chunks).await {
            Ok(fetched) => Ok(fetched),
            Err(error) => Err(self.about(segment, &key, &error).await),
        }
    }

    /// What is wrong with a segment that could not be read.
    async fn about(&self, segment: &SegmentRef, key: &str, error: &Error) -> Error {
        if error.kind() == ErrorKind::Corrupt {
            return self.lost(key, error.message(), VERIFY_AND_PUSH_AGAIN);
        }
        // Stores do not say of one that is too short what they say of one that is missing.
        let folder = names::parts(names::SEGMENTS, segment.push);
        let Ok(listed) = self.repository.objects().list(&folder).await else {
            return self.failed(key, error);
        };
        let wanted = segment.footer.segment_bytes();
        match listed.iter().find(|object| object.key == key) {
            None => self.lost(key, "it is missing", PUSH_AGAIN),
            Some(found) if found.len_bytes != wanted => {
                let len = found.len_bytes;
                let why = format!("it has {len} bytes, not {wanted}");
                self.lost(key, &why, PUSH_AGAIN)
            }
            Some(_) => self.failed(key, error),
        }
    }

    /// What a disk leads to is not there any more.
    fn lost(&self, key: &str, why: &str, advice: &str) -> Error {
        let message = format!("{key}: {why}; {advice}");
        Error::new(ErrorKind::Corrupt, READ_DISK, message).target(&self.name)
    }

    /// What a disk leads to cannot be read now.
    fn failed(&self, key: &str, error: &Error) -> Error {
        let message = format!("{key}: {}", error.message());
        let failed = Error::new(error.kind(), READ_DISK, message).target(&self.name);
        failed.with_errno(error.errno())
    }

    async fn fetch_from(
        &self,
        segment: &SegmentRef,
        key: &str,
        chunks: Range<u32>,
    ) -> Result<Vec<Vec<u8>>> {
        let index = self.index(segment, key).await?;
        let range = index.range(chunks.clone());
        let range = range.ok_or_else(|| damaged("a map leads beyond a segment"))?;
        let stored = self.repository.objects().get_range(key, range).await?;
        let listed = index.chunks()[chunks.start as usize..chunks.end as usize].to_vec();
        let decompressed = lane::compute(move || {
            let mut rest = &stored[..];
            let chunks = listed.iter().map(|chunk| {
                let (this, next) = rest
                    .split_at_checked(chunk.stored_bytes as usize)
                    .ok_or_else(|| damaged("a segment ends too early"))?;
                rest = next;
                decompress(this, &chunk.hash)
            });
            chunks.collect::<Result<Vec<_>>>()
        });
        decompressed.await
    }

    /// One chunk, kept for whoever wants another part of it.
    async fn chunk(&self, chunk: u64, segment: &SegmentRef, at: u32) -> Result<Arc<Vec<u8>>> {
        let fetch = async {
            let mut fetched = self.fetch(segment, at..at + 1).await?;
            let fetched = fetched.pop();
            fetched
                .map(Arc::new)
                .ok_or_else(|| damaged("a segment without chunks"))
        };
        self.chunks.get(chunk, fetch).await
    }

    /// Fills `into` from `offset_bytes` on, inside the disk.
    async fn read(&self, offset_bytes: u64, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            let offset = offset_bytes + done as u64;
            let (chunk, skip) = (offset / CHUNK_BYTES, (offset % CHUNK_BYTES) as usize);
            let left = (into.len() - done + skip) as u64;
            let found = self.find(chunk, chunk + left.div_ceil(CHUNK_BYTES)).await?;
            let rest = &mut into[done..];
            let whole = (rest.len() as u64 / CHUNK_BYTES) as u32;
            done += match found.place {
                None => {
                    let bytes = u64::from(found.chunks) * CHUNK_BYTES - skip as u64;
                    let len = rest.len().min(bytes as usize);
                    rest[..len].fill(0);
                    len
                }
                Some((segment, first)) if skip == 0 && whole.min(found.chunks) > 1 => {
                    let chunks = found.chunks.min(whole).min(READ_CHUNKS);
                    let fetched = self.fetch(&segment, first..first + chunks).await?;
                    let fetched = fetched.concat();
                    rest[..fetched.len()].copy_from_slice(&fetched);
                    fetched.len()
                }
                Some((segment, first)) => {
                    let content = self.chunk(chunk, &segment, first).await?;
                    let len = rest.len().min(content.len() - skip);
                    rest[..len].copy_from_slice(&content[skip..skip + len]);
                    len
                }
            };
        }
        Ok(())
    }

    async fn status(&self, offset_bytes: u64, len_bytes: u64) -> Result<StorageExtent> {
        let disk_bytes = self.manifest.disk_bytes;
        if offset_bytes >= disk_bytes {
            return Ok(StorageExtent {
                status: BlockStatus::Hole,
                len_bytes,
            });
        }
        let end = offset_bytes.saturating_add(len_bytes).min(disk_bytes);
        let first = offset_bytes / CHUNK_BYTES;
        let found = self.find(first, end.div_ceil(CHUNK_BYTES)).await?;
        let found_end = (first + u64::from(found.chunks)) * CHUNK_BYTES;
        Ok(StorageExtent {
            status: match found.place {
                None => BlockStatus::Hole,
                Some(_) => BlockStatus::Data,
            },
            len_bytes: found_end.min(end) - offset_bytes,
        })
    }
}

impl Storage for RepositoryStorage {
    vellum_storage::read_only!();

    fn name(&self) -> &str {
        &self.0.name
    }

    fn version(&self) -> SourceVersion {
        SourceVersion::Known(self.0.manifest.push.to_string())
    }

    fn len_bytes(&self) -> Result<u64> {
        Ok(self.0.manifest.disk_bytes)
    }

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let disk = self.0.clone();
        Io::start(async move {
            let mut offset = offset_bytes;
            let mut read = Buffers::new();
            for mut buffer in buffers {
                let inside = disk.manifest.disk_bytes.saturating_sub(offset);
                let (within, beyond) = split(&mut buffer, inside);
                beyond.fill(0);
                disk.read(offset, within).await?;
                offset += buffer.len() as u64;
                read.push(buffer);
            }
            Ok(read)
        })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Io<StorageExtent> {
        let disk = self.0.clone();
        Io::start(async move { disk.status(offset_bytes, len_bytes).await })
    }
}

fn split(buffer: &mut Buffer, inside_bytes: u64) -> (&mut [u8], &mut [u8]) {
    let at = inside_bytes.min(buffer.len() as u64) as usize;
    buffer.split_at_mut(at)
}
