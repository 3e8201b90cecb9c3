//! [`DmgLayout`]: where the chunks of a UDIF image lie.

use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{Error, ErrorKind, Result, Storage};
use vellum_io::lane::compute;

use super::chunk::{Chunk, Kind};
use super::decompress::{MOST_DICTIONARY_KB, decompress};
use crate::fields::read_at;
use crate::inflations::{Content, Inflations};
use crate::two_level::corrupt;
use crate::{Layout, NewBlock, Place, Run};

/// What the device takes for a block: what most images have as a chunk.
const BLOCK_BYTES: u64 = 256 << 10;

/// No compression makes of a chunk more than twice as much and this. So whoever has very small chunks with very much
/// stored for each does not keep readers busy.
const SPARE_BYTES: u64 = 64 << 10;

/// What chunks that are being inflated may take in memory, in bytes. One may always be.
const INFLATED_BYTES: u64 = 256 << 20;

/// The most chunks that are inflated at a time.
const MOST_INFLATIONS: u64 = 16;

/// Where the chunks of an image lie.
#[derive(Debug)]
pub struct DmgLayout {
    files: [Arc<dyn Storage>; 1],
    size_bytes: u64,
    /// In their order on the disk.
    chunks: Vec<Chunk>,
    /// By their numbers.
    inflations: Inflations<usize>,
    /// Whether chunks are so large that there is room for one.
    are_large: bool,
    /// The chunk that was inflated last, by its number.
    last: Mutex<Option<(usize, Content)>>,
}

/// How many chunks there is room for to be inflated at a time.
fn most_inflations(chunks: &[Chunk]) -> usize {
    let needed = chunks.iter().map(|chunk| match chunk.kind {
        Kind::Zlib | Kind::Bzip2 | Kind::Lzfse => 3 * chunk.len_bytes + SPARE_BYTES,
        Kind::Xz => 3 * chunk.len_bytes + SPARE_BYTES + (u64::from(MOST_DICTIONARY_KB) << 10),
        Kind::Zero | Kind::Raw | Kind::Unknown(_) => 0,
    });
    let largest = needed.max().unwrap_or(0).max(1);
    (INFLATED_BYTES / largest).clamp(1, MOST_INFLATIONS) as usize
}

impl DmgLayout {
    /// Chunks are in their order on the disk.
    pub(super) fn new(file: Arc<dyn Storage>, size_bytes: u64, chunks: Vec<Chunk>) -> DmgLayout {
        let most = most_inflations(&chunks);
        DmgLayout {
            files: [file],
            size_bytes,
            chunks,
            inflations: Inflations::new(most),
            are_large: most == 1,
            last: Mutex::new(None),
        }
    }

    /// The chunk at an offset of the disk: its number, and where its part of the disk ends.
    fn chunk_at(&self, offset_bytes: u64) -> Result<(usize, &Chunk, u64)> {
        let behind = self
            .chunks
            .partition_point(|chunk| chunk.start_bytes <= offset_bytes);
        let next = self.chunks.get(behind).map(|next| next.start_bytes);
        let number = behind.wrapping_sub(1);
        let chunk = self.chunks.get(number).filter(|chunk| {
            // It was seen that both fit in one number.
            offset_bytes < chunk.start_bytes + chunk.len_bytes
        });
        let message = "the image has nothing for this part of the disk";
        let chunk = chunk.ok_or_else(|| corrupt("read", message).at(offset_bytes))?;
        let end = chunk.start_bytes + chunk.len_bytes;
        Ok((number, chunk, next.map_or(end, |next| next.min(end))))
    }

    /// The content of a chunk, if it is the one that is kept.
    fn kept(&self, number: usize) -> Option<Content> {
        let last = self.last.lock();
        let (kept, content) = last.as_ref()?;
        (*kept == number).then(|| content.clone())
    }

    async fn inflate_chunk(&self, number: usize, chunk: &Chunk) -> Result<Content> {
        // Whoever inflated it may have ended before this one has joined.
        if let Some(content) = self.kept(number) {
            return Ok(content);
        }
        let message = format!("chunk {number} does not decompress");
        if chunk.stored_bytes > 2 * chunk.len_bytes + SPARE_BYTES {
            return Err(corrupt("read", message));
        }
        if self.are_large {
            // Not both in memory.
            *self.last.lock() = None;
        }
        let [file] = &self.files;
        let stored = read_at(&**file, chunk.offset_bytes, chunk.stored_bytes as usize).await?;
        let (kind, len) = (chunk.kind, chunk.len_bytes as usize);
        let content = compute(move || decompress(kind, &stored, len)).await;
        let content = Arc::new(content.ok_or_else(|| corrupt("read", message))?);
        *self.last.lock() = Some((number, content.clone()));
        Ok(content)
    }

    /// Puts bytes of a compressed chunk from one of its own on into `into`.
    async fn copy_chunk(
        &self,
        number: usize,
        chunk: &Chunk,
        from_bytes: u64,
        into: &mut [u8],
    ) -> Result<()> {
        let content = match self.kept(number) {
            Some(content) => content,
            None => {
                let inflate = self.inflate_chunk(number, chunk);
                self.inflations.join(number, inflate).await?
            }
        };
        let from = from_bytes as usize;
        let end = from.checked_add(into.len());
        if let Some(content) = end.and_then(|end| content.get(from..end)) {
            into.copy_from_slice(content);
        }
        Ok(())
    }
}

impl Layout for DmgLayout {
    type Changes = ();

    fn format(&self) -> &'static str {
        "dmg"
    }

    fn files(&self) -> &[Arc<dyn Storage>] {
        &self.files
    }

    fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    fn block_bytes(&self) -> u64 {
        BLOCK_BYTES
    }

    fn cluster_size_bytes(&self) -> Option<u64> {
        None
    }

    fn has_backing_files(&self) -> bool {
        false
    }

    fn lookup(&self, offset_bytes: u64, len_bytes: u64) -> Result<Option<Run>> {
        let (_, chunk, end_bytes) = self.chunk_at(offset_bytes)?;
        let len_bytes = len_bytes.min(end_bytes - offset_bytes);
        let from_bytes = offset_bytes - chunk.start_bytes;
        let run = |len_bytes, place| Ok(Some(Run { len_bytes, place }));
        match chunk.kind {
            Kind::Zero => run(len_bytes, Place::Zero),
            Kind::Raw if from_bytes < chunk.stored_bytes => {
                let place = Place::Data {
                    file: 0,
                    offset_bytes: chunk.offset_bytes + from_bytes,
                };
                run(len_bytes.min(chunk.stored_bytes - from_bytes), place)
            }
            Kind::Raw => run(len_bytes, Place::Zero),
            Kind::Unknown(code) => {
                let message = format!("a chunk is of unknown type {code:x}");
                Err(Error::new(ErrorKind::Unsupported, "read", message).at(offset_bytes))
            }
            _ => run(len_bytes, Place::Compressed),
        }
    }

    async fn inflate(&self, offset_bytes: u64) -> Result<Vec<u8>> {
        let end_bytes = self
            .size_bytes
            .min(offset_bytes.saturating_add(BLOCK_BYTES));
        let mut block = vec![0; end_bytes.saturating_sub(offset_bytes) as usize];
        let mut rest = &mut block[..];
        let mut at = offset_bytes;
        while !rest.is_empty() {
            // Of chunks that cannot be read zeroes are put here: nobody gets them.
            let (number, chunk, end) = match self.chunk_at(at) {
                Ok(found) => found,
                Err(_) => break,
            };
            let len = (end - at).min(rest.len() as u64) as usize;
            let Some((piece, behind)) = rest.split_at_mut_checked(len) else {
                break;
            };
            if matches!(
                chunk.kind,
                Kind::Zlib | Kind::Bzip2 | Kind::Lzfse | Kind::Xz
            ) {
                let copied = self.copy_chunk(number, chunk, at - chunk.start_bytes, piece);
                let [file] = &self.files;
                copied
                    .await
                    .map_err(|error| error.target(file.name()).at(offset_bytes))?;
            }
            at += len as u64;
            rest = behind;
        }
        Ok(block)
    }

    async fn allocate(&self, _offset_bytes: u64) -> Result<NewBlock> {
        let message = "images of this format are read only";
        Err(Error::new(ErrorKind::ReadOnly, "write", message))
    }

    fn link(&self, _offset_bytes: u64, _block: NewBlock) -> Result<()> {
        Ok(())
    }

    fn take_changes(&self) -> Option<()> {
        None
    }

    async fn write_changes(&self, _changes: &()) -> Result<()> {
        Ok(())
    }
}
