//! Space: where an image lies, and what it needs at most.
//!
//! A scenario may give the image a place of fixed length, or a quota of its file system, that
//! shrinks and grows. Then these rules hold beside all others:
//!
//! 1. ENOSPC that could be avoided is a failure (`Ledger`). In a place at least as long as `measure`
//!    reports for the full image (`full_bytes`) no request may get it.
//! 2. Allocation is compact, and a crash leaks little (`checks`).
//!
//! | file | what it does |
//! | --- | --- |
//! | `ledger` | which guest clusters need a host cluster, and whether there is room for them |
//! | `checks` | what is checked after a cycle: host offsets in use, leaks of a killed process |

pub(crate) mod checks;
pub(crate) mod ledger;
mod place;

pub(crate) use ledger::Ledger;
pub use place::{Place, full_bytes};
pub(crate) use place::{Sizes, blocks_of};
