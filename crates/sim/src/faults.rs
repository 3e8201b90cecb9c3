//! Requests that a disk fails.

use crate::rng::Rng;
use crate::schedule::RequestKind;

/// What file systems and devices say.
pub const ERRNOS: &[i32] = &[
    5,   // EIO
    28,  // ENOSPC
    122, // EDQUOT
    116, // ESTALE
    110, // ETIMEDOUT
    12,  // ENOMEM
    4,   // EINTR
    11,  // EAGAIN
];

/// ENOSPC.
pub(crate) const FULL: i32 = 28;
/// So many writes find a disk full at most before there is room.
const LONGEST_FULL: u64 = 30;

/// Which requests fail, and how; see [`crate::disk::Disk::set_faults`].
#[derive(Debug, Clone)]
pub struct Faults {
    pub(crate) rng: Rng,
    /// One of so many reads and of so many writes fails; 0: none.
    pub requests_one_in: u64,
    /// One of so many flushes fails; 0: none.
    pub flushes_one_in: u64,
    /// At one of so many writes there is no room any more, for some writes; 0: never.
    pub fills_one_in: u64,
    /// So many writes find no room now.
    pub(crate) full_for: u64,
    /// With what; one of these.
    pub errnos: Vec<i32>,
    /// A descriptor does not remember that a flush has failed, as no descriptor of the
    /// kernel's does: the next flush says success.
    pub forgets: bool,
    /// Flushes that fail say that they have not.
    pub unreported: bool,
}

impl Faults {
    /// No request fails yet.
    pub fn new(seed: u64) -> Self {
        Faults {
            rng: Rng::new(seed),
            requests_one_in: 0,
            flushes_one_in: 0,
            fills_one_in: 0,
            full_for: 0,
            errnos: ERRNOS.to_vec(),
            forgets: false,
            unreported: false,
        }
    }

    /// Whether a write finds no room.
    fn is_full(&mut self) -> bool {
        if self.full_for == 0 && self.fills_one_in > 0 && self.rng.chance(1, self.fills_one_in) {
            self.full_for = self.rng.between(1, LONGEST_FULL);
        }
        let is_full = self.full_for > 0;
        self.full_for = self.full_for.saturating_sub(1);
        is_full
    }

    /// The errno with which a request of a kind is to fail.
    pub(crate) fn strike(&mut self, kind: RequestKind) -> Option<i32> {
        if kind == RequestKind::Write && self.is_full() {
            return Some(FULL);
        }
        let one_in = match kind {
            RequestKind::Flush => self.flushes_one_in,
            RequestKind::Read | RequestKind::Write => self.requests_one_in,
        };
        (one_in > 0 && self.rng.chance(1, one_in)).then(|| *self.rng.pick(&self.errnos))
    }
}
