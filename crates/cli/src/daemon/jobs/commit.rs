//! `block-commit` of layers that nobody writes to: the image above them stands on the base
//! in the end.

use std::rc::Rc;

use vellum::{Error, ErrorKind};
use vellum_control::nodes::Changes;
use vellum_jobs::live::{Copied, DirtyMap, LiveCommit, LiveCommitOptions};

use super::active_commit::PARALLEL;
use super::{Job, Settings, Stake, Teller, Work};

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

/// Uses all nodes of a chain for a commit; returns its top and its base.
pub(super) fn join_all(
    stake: &mut Stake,
    settings: &Settings,
    chain: &[String],
    top_role: &str,
) -> vellum::Result<(String, String)> {
    let [top, between @ .., base] = chain else {
        let message = "the chain has no base";
        return Err(Error::new(ErrorKind::InvalidArgument, "commit", message));
    };
    let none = Changes::NONE;
    // Users go on writing to the active layer.
    let kept = match top_role == ACTIVE {
        true => Changes::SIZE,
        false => Changes::ALL,
    };
    stake.join(settings, top, top_role, none, kept)?;
    for node in between {
        stake.join(settings, node, "intermediate node", none, Changes::ALL)?;
    }
    stake.join(settings, base, "base", Changes::CONTENT, Changes::ALL)?;
    Ok((top.clone(), base.clone()))
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
        match Commit::try_prepare(&mut stake, job, &overlay, &chain).await {
            Ok((commit, size_bytes)) => Ok(Commit {
                stake,
                overlay,
                chain,
                backing_file,
                commit,
                size_bytes,
            }),
            Err(error) => {
                stake.leave().await;
                Err(error)
            }
        }
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
        let (source, target) = (stake.nodes.device(&top)?, stake.nodes.device(&base)?);
        let size_bytes = source.size_bytes();
        let options = LiveCommitOptions {
            layers: chain.len() as u32 - 1,
            parallel: PARALLEL,
            rate_limit_bytes: job.speed_bytes(),
        };
        // Nobody writes, so nothing becomes dirty.
        let dirty = DirtyMap::new(0);
        let commit = LiveCommit::new(source, target, dirty, options).await?;
        Ok((commit, size_bytes))
    }
}

impl Work for Commit {
    async fn run(&mut self, job: &Job) -> vellum::Result<Copied> {
        job.set_progress(0, self.size_bytes);
        let mut teller = Teller { job, exact: false };
        let copied = self.commit.copy_all(&job.reins, &mut teller).await;
        let copied = copied.map_err(|error| error.cause)?;
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

    async fn leave(&mut self) {
        self.stake.leave().await;
        self.stake.nodes.drop_unused(&self.chain).await;
    }
}
