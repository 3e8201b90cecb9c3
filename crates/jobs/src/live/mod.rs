//! Jobs on devices that are in use: what guests write meanwhile is not lost.
//!
//! [`LiveMirror`] brings what a device shows into another one, and keeps it there while more is
//! written, until that one takes its place; or what an image holds into a layer below it, which
//! is a commit. [`LiveStream`] brings into an image what the layers below it hold. Both need the
//! users of the image to go through a device of theirs ([`Tracker`], [`vellum::nodes::CopyOnRead`]) from before the job
//! begins; [`vellum::nodes::Link`] puts it there.
//!
//! [`LiveBackup`] copies what a device shows at one moment to another device, while more is
//! written to the first: its users go through a [`CopyBeforeWrite`] from that moment on.
//!
//! [`in_steps()`] is for what has no guest to look after: it only keeps to the controls of its job.
//!
//! Invariants of a mirror, and of a commit:
//! - A range is called dirty once a write to it is complete, or has failed, and before its
//!   user hears of that. So when no user's request runs, everything is either in the
//!   target or called dirty.
//! - No range is copied twice at a time: who copies a range holds it. What an older copy
//!   wrote never hides a newer one.
//! - It ends, however fast users write: where rounds make no headway, users wait until what
//!   they write is copied too, and what is dirty only becomes less. They do not where the
//!   target has answered to nothing for two seconds, unless somebody asked for that. When users are held up for the last round, they are so for a limited time, and
//!   one more round is made beside them if that was too short.
//! - The image itself is never changed. Whatever the target holds, the image shows what it
//!   did, on top of it, as long as it is there: a job that is cut off at any moment, by
//!   cancelling or by a power cut, costs nothing but its work. Only when users no longer
//!   see the image may it go, and they do so after the target has everything, durably.
//!
//! A cut therefore leaves, before the exchange, an image whose backing file holds some of
//! the image's own bytes already (each of these is hidden by the image); after it, a
//! backing file that is whole.

mod backup;
#[cfg(test)]
mod blocked_device;
mod copy_before_write;
mod dirty;
mod given_up;
mod in_steps;
mod live_mirror;
mod mirror;
mod parallel;
mod stream;
mod tracker;

pub use backup::LiveBackup;
pub use copy_before_write::{
    CopyBeforeWrite, CopyBeforeWriteOptions, FleeceOptions, Moment, OnCopyError, WhenFull,
};
pub use dirty::{DirtyMap, DirtyRanges};
pub use in_steps::in_steps;
pub use live_mirror::{InitialSync, LiveMirror, LiveMirrorOptions, MirrorHandle, MirrorPart};
pub use parallel::CopyOutcome;
pub use stream::LiveStream;
pub use tracker::Tracker;
