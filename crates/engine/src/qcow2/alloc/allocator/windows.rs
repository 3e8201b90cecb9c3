//! Clusters for sequential writers: windows are opened, used and closed (see
//! [`streams`](crate::qcow2::alloc::streams)).

use vellum_io::Result;
use vellum_io::range_lock::overlap;

use super::{Allocator, Attempt, Blocker, State, check_limit};
use crate::qcow2::alloc::reserve::ReservedRun;
use vellum_format::types::HostCluster;

impl Allocator {
    /// Clusters for a writer that goes on at cluster `after`, if a window is open for it or should be.
    pub(super) fn continue_stream(
        &self,
        state: &mut State,
        want: u64,
        after: u64,
    ) -> Result<Option<Attempt>> {
        if let Some((index, run)) = state.streams.window_at(after) {
            return self.take_from_window(state, index, run, want);
        }
        let next = state.reserve.front().unwrap_or_else(|| {
            let extent = self.free_extent(state, want);
            extent.map_or(state.tail, |extent| extent.start)
        });
        if next == after || state.lowest_first > 0 || state.is_short() || state.closing {
            return Ok(None);
        }
        let most = self.slack_clusters(state) / 2;
        let Some(size) = state.streams.wanted(want, after, most) else {
            return Ok(None);
        };
        if let Some(blocked) = self.fill_reserve(state)? {
            return Ok(Some(blocked));
        }
        let Some(run) = self.claim(state, size)? else {
            return Ok(None);
        };
        if let Some(closed) = state.streams.open(run, after) {
            state.insert_free(closed);
        }
        match state.streams.window_at(after) {
            Some((index, run)) => self.take_from_window(state, index, run, want),
            None => Ok(None),
        }
    }

    /// Fills the reserve, so that where a window begins does not depend on how full it is: a copy is laid
    /// out in the same way each time.
    fn fill_reserve(&self, state: &mut State) -> Result<Option<Attempt>> {
        let ahead = self.ahead_clusters(state);
        while state.reserve.clusters() < ahead {
            let missing = ahead - state.reserve.clusters();
            match self.raise(state, 1, missing)? {
                None => {}
                Some(Blocker::Full) => break,
                Some(obstacle) => return Ok(Some(Attempt::Blocked(obstacle))),
            }
        }
        Ok(None)
    }

    fn take_from_window(
        &self,
        state: &mut State,
        index: usize,
        run: ReservedRun,
        want: u64,
    ) -> Result<Option<Attempt>> {
        let (clusters, slice) = match self.find(run.start, want.min(run.clusters()))? {
            Ok(found) => found,
            Err(obstacle) => return Ok(Some(Attempt::Blocked(obstacle))),
        };
        if clusters.start != run.start {
            // Its first cluster has been counted by others.
            let left = state.streams.close(index);
            state.insert_free(left);
            return Ok(None);
        }
        if !state.length.allows(clusters.end * self.cluster_bytes()) {
            return Ok(Some(Attempt::Blocked(Blocker::Extending)));
        }
        if !self.count_once(&clusters)? {
            return Ok(Some(Attempt::Blocked(Blocker::Load(slice.key))));
        }
        let (taken, made_with) = state.streams.take(index, clusters.end - clusters.start);
        state.streams.note_stop(taken.end, made_with);
        let period = state.period;
        let taken = ReservedRun { period, ..taken };
        Ok(Some(Attempt::Done(self.hand_out(state, taken))))
    }

    /// Takes up to `size` free clusters side by side out of those that are handed out, without
    /// counting them, if that needs nothing from the disk.
    fn claim(&self, state: &mut State, size: u64) -> Result<Option<ReservedRun>> {
        if state.end_held || state.beyond.is_some() {
            return Ok(None);
        }
        let extent = self.free_extent(state, size);
        if extent.is_none() && !self.may_grow(state, size) {
            return Ok(None);
        }
        let start = extent.as_ref().map_or(state.tail, |extent| extent.start);
        let limit = extent
            .as_ref()
            .map_or(state.room.limit(), |extent| extent.end);
        check_limit(HostCluster(start), self.cluster_bytes())?;
        let Ok((clusters, _)) = self.find(start, size)? else {
            return Ok(None);
        };
        let clusters = clusters.start..clusters.end.min(limit);
        if clusters.is_empty() || (extent.is_some() && clusters.start != start) {
            return Ok(None);
        }
        let mut written = state.written_beyond.iter();
        let was_written = written.any(|written| overlap(written, &clusters));
        match extent {
            Some(_) => state.free.remove(clusters.clone()),
            None => state.tail = clusters.end,
        }
        Ok(Some(ReservedRun {
            start: clusters.start,
            end: clusters.end,
            period: state.period,
            reads_as_zeroes: extent.is_none() && self.zero_init && !was_written,
        }))
    }
}
