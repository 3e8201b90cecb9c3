//! Audit: whether an image that nobody vouches for is safe to open.
//!
//! Three questions: which other files does it ask for (or could it make a program
//! open), does it keep the limits and agree with itself, and is it what it claims to
//! be, and nothing else besides? What the [`Policy`] does not allow is a reason to
//! reject the image.
//!
//! Invariants:
//! - No file is opened: everything is read from the one storage that was handed over.
//!   Names are resolved by looking at links only, and only where the policy asks for it.
//! - Nothing is written.
//! - Memory stays below [`Policy::max_memory_bytes`] and a little (for formats of other programs, within
//!   the budgets that their tables have), time below [`Policy::max_time`] and one read, whatever the
//!   bytes say.

mod foreign;
mod qcow2;
mod reference;
mod report;
mod signature;

pub use reference::{Form, Reference, Role};
pub(crate) use report::{Audit, MAX_TOLD, read};
pub use report::{Checked, Facts, Finding, Level, Permission, Policy, Report, audit};
pub use signature::Signature;
