//! [`ProgressReporter`]: how far a copy is, as a job tells it.

use vellum_jobs::copy::Observer;

use super::Job;

/// Tells the job how far a copy is.
pub(super) struct ProgressReporter<'a> {
    pub(super) job: &'a Job,
    /// Only what has to be written counts, not how far that is in the image.
    pub(super) exact: bool,
}

impl Observer for ProgressReporter<'_> {
    fn wants_progress(&self) -> bool {
        self.exact
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        self.job.set_progress(done_bytes, total_bytes);
    }
}
