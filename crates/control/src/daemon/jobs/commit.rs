//! `block-commit` of layers that nobody writes to: the image above them stands on the base
//! in the end.

use std::rc::Rc;
use std::sync::Arc;

use crate::nodes::Changes;
use vellum::{Error, ErrorKind};
use vellum_jobs::live::{CopyOutcome, DirtyMap, LiveCommit, LiveCommitOptions};

use super::{Job, JobNodes, PARALLEL, ProgressReporter, Settings, Work};

/// A commit of layers in the middle of a chain.
pub(in crate::daemon) struct Commit {
    job_nodes: JobNodes,
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
    job_nodes: &mut JobNodes,
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
    job_nodes.nodes.check_no_job(base)?;
    job_nodes.join(settings, top, top_role, none, kept)?;
    for node in between {
        job_nodes.join(settings, node, "intermediate node", none, Changes::ALL)?;
    }
    job_nodes.join(settings, base, "base", Changes::CONTENT, Changes::ALL)?;
    Ok((top.clone(), base.clone()))
}

/// What copies a chain, from its top, into its base.
pub(super) async fn copier(
    job_nodes: &JobNodes,
    chain: &[String],
    dirty: Arc<DirtyMap>,
) -> vellum::Result<LiveCommit> {
    let [top, .., base] = chain else {
        return Err(no_base());
    };
    let (source, target) = (job_nodes.nodes.device(top)?, job_nodes.nodes.device(base)?);
    let options = LiveCommitOptions {
        layers: chain.len() as u32 - 1,
        parallel: PARALLEL,
    };
    LiveCommit::new(source, target, dirty, options).await
}

impl Commit {
    /// Prepares the commit of a chain, from its top to its base, below `overlay`.
    pub(in crate::daemon) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        overlay: String,
        chain: Vec<String>,
        backing_file: Option<String>,
    ) -> vellum::Result<Commit> {
        let prepared = Commit::try_prepare(&mut job_nodes, job, &overlay, &chain).await;
        let (commit, size_bytes) = job_nodes.or_leave(prepared).await?;
        Ok(Commit {
            job_nodes,
            overlay,
            chain,
            backing_file,
            commit,
            size_bytes,
        })
    }

    async fn try_prepare(
        job_nodes: &mut JobNodes,
        job: &Rc<Job>,
        overlay: &str,
        chain: &[String],
    ) -> vellum::Result<(LiveCommit, u64)> {
        let none = Changes::NONE;
        job_nodes.join(&job.settings, overlay, "overlay", none, none)?;
        let (top, base) = join_all(job_nodes, &job.settings, chain, "intermediate node")?;
        job_nodes.open(&base).await?;
        job_nodes.open(overlay).await?;
        let size_bytes = job_nodes.nodes.device(&top)?.size_bytes();
        // Nobody writes, so nothing becomes dirty.
        let commit = copier(job_nodes, chain, DirtyMap::new(0)).await?;
        Ok((commit, size_bytes))
    }
}

impl Work for Commit {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        job.set_progress(0, self.size_bytes);
        let mut reporter = ProgressReporter { job, exact: false };
        let copied = self.commit.copy_all(&job.control, &mut reporter).await;
        let copied = copied.map_err(|error| job.report_failure(error))?;
        if copied == CopyOutcome::All {
            job.set_progress(self.size_bytes, self.size_bytes);
        }
        Ok(copied)
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        self.commit.finish().await?;
        let base = self.chain.last().map(String::as_str);
        let file = self.backing_file.take();
        self.job_nodes.nodes.rebase(&self.overlay, base, file).await
    }

    async fn leave(mut self) {
        drop(self.commit);
        self.job_nodes.leave().await;
        self.job_nodes.nodes.drop_unused(&self.chain).await;
    }
}
