//! `block-commit` of an image that users write to: they go on with the base in the end.

use std::pin::pin;
use std::rc::Rc;

use futures_util::future::select;
use vellum_jobs::live::{CopyOutcome, DirtyMap, LiveCommit, Tracker};

use super::{Completion, Job, JobNodes, ProgressReporter, Work, commit};

/// An active commit.
pub(in crate::daemon) struct ActiveCommit {
    job_nodes: JobNodes,
    top: String,
    base: String,
    commit: LiveCommit,
    /// A tracker stands in front of the top.
    watching: bool,
}

impl ActiveCommit {
    /// Prepares the commit of a chain, from its top to its base.
    pub(in crate::daemon) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        chain: &[String],
    ) -> vellum::Result<ActiveCommit> {
        let prepared = ActiveCommit::try_prepare(&mut job_nodes, job, chain).await;
        let (top, base, commit) = job_nodes.or_leave(prepared).await?;
        Ok(ActiveCommit {
            job_nodes,
            top,
            base,
            commit,
            watching: true,
        })
    }

    async fn try_prepare(
        job_nodes: &mut JobNodes,
        job: &Rc<Job>,
        chain: &[String],
    ) -> vellum::Result<(String, String, LiveCommit)> {
        let (top, base) = commit::join_all(job_nodes, &job.settings, chain, commit::ACTIVE)?;
        job_nodes.open(&base).await?;
        let source = job_nodes.nodes.device(&top)?;
        let dirty = DirtyMap::new(source.size_bytes());
        let tracker = Tracker::new(source, dirty.clone());
        let commit = commit::copier(job_nodes, chain, dirty).await?;
        job_nodes.nodes.insert_filter(&top, Some(tracker)).await?;
        Ok((top, base, commit))
    }
}

impl Work for ActiveCommit {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        let mut reporter = ProgressReporter { job, exact: true };
        let copied = self.commit.copy_all(&job.control, &mut reporter).await;
        let failed = |error| job.report_failure(error);
        let mut copied = copied.map_err(failed)?;
        let mut ready = false;
        loop {
            if copied == CopyOutcome::GivenUp || job.is_cancelled() {
                return Ok(CopyOutcome::GivenUp);
            }
            copied = self.commit.catch_up(&job.control).await.map_err(failed)?;
            if copied == CopyOutcome::GivenUp {
                return Ok(copied);
            }
            if !ready {
                ready = true;
                job.become_ready();
            }
            if job.completion().is_some() {
                return Ok(CopyOutcome::All);
            }
            let decided = job.until(|job| job.completion().is_some() || job.is_cancelled());
            select(pin!(decided), pin!(self.commit.wait_for_writes())).await;
        }
    }

    async fn conclude(&mut self, job: &Job) -> vellum::Result<()> {
        // However long it was pending: users are held up only for what they write while
        // this ends.
        self.commit.draw_near().await?;
        self.job_nodes.nodes.flush(&self.top).await?;
        let held = self.job_nodes.nodes.drain(&self.top).await?;
        self.commit.finish().await?;
        if job.completion() == Some(Completion::InForce) {
            self.job_nodes.nodes.redirect_to(held, &self.base).await?;
            self.watching = false;
            self.job_nodes.keep_open(&self.base);
        }
        Ok(())
    }

    async fn leave(mut self) {
        if self.watching {
            // There is nothing to do about it: the top goes on being watched in vain.
            let _ = self.job_nodes.nodes.insert_filter(&self.top, None).await;
        }
        drop(self.commit);
        self.job_nodes.leave().await;
    }
}
