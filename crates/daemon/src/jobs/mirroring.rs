//! A node that users write to, brought into another one until they go on with that: a mirror,
//! or the commit of an active layer.
//!
//! Invariants:
//! - Users are led to the target while none of their requests runs, when it has all that they
//!   were told is written, durably, and what they leave is durable too.
//! - They are held up for a limited time; where that is too short to end, they go on, and more
//!   is copied beside them first.
//! - However long it was pending: what was written meanwhile is copied before other commands wait.
//! - A job that is given up lets the source go at once. A target that has not answered yet
//!   stays in use until it has, or has failed: what is on its way to it may still land.

use std::pin::pin;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use vellum::{Error, ErrorKind};
use vellum_graph::change::DrainedUsers;
use vellum_graph::foreign;
use vellum_graph::live::Keeps;
use vellum_io::lane;
use vellum_jobs::copy::CopyError;
use vellum_jobs::live::{CopyOutcome, InitialSync, LiveMirror};

use super::failures::ErrorPolicies;
use super::{Completion, Job, JobNodes, Work};

/// So long are users held up by the first attempt to end; each other one may take twice as
/// long as the one before.
const HOLD: Duration = Duration::from_millis(40);

/// What a mirror is made of.
pub(crate) struct Mirroring {
    pub(super) job_nodes: JobNodes,
    pub(super) source: String,
    pub(super) target: String,
    pub(super) copier: LiveMirror,
    pub(super) initial: InitialSync,
    /// The target is zeroed before anything is copied.
    pub(super) zeroes_target: bool,
    pub(super) policies: ErrorPolicies,
    /// A tracker stands in front of the source.
    pub(super) watching: bool,
    /// The target stands on the source before users go on with it.
    pub(super) stands_on_source: bool,
}

impl Mirroring {
    /// Does what comes before the copy.
    async fn begin(&self, job: &Job) -> vellum::Result<CopyOutcome> {
        let mut zeroed = !self.zeroes_target;
        loop {
            let done = match zeroed {
                false => self.copier.zero_target(&job.control).await,
                true => self.copier.begin(self.initial, &job.control).await,
            };
            match done {
                Ok(CopyOutcome::All) if !zeroed => zeroed = true,
                Ok(outcome) => return Ok(outcome),
                Err(error) => job.survive(error, self.policies).await?,
            }
        }
    }

    /// Copies what is dirty: until next to nothing is, or once.
    async fn copy(&self, job: &Job, is_ready: bool) -> Result<CopyOutcome, CopyError> {
        if is_ready && job.completion().is_none() {
            return self.copier.keep_up(&job.control).await;
        }
        let copied = self.copier.catch_up(&job.control).await?;
        if !is_ready && copied == CopyOutcome::All {
            self.copier.flush().await?;
            self.copier.relax();
        }
        Ok(copied)
    }

    /// Has the target show what the source does, and holds users up from that moment on: since when.
    async fn hold(&mut self) -> vellum::Result<(DrainedUsers, Instant)> {
        let nodes = self.job_nodes.nodes.clone();
        let mut limit = HOLD;
        loop {
            // Users are held up only for what they write while this ends.
            self.copier.draw_near().await?;
            nodes.flush(&self.source).await?;
            let begun = lane::now();
            let held = nodes.drain(&self.source).await?;
            if self.copier.finish_within(limit).await? {
                return Ok((held, begun));
            }
            limit *= 2;
        }
    }

    /// Leads users to the target, if that is wanted.
    async fn lead(&mut self, job: &Job, held: DrainedUsers) -> vellum::Result<()> {
        // Somebody may have opened it anew with another size, and those who are led there were
        // told of one.
        if self.copier.is_of_other_size() {
            return Err(other_size());
        }
        // The target is a copy of this moment, or what users write to from now on: nothing
        // of the source may land there any more.
        self.copier.handle().release();
        if job.completion() != Some(Completion::InForce) {
            return Ok(());
        }
        let nodes = &self.job_nodes.nodes;
        if self.stands_on_source {
            // Its users write to it until they are led on.
            self.job_nodes.keep_below(&self.target, Keeps::Size)?;
            nodes.put_over(&self.target, &self.source).await?;
        }
        foreign::change_identity(&*nodes.device(&self.target)?).await?;
        nodes.redirect_to(held, &self.target).await?;
        self.watching = false;
        self.job_nodes.keep_open(&self.target);
        Ok(())
    }
}

fn other_size() -> Error {
    let message = "Source and target image have different sizes";
    Error::new(ErrorKind::InvalidArgument, "mirror", message)
}

impl Work for Mirroring {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        if self.copier.is_of_other_size() {
            return Err(other_size());
        }
        job.follow(self.copier.handle());
        if self.begin(job).await? == CopyOutcome::GivenUp {
            return Ok(CopyOutcome::GivenUp);
        }
        let mut is_ready = false;
        loop {
            let completing = job.completion().is_some();
            match self.copy(job, is_ready).await {
                Ok(CopyOutcome::GivenUp) => return Ok(CopyOutcome::GivenUp),
                Ok(CopyOutcome::All) => {}
                Err(error) => {
                    job.survive(error, self.policies).await?;
                    continue;
                }
            }
            job.note_sync(self.copier.is_in_sync());
            if !is_ready {
                is_ready = true;
                job.become_ready();
            }
            // A job that is paused completes when it goes on.
            let decided = job.until(|job| {
                let wanted = job.completion().is_some();
                job.is_cancelled() || wanted && !job.is_paused()
            });
            if !completing {
                select(pin!(decided), pin!(self.copier.wait_for_writes())).await;
            } else if !job.is_paused() {
                return Ok(CopyOutcome::All);
            } else {
                decided.await;
            }
            if job.is_cancelled() {
                return Ok(CopyOutcome::GivenUp);
            }
        }
    }

    async fn draw_near(&mut self) -> vellum::Result<()> {
        self.copier.draw_near().await
    }

    async fn conclude(&mut self, job: &Job) -> vellum::Result<()> {
        let held = {
            let given_up = job.until(Job::is_cancelled);
            match select(pin!(self.hold()), pin!(given_up)).await {
                Either::Left((held, _)) => held?,
                Either::Right(_) => {
                    return Err(Error::new(ErrorKind::Io, "mirror", "Operation canceled"));
                }
            }
        };
        // To its end, whoever wants it given up by now: the state file may say already where users are.
        let (held, begun) = held;
        self.lead(job, held).await?;
        job.note_hold(lane::now() - begun);
        Ok(())
    }

    async fn leave(mut self) {
        self.copier.handle().release();
        if self.watching {
            // There is nothing to do about it: the source goes on being watched in vain.
            let _ = self.job_nodes.nodes.insert_filter(&self.source, None).await;
        }
        if self.copier.end().await {
            drop(self.copier);
            self.job_nodes.leave().await;
            // It was described with a filter, say, whose users are on the target.
            return self.job_nodes.nodes.drop_unused(&[self.source]).await;
        }
        let copier = self.copier;
        let left = async move { copier.left_target().await };
        self.job_nodes.leave_before(&self.target, left);
    }
}
