//! [`Streams`]: free clusters set aside for sequential writers, so that several of them side by
//! side still get long runs each.
//!
//! A writer that continues where it stopped gets the clusters after its last ones: if another
//! writer came between, it gets a *window*, a free run that nobody else is given. Windows grow with
//! the stream. Their clusters are not counted before they are handed out: a crash leaks none of
//! them, and closing a window returns what is left of it to the free clusters.
//!
//! Invariant: [`Streams::clusters`] is the sum over all windows. The allocator bounds it, and closes
//! all windows before it reports that there is no room.

use std::ops::Range;

use super::reserve::ReservedRun;

#[derive(Debug)]
struct Window {
    run: ReservedRun,
    /// Until the first of its clusters is taken: where the writer that it is for has stopped.
    follows: Option<u64>,
    /// How many clusters it was made with.
    made_with: u64,
    used_at: u64,
}

/// Where a writer stopped, and what its window had been.
#[derive(Debug, Clone, Copy, Default)]
struct Stop {
    end: u64,
    made_with: u64,
}

const MOST_WINDOWS: usize = 16;
const REMEMBERED_STOPS: usize = 32;
const FIRST_WINDOW_CLUSTERS: u64 = 4;
const MAX_WINDOW_CLUSTERS: u64 = 256;

/// See the module's head.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    windows: Vec<Window>,
    stops: [Stop; REMEMBERED_STOPS],
    next_stop: usize,
    taken: u64,
    clusters: u64,
}

impl Streams {
    /// How many clusters are set aside.
    pub(crate) fn clusters(&self) -> u64 {
        self.clusters
    }

    /// Notes that a writer was given the clusters before `end`, from a window of `made_with`
    /// clusters, or 0.
    pub(crate) fn note_stop(&mut self, end: u64, made_with: u64) {
        self.stops[self.next_stop] = Stop { end, made_with };
        self.next_stop = (self.next_stop + 1) % REMEMBERED_STOPS;
        self.taken += 1;
    }

    /// The window of a writer that has stopped at `after`, and what is left of it.
    pub(crate) fn window_at(&self, after: u64) -> Option<(usize, ReservedRun)> {
        let index = self
            .windows
            .iter()
            .position(|window| window.run.start == after || window.follows == Some(after))?;
        Some((index, self.windows[index].run))
    }

    /// Takes the first `clusters` of a window; with how many it was made.
    pub(crate) fn take(&mut self, index: usize, clusters: u64) -> (ReservedRun, u64) {
        let window = &mut self.windows[index];
        window.used_at = self.taken;
        window.follows = None;
        let (run, made_with) = (window.run.split(clusters), window.made_with);
        if window.run.clusters() == 0 {
            self.windows.swap_remove(index);
        }
        self.clusters -= run.clusters();
        (run, made_with)
    }

    /// How long a window should be for a writer that stopped at `after` a moment ago and goes on
    /// there with `want` clusters, if `most` can be set aside; `None`: it gets none. Nor does a writer
    /// between whose clusters only a refcount block was made.
    pub(crate) fn wanted(&self, want: u64, after: u64, most: u64) -> Option<u64> {
        let last = &self.stops[(self.next_stop + REMEMBERED_STOPS - 1) % REMEMBERED_STOPS];
        let stop = self.stops.iter().find(|stop| stop.end == after)?;
        if last.end == after && stop.made_with == 0 {
            return None;
        }
        let size = (2 * stop.made_with)
            .max(2 * want)
            .clamp(FIRST_WINDOW_CLUSTERS, MAX_WINDOW_CLUSTERS)
            .min(most.saturating_sub(self.clusters));
        (size > want).then_some(size)
    }

    /// Sets a free run aside for a writer that has stopped at `after`; returns what has to be given
    /// back for it.
    pub(crate) fn open(&mut self, run: ReservedRun, after: u64) -> Option<Range<u64>> {
        let mut closed = None;
        if self.windows.len() == MOST_WINDOWS {
            let windows = self.windows.iter().enumerate();
            let oldest = windows.min_by_key(|(_, window)| window.used_at);
            closed = oldest
                .map(|(index, _)| index)
                .map(|oldest| self.close(oldest));
        }
        self.clusters += run.clusters();
        self.windows.push(Window {
            run,
            follows: Some(after),
            made_with: run.clusters(),
            used_at: self.taken,
        });
        closed
    }

    /// Closes a window; returns the clusters that are left of it.
    pub(crate) fn close(&mut self, index: usize) -> Range<u64> {
        let run = self.windows.swap_remove(index).run;
        self.clusters -= run.clusters();
        run.start..run.end
    }

    /// Closes all windows; returns what is left of them.
    pub(crate) fn close_all(&mut self) -> Vec<Range<u64>> {
        self.clusters = 0;
        let windows = self.windows.drain(..);
        windows
            .map(|window| window.run.start..window.run.end)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(start: u64, end: u64) -> ReservedRun {
        ReservedRun {
            start,
            end,
            period: 1,
            reads_as_zeroes: true,
        }
    }

    #[test]
    fn a_stream_that_goes_on_gets_longer_and_longer_windows() {
        let mut streams = Streams::default();
        assert_eq!(streams.wanted(1, 5, 1000), None, "nobody has stopped there");
        streams.note_stop(5, 0);
        assert_eq!(streams.wanted(1, 5, 1000), None, "nobody came between");
        streams.note_stop(6, 0);
        let size = streams.wanted(1, 5, 1000).expect("a window");
        assert_eq!(size, FIRST_WINDOW_CLUSTERS);
        assert_eq!(streams.open(run(10, 10 + size), 5), None);
        assert!(streams.window_at(5).is_some(), "who was held up asks again");
        let (index, left) = streams.window_at(10).expect("it is open");
        assert_eq!((left.start, left.end), (10, 14));
        let (taken, made_with) = streams.take(index, 4);
        assert_eq!((taken.end, made_with, streams.clusters()), (14, 4, 0));
        assert!(streams.window_at(5).is_none(), "nothing is left of it");
        streams.note_stop(taken.end, made_with);
        assert_eq!(streams.wanted(1, 14, 1000), Some(8));
        assert_eq!(streams.wanted(1, 14, 5), Some(5), "no more than is allowed");
        assert_eq!(streams.wanted(1, 14, 1), None);
    }

    #[test]
    fn the_window_that_rested_longest_is_closed_for_another_one() {
        let mut streams = Streams::default();
        for index in 0..MOST_WINDOWS as u64 {
            streams.note_stop(1000, 0);
            assert_eq!(streams.open(run(10 * index, 10 * index + 4), 1000), None);
        }
        let (first, _) = streams.window_at(0).expect("it is open");
        streams.note_stop(1000, 0);
        let (_, made_with) = streams.take(first, 1);
        assert_eq!(made_with, 4);
        assert_eq!(streams.open(run(500, 504), 1000), Some(10..14));
        let all: u64 = streams
            .close_all()
            .iter()
            .map(|run| run.end - run.start)
            .sum();
        assert_eq!((all, streams.clusters()), (16 * 4 - 1, 0));
    }
}
