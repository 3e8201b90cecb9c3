//! The states of a job, and what may be asked of it in each: QEMU's, by QEMU's names.

/// Where a job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// It exists, and has not begun.
    Created,
    /// It works.
    Running,
    /// It was held up while it worked.
    Paused,
    /// Its result is there, and kept up to date until it is to complete.
    Ready,
    /// It was held up while it was ready.
    Standby,
    /// Its work is done.
    Waiting,
    /// It waits to be finalized.
    Pending,
    /// It undoes what it has begun.
    Aborting,
    /// It is over, and waits to be dismissed.
    Concluded,
    /// It is gone.
    Null,
}

/// What may be asked of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verb {
    /// Give up.
    Cancel,
    /// Hold up.
    Pause,
    /// Go on.
    Resume,
    /// Put the result in force.
    Complete,
    /// Do what was waited with.
    Finalize,
    /// Be forgotten.
    Dismiss,
    /// Be faster or slower.
    SetSpeed,
    /// Work in another way.
    Change,
}

impl Status {
    /// Its name in QMP.
    pub fn name(self) -> &'static str {
        match self {
            Status::Created => "created",
            Status::Running => "running",
            Status::Paused => "paused",
            Status::Ready => "ready",
            Status::Standby => "standby",
            Status::Waiting => "waiting",
            Status::Pending => "pending",
            Status::Aborting => "aborting",
            Status::Concluded => "concluded",
            Status::Null => "null",
        }
    }

    /// Whether a verb can be said to a job in this state.
    pub fn accepts(self, verb: Verb) -> bool {
        use Status::{Created, Paused, Pending, Ready, Running, Standby, Waiting};
        match verb {
            Verb::Cancel => matches!(
                self,
                Created | Running | Paused | Ready | Standby | Waiting | Pending
            ),
            Verb::Pause | Verb::Resume | Verb::SetSpeed => {
                matches!(self, Created | Running | Paused | Ready | Standby)
            }
            Verb::Change => matches!(self, Running | Paused | Ready | Standby),
            Verb::Complete => matches!(self, Ready | Standby),
            Verb::Finalize => self == Pending,
            Verb::Dismiss => self == Status::Concluded,
        }
    }
}

impl Verb {
    /// Its name in QMP.
    pub fn name(self) -> &'static str {
        match self {
            Verb::Cancel => "cancel",
            Verb::Pause => "pause",
            Verb::Resume => "resume",
            Verb::Complete => "complete",
            Verb::Finalize => "finalize",
            Verb::Dismiss => "dismiss",
            Verb::SetSpeed => "set-speed",
            Verb::Change => "change",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_over_can_only_be_dismissed() {
        let verbs = [
            Verb::Cancel,
            Verb::Pause,
            Verb::Resume,
            Verb::Complete,
            Verb::Finalize,
            Verb::Dismiss,
            Verb::SetSpeed,
        ];
        let accepted = |status: Status| -> Vec<&str> {
            let verbs = verbs.iter().filter(|verb| status.accepts(**verb));
            verbs.map(|verb| verb.name()).collect()
        };
        assert_eq!(accepted(Status::Concluded), ["dismiss"]);
        assert_eq!(accepted(Status::Pending), ["cancel", "finalize"]);
        assert_eq!(
            accepted(Status::Ready),
            ["cancel", "pause", "resume", "complete", "set-speed"]
        );
        assert!(accepted(Status::Aborting).is_empty() && accepted(Status::Null).is_empty());
    }
}
