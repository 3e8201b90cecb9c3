//! A push: chunks are read, hashed, compressed and stored side by side.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::BlockDevice;
use vellum_io::executor::JoinHandle;
use vellum_io::{Buffer, Error, ErrorKind, Result, buffer, lane, spawn};

use crate::clock::local_seconds;
use crate::codec::manifest::{Cost, Entry, Manifest, PieceRef, TombstoneKind};
use crate::codec::piece::{Piece, Source};
use crate::codec::{CHUNK_BYTES, Hash, MOST_DISK_BYTES, PushId, segment};
use crate::holder::Holder;
use crate::known::{Known, Place, Segments};
use crate::names::{self, DiskName, TagName};
use crate::repository::{Repository, Used};
use crate::session::{self, Begun};
use crate::sound::Sound;

use super::map::MapWriter;
use super::plan::{Changes, Plan, Span};
use super::segments::SegmentWriter;
use super::upload::Uploads;

/// Requests of a MiB that are read and hashed at once, and as many that are compressed.
const AT_ONCE: usize = 16;

/// How often a push says that it runs.
const SIGN_OF_LIFE: Duration = Duration::from_secs(30);

/// How a disk is pushed.
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// Its tag.
    pub tag: TagName,
    /// Only what has changed is read; the rest is as in another disk of the repository.
    pub since: Option<Since>,
    /// The level of zstd.
    pub level: i32,
    /// Chunks of the repository that are known at once, of about 80 bytes each. Others are sent again.
    pub most_known_chunks: usize,
    /// Another push to the tag is known to have ended.
    pub take_over: bool,
    /// Who pushes.
    pub holder: Holder,
    /// What names the push: a new one for each.
    pub push: PushId,
}

/// What has changed since when.
#[derive(Debug, Clone)]
pub struct Since {
    /// The disk that all else is as in.
    pub base: DiskName,
    /// The push that must have made it, where that is known.
    pub push: Option<PushId>,
    /// What may have changed: bytes of the disk.
    pub dirty: Vec<Range<u64>>,
}

impl PushOptions {
    /// All of a disk, by this process.
    ///
    /// # Errors
    /// If the system has no random bytes.
    pub fn new(tag: TagName) -> Result<Self> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|error| {
            let message = format!("the system has no random bytes: {error}");
            Error::new(ErrorKind::Io, "push", message)
        })?;
        Ok(PushOptions {
            tag,
            since: None,
            level: 3,
            most_known_chunks: 16 << 20,
            take_over: false,
            holder: Holder::this_process(),
            push: PushId(id),
        })
    }
}

/// What was pushed.
#[derive(Debug, Clone)]
pub struct Pushed {
    /// The disk.
    pub manifest: Manifest,
    /// Segments of pushes that were killed, and did not need to be sent again.
    pub resumed_segments: usize,
}

/// Pushes a disk; `progress` is told how many bytes of how many are done. Nobody may change the disk
/// meanwhile.
///
/// # Errors
/// [`ErrorKind::Locked`] if another push to the tag runs, [`ErrorKind::Changed`] if it has come first,
/// [`ErrorKind::Unsupported`] if the store would not notice that; what the disk says, and the store. What was sent is used by the next push to the tag.
pub async fn push(
    repository: &Repository,
    disk: &Arc<dyn BlockDevice>,
    options: &PushOptions,
    progress: impl FnMut(u64, u64),
) -> Result<Pushed> {
    let disk_bytes = disk.size_bytes();
    if disk_bytes > MOST_DISK_BYTES {
        let message = format!("a disk of {disk_bytes} bytes is too large for a repository");
        return Err(Error::new(ErrorKind::Unsupported, "push", message));
    }
    let PushOptions {
        tag, push, holder, ..
    } = options;
    repository.check_store().await?;
    let begun = session::begin(repository, tag, *push, holder, options.take_over).await?;
    let work = pin!(push_in(repository, disk, options, &begun, progress));
    let alive = pin!(say_alive(repository, &begun));
    let pushed = match select(work, alive).await {
        Either::Left((pushed, _)) => pushed,
        Either::Right((never, _)) => match never {},
    };
    let has_ended = match &pushed {
        Ok(_) => true,
        // Nothing can come of it.
        Err(error) => error.kind() == ErrorKind::Changed,
    };
    if has_ended {
        end(repository, &begun).await;
    }
    pushed
}

/// What is left of a session is harmless; the next push to the tag removes it.
pub(crate) async fn end(repository: &Repository, begun: &Begun) {
    let resumed = begun
        .resumed
        .iter()
        .map(|killed| names::session(killed.push));
    let _ = repository.remove_all(resumed.collect()).await;
    let _ = begun.session.remove(repository).await;
}

async fn say_alive(repository: &Repository, begun: &Begun) -> std::convert::Infallible {
    loop {
        match lane::is_running() {
            true => lane::sleep(SIGN_OF_LIFE).await,
            // A simulation has no time.
            false => std::future::pending().await,
        }
        // The next one may get through.
        let _ = begun.say(repository).await;
    }
}

async fn push_in(
    repository: &Repository,
    disk: &Arc<dyn BlockDevice>,
    options: &PushOptions,
    begun: &Begun,
    mut progress: impl FnMut(u64, u64),
) -> Result<Pushed> {
    let disk_bytes = disk.size_bytes();
    let changes = changes(repository, options, disk_bytes).await?;
    let base = changes.as_ref().map(|changes| changes.base.clone());
    let mut segments = Segments::default();
    let mut known = Known::new(options.most_known_chunks);
    let mut resumed_segments = 0;
    for killed in &begun.resumed {
        resumed_segments += known
            .load_killed(repository, &mut segments, killed.push)
            .await?;
    }
    // What a damaged manifest leads to is sent again.
    let (used, _) = repository.used_and_damaged().await?;
    let newest = match &base {
        Some(base) => Some(base.clone()),
        None => newest_of(repository, &options.tag).await?,
    };
    let first = newest.as_ref().map_or_else(Vec::new, pushes_of);
    let sound = Sound::look(repository).await?;
    let can_be_used = (&used, &sound);
    known
        .load(repository, &mut segments, can_be_used, &first)
        .await?;
    drop::<Used>(used);
    let mut pipeline = Pipeline {
        disk: disk.clone(),
        disk_bytes,
        level: options.level,
        reading: VecDeque::new(),
        compressing: VecDeque::new(),
        known,
        segments,
        writer: SegmentWriter::new(options.push),
        map: MapWriter::new(options.push, disk_bytes),
        uploads: Uploads::new(repository.objects().clone()),
        cost: Cost::default(),
        done_chunks: 0,
    };
    let disk = disk.clone();
    let mut plan = Plan::new(repository, disk, disk_bytes, newest, changes, sound);
    pipeline.run(&mut plan, &mut progress).await?;
    let mut manifest = Manifest::new(
        options.push,
        options.tag.clone(),
        begun.session.number,
        disk_bytes,
    );
    pipeline.finish(&mut manifest).await?;
    manifest.created_seconds = local_seconds();
    manifest.host.clone_from(&options.holder.host);
    manifest.base = base.map(|base| base.push);
    commit(repository, &manifest).await?;
    Ok(Pushed {
        manifest,
        resumed_segments,
    })
}

async fn newest_of(repository: &Repository, tag: &TagName) -> Result<Option<Manifest>> {
    let disk = DiskName {
        tag: tag.clone(),
        number: None,
    };
    repository.look_for(&disk).await
}

/// The pushes whose segments a disk has, the newest first.
fn pushes_of(manifest: &Manifest) -> Vec<PushId> {
    let mut pushes = vec![manifest.push];
    pushes.extend(manifest.segments.iter().map(|used| used.push));
    pushes
}

pub(crate) async fn changes(
    repository: &Repository,
    options: &PushOptions,
    disk_bytes: u64,
) -> Result<Option<Changes>> {
    let Some(since) = &options.since else {
        return Ok(None);
    };
    let base = repository.find(&since.base).await?;
    if since.push.is_some_and(|push| push != base.push) {
        let message = format!(
            "'{}' is not the disk that the changes are since",
            since.base
        );
        return Err(Error::new(ErrorKind::InvalidArgument, "push", message));
    }
    Ok(Some(Changes::new(base, &since.dirty, disk_bytes)))
}

/// Puts the manifest: from now on the disk is there.
async fn commit(repository: &Repository, manifest: &Manifest) -> Result<()> {
    let Manifest { tag, number, .. } = manifest;
    let content = Entry::Manifest(Box::new(manifest.clone())).encode()?;
    let key = names::entry(tag, *number);
    if repository.objects().put_new(&key, content).await? {
        return Ok(());
    }
    let message = match repository.entry(tag, *number).await? {
        // The answer to an earlier try was lost.
        Some(Entry::Manifest(there)) if there.push == manifest.push => return Ok(()),
        Some(Entry::Tombstone(there)) if there.kind == TombstoneKind::Void => {
            format!(
                "this push to '{tag}' was given up by somebody: {}",
                there.why
            )
        }
        _ => format!("another push to '{tag}' has come first"),
    };
    let message = format!("{message}; nothing of the repository has changed, push again");
    Err(Error::new(ErrorKind::Changed, "push", message).target(repository.name()))
}

/// A chunk that was read: its bytes, as far as the disk goes; `None` for zeroes.
type ReadChunk = Option<(Hash, Vec<u8>)>;

/// What comes next in the map.
enum Reading {
    Zeroes(u32),
    Kept {
        piece: std::rc::Rc<Piece>,
        first: u32,
        chunks: u32,
    },
    Read(JoinHandle<Result<Vec<ReadChunk>>>),
    EndOfPiece {
        base: Option<PieceRef>,
    },
}

/// Chunks that are compressed: their hashes, and what they become.
type Compressing = (Vec<Hash>, JoinHandle<Result<Vec<Vec<u8>>>>);

struct Pipeline {
    disk: Arc<dyn BlockDevice>,
    disk_bytes: u64,
    level: i32,
    reading: VecDeque<Reading>,
    compressing: VecDeque<Compressing>,
    known: Known,
    segments: Segments,
    writer: SegmentWriter,
    map: MapWriter,
    uploads: Uploads,
    cost: Cost,
    done_chunks: u64,
}

impl Pipeline {
    async fn run(
        &mut self,
        plan: &mut Plan<'_>,
        progress: &mut impl FnMut(u64, u64),
    ) -> Result<()> {
        while let Some(span) = plan.next().await? {
            self.begin(span);
            if let Some(base) = plan.ends_piece() {
                self.reading.push_back(Reading::EndOfPiece { base });
            }
            while self.reading.len() > AT_ONCE {
                self.take_next().await?;
                progress(self.done_bytes(), self.disk_bytes);
            }
        }
        while !self.reading.is_empty() {
            self.take_next().await?;
            progress(self.done_bytes(), self.disk_bytes);
        }
        while !self.compressing.is_empty() {
            self.store_next().await?;
        }
        Ok(())
    }

    fn done_bytes(&self) -> u64 {
        (self.done_chunks * CHUNK_BYTES).min(self.disk_bytes)
    }

    fn begin(&mut self, span: Span) {
        self.reading.push_back(match span {
            Span::Zeroes(chunks) => Reading::Zeroes(chunks),
            Span::Kept {
                piece,
                first,
                chunks,
            } => Reading::Kept {
                piece,
                first,
                chunks,
            },
            Span::Read { chunk, chunks } => {
                let start = chunk * CHUNK_BYTES;
                let end = (start + u64::from(chunks) * CHUNK_BYTES).min(self.disk_bytes);
                self.cost.read_bytes += end - start;
                Reading::Read(spawn(read(self.disk.clone(), start..end)))
            }
        });
    }

    /// The next part of the map.
    async fn take_next(&mut self) -> Result<()> {
        let chunks = match self.reading.pop_front() {
            None => 0,
            Some(Reading::Zeroes(chunks)) => {
                self.map.add(chunks, None);
                chunks
            }
            Some(Reading::Kept {
                piece,
                first,
                chunks,
            }) => {
                self.keep(&piece, first, chunks);
                chunks
            }
            Some(Reading::Read(read)) => {
                let read = read.await?;
                let chunks = read.len() as u32;
                self.look_for(read).await?;
                chunks
            }
            Some(Reading::EndOfPiece { base }) => {
                self.map.end_piece(base);
                self.map.settle(&self.segments, &mut self.uploads).await?;
                0
            }
        };
        self.done_chunks += u64::from(chunks);
        Ok(())
    }

    fn keep(&mut self, piece: &Piece, first: u32, chunks: u32) {
        let (mut next, end) = (first, first + chunks);
        while let Some(run) = piece.find(next).filter(|_| next < end) {
            let chunks = run.chunks.min(end - next);
            let place = match run.source {
                Source::Zeroes => None,
                Source::Segment { segment, first } => {
                    let segment = &piece.segments()[segment as usize];
                    Some(Place {
                        segment: self.segments.add(segment),
                        chunk: first,
                    })
                }
            };
            self.map.add(chunks, place);
            next += chunks;
        }
    }

    /// Looks for chunks among what is known; the others get places.
    async fn look_for(&mut self, read: Vec<ReadChunk>) -> Result<()> {
        let mut new = Vec::new();
        for chunk in read {
            let Some((hash, content)) = chunk else {
                self.map.add(1, None);
                continue;
            };
            let place = match self.known.find(&hash) {
                Some(place) => place,
                None => {
                    let place = self.writer.reserve(&mut self.segments);
                    self.known.add(hash, place);
                    new.push((hash, content));
                    place
                }
            };
            self.map.add(1, Some(place));
        }
        if new.is_empty() {
            return Ok(());
        }
        self.cost.new_bytes += new.len() as u64 * CHUNK_BYTES;
        let (hashes, contents) = new.into_iter().unzip::<_, _, Vec<_>, Vec<_>>();
        let level = self.level;
        let compressed = lane::compute(move || {
            let contents = contents.into_iter();
            contents
                .map(|content| segment::compress(&content, level))
                .collect()
        });
        self.compressing.push_back((hashes, spawn(compressed)));
        while self.compressing.len() > AT_ONCE {
            self.store_next().await?;
        }
        Ok(())
    }

    async fn store_next(&mut self) -> Result<()> {
        let Some((hashes, compressed)) = self.compressing.pop_front() else {
            return Ok(());
        };
        for (hash, stored) in hashes.into_iter().zip(compressed.await?) {
            let (segments, uploads) = (&mut self.segments, &mut self.uploads);
            self.writer.add(hash, &stored, segments, uploads).await?;
        }
        Ok(())
    }

    async fn finish(mut self, manifest: &mut Manifest) -> Result<()> {
        self.writer
            .finish(&mut self.segments, &mut self.uploads)
            .await?;
        self.map
            .finish(&self.segments, &mut self.uploads, manifest)
            .await?;
        self.cost.sent_bytes = self.uploads.finish().await?;
        manifest.cost = self.cost;
        Ok(())
    }
}

/// Reads chunks and hashes them.
pub(crate) async fn read(disk: Arc<dyn BlockDevice>, range: Range<u64>) -> Result<Vec<ReadChunk>> {
    let read = Buffer::for_read((range.end - range.start) as usize);
    let read = disk.read(range.start, read).await?;
    let hashed = lane::compute(move || {
        let chunks = read.chunks(CHUNK_BYTES as usize);
        chunks.map(hash_chunk).collect::<Vec<_>>()
    });
    Ok(hashed.await)
}

fn hash_chunk(bytes: &[u8]) -> ReadChunk {
    if buffer::is_zero(bytes) {
        return None;
    }
    let mut chunk = bytes.to_vec();
    chunk.resize(CHUNK_BYTES as usize, 0);
    Some((*blake3::hash(&chunk).as_bytes(), chunk))
}
