//! What a job does about requests that fail.

use std::time::Duration;

use serde_json::json;
use vellum::{Error, ErrorKind};
use vellum_io::lane::sleep;
use vellum_jobs::copy::{CopyError, Step};
use vellum_jobs::job::JobCommand;

use super::Job;

/// So long does a job wait before it tries again what failed.
const RETRY: Duration = Duration::from_millis(100);

/// What is to be done about a failure: QEMU's policies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum OnError {
    /// The job fails.
    #[default]
    Report,
    /// It tries again.
    Ignore,
    /// It waits for space if there is none, and fails otherwise.
    Enospc,
    /// It waits until it is resumed.
    Stop,
}

/// What is to be done about failures of either side.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ErrorPolicies {
    pub(crate) source: OnError,
    pub(crate) target: OnError,
}

/// What is done about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// The job fails.
    Report,
    /// It goes on.
    Ignore,
    /// It waits until it is resumed.
    Stop,
}

impl OnError {
    fn action(self, error: &Error) -> Action {
        match self {
            OnError::Report => Action::Report,
            OnError::Ignore => Action::Ignore,
            OnError::Stop => Action::Stop,
            OnError::Enospc if error.kind() == ErrorKind::NoSpace => Action::Stop,
            OnError::Enospc => Action::Report,
        }
    }
}

impl Action {
    fn name(self) -> &'static str {
        match self {
            Action::Report => "report",
            Action::Ignore => "ignore",
            Action::Stop => "stop",
        }
    }
}

impl Job {
    /// Reports that a copy failed, and does what the policies say about that. It returns when
    /// what failed is to be tried again.
    ///
    /// # Errors
    /// Why it failed, if the job fails of it.
    pub(super) async fn survive(
        &self,
        error: CopyError,
        policies: ErrorPolicies,
    ) -> vellum::Result<()> {
        match self.meet(&error, policies) {
            Action::Report => return Err(error.cause),
            Action::Ignore => sleep(RETRY).await,
            Action::Stop => self.wait_for_resume().await,
        }
        Ok(())
    }

    /// Waits while the job is held up.
    pub(super) async fn wait_for_resume(&self) {
        self.control
            .wait_until(|command| command != JobCommand::Pause)
            .await;
    }

    /// Reports that a request failed; what the policies say about that. The job is held up where
    /// it is to be.
    pub(super) fn meet(&self, error: &CopyError, policies: ErrorPolicies) -> Action {
        let (operation, policy) = match error.step {
            Step::Write => ("write", policies.target),
            Step::Status | Step::Read | Step::ReadShown => ("read", policies.source),
        };
        let action = policy.action(&error.cause);
        let data = json!({
            "device": self.settings.id,
            "operation": operation,
            "action": action.name(),
        });
        self.events.emit("BLOCK_JOB_ERROR", data);
        if action == Action::Stop {
            self.io_status.set(match error.cause.kind() {
                ErrorKind::NoSpace => "nospace",
                _ => "failed",
            });
            if self.control.command() == JobCommand::Run {
                self.pause();
            }
        }
        action
    }

    /// As [`Job::survive`], where no policy helps.
    pub(super) fn report_failure(&self, error: CopyError) -> Error {
        self.meet(&error, ErrorPolicies::default());
        error.cause
    }
}
