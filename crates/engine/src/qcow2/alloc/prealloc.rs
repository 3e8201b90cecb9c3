//! What is done ahead of the writes, so that they need not wait for it.
//!
//! While a program keeps allocating, counts are raised and the file is made longer
//! in growing steps, and the next refcount block is made before the last one is
//! full. All of it happens in a task of its own. A crash leaves clusters counted
//! as used that nobody uses and a file that is too long, both harmless; [`Allocator::release_reserve`]
//! takes both back, and refcount blocks that count nothing yet. A program that allocates little leaves nothing behind, however
//! it ends.
//!
//! Failures here are not reported: what is needed at once is done again, and
//! reported, by the request that needs it.
//!
//! Invariant: a close that succeeds leaves no cluster counted that nobody uses, unless there were
//! such before: what it drops itself goes down in the counts before these are written for
//! the last time.

use std::sync::Arc;

use vellum_format::types::HostCluster;
use vellum_io::{Result, executor, spawn_to_completion};
use vellum_storage::Capabilities;

use super::allocator::{Allocator, Blocker, State};
use super::reserve::MOST_COUNTED_AHEAD;

/// Calls to the refcounts between two looks at whether there is other work.
const RAISES_AT_ONCE: usize = 64;

vellum_io::with_setters! {
    /// How far ahead of the writes clusters are counted as used.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct PreallocateAhead {
        /// Clusters that are allocated one by one after an image was opened.
        pub after_clusters: u64,
        /// The file is made longer by up to four times so many bytes, and refcount blocks are made
        /// ahead for them. Of its clusters a few are counted ahead.
        pub max_bytes: u64,
    }
}

impl PreallocateAhead {
    /// Nothing is done ahead.
    pub const NONE: Self = PreallocateAhead {
        after_clusters: u64::MAX,
        max_bytes: 0,
    };
}

impl Default for PreallocateAhead {
    fn default() -> Self {
        PreallocateAhead {
            after_clusters: 64,
            max_bytes: 64 << 20,
        }
    }
}

/// How long the file is, and must be. In bytes, unless said otherwise.
#[derive(Debug)]
pub(crate) struct FileLength {
    growable: bool,
    /// The file may be made longer before it is written there.
    ahead: bool,
    at_open: u64,
    /// In clusters.
    tail_at_open: u64,
    /// The end of everything that was handed out or written since, refcount blocks
    /// that count nothing else left out.
    needed: u64,
    /// Entries lead so far, where the guest may write: the file is not cut before that.
    mapped: u64,
    /// The file is at least so long.
    actual: u64,
    /// As `reached`, durably.
    durable: u64,
    extending_to: Option<u64>,
    extended: bool,
    /// How many times the file was cut.
    truncations: u64,
}

/// A length that the file had, before the next cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LengthMark {
    len_bytes: u64,
    cuts: u64,
}

impl FileLength {
    pub(crate) fn new(capabilities: &Capabilities, at_open: u64, tail_at_open: u64) -> Self {
        let growable = capabilities.growable;
        FileLength {
            growable,
            ahead: growable && capabilities.has_zero_init,
            at_open,
            tail_at_open,
            needed: 0,
            mapped: 0,
            actual: at_open,
            durable: 0,
            extending_to: None,
            extended: false,
            truncations: 0,
        }
    }

    pub(crate) fn note_end(&mut self, end_bytes: u64) {
        self.needed = self.needed.max(end_bytes);
    }

    /// Entries lead to where nothing was handed out: the file gets there as the guest writes
    /// there, and otherwise no longer ahead of writes.
    pub(crate) fn note_mapped(&mut self, end_bytes: u64) {
        self.mapped = self.mapped.max(end_bytes);
        self.ahead = false;
    }

    /// The file is being made longer.
    pub(crate) fn is_extending(&self) -> bool {
        self.extending_to.is_some()
    }

    /// The file may reach beyond everything that is needed.
    pub(crate) fn note_extended(&mut self) {
        self.extended = true;
    }

    /// The end of everything that is needed.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.at_open.max(self.needed)
    }

    #[cfg(test)]
    pub(crate) fn needed_bytes(&self) -> u64 {
        self.needed
    }

    pub(crate) fn mark(&self) -> LengthMark {
        LengthMark {
            len_bytes: self.actual,
            cuts: self.truncations,
        }
    }

    /// A barrier has passed after `mark`, which says nothing once the file was cut.
    pub(crate) fn note_durable(&mut self, mark: LengthMark) {
        if mark.cuts == self.truncations {
            self.durable = self.durable.max(mark.len_bytes);
        }
    }

    /// The file was cut at `end_bytes`, which is the end of cluster `tail`'s
    /// predecessor.
    pub(crate) fn note_truncated(&mut self, end_bytes: u64, tail: u64) {
        self.at_open = self.at_open.min(end_bytes);
        self.tail_at_open = self.tail_at_open.min(tail);
        self.needed = self.needed.min(end_bytes);
        self.actual = self.actual.min(end_bytes);
        self.durable = self.durable.min(end_bytes);
        self.extended = false;
        self.truncations += 1;
    }

    pub(crate) fn is_durable_to(&self, end_bytes: u64) -> bool {
        !self.growable || end_bytes <= self.durable
    }

    /// Whether clusters up to `end_bytes` may be written now: making the file
    /// longer would cut off what is written beyond its new end meanwhile.
    pub(crate) fn allows(&self, end_bytes: u64) -> bool {
        self.extending_to.is_none_or(|to| end_bytes <= to)
    }
}

/// What is to be done next.
enum Task {
    Clear(Blocker),
    Extend,
}

/// Ends a preparation, however it ends.
struct Preparing<'a>(&'a Allocator);

impl Drop for Preparing<'_> {
    fn drop(&mut self) {
        self.0.state().preparing = false;
    }
}

/// Ends a change of the file's length, however it ends.
struct Extending<'a>(&'a Allocator);

impl Drop for Extending<'_> {
    fn drop(&mut self) {
        self.0.state().length.extending_to = None;
    }
}

impl Allocator {
    /// How many clusters should be counted ahead.
    pub(crate) fn ahead_clusters(&self, state: &State) -> u64 {
        let most = MOST_COUNTED_AHEAD.min(self.slack_clusters(state));
        self.reach_clusters(state).min(most)
    }

    /// How far ahead the file should be long enough, and have refcount blocks.
    fn reach_clusters(&self, state: &State) -> u64 {
        let compacts = state.lowest_first > 0;
        let rests = state.closing || state.end_held || state.is_short() || compacts;
        if rests || state.handed_out <= self.options.after_clusters {
            return 0;
        }
        let most = (self.options.max_bytes / self.cluster_bytes()).max(1);
        state.handed_out.clamp(1, most)
    }

    /// Starts what should be done ahead, if there is anything.
    pub(crate) fn prepare(self: &Arc<Self>) {
        let mut state = self.state();
        if state.preparing || !executor::is_entered() {
            return;
        }
        let Some(first) = self.next_task(&mut state) else {
            return;
        };
        state.preparing = true;
        drop(state);
        let allocator = self.clone();
        drop(spawn_to_completion(async move {
            allocator.prepare_from(first).await
        }));
    }

    async fn prepare_from(self: &Arc<Self>, first: Task) {
        let _preparing = Preparing(self);
        let mut next = Some(first);
        while let Some(task) = next {
            let done = match task {
                Task::Clear(obstacle) => self.resolve(obstacle).await,
                Task::Extend => self.extend().await,
            };
            let mut state = self.state();
            if done.is_err() {
                self.try_later(&mut state);
            }
            next = self.next_task(&mut state);
        }
    }

    /// Counts clusters ahead if there are few, as far as that needs nothing from the disk; returns what
    /// is in the way. Requests do so in their order, so that which clusters they get depends on no time.
    pub(crate) fn count_ahead(&self, state: &mut State) -> Option<Blocker> {
        let ahead = self.ahead_clusters(state);
        for _ in 0..RAISES_AT_ONCE {
            let have = state.reserve.clusters();
            let is_about_to_grow = state.free.clusters() == 0 && !self.may_grow(state, 0);
            if 2 * have >= ahead || is_about_to_grow {
                break;
            }
            match self.raise(state, 1, ahead - have) {
                Ok(None) => {}
                Ok(Some(obstacle)) => return Some(obstacle),
                Err(_) => return Some(Blocker::Full),
            }
        }
        None
    }

    fn try_later(&self, state: &mut State) {
        let ahead = self.ahead_clusters(state);
        state.prepare_from = state.handed_out + ahead.max(1);
    }

    fn next_task(&self, state: &mut State) -> Option<Task> {
        if self.reach_clusters(state) == 0 || state.handed_out < state.prepare_from {
            return None;
        }
        if let Some(obstacle) = self.count_ahead(state) {
            if obstacle == Blocker::Full {
                self.try_later(state);
                return None;
            }
            return Some(Task::Clear(obstacle));
        }
        let reach = self.reach_clusters(state);
        if let Some(cluster) = self.wanted_block(state, reach) {
            return Some(Task::Clear(Blocker::NoBlock(cluster)));
        }
        if self.wanted_length(state, reach).is_some() {
            return Some(Task::Extend);
        }
        let handed_out = state.handed_out;
        let scan = !state.scan.left.is_empty()
            && !state.free.is_crowded()
            && state.scan.wants_step(handed_out);
        scan.then_some(Task::Clear(Blocker::Scan))
    }

    /// The first cluster of the range that the tail will reach soon, if nothing
    /// counts that range yet.
    fn wanted_block(&self, state: &State, reach: u64) -> Option<HostCluster> {
        let entries = self.refcounts.geometry.refcount_block_entries();
        let next = (state.tail / entries + 1) * entries;
        // It lies where what it counts begins, with nothing before it yet.
        let soon = next - state.tail <= (2 * reach).min(self.slack_clusters(state));
        let used = state.tail > state.length.tail_at_open;
        if !soon || !used || !state.length.growable {
            return None;
        }
        let cluster = HostCluster(next);
        matches!(self.refcounts.place(cluster), Ok(None)).then_some(cluster)
    }

    /// How long the file should be, if it is too short.
    fn wanted_length(&self, state: &State, reach: u64) -> Option<u64> {
        let length = &state.length;
        if !length.ahead || reach == 0 || state.tail <= length.tail_at_open {
            return None;
        }
        let tail = state.tail * self.cluster_bytes();
        let most = 4 * reach.max(self.options.max_bytes / self.cluster_bytes());
        // Churn hands out many clusters without the file growing.
        let step = state.handed_out.min(most).min(state.tail / 4) * self.cluster_bytes();
        let enough = tail.saturating_add(step / 2);
        (length.actual < enough).then(|| tail.max(length.needed) + step)
    }

    /// Makes the file longer.
    async fn extend(&self) -> Result<()> {
        let _one = self.growing.lock().await;
        let target = {
            let mut state = self.state();
            let reach = self.reach_clusters(&state);
            let Some(target) = self.wanted_length(&state, reach) else {
                return Ok(());
            };
            state.length.extending_to = Some(target);
            target
        };
        let _extending = Extending(self);
        let file = &self.refcounts.file;
        let result = if file.len_bytes()? < target {
            file.truncate(target).await
        } else {
            Ok(())
        };
        let mut state = self.state();
        match &result {
            Ok(()) => {
                state.length.actual = target;
                state.length.extended = true;
            }
            // Then the writes make it longer, as far as they get.
            Err(_) => state.length.ahead = false,
        }
        result
    }

    /// Gives back what was counted ahead and cuts the file to its end, or lets it
    /// reach there, for readers that take a cluster cut short for damage. For the
    /// close: afterwards nothing is done ahead any more. The counts that it lowers
    /// are written by the next commit.
    ///
    /// # Errors
    /// When the file's length cannot be set, or a count is zero already.
    pub(crate) async fn release_reserve(&self) -> Result<()> {
        self.state().closing = true;
        self.count_beyond().await?;
        // What runs in the background comes to its end.
        let _one = self.growing.lock().await;
        self.empty_reserve().await?;
        self.take_back_blocks().await?;
        self.set_length().await
    }

    /// Gives back what was counted ahead.
    pub(crate) async fn empty_reserve(&self) -> Result<()> {
        let deferred = {
            let mut state = self.state();
            state.close_streams();
            let unused = state.reserve.drain();
            let mut deferred = std::mem::take(&mut state.deferred_decrements);
            deferred.extend(unused.iter().map(|run| run.start..run.end));
            deferred
        };
        self.decrement(deferred).await
    }

    async fn set_length(&self) -> Result<()> {
        let file = &self.refcounts.file;
        let (end, grown, extended) = {
            let mut state = self.state();
            let length = &mut state.length;
            let whole = length.at_open.next_multiple_of(self.cluster_bytes());
            let end = length.at_open.max(length.needed);
            if length.growable {
                length.extending_to = Some(end);
            }
            (end, length.needed > whole, length.extended)
        };
        let mapped = self.state().length.mapped;
        let _extending = Extending(self);
        let len_bytes = file.len_bytes()?;
        let short = grown && len_bytes < end;
        let long = extended && len_bytes > end;
        if file.capabilities().growable && (short || long) {
            file.truncate(end.max(len_bytes.min(mapped))).await?;
        }
        let mut state = self.state();
        state.length.actual = state.length.actual.min(end);
        state.length.extended = false;
        Ok(())
    }
}
