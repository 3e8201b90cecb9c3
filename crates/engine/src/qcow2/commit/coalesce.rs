//! Work that many ask for and one does, as in group commit: the first who asks becomes the
//! *leader* of a round and does the work, the others are *followers*. Whoever asks is served
//! by a round that began after he asked, and rounds come one at a time.

use vellum_io::sync::{Event, Mutex, MutexGuard};
use vellum_io::{Error, ErrorKind, Result};

#[derive(Default)]
struct Rounds {
    started: u64,
    finished: u64,
    running: bool,
    /// Why the rounds up to `finished` failed, if the last of them did.
    failure: Option<Error>,
}

/// Joins those who ask for the same work.
#[derive(Default)]
pub(crate) struct Coalescer {
    rounds: Mutex<Rounds>,
    ended: Event,
}

/// What whoever asked has to do.
pub(crate) enum Role<'a> {
    /// The caller does the work, and ends the round.
    Leader(Leader<'a>),
    /// Somebody else has done it.
    Follower(Result<()>),
}

impl Coalescer {
    fn lock(&self) -> MutexGuard<'_, Rounds> {
        self.rounds.lock()
    }

    /// Whether somebody is at work.
    pub(crate) fn is_running(&self) -> bool {
        self.lock().running
    }

    /// Waits until the work has been done by a round that began after this call, or
    /// the caller is the one to do it.
    pub(crate) async fn join(&self) -> Role<'_> {
        let wanted = self.lock().started + 1;
        loop {
            let listener = self.ended.listen();
            {
                let mut rounds = self.lock();
                if rounds.finished >= wanted {
                    return Role::Follower(rounds.failure.clone().map_or(Ok(()), Err));
                }
                if !rounds.running {
                    rounds.running = true;
                    rounds.started += 1;
                    return Role::Leader(Leader {
                        coalescer: self,
                        round: rounds.started,
                        result: None,
                    });
                }
            }
            listener.await;
        }
    }
}

/// Leads a round that is not over. If it is dropped before [`Leader::end`], because its
/// lane has ended, the round has failed.
#[must_use = "others wait for the end of the round"]
pub(crate) struct Leader<'a> {
    coalescer: &'a Coalescer,
    round: u64,
    result: Option<Result<()>>,
}

impl Leader<'_> {
    /// Ends the round and tells the followers.
    pub(crate) fn end(mut self, result: Result<()>) -> Result<()> {
        self.result = Some(result.clone());
        result
    }

    /// The error of followers whose leader is gone.
    pub(crate) fn abandoned() -> Error {
        let message = "the work was abandoned: its lane ended (see lane::finish)";
        Error::new(ErrorKind::Io, "commit", message)
    }
}

impl Drop for Leader<'_> {
    fn drop(&mut self) {
        let result = self.result.take().unwrap_or_else(|| Err(Self::abandoned()));
        let mut rounds = self.coalescer.lock();
        rounds.finished = self.round;
        rounds.running = false;
        rounds.failure = result.err();
        drop(rounds);
        self.coalescer.ended.notify(usize::MAX);
    }
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;
    use futures_util::FutureExt;

    #[test]
    fn who_asks_during_a_round_waits_for_the_next() {
        let coalescer = Coalescer::default();
        let Some(Role::Leader(first)) = coalescer.join().now_or_never() else {
            panic!("nobody else is there");
        };
        let mut second = Box::pin(coalescer.join());
        let mut third = Box::pin(coalescer.join());
        assert!(second.as_mut().now_or_never().is_none());
        assert!(third.as_mut().now_or_never().is_none());
        first.end(Ok(())).unwrap();
        let Some(Role::Leader(leader)) = second.as_mut().now_or_never() else {
            panic!("the first round began before");
        };
        assert!(third.as_mut().now_or_never().is_none());
        leader.end(Ok(())).unwrap();
        assert!(matches!(
            third.as_mut().now_or_never(),
            Some(Role::Follower(Ok(())))
        ));
    }

    #[test]
    fn an_abandoned_round_has_failed() {
        let coalescer = Coalescer::default();
        let first = coalescer.join().now_or_never();
        let mut second = Box::pin(coalescer.join());
        assert!(second.as_mut().now_or_never().is_none());
        drop(first);
        assert!(!coalescer.is_running());
        assert!(matches!(
            second.as_mut().now_or_never(),
            Some(Role::Leader(_))
        ));
    }
}
