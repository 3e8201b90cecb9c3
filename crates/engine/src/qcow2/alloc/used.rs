//! [`UsedCount`]: how many clusters are in use, counted while others allocate and give back.
//!
//! Counting looks at every refcount block, which takes as long as the image is large. So whatever changes
//! meanwhile is noted, slice by slice, and looked at again: as often as needed beside the others, and the last time,
//! when little is left, while they are held up.

use vellum_format::types::HostCluster;
use vellum_io::Result;

use super::allocator::Allocator;
use super::changed_slices::Counting;
use super::refcounts::Refcounts;

/// Counting goes on beside the others while more slices than this have changed,
const FEW_SLICES: usize = 16;
/// and so many times at most: a busy guest changes many each time.
const MOST_ROUNDS: usize = 4;

/// What was counted of a slice.
#[derive(Clone, Copy, Default)]
struct Counted {
    /// Where the slice lay; `None` where there was none.
    key: Option<u64>,
    used: u64,
}

/// See the module's head.
pub(crate) struct UsedCount<'a> {
    refcounts: &'a Refcounts,
    slices: Vec<Counted>,
    counting: Counting<'a>,
}

impl<'a> UsedCount<'a> {
    /// Counts all that is in use, and little of what changed meanwhile is left to be looked at again.
    ///
    /// # Errors
    /// When the refcounts cannot be read.
    async fn begin(refcounts: &'a Refcounts) -> Result<Self> {
        let mut count = UsedCount {
            refcounts,
            slices: Vec::new(),
            counting: Counting::begin(&refcounts.changed_slices).await,
        };
        for _ in 0..MOST_ROUNDS {
            if count.look_again().await? <= FEW_SLICES {
                break;
            }
        }
        Ok(count)
    }

    /// Looks at the slices that have changed, or were never looked at. How many these were.
    async fn look_again(&mut self) -> Result<usize> {
        let refcounts = self.refcounts;
        let changed = self.counting.take();
        let per_slice = refcounts.entries_per_slice();
        let blocks = refcounts.table().entries.used().len() as u64;
        let clusters = blocks * refcounts.geometry.refcount_block_entries();
        let slices = (clusters / per_slice) as usize;
        self.slices.resize(slices, Counted::default());
        let mut looked_at = 0;
        for (index, counted) in self.slices.iter_mut().enumerate() {
            let first = index as u64 * per_slice;
            let place = refcounts.place(HostCluster(first))?;
            let key = place.map(|place| place.key);
            if key == counted.key && key.is_none_or(|key| !changed.contains(&key)) {
                continue;
            }
            let used = refcounts.count_used(first..first + per_slice).await?;
            *counted = Counted { key, used };
            looked_at += 1;
        }
        Ok(looked_at)
    }

    fn used(&self) -> u64 {
        self.slices.iter().map(|counted| counted.used).sum()
    }
}

impl Allocator {
    /// How many clusters are counted as used, beside others who change that.
    ///
    /// # Errors
    /// When the refcounts cannot be read.
    pub(crate) async fn count_used(&self) -> Result<UsedCount<'_>> {
        UsedCount::begin(&self.refcounts).await
    }

    /// How many clusters are counted as used of those that somebody has asked for. For whoever holds back
    /// all that allocate or give up, and has counted before.
    ///
    /// # Errors
    /// When the refcounts cannot be read, or a count is zero already.
    pub(crate) async fn settled_used_clusters(&self, mut count: UsedCount<'_>) -> Result<u64> {
        // What counts ahead in the background comes to its end.
        let _one = self.growing.lock().await;
        self.empty_reserve().await?;
        count.look_again().await?;
        // What goes on in the background may have filled it again.
        let state = self.state();
        let deferred = state.deferred_decrements.iter();
        let deferred: u64 = deferred.map(|run| run.end - run.start).sum();
        Ok(count
            .used()
            .saturating_sub(state.reserve.clusters() + deferred))
    }

    /// How many clusters are counted as used.
    ///
    /// # Errors
    /// When the refcounts cannot be read.
    pub(crate) async fn used_clusters(&self) -> Result<u64> {
        Ok(self.count_used().await?.used())
    }
}
