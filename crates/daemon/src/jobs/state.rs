//! [`JobState`]: a job at one moment, for other threads.

use super::Job;

/// A job, as far as it is to be looked at.
#[derive(Debug, Clone)]
pub(crate) struct JobState {
    pub(crate) id: String,
    /// `backup`, `mirror` and so on.
    pub(crate) kind: &'static str,
    /// QMP's name of its state.
    pub(crate) status: &'static str,
    pub(crate) done_bytes: u64,
    /// Bytes to do, with those that are done.
    pub(crate) total_bytes: u64,
    /// 0: it is not limited.
    pub(crate) bytes_per_second: u64,
    /// How long it will still run, as far as that can be said.
    pub(crate) seconds_left: Option<u64>,
}

impl Job {
    /// How far it is now.
    pub(crate) fn state(&self) -> JobState {
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
