//! `block-commit` of layers that nobody writes to: the image above them stands on the base
//! in the end.

use std::rc::Rc;
use std::sync::Arc;

use vellum::{Error, ErrorKind};
use vellum_graph::Nodes;
use vellum_graph::live::{BETWEEN, Changes, OVERLAY, User};
use vellum_jobs::live::{
    CopyOutcome, DirtyMap, InitialSync, LiveMirror, LiveMirrorOptions, MirrorPart,
};

use super::failures::ErrorPolicies;
use super::job::PARALLEL;
use super::{Job, JobNodes, Settings, Work};

/// What is committed where.
#[derive(Debug)]
pub(crate) struct Committed {
    /// The image above.
    pub(crate) overlay: String,
    /// What stands on the top: that image, or a filter that it stands on by way of others.
    pub(crate) above: String,
    /// What is committed, and in the end the base.
    pub(crate) chain: Vec<String>,
    /// What the image above is to call the base.
    pub(crate) backing_file: Option<String>,
}

/// A commit of layers in the middle of a chain.
pub(crate) struct Commit {
    job_nodes: JobNodes,
    user: User,
    what: Committed,
    copier: LiveMirror,
    size_bytes: u64,
    policies: ErrorPolicies,
}

/// What a filter is to a commit that stands on its top.
const FILTER: &str = "filter over the top";

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
    job_nodes.join(settings, top, top_role, none, kept)?;
    for node in between {
        job_nodes.join(settings, node, BETWEEN, none, Changes::ALL)?;
    }
    job_nodes.join(settings, base, "base", Changes::CONTENT, Changes::ALL)?;
    Ok((top.clone(), base.clone()))
}

/// How many layers of a chain are committed: all but the base, and but for filters.
pub(super) fn layers(nodes: &Nodes, chain: &[String]) -> u32 {
    let above_base = &chain[..chain.len() - 1];
    let layers = above_base.iter().filter(|node| !nodes.is_filter(node));
    layers.count() as u32
}

/// The grain in which is noted what has to be copied to a node, in bytes: QEMU's.
///
/// # Errors
/// If there is no such node.
pub(super) fn grain_bytes(nodes: &Nodes, target: &str) -> vellum::Result<u64> {
    let cluster_bytes = nodes.device(target)?.info().cluster_size_bytes;
    Ok(cluster_bytes.map_or(64 << 10, |bytes| bytes.clamp(4 << 10, 64 << 10)))
}

/// What copies one node into another one.
pub(super) async fn copier(
    job_nodes: &JobNodes,
    (top, base): (&str, &str),
    part: MirrorPart,
    dirty: Arc<DirtyMap>,
) -> vellum::Result<LiveMirror> {
    let (source, target) = (job_nodes.way_to(top)?, job_nodes.way_to(base)?);
    let options = LiveMirrorOptions {
        part,
        parallel: PARALLEL,
        unmap: true,
        write_blocking: false,
    };
    LiveMirror::new(source, target, dirty, options).await
}

impl Commit {
    /// Prepares the commit of a chain, from its top to its base, below `overlay`.
    pub(crate) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        what: Committed,
        policies: ErrorPolicies,
    ) -> vellum::Result<Commit> {
        let prepared = Commit::try_prepare(&mut job_nodes, job, &what).await;
        let (copier, size_bytes) = job_nodes.or_leave(prepared).await?;
        let id = job.settings.id.clone();
        let kind = job.settings.kind;
        Ok(Commit {
            job_nodes,
            user: User::Job { id, kind },
            what,
            copier,
            size_bytes,
            policies,
        })
    }

    async fn try_prepare(
        job_nodes: &mut JobNodes,
        job: &Rc<Job>,
        what: &Committed,
    ) -> vellum::Result<(LiveMirror, u64)> {
        let (overlay, chain) = (&what.overlay, &what.chain);
        let none = Changes::NONE;
        job_nodes.join(&job.settings, overlay, OVERLAY, none, none)?;
        if what.above != *overlay {
            job_nodes.join(&job.settings, &what.above, FILTER, none, none)?;
        }
        let (top, base) = join_all(job_nodes, &job.settings, chain, BETWEEN)?;
        job_nodes.open(&base).await?;
        job_nodes.open(overlay).await?;
        let device = job_nodes.nodes.device(&top)?;
        let size_bytes = device.size_bytes();
        let dirty = DirtyMap::in_grains_of(grain_bytes(&job_nodes.nodes, &base)?, size_bytes);
        let part = MirrorPart::Layers(layers(&job_nodes.nodes, chain));
        let copier = copier(job_nodes, (&top, &base), part, dirty).await?;
        job_nodes.show_filter(&job.settings, "commit_top", &top, device)?;
        Ok((copier, size_bytes))
    }
}

impl Work for Commit {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        job.set_progress(0, self.size_bytes);
        let mut begun = false;
        loop {
            let done = match begun {
                false => {
                    let initial =
                        InitialSync::Layers(layers(&self.job_nodes.nodes, &self.what.chain));
                    self.copier.begin(initial, &job.control).await
                }
                true => self.copier.catch_up(&job.control).await,
            };
            match done {
                Ok(CopyOutcome::All) if !begun => begun = true,
                Ok(CopyOutcome::All) => break,
                Ok(CopyOutcome::GivenUp) => return Ok(CopyOutcome::GivenUp),
                Err(error) => job.survive(error, self.policies).await?,
            }
        }
        job.set_progress(self.size_bytes, self.size_bytes);
        Ok(CopyOutcome::All)
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        self.copier.finish().await?;
        let base = self.what.chain.last().map(String::as_str);
        let file = self.what.backing_file.take();
        let nodes = self.job_nodes.nodes.clone();
        // A stream may have put another image over the top meanwhile. Until all of them have left
        // that, it shows what it did: each may stand on either.
        for overlay in nodes.overlays_of_job(&self.user) {
            self.job_nodes.open(&overlay).await?;
            let is_filtered = overlay == self.what.overlay && overlay != self.what.above;
            match base.filter(|_| is_filtered) {
                Some(base) => {
                    let between = (&*overlay, &*self.what.above);
                    nodes.rebase_below(between, base, file.clone()).await?;
                }
                None => nodes.rebase(&overlay, base, file.clone()).await?,
            }
        }
        Ok(())
    }

    async fn leave(mut self) {
        if !self.copier.end().await {
            // Nobody may have the base while something is on its way to it.
            self.copier.left_target().await;
        }
        drop(self.copier);
        self.job_nodes.nodes.leave_all(&self.user);
        self.job_nodes.leave().await;
        let mut unused = vec![self.what.overlay];
        unused.append(&mut self.what.chain);
        self.job_nodes.nodes.drop_unused(&unused).await;
    }
}
