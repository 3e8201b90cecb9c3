//! `block-commit` of layers that nobody writes to: the image above them stands on the base
//! in the end.

use std::rc::Rc;
use std::sync::Arc;

use crate::nodes::Changes;
use vellum::{Error, ErrorKind};
use vellum_jobs::live::{Copied, DirtyMap, LiveCommit, LiveCommitOptions};

use super::{Job, PARALLEL, Settings, Stake, Teller, Work};

/// A commit of layers in the middle of a chain.
pub(in crate::daemon) struct Commit {
    stake: Stake,
    /// The image above.
    overlay: String,
    /// What is committed, and in the end the base.
    chain: Vec<String>,
    /// What the image above is to call the base.
    backing_file: Option<String>,
    commit: LiveCommit,
    size_bytes: u64,
}

/// What a layer is that users write to.
pub(super) const ACTIVE: &str = "main node";

fn no_base() -> Error {
    let message = "the chain has no base";
    Error::new(ErrorKind::InvalidArgument, "commit", message)
}

/// Uses all nodes of a chain for a commit; returns its top and its base.
pub(super) fn join_all(
    stake: &mut Stake,
    settings: &Settings,
    chain: &[String],
    top_role: &str,
) -> vellum::Result<(String, String)> {
    let [top, between @ .., base] = chain else {
        return Err(no_base());
    };
    let none = Changes::NONE;
    // Users go on writing to the active layer.
    let kept = match top_role == ACTIVE {
        true => Changes::SIZE,
        false => Changes::ALL,
    };
    // What watches the base would not see what is written to it here.
    stake.nodes.check_no_job(base)?;
    stake.join(settings, top, top_role, none, kept)?;
    for node in between {
        stake.join(settings, node, "intermediate node", none, Changes::ALL)?;
    }
    stake.join(settings, base, "base", Changes::CONTENT, Changes::ALL)?;
    Ok((top.clone(), base.clone()))
}

/// What copies a chain, from its top, into its base.
pub(super) async fn copier(
    stake: &Stake,
    chain: &[String],
    dirty: Arc<DirtyMap>,
) -> vellum::Result<LiveCommit> {
    let [top, .., base] = chain else {
        return Err(no_base());
    };
    let (source, target) = (stake.nodes.device(top)?, stake.nodes.device(base)?);
    let options = LiveCommitOptions {
        layers: chain.len() as u32 - 1,
        parallel: PARALLEL,
    };
    LiveCommit::new(source, target, dirty, options).await
}

impl Commit {
    /// Prepares the commit of a chain, from its top to its base, below `overlay`.
    pub(in crate::daemon) async fn prepare(
        mut stake: Stake,
        job: &Rc<Job>,
        overlay: String,
        chain: Vec<String>,
        backing_file: Option<String>,
    ) -> vellum::Result<Commit> {
        let prepared = Commit::try_prepare(&mut stake, job, &overlay, &chain).await;
        let (commit, size_bytes) = stake.or_leave(prepared).await?;
        Ok(Commit {
            stake,
            overlay,
            chain,
            backing_file,
            commit,
            size_bytes,
        })
    }

    async fn try_prepare(
        stake: &mut Stake,
        job: &Rc<Job>,
        overlay: &str,
        chain: &[String],
    ) -> vellum::Result<(LiveCommit, u64)> {
        let none = Changes::NONE;
        stake.join(&job.settings, overlay, "overlay", none, none)?;
        let (top, base) = join_all(stake, &job.settings, chain, "intermediate node")?;
        stake.open(&base).await?;
        stake.open(overlay).await?;
        let size_bytes = stake.nodes.device(&top)?.size_bytes();
        // Nobody writes, so nothing becomes dirty.
        let commit = copier(stake, chain, DirtyMap::new(0)).await?;
        Ok((commit, size_bytes))
    }
}

impl Work for Commit {
    async fn run(&mut self, job: &Job) -> vellum::Result<Copied> {
        job.set_progress(0, self.size_bytes);
        let mut teller = Teller { job, exact: false };
        let copied = self.commit.copy_all(&job.reins, &mut teller).await;
        let copied = copied.map_err(|error| job.tell_failure(error))?;
        if copied == Copied::All {
            job.set_progress(self.size_bytes, self.size_bytes);
        }
        Ok(copied)
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        self.commit.finish().await?;
        let base = self.chain.last().map(String::as_str);
        let file = self.backing_file.take();
        self.stake.nodes.rebase(&self.overlay, base, file).await
    }

    async fn leave(mut self) {
        drop(self.commit);
        self.stake.leave().await;
        self.stake.nodes.drop_unused(&self.chain).await;
    }
}
