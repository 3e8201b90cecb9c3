//! Which chunks a repository holds, and where: so that a push sends none twice.
//!
//! Memory: about 80 bytes a chunk, for as many chunks as the push allows.

use std::collections::HashMap;

use futures_util::stream::{self, StreamExt};
use vellum_io::Result;

use crate::codec::hash_list::{self, Listed, MOST_LIST_BYTES};
use crate::codec::piece::SegmentRef;
use crate::codec::segment::{FOOTER_BYTES, Footer, SegmentIndex};
use crate::codec::{Hash, PushId};
use crate::names;
use crate::repository::{REQUESTS_AT_ONCE, Repository, Used};
use crate::sound::Sound;

/// The number of the first list that another push makes for one that was killed: beyond all of its own.
const FIRST_LATER_LIST: u32 = 90_000_000;

/// A segment among all that a push knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct SegmentNumber(pub(crate) u32);

/// Where a chunk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) segment: SegmentNumber,
    pub(crate) chunk: u32,
}

/// All segments that a push knows, by a number of its own.
#[derive(Debug, Default)]
pub(crate) struct Segments {
    numbers: HashMap<(PushId, u32), SegmentNumber>,
    /// `None`: it is not complete yet.
    refs: Vec<Option<SegmentRef>>,
}

impl Segments {
    /// The number of a segment.
    pub(crate) fn add(&mut self, segment: &SegmentRef) -> SegmentNumber {
        let number = self.reserve(segment.push, segment.number);
        self.complete(number, *segment);
        number
    }

    /// The number of a segment that is going to be.
    pub(crate) fn reserve(&mut self, push: PushId, number: u32) -> SegmentNumber {
        let next = SegmentNumber(self.refs.len() as u32);
        let segment = *self.numbers.entry((push, number)).or_insert(next);
        if segment == next {
            self.refs.push(None);
        }
        segment
    }

    pub(crate) fn complete(&mut self, number: SegmentNumber, segment: SegmentRef) {
        if let Some(place) = self.refs.get_mut(number.0 as usize) {
            *place = Some(segment);
        }
    }

    pub(crate) fn get(&self, number: SegmentNumber) -> Option<SegmentRef> {
        self.refs.get(number.0 as usize).copied().flatten()
    }
}

/// The chunks that are known.
#[derive(Debug)]
pub(crate) struct Known {
    chunks: HashMap<Hash, Place>,
    most_chunks: usize,
}

impl Known {
    pub(crate) fn new(most_chunks: usize) -> Self {
        Known {
            chunks: HashMap::new(),
            most_chunks,
        }
    }

    pub(crate) fn find(&self, hash: &Hash) -> Option<Place> {
        self.chunks.get(hash).copied()
    }

    /// Notes where a chunk is, if there is room.
    pub(crate) fn add(&mut self, hash: Hash, place: Place) {
        if !self.is_full() {
            self.chunks.entry(hash).or_insert(place);
        }
    }

    fn is_full(&self) -> bool {
        self.chunks.len() >= self.most_chunks
    }

    fn add_all(&mut self, segment: SegmentNumber, index: &SegmentIndex) {
        for (chunk, stored) in (0..).zip(index.chunks()) {
            self.add(stored.hash, Place { segment, chunk });
        }
    }

    /// Looks into all segments that manifests lead to and that are sound, those of `first` before others.
    pub(crate) async fn load(
        &mut self,
        repository: &Repository,
        segments: &mut Segments,
        (used, sound): (&Used, &Sound),
        first: &[PushId],
    ) -> Result<()> {
        let mut keys = Vec::new();
        for object in repository.objects().list(names::INDEXES).await? {
            if let Some((push, _)) = names::parse_part(names::INDEXES, &object.key) {
                let is_other = !first.contains(&push);
                let wanted = used.segments.contains_key(&push);
                keys.extend(wanted.then_some((is_other, push, object.key)));
            }
        }
        keys.sort();
        let read = |(_, push, key): (bool, PushId, String)| async move {
            let list = repository.objects().get(&key, MOST_LIST_BYTES).await;
            (push, list)
        };
        let mut lists = stream::iter(keys).map(read).buffered(REQUESTS_AT_ONCE);
        while let Some((push, list)) = lists.next().await {
            if self.is_full() {
                break;
            }
            // What is in a damaged one is sent again; `verify` tells of it.
            for listed in hash_list::decode(&list?).unwrap_or_default() {
                let segment = listed.segment(push);
                // One that no manifest leads to may be removed at any time.
                if used.has_segment(push, listed.number) && sound.has(&segment) {
                    let number = segments.add(&segment);
                    self.add_all(number, &listed.index);
                }
            }
        }
        Ok(())
    }

    /// Looks into the segments of a push that was killed, and lists them, which it may not have come to;
    /// says how many there are.
    pub(crate) async fn load_killed(
        &mut self,
        repository: &Repository,
        segments: &mut Segments,
        push: PushId,
    ) -> Result<usize> {
        let objects = repository.objects();
        let listed = objects.list(&names::parts(names::SEGMENTS, push)).await?;
        let mut found = Vec::new();
        for object in listed {
            let Some((_, number)) = names::parse_part(names::SEGMENTS, &object.key) else {
                continue;
            };
            let Some(footer_start) = object.len_bytes.checked_sub(FOOTER_BYTES) else {
                continue;
            };
            let footer = objects
                .get_range(&object.key, footer_start..object.len_bytes)
                .await?;
            let Ok(footer) = Footer::decode(&footer) else {
                continue;
            };
            if footer.segment_bytes() != object.len_bytes {
                continue;
            }
            let index = objects.get_range(&object.key, footer.index_range()).await?;
            let whole = *blake3::hash(&index).as_bytes() == footer.index_hash;
            let Ok(decoded) = SegmentIndex::decode(&index, footer.chunks) else {
                continue;
            };
            if whole {
                let listed = Listed {
                    number,
                    index: decoded,
                    footer,
                };
                let segment = segments.add(&listed.segment(push));
                self.add_all(segment, &listed.index);
                found.push((number, index));
            }
        }
        for (list, part) in (FIRST_LATER_LIST..).zip(found.chunks(hash_list::MOST_SEGMENTS)) {
            let key = names::part(names::INDEXES, push, list);
            objects.put(&key, hash_list::encode(part)).await?;
        }
        Ok(found.len())
    }
}
