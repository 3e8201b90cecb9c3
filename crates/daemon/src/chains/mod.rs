//! Policies for backing chains: a disk has at most so many layers, or so much in the overlays that were
//! put over it. What is beyond is committed or streamed in the background.
//!
//! Now and then each disk with a policy is looked at, and one job begun where it is beyond: an
//! ordinary `block-commit` or `block-stream` called `chain-DISK`, which clients see and may cancel, and
//! which the state file knows.
//!
//! Invariants:
//! - Written is only to images above the disk's own, and to that, and only if nobody but this chain
//!   uses them: what they stand on (a golden image) is only read.
//! - A disk whose layers a job uses gets no other one.
//! - While nothing changes that a policy depends on, no chain is looked at.
//! - What has not helped is tried again later and later.

mod decide;
mod keep;
mod look;
mod policies;

pub(crate) use decide::Policy;
pub(crate) use keep::{query, set, take};
pub(crate) use policies::ChainPolicies;
