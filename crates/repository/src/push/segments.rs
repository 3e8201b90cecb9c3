//! New chunks become segments, in the order in which places in them were given away.

use vellum_io::Result;

use super::upload::Uploads;
use crate::codec::hash_list::{self, MOST_SEGMENTS};
use crate::codec::piece::SegmentRef;
use crate::codec::segment::{Footer, SegmentIndex, StoredChunk};
use crate::codec::{Hash, PushId, SEGMENT_CHUNKS};
use crate::known::{Place, Segments};
use crate::names;

/// The segment that is being filled, and what is to be told of those before it.
#[derive(Debug)]
pub(crate) struct SegmentWriter {
    push: PushId,
    /// Chunks that have got a place.
    reserved: u64,
    /// The number of the segment that is being filled.
    number: u32,
    data: Vec<u8>,
    chunks: Vec<StoredChunk>,
    listed: Vec<(u32, Vec<u8>)>,
    lists: u32,
}

impl SegmentWriter {
    pub(crate) fn new(push: PushId) -> Self {
        SegmentWriter {
            push,
            reserved: 0,
            number: 0,
            data: Vec::new(),
            chunks: Vec::new(),
            listed: Vec::new(),
            lists: 0,
        }
    }

    /// A place for the next chunk.
    pub(crate) fn reserve(&mut self, segments: &mut Segments) -> Place {
        let per_segment = u64::from(SEGMENT_CHUNKS);
        let number = (self.reserved / per_segment) as u32;
        let chunk = (self.reserved % per_segment) as u32;
        self.reserved += 1;
        let segment = segments.reserve(self.push, number);
        Place { segment, chunk }
    }

    /// The chunk of the next place that was given away.
    pub(crate) async fn add(
        &mut self,
        hash: Hash,
        stored: &[u8],
        segments: &mut Segments,
        uploads: &mut Uploads,
    ) -> Result<()> {
        let stored_bytes = stored.len() as u32;
        self.data.extend_from_slice(stored);
        self.chunks.push(StoredChunk { hash, stored_bytes });
        match self.chunks.len() as u32 == SEGMENT_CHUNKS {
            true => self.seal(segments, uploads).await,
            false => Ok(()),
        }
    }

    async fn seal(&mut self, segments: &mut Segments, uploads: &mut Uploads) -> Result<()> {
        let index = SegmentIndex::new(std::mem::take(&mut self.chunks))?;
        let encoded = index.encode();
        let footer = Footer::of(&index, *blake3::hash(&encoded).as_bytes());
        let mut content = std::mem::take(&mut self.data);
        content.extend_from_slice(&encoded);
        content.extend(footer.encode());
        let number = self.number;
        let segment = SegmentRef {
            push: self.push,
            number,
            footer,
        };
        segments.add(&segment);
        uploads
            .send(names::part(names::SEGMENTS, self.push, number), content)
            .await?;
        self.number += 1;
        self.listed.push((number, encoded));
        match self.listed.len() == MOST_SEGMENTS {
            true => self.list(uploads).await,
            false => Ok(()),
        }
    }

    async fn list(&mut self, uploads: &mut Uploads) -> Result<()> {
        let list = hash_list::encode(&std::mem::take(&mut self.listed));
        let key = names::part(names::INDEXES, self.push, self.lists);
        self.lists += 1;
        uploads.send(key, list).await
    }

    /// The last chunk has come.
    pub(crate) async fn finish(
        &mut self,
        segments: &mut Segments,
        uploads: &mut Uploads,
    ) -> Result<()> {
        if !self.chunks.is_empty() {
            self.seal(segments, uploads).await?;
        }
        match self.listed.is_empty() {
            true => Ok(()),
            false => self.list(uploads).await,
        }
    }
}
