//! Reads.

use super::core::Core;
use super::plan::Spot;
use crate::inflations::Content;
use crate::layout::{Layout, Place, Run};

use std::sync::Arc;
use vellum::{Buffer, Buffers, Io, Result};
use vellum_io::finish_all;
use vellum_storage::Event;

/// Runs of one request that are read side by side.
const RUNS_AT_ONCE: usize = 32;

/// Blocks that one lookup goes over at most.
const MOST_BLOCKS: u64 = 512;

/// One run: the storage's own request is what is waited for.
pub(super) fn read<L: Layout>(
    core: &Arc<Core<L>>,
    offset_bytes: u64,
    buffer: Buffer,
) -> Io<Buffer> {
    let len_bytes = buffer.len() as u64;
    if let Err(error) = core.check_range("read", offset_bytes, len_bytes) {
        return Io::ready(Err(error));
    }
    if len_bytes == 0 {
        return Io::ready(Ok(buffer));
    }
    if core.listener.is_none()
        && let Ok(Some(run)) = core.layout.lookup(offset_bytes, len_bytes)
        && run.len_bytes == len_bytes
        && let Some(spot) = Spot::of(run.place, offset_bytes)
    {
        return core.read_data(spot, buffer);
    }
    let core = core.clone();
    Io::start(async move { core.read(offset_bytes, buffer).await })
}

impl<L: Layout> Core<L> {
    fn read_data(&self, spot: Spot, buffer: Buffer) -> Io<Buffer> {
        let read = self.request(spot, |file, at| file.read(at, Buffers::from_buf([buffer])));
        read.into_single()
    }

    /// The run at an offset, whose table is loaded if need be.
    pub(super) async fn run_at(&self, offset_bytes: u64, len_bytes: u64) -> Result<Run> {
        // Who goes on block by block asks again and again: a lookup must not look at all that is left.
        let most_bytes = self.layout.block_bytes().saturating_mul(MOST_BLOCKS);
        let len_bytes = len_bytes.min(most_bytes);
        loop {
            if let Some(run) = self.layout.lookup(offset_bytes, len_bytes)? {
                return Ok(Run {
                    len_bytes: run.len_bytes.clamp(1, len_bytes.max(1)),
                    ..run
                });
            }
            self.layout.load(offset_bytes).await?;
        }
    }

    /// Reads runs side by side. What is read may be in the middle of a change of its own block by
    /// another request; then it reads as before it or after it.
    pub(super) async fn read(&self, offset_bytes: u64, mut buffer: Buffer) -> Result<Buffer> {
        let mut at = offset_bytes;
        let mut pieces = Vec::new();
        while !buffer.is_empty() {
            let mut run = self.run_at(at, buffer.len() as u64).await?;
            if run.place == Place::Compressed {
                run.len_bytes = run.len_bytes.min(self.block_at(at).end - at);
            }
            let piece = buffer.split_to(run.len_bytes as usize);
            pieces.push(self.read_run(at, run.place, piece));
            at += run.len_bytes;
        }
        Ok(Buffer::join_all(finish_all(RUNS_AT_ONCE, pieces).await?))
    }

    async fn read_run(
        &self,
        offset_bytes: u64,
        place: Place,
        mut buffer: Buffer,
    ) -> Result<Buffer> {
        match place {
            Place::Zero => {
                buffer.fill(0);
                Ok(buffer)
            }
            Place::Absent => self.read_backing(offset_bytes, buffer).await,
            Place::Data {
                file,
                offset_bytes: host_bytes,
            } => {
                self.tell(Event::ReadAio).await;
                let spot = Spot {
                    file,
                    host_bytes,
                    guest_bytes: offset_bytes,
                };
                self.read_data(spot, buffer).await
            }
            Place::Compressed => {
                let block = self.block_at(offset_bytes);
                let content = match self.inflate(block.start).await {
                    Ok(content) => content,
                    Err(error) => {
                        // Unless the block has got another place since it was looked up.
                        let run = self.run_at(offset_bytes, buffer.len() as u64).await?;
                        if run.place == Place::Compressed {
                            return Err(error);
                        }
                        return Box::pin(self.read(offset_bytes, buffer)).await;
                    }
                };
                let from = (offset_bytes - block.start) as usize;
                buffer.fill(0);
                let there = content.get(from..).unwrap_or_default();
                let len = there.len().min(buffer.len());
                buffer[..len].copy_from_slice(&there[..len]);
                Ok(buffer)
            }
        }
    }

    /// The content of a block, inflated once for all who ask for it meanwhile.
    async fn inflate(&self, block_bytes: u64) -> Result<Content> {
        let generation = match self.inflated.get(block_bytes) {
            Ok(content) => return Ok(content),
            Err(generation) => generation,
        };
        // Under another generation the block may have another place.
        let piece = (generation, block_bytes);
        let inflate = async {
            // Whoever inflated it may have ended before this one has joined.
            if let Ok(content) = self.inflated.get(block_bytes) {
                return Ok(content);
            }
            let content = Arc::new(self.layout.inflate(block_bytes).await?);
            self.inflated.put(generation, block_bytes, &content);
            Ok(content)
        };
        self.inflations.join(piece, inflate).await
    }

    async fn read_backing(&self, offset_bytes: u64, mut buffer: Buffer) -> Result<Buffer> {
        let Some(backing) = &self.backing else {
            buffer.fill(0);
            return Ok(buffer);
        };
        let there = backing.size_bytes().saturating_sub(offset_bytes);
        let there = there.min(buffer.len() as u64) as usize;
        let inside = buffer.split_to(there);
        buffer.fill(0);
        if inside.is_empty() {
            return Ok(buffer);
        }
        self.tell(Event::ReadBackingAio).await;
        let inside = backing.read(offset_bytes, inside).await?;
        Ok(Buffer::join_all([inside, buffer]))
    }
}
