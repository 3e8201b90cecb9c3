//! Jobs: what is being done to nodes in the background, from the command that begins it to
//! the one that dismisses it.
//!
//! A job goes through the states of [`vellum_jobs::job::Status`]; every change of state is
//! an event. What it does is a [`Work`].
//!
//! Invariant: the graph is changed by a job only while it holds [`Daemon::parts`](crate::Daemon::parts), so no
//! command meets a change half made.

pub(super) mod active_commit;
pub(super) mod amend;
pub(super) mod backup;
pub(super) mod commit;
pub(super) mod compact;
pub(super) mod create;
mod estimate;
pub(super) mod failures;
pub(super) mod fleece;
mod job;
mod job_nodes;
pub(crate) mod kinds;
mod list;
pub(super) mod mirror;
pub(super) mod mirroring;
mod progress;
mod run;
pub(super) mod scrub;
#[cfg_attr(
    not(feature = "http"),
    allow(dead_code, reason = "only HTTP looks at it")
)]
mod state;
pub(super) mod stream;

pub(crate) use job::{Completion, Job, Settings, Work};
pub(crate) use job_nodes::JobNodes;
pub(crate) use list::Jobs;
pub(crate) use run::start;
#[cfg_attr(
    not(feature = "http"),
    allow(unused_imports, reason = "only HTTP looks at it")
)]
pub(crate) use state::JobState;
