//! [`LiveCommit`]: an image in use, committed into a layer below it.

use std::pin::pin;
use std::sync::Arc;

use futures_util::future::{Either, select};
use vellum::nodes::{Link, nothing};
use vellum::{BlockDevice, Result};

use super::dirty::DirtyMap;
use super::mirror::Mirror;
use super::parallel::{self, NextPiece};
use crate::copy::{CopyError, CopyOptions, Observer, copy};
use crate::job::{JobCommand, JobControl};
use crate::scope::Scope;

/// How many bytes may be dirty when users are held up for the last round: with more, one
/// more round is made beside them first.
const SHORT_ROUND_BYTES: u64 = 4 << 20;
/// So many rounds are made beside users who go on at full speed; then they wait for copies
/// of what they write.
const MAX_ROUNDS: u32 = 8;

/// How a commit is done.
#[derive(Debug, Clone)]
pub struct LiveCommitOptions {
    /// How many layers are committed: 1 for the image alone, 2 for it and its backing
    /// file, and so on. The next one below is the target.
    pub layers: u32,
    /// How many pieces are in flight at once.
    pub parallel: usize,
}

/// A commit of an image that is in use. Once something of it has failed or was given up,
/// nothing more can be made of it.
#[derive(Debug)]
pub struct LiveCommit {
    /// The job's own ways to both, to hold its requests up and to wait for them.
    source: Arc<Link>,
    target: Arc<Link>,
    dirty: Arc<DirtyMap>,
    mirror: Arc<Mirror>,
    options: LiveCommitOptions,
    /// Where requests go of a job that was given up.
    nowhere: Arc<dyn BlockDevice>,
}

/// How a copy ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopyOutcome {
    /// All of it was copied.
    All,
    /// It was given up, as it was told to; none of its requests runs any more.
    GivenUp,
}

impl LiveCommit {
    /// A commit of `source`, whose users go through a [`super::Tracker`] with `dirty`, into
    /// `target`, which nobody else writes to. A target that is shorter grows.
    ///
    /// # Errors
    /// If the target cannot be made as long as the source.
    pub async fn new(
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        dirty: Arc<DirtyMap>,
        options: LiveCommitOptions,
    ) -> Result<Self> {
        let size_bytes = source.size_bytes();
        if target.size_bytes() < size_bytes {
            target.truncate(size_bytes).await?;
        }
        let target = Link::new(target);
        let mirror = Mirror::new(
            source.clone(),
            target.clone(),
            options.layers,
            dirty.clone(),
        );
        dirty.follow(&mirror);
        Ok(LiveCommit {
            source: Link::new(source),
            target,
            dirty,
            mirror,
            options,
            nowhere: nothing()?,
        })
    }

    /// Copies everything once.
    ///
    /// # Errors
    /// What reading and writing meet. The source is as it was.
    pub async fn copy_all(
        &self,
        control: &JobControl,
        observer: &mut dyn Observer,
    ) -> Result<CopyOutcome, CopyError> {
        let scope = Scope::Layers(self.options.layers);
        self.copy(scope, control, observer).await
    }

    /// Copies what is dirty, round by round, until that is so little that users may be held
    /// up for it. It takes so many rounds at most, however fast they write: where rounds
    /// make no headway, users wait from then on until what they write is copied too.
    ///
    /// # Errors
    /// As [`LiveCommit::copy_all`].
    pub async fn catch_up(&self, control: &JobControl) -> Result<CopyOutcome, CopyError> {
        let mut rounds = 0;
        loop {
            let before = self.dirty.dirty_bytes();
            if before == 0 {
                return Ok(CopyOutcome::All);
            }
            let copied = self.round(control).await;
            if !matches!(copied, Ok(CopyOutcome::All)) {
                // Nobody need wait for a copy that is worth nothing.
                self.mirror.keep_pace(false);
                return copied;
            }
            let left = self.dirty.dirty_bytes();
            if left <= SHORT_ROUND_BYTES {
                return Ok(CopyOutcome::All);
            }
            rounds += 1;
            if rounds >= MAX_ROUNDS || left > before / 2 {
                self.mirror.keep_pace(true);
            }
        }
    }

    /// Copies what is dirty, and makes the target durable, beside users who write: what is
    /// left to [`LiveCommit::finish`] is what they write while this ends. There is no limit
    /// on its speed.
    ///
    /// # Errors
    /// As [`LiveCommit::copy_all`], and if the target cannot be made durable.
    pub async fn draw_near(&self) -> Result<()> {
        let caught_up = self.catch_up(&JobControl::new()).await;
        caught_up.map_err(|error| error.cause)?;
        self.target.flush().await
    }

    /// Waits until something is dirty.
    pub async fn wait_for_writes(&self) {
        self.dirty.wait().await;
    }

    /// Copies what is still dirty, and makes the target durable. While it runs no user of
    /// the source may write, so there is no limit on its speed. From then on the target shows
    /// what the source does.
    ///
    /// # Errors
    /// As [`LiveCommit::copy_all`], and if the target cannot be made durable.
    pub async fn finish(&self) -> Result<()> {
        let cause = |error: CopyError| error.cause;
        let control = JobControl::new();
        self.round(&control).await.map_err(cause)?;
        self.target.flush().await
    }

    /// Copies what is dirty now, once.
    async fn round(&self, control: &JobControl) -> Result<CopyOutcome, CopyError> {
        let mut at = 0;
        let look = async || {
            Ok(match self.dirty.next_from(at) {
                None => NextPiece::End,
                Some(range) => {
                    at = range.end;
                    NextPiece::Piece(range)
                }
            })
        };
        let bring = |range| self.mirror.bring(range);
        parallel::run(self.options.parallel, control, look, bring).await
    }

    async fn copy(
        &self,
        scope: Scope,
        control: &JobControl,
        observer: &mut dyn Observer,
    ) -> Result<CopyOutcome, CopyError> {
        let source: Arc<dyn BlockDevice> = self.source.clone();
        let target: Arc<dyn BlockDevice> = self.target.clone();
        let options = CopyOptions {
            scope,
            detect_zeroes: false,
            parallel: self.options.parallel,
            speed: control.speed().clone(),
            ..CopyOptions::default()
        };
        let sources = [source];
        let copied = {
            let copying = pin!(copy(&sources, &target, &options, observer));
            match select(copying, pin!(self.follow_control(control))).await {
                Either::Left((copied, _)) => copied.map(|()| CopyOutcome::All),
                Either::Right(_) => Ok(CopyOutcome::GivenUp),
            }
        };
        if !matches!(copied, Ok(CopyOutcome::All)) {
            // What was begun and is not waited for any more must not land later: not what
            // runs, nor what was held up.
            self.target.drain().await.set(self.nowhere.clone());
        }
        copied
    }

    /// Holds the job's requests up while it is paused; returns when it is to be given up.
    async fn follow_control(&self, control: &JobControl) {
        loop {
            control
                .wait_until(|command| command != JobCommand::Run)
                .await;
            if control.command() == JobCommand::Cancel {
                return;
            }
            let _held = self.target.drain().await;
            control
                .wait_until(|command| command != JobCommand::Pause)
                .await;
        }
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::{block_on, yield_now};
    use vellum_io::spawn;

    use super::*;
    use crate::copy::Silent;
    use crate::live::blocked_device::BlockedDevice;

    async fn some_turns() {
        for _ in 0..50 {
            yield_now().await;
        }
    }

    /// Begins to copy; the result says how that ended.
    async fn begin(
        source: &Arc<BlockedDevice>,
        target: &Arc<BlockedDevice>,
        control: &Arc<JobControl>,
    ) -> vellum_io::JoinHandle<CopyOutcome> {
        let options = LiveCommitOptions {
            layers: 1,
            parallel: 4,
        };
        let dirty = DirtyMap::new(4096);
        let job = LiveCommit::new(source.clone(), target.clone(), dirty, options).await;
        let (job, control) = (job.expect("a job"), control.clone());
        let copying = spawn(async move {
            let copied = job.copy_all(&control, &mut Silent).await;
            copied.expect("a copy")
        });
        some_turns().await;
        copying
    }

    #[test]
    fn a_job_that_is_given_up_waits_for_what_it_is_writing() {
        block_on(async {
            let (source, target) = (BlockedDevice::new(1, true), BlockedDevice::new(2, false));
            let control = Arc::new(JobControl::new());
            let mut copying = begin(&source, &target, &control).await;
            control.set(JobCommand::Cancel);
            for _ in 0..50 {
                let turn = pin!(yield_now());
                let Either::Right((_, still)) = select(copying, turn).await else {
                    panic!("a write may land at any time");
                };
                copying = still;
            }
            target.open();
            assert_eq!(copying.await, CopyOutcome::GivenUp);
            assert_eq!(target.first_byte().await, 1);
        });
    }

    #[test]
    fn what_was_held_up_is_never_written_once_the_job_is_given_up() {
        block_on(async {
            let (source, target) = (BlockedDevice::new(1, false), BlockedDevice::new(2, true));
            let control = Arc::new(JobControl::new());
            let copying = begin(&source, &target, &control).await;
            control.set(JobCommand::Pause);
            some_turns().await;
            source.open();
            some_turns().await;
            assert_eq!(target.first_byte().await, 2, "it is held up");
            control.set(JobCommand::Cancel);
            assert_eq!(copying.await, CopyOutcome::GivenUp);
            some_turns().await;
            assert_eq!(target.first_byte().await, 2);
        });
    }
}
