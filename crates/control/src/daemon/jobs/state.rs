//! [`JobState`]: a job at one moment, for other threads.

use super::Job;

/// A job, as far as it is to be looked at.
#[derive(Debug, Clone)]
pub(in crate::daemon) struct JobState {
    pub(in crate::daemon) id: String,
    /// `backup`, `mirror` and so on.
    pub(in crate::daemon) kind: &'static str,
    /// QMP's name of its state.
    pub(in crate::daemon) status: &'static str,
    pub(in crate::daemon) done_bytes: u64,
    /// Bytes to do, with those that are done.
    pub(in crate::daemon) total_bytes: u64,
    /// 0: it is not limited.
    pub(in crate::daemon) bytes_per_second: u64,
    /// How long it will still run, as far as that can be said.
    pub(in crate::daemon) seconds_left: Option<u64>,
}

impl Job {
    /// How far it is now.
    pub(in crate::daemon) fn state(&self) -> JobState {
        let (done_bytes, total_bytes) = self.progress();
        JobState {
            id: self.settings.id.clone(),
            kind: self.settings.kind,
            status: self.status().name(),
            done_bytes,
            total_bytes,
            bytes_per_second: self.control.speed().get(),
            seconds_left: self.seconds_left(),
        }
    }
}
