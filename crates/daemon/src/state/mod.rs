//! `--state FILE`: what there is, so that a daemon that was killed comes back with it.
//!
//! After each command that may have changed something, before it is answered, and when a job ends,
//! what there is is compared with what the file has, and written if it is another. The graph is told
//! as it is ([`Nodes::descriptions`](vellum_graph::Nodes::descriptions)); what nodes do not know (the arguments of objects, exports and
//! jobs) is noted when the command succeeds.
//!
//! Invariants:
//! - Users of a node go on with another one (a snapshot's overlay, the target of a mirror), or with one that
//!   a client has had opened anew, only when the file says so, and are held up until then: what they write
//!   from then on is found there.
//! - A client is told that something is done when the file has it. A job that has ended while the file could
//!   not be written is an exception: that is in the log, and the file is tried again until it says so.
//! - Nothing is written before everything was brought back, nor once the daemon takes away what there is, but
//!   that a job has ended well, or as its client wanted: it is to come back. A client is told that what it asks for then is lost.

mod anew;
mod content;
mod described;
mod file;
mod keeper;
mod lost;
mod named;
mod owner;
mod record;
mod recorder;
mod restore;
mod retry;
mod saved;

pub(crate) use content::ExportPiece;
pub(crate) use described::shows_the_same;
pub(crate) use recorder::Recorder;
pub use saved::SavedState;
