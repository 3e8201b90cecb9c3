//! [`JobControl`]: what a running job is told to do, and how fast it may be.

use std::sync::Arc;

use event_listener::Event;
use parking_lot::Mutex;

use crate::Speed;

/// What a job is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum JobCommand {
    /// Go on.
    #[default]
    Run,
    /// Begin nothing until another command comes.
    Pause,
    /// Give up. Later commands are ignored.
    Cancel,
}

/// The controls of a job, which the job looks at whenever it can stop.
#[derive(Debug, Default)]
pub struct JobControl {
    command: Mutex<JobCommand>,
    speed: Arc<Speed>,
    changed: Event,
}

impl JobControl {
    /// The controls of a job that is to run.
    pub fn new() -> Self {
        Self::default()
    }

    /// The command that holds now.
    pub fn command(&self) -> JobCommand {
        *self.command.lock()
    }

    /// How fast the job may be; as fast as it can, unless somebody has set that.
    pub fn speed(&self) -> &Arc<Speed> {
        &self.speed
    }

    /// Gives another command.
    pub fn set(&self, command: JobCommand) {
        let mut old = self.command.lock();
        if *old != JobCommand::Cancel {
            *old = command;
        }
        drop(old);
        self.changed.notify(usize::MAX);
    }

    /// Waits until the command meets a condition.
    pub async fn wait_until(&self, is_met: impl Fn(JobCommand) -> bool) {
        loop {
            let changed = self.changed.listen();
            if is_met(self.command()) {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cancelling_cannot_be_taken_back() {
        let control = JobControl::new();
        control.set(JobCommand::Pause);
        control.set(JobCommand::Cancel);
        control.set(JobCommand::Run);
        assert_eq!(control.command(), JobCommand::Cancel);
        vellum_io::lane::block_on(control.wait_until(|command| command == JobCommand::Cancel));
    }
}
