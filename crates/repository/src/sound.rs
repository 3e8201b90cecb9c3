//! Which segments can be led to: those that are there, as long as they were made, and not known to be
//! damaged. What is in others a push sends again, so that pushing a disk again makes it whole.
//!
//! Whether a segment is there, and its length, a list tells. What it holds only those see who read all of
//! it: [`crate::verify()`] leaves a mark for pushes, an object beside the damaged one, until it finds the
//! segment whole. A mark changes nothing for disks that lead there already.

use std::collections::{HashMap, HashSet};

use vellum_io::Result;

use crate::codec::PushId;
use crate::codec::piece::SegmentRef;
use crate::names::{self, DAMAGED, SEGMENTS};
use crate::repository::Repository;

/// A segment's push, and its number there.
type SegmentKey = (PushId, u32);

/// The segments that are there and not known to be damaged, with their lengths.
#[derive(Debug, Default)]
pub(crate) struct Sound(HashMap<SegmentKey, u64>);

impl Sound {
    /// Looks at all segments. What a manifest leads to that was read before is among them, if it is
    /// there at all.
    ///
    /// # Errors
    /// What the store says to lists.
    pub(crate) async fn look(repository: &Repository) -> Result<Self> {
        let damaged = marked(repository).await?;
        let listed = repository.objects().list(SEGMENTS).await?;
        let lengths = listed.into_iter().filter_map(|object| {
            let segment = names::parse_part(SEGMENTS, &object.key)?;
            (!damaged.contains(&segment)).then_some((segment, object.len_bytes))
        });
        Ok(Sound(lengths.collect()))
    }

    /// Whether a segment can be led to.
    pub(crate) fn has(&self, segment: &SegmentRef) -> bool {
        let len_bytes = self.0.get(&(segment.push, segment.number));
        len_bytes == Some(&segment.footer.segment_bytes())
    }
}

/// The segments that were found to be damaged.
///
/// # Errors
/// What the store says to lists.
pub(crate) async fn marked(repository: &Repository) -> Result<HashSet<SegmentKey>> {
    let listed = repository.objects().list(DAMAGED).await?;
    let segments = listed
        .iter()
        .filter_map(|object| names::parse_part(DAMAGED, &object.key));
    Ok(segments.collect())
}

/// Tells later pushes that a segment is damaged.
///
/// # Errors
/// What the store says: who verifies a repository need not be allowed to write to it.
pub(crate) async fn mark(repository: &Repository, (push, number): SegmentKey) -> Result<()> {
    let key = names::part(DAMAGED, push, number);
    // The name says all; some stores and shares have trouble with empty objects.
    repository.objects().put(&key, b"damaged\n".to_vec()).await
}

/// The opposite of [`mark`].
///
/// # Errors
/// As there.
pub(crate) async fn unmark(repository: &Repository, (push, number): SegmentKey) -> Result<()> {
    let key = names::part(DAMAGED, push, number);
    repository.objects().remove(&key).await
}

/// Removes the marks of segments that are not there any more.
///
/// # Errors
/// What the store says.
pub(crate) async fn forget_removed(repository: &Repository) -> Result<()> {
    // In this order, so that no mark goes of a segment that is made in between.
    let mut marked = marked(repository).await?;
    if marked.is_empty() {
        return Ok(());
    }
    for object in repository.objects().list(SEGMENTS).await? {
        if let Some(segment) = names::parse_part(SEGMENTS, &object.key) {
            marked.remove(&segment);
        }
    }
    let keys = marked.into_iter();
    let keys = keys.map(|(push, number)| names::part(DAMAGED, push, number));
    repository.remove_all(keys.collect()).await
}
