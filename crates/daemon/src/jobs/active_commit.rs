//! `block-commit` of an image that users write to: they go on with the base in the end.

use std::rc::Rc;

use vellum_graph::foreign;
use vellum_jobs::live::{DirtyMap, InitialSync, LiveMirror, MirrorPart, Tracker};

use super::failures::ErrorPolicies;
use super::mirroring::Mirroring;
use super::{Job, JobNodes, commit};

/// Prepares the commit of a chain, from its top to its base.
pub(crate) async fn prepare(
    mut job_nodes: JobNodes,
    job: &Rc<Job>,
    chain: &[String],
    policies: ErrorPolicies,
) -> vellum::Result<Mirroring> {
    let prepared = try_prepare(&mut job_nodes, job, chain).await;
    let (source, target, copier) = job_nodes.or_leave(prepared).await?;
    Ok(Mirroring {
        initial: InitialSync::Layers(commit::layers(&job_nodes.nodes, chain)),
        job_nodes,
        source,
        target,
        copier,
        zeroes_target: false,
        policies,
        watching: true,
        stands_on_source: false,
    })
}

async fn try_prepare(
    job_nodes: &mut JobNodes,
    job: &Rc<Job>,
    chain: &[String],
) -> vellum::Result<(String, String, LiveMirror)> {
    let (top, base) = commit::join_all(job_nodes, &job.settings, chain, commit::ACTIVE)?;
    job_nodes.open(&base).await?;
    // Until users go on with the base, or for good, it is the one that the image on top knows.
    foreign::keep_identity(&*job_nodes.nodes.device(&base)?);
    let source = job_nodes.nodes.device(&top)?;
    let grain_bytes = commit::grain_bytes(&job_nodes.nodes, &base)?;
    let dirty = DirtyMap::in_grains_of(grain_bytes, source.size_bytes());
    let tracker = Tracker::new(source, dirty.clone());
    let part = MirrorPart::Layers(commit::layers(&job_nodes.nodes, chain));
    let copier = commit::copier(job_nodes, (&top, &base), part, dirty).await?;
    let front = tracker.clone();
    job_nodes.nodes.insert_filter(&top, Some(front)).await?;
    job_nodes.show_filter(&job.settings, "mirror_top", &top, tracker)?;
    Ok((top, base, copier))
}
