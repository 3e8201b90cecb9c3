//! `blockdev-mirror` and `drive-mirror`: what a node shows, in another one that users may go
//! on with.

use std::rc::Rc;

use vellum::{Error, ErrorKind};
use vellum_graph::live::{Changes, Keeps};
use vellum_jobs::live::{
    DirtyMap, InitialSync, LiveMirror, LiveMirrorOptions, MirrorPart, Tracker,
};

use super::failures::ErrorPolicies;
use super::mirroring::Mirroring;
use super::{Job, JobNodes, commit};

/// What is copied of what is there when the job begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sync {
    /// All that the source shows.
    Full,
    /// What it holds itself.
    Top,
    /// Nothing.
    None,
}

/// What a mirror is about.
#[derive(Debug, Clone)]
pub(crate) struct Mirrored {
    pub(crate) source: String,
    pub(crate) target: String,
    pub(crate) sync: Sync,
    /// The target does not read as zeroes yet.
    pub(crate) zero: bool,
    /// The target is there for the job alone.
    pub(crate) owns_target: bool,
    /// The target stands on the source once users go on with it: it has only what they write.
    pub(crate) stands_on_source: bool,
    pub(crate) granularity_bytes: Option<u64>,
    pub(crate) parallel: usize,
    pub(crate) unmap: bool,
    pub(crate) write_blocking: bool,
    pub(crate) policies: ErrorPolicies,
}

/// Prepares a mirror.
pub(crate) async fn prepare(
    mut job_nodes: JobNodes,
    job: &Rc<Job>,
    what: Mirrored,
) -> vellum::Result<Mirroring> {
    let prepared = try_prepare(&mut job_nodes, job, &what).await;
    let copier = job_nodes.or_leave(prepared).await?;
    if what.owns_target {
        job_nodes.own(&what.target);
    }
    let zeroes_target =
        what.sync == Sync::Full && what.zero && job_nodes.nodes.gives_space_back(&what.target);
    let initial = match what.sync {
        Sync::None => InitialSync::Nothing,
        Sync::Top => InitialSync::Layers(1),
        Sync::Full if what.zero && !zeroes_target => InitialSync::Everything,
        Sync::Full => InitialSync::Present,
    };
    Ok(Mirroring {
        job_nodes,
        source: what.source,
        target: what.target,
        copier,
        initial,
        zeroes_target,
        policies: what.policies,
        watching: true,
        stands_on_source: what.stands_on_source,
    })
}

async fn try_prepare(
    job_nodes: &mut JobNodes,
    job: &Rc<Job>,
    what: &Mirrored,
) -> vellum::Result<LiveMirror> {
    let (none, size) = (Changes::NONE, Changes::SIZE);
    let settings = &job.settings;
    job_nodes.join(settings, &what.source, "main node", none, size)?;
    let (content, all) = (Changes::CONTENT, Changes::ALL);
    job_nodes.join(settings, &what.target, "target", content, all)?;
    job_nodes.keep_below(&what.target, Keeps::All)?;
    let nodes = job_nodes.nodes.clone();
    let source = nodes.device(&what.source)?;
    let target = job_nodes.way_to(&what.target)?;
    if target.info().read_only {
        let message = "Block node is read-only";
        return Err(Error::new(ErrorKind::InvalidArgument, "mirror", message).target(&*what.target));
    }
    let usual = commit::grain_bytes(&nodes, &what.target)?;
    let grain_bytes = match what.granularity_bytes {
        // What is around a part of a cluster would be missing until the target stands on it.
        Some(bytes) if what.stands_on_source => bytes.max(usual),
        Some(bytes) => bytes,
        None => usual,
    };
    let dirty = DirtyMap::in_grains_of(grain_bytes, source.size_bytes());
    let tracker = Tracker::new(source.clone(), dirty.clone());
    let options = LiveMirrorOptions {
        part: MirrorPart::All,
        parallel: what.parallel,
        unmap: what.unmap,
        write_blocking: what.write_blocking,
    };
    let copier = LiveMirror::new(source, target, dirty, options).await?;
    let front = tracker.clone();
    nodes.insert_filter(&what.source, Some(front)).await?;
    job_nodes.show_filter(settings, "mirror_top", &what.source, tracker)?;
    Ok(copier)
}
