//! [`Moment`]: what the daemon's own lane alone can say of it. The rest is found by whoever asks.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use crate::daemon::Daemon;
use crate::export::CountedExport;
use crate::jobs::JobState;
use crate::space::{SpaceSurvey, Warning};

/// The daemon at one moment.
#[derive(Debug)]
pub(super) struct Moment {
    pub(super) uptime: Duration,
    pub(super) exports: Vec<CountedExport>,
    /// The oldest first.
    pub(super) jobs: Vec<JobState>,
    /// File systems that are watched.
    pub(super) warnings: Vec<Warning>,
    /// The last surveys of space, by the names of nodes; some may be gone.
    pub(super) surveys: BTreeMap<String, SpaceSurvey>,
}

impl Moment {
    /// What is so now. Waits for nothing.
    pub(super) fn now(daemon: &Rc<Daemon>) -> Moment {
        let jobs = daemon.jobs.list();
        Moment {
            uptime: daemon.begun.elapsed(),
            exports: daemon.counted.list(&daemon.nodes),
            jobs: jobs.iter().rev().map(|job| job.state()).collect(),
            warnings: daemon.space.warnings(),
            surveys: daemon.surveys.all(),
        }
    }
}
