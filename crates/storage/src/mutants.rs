//! Mutants, as mutation testing calls them: mends that a test takes out one by one, to show
//! that they would be missed. docs/TESTING.md lists what notices which.
//!
//! Invariant: without the feature `mutants`, which only the simulator's tests ask for, none is
//! ever out and asking costs nothing. With it each thread has its own, and at first none.

/// What is done wrong, as it once was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mutant {
    /// Users are led to another node before what they have written to the old one is durable.
    LeaveUnflushed,
    /// A node is opened anew without what it still has in memory.
    ReopenUnflushed,
    /// A header names another backing file before what was brought up from the old one is durable.
    RenameUnflushed,
    /// Users are led to the target of a mirror before it is durable.
    SwitchUnflushed,
    /// What is zeroed or discarded while a mirror runs is not noted for it.
    ForgetDirtyZeroes,
    /// The first error of several requests is told while the others still run.
    TellTheFirstError,
    /// A barrier that fails for lack of space is forgotten.
    ForgetFullBarriers,
    /// Links are taken to be drained while requests run.
    DrainNothing,
    /// Ways past a link stay open while it is drained.
    KeepShortcuts,
    /// Links pass writes on without FUA.
    IgnoreFua,
    /// Clusters are used again while somebody may still read what they held.
    ReuseWhileRead,
    /// What is done for an NBD client goes on though the client or its export is gone.
    WorkForTheGone,
    /// A batch of the write log is acknowledged before it is durable.
    AppendWithoutFlush,
    /// Requests that overlap are noted for the write log in any order.
    NoteInAnyOrder,
    /// Writes are noted that ran beside overlapping changes which are not.
    NoteBesideOthers,
    /// Records of the write log are given up before the image has what they hold.
    MoveTailUnflushed,
    /// After a flush that went past the write log its older records stay live.
    KeepRecordsLive,
    /// A flush of what is in place goes around the write log though older records of it are live.
    GoAroundLive,
    /// The image says that its write log counts only after the first record.
    MarkLate,
    /// Records of the write log name a superblock that may not become durable.
    NameSuperblockEarly,
    /// The write log is given up before what it held is durable in the image.
    ReplayUnflushed,
    /// A region with checksums that count is written to before its entry is durably gone.
    OpenRegionsLate,
    /// A flush of the NBD client knows of other connections only what somebody found lost.
    FlushOneConnection,
    /// Clusters that the mapping dropped are never committed for a request that needs room.
    KeepPendingFrees,
    /// What was reserved ahead is not returned when room runs out.
    KeepReserve,
    /// An open frees leaked clusters by a mapping that may be in the page cache only.
    FreeLeaksUnsynced,
    /// An image is changed before what was read of it is durable.
    ChangeUnsynced,
}

#[cfg(feature = "mutants")]
mod switch {
    use std::cell::Cell;

    use super::Mutant;

    thread_local! {
        static CURRENT: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Has the calling thread do something wrong from now on, or nothing any more.
    pub fn set(mutant: Option<Mutant>) {
        CURRENT.set(mutant);
    }

    /// Whether the calling thread is to do this wrong.
    pub fn is(mutant: Mutant) -> bool {
        CURRENT.get() == Some(mutant)
    }
}

#[cfg(feature = "mutants")]
pub use switch::{is, set};

/// Whether the calling thread is to do this wrong: never.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn is(_mutant: Mutant) -> bool {
    false
}

/// Whether this build has mutants. No program that people use may.
pub const ARE_BUILT_IN: bool = cfg!(feature = "mutants");
