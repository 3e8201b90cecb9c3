//! [`Effect`]: what a command changes, as far as clients that hang up and the state file are concerned.

/// What a command changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Nothing: it may be dropped at any await.
    Nothing,
    /// Nothing that the state file has; the end of a job is recorded by the job itself.
    Unrecorded,
    /// What the state file has.
    Recorded,
    /// The same, and its arguments are recorded: they begin its job again after a restart.
    BeginsJob,
}
