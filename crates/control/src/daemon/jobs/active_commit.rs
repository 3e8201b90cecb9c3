//! `block-commit` of an image that users write to: they go on with the base in the end.

use std::pin::pin;
use std::rc::Rc;

use futures_util::future::select;
use vellum_jobs::live::{Copied, DirtyMap, LiveCommit, Tracker};

use super::{Completion, Job, Stake, Teller, Work, commit};

/// An active commit.
pub(in crate::daemon) struct ActiveCommit {
    stake: Stake,
    top: String,
    base: String,
    commit: LiveCommit,
    /// A tracker stands in front of the top.
    watching: bool,
}

impl ActiveCommit {
    /// Prepares the commit of a chain, from its top to its base.
    pub(in crate::daemon) async fn prepare(
        mut stake: Stake,
        job: &Rc<Job>,
        chain: &[String],
    ) -> vellum::Result<ActiveCommit> {
        let prepared = ActiveCommit::try_prepare(&mut stake, job, chain).await;
        let (top, base, commit) = stake.or_leave(prepared).await?;
        Ok(ActiveCommit {
            stake,
            top,
            base,
            commit,
            watching: true,
        })
    }

    async fn try_prepare(
        stake: &mut Stake,
        job: &Rc<Job>,
        chain: &[String],
    ) -> vellum::Result<(String, String, LiveCommit)> {
        let (top, base) = commit::join_all(stake, &job.settings, chain, commit::ACTIVE)?;
        stake.open(&base).await?;
        let source = stake.nodes.device(&top)?;
        let dirty = DirtyMap::new(source.size_bytes());
        let tracker = Tracker::new(source, dirty.clone());
        let commit = commit::copier(stake, chain, dirty).await?;
        stake.nodes.put_in_front(&top, Some(tracker)).await?;
        Ok((top, base, commit))
    }
}

impl Work for ActiveCommit {
    async fn run(&mut self, job: &Job) -> vellum::Result<Copied> {
        let mut teller = Teller { job, exact: true };
        let copied = self.commit.copy_all(&job.reins, &mut teller).await;
        let failed = |error| job.tell_failure(error);
        let mut copied = copied.map_err(failed)?;
        let mut ready = false;
        loop {
            if copied == Copied::GivenUp || job.is_cancelled() {
                return Ok(Copied::GivenUp);
            }
            copied = self.commit.catch_up(&job.reins).await.map_err(failed)?;
            if copied == Copied::GivenUp {
                return Ok(copied);
            }
            if !ready {
                ready = true;
                job.become_ready();
            }
            if job.completion().is_some() {
                return Ok(Copied::All);
            }
            let told = job.until(|job| job.completion().is_some() || job.is_cancelled());
            select(pin!(told), pin!(self.commit.wait_for_writes())).await;
        }
    }

    async fn conclude(&mut self, job: &Job) -> vellum::Result<()> {
        // However long it was pending: users are held up only for what they write while
        // this ends.
        self.commit.draw_near().await?;
        self.stake.nodes.flush(&self.top).await?;
        let held = self.stake.nodes.hold(&self.top).await?;
        self.commit.finish().await?;
        if job.completion() == Some(Completion::InForce) {
            self.stake.nodes.lead_to(held, &self.base).await?;
            self.watching = false;
            self.stake.keep_open(&self.base);
        }
        Ok(())
    }

    async fn leave(mut self) {
        if self.watching {
            // There is nothing to do about it: the top goes on being watched in vain.
            let _ = self.stake.nodes.put_in_front(&self.top, None).await;
        }
        drop(self.commit);
        self.stake.leave().await;
    }
}
