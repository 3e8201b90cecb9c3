//! Work that many ask for and one does: everybody who asks is served by a turn that
//! began after he asked, and turns come one at a time.

use std::sync::PoisonError;

use vellum_storage::sync::{Event, Mutex, MutexGuard};
use vellum_storage::{Error, ErrorKind, Result};

#[derive(Default)]
struct Turns {
    started: u64,
    finished: u64,
    running: bool,
    /// Why the turns up to `finished` failed, if the last of them did.
    failure: Option<Error>,
}

/// Those who ask for the same work.
#[derive(Default)]
pub(crate) struct Group {
    turns: Mutex<Turns>,
    ended: Event,
}

/// What asking came to.
pub(crate) enum Turn<'a> {
    /// The caller does the work, and ends the turn.
    Mine(RunningTurn<'a>),
    /// Somebody else has done it.
    Served(Result<()>),
}

impl Group {
    fn turns(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether somebody is at work.
    pub(crate) fn is_running(&self) -> bool {
        self.turns().running
    }

    /// Waits until the work has been done by a turn that began after this call, or
    /// the caller is the one to do it.
    pub(crate) async fn join(&self) -> Turn<'_> {
        let wanted = self.turns().started + 1;
        loop {
            let listener = self.ended.listen();
            {
                let mut turns = self.turns();
                if turns.finished >= wanted {
                    return Turn::Served(turns.failure.clone().map_or(Ok(()), Err));
                }
                if !turns.running {
                    turns.running = true;
                    turns.started += 1;
                    return Turn::Mine(RunningTurn {
                        group: self,
                        turn: turns.started,
                        result: None,
                    });
                }
            }
            listener.await;
        }
    }
}

/// A turn that is not over. If it is dropped before [`RunningTurn::end`], for its
/// lane has ended, it counts as failed.
#[must_use = "others wait for the end of the turn"]
pub(crate) struct RunningTurn<'a> {
    group: &'a Group,
    turn: u64,
    result: Option<Result<()>>,
}

impl RunningTurn<'_> {
    /// Ends the turn and tells those who wait.
    pub(crate) fn end(mut self, result: Result<()>) -> Result<()> {
        self.result = Some(result.clone());
        result
    }

    /// What those learn who wait for a turn that nobody ends.
    pub(crate) fn abandoned() -> Error {
        let message = "the work was abandoned: its lane ended (see lane::finish)";
        Error::new(ErrorKind::Io, "commit", message)
    }
}

impl Drop for RunningTurn<'_> {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or_else(|| Err(Self::abandoned()));
        let mut turns = self.group.turns();
        turns.finished = self.turn;
        turns.running = false;
        turns.failure = result.err();
        drop(turns);
        self.group.ended.notify(usize::MAX);
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn who_asks_during_a_turn_waits_for_the_next() {
        let group = Group::default();
        let Some(Turn::Mine(first)) = group.join().now_or_never() else {
            panic!("nobody else is there");
        };
        let mut second = Box::pin(group.join());
        let mut third = Box::pin(group.join());
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        first.end(Ok(())).unwrap();
        let Some(Turn::Mine(turn)) = second.as_mut().now_or_never() else {
            panic!("the first turn began before");
        };
        assert!(third.as_mut().now_or_never().is_none());
        turn.end(Ok(())).unwrap();
        assert!(matches!(
            third.as_mut().now_or_never(),
            Some(Turn::Served(Ok(())))
        ));
    }

    #[test]
    fn an_abandoned_turn_has_failed() {
        let group = Group::default();
        let first = group.join().now_or_never();
        let mut second = Box::pin(group.join());
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        assert!(!group.is_running());
        assert!(matches!(
            second.as_mut().now_or_never(),
            Some(Turn::Mine(_))
        ));
    }
}
