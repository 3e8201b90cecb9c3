//! [`Overlaps`]: which requests that are noted ran beside an overlapping change that is not.
//!
//! In which order the image got two such, nobody knows: a note of the one might come back over the
//! other although the guest has seen that one last, or hold the bytes around it as they were
//! before. So neither is noted.
//!
//! Invariant: a request that ran beside an overlapping change learns that when it ends, whichever
//! began or ends first.

use std::ops::Range;

use parking_lot::Mutex;
use vellum_io::range_lock::overlap;

#[derive(Debug)]
struct Noted {
    id: u64,
    range: Range<u64>,
    has_met: bool,
}

#[derive(Debug, Default)]
struct Running {
    noted: Vec<Noted>,
    others: Vec<(u64, Range<u64>)>,
    next_id: u64,
}

impl Running {
    fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }
}

/// See the module's head. Ranges are guest offsets in bytes.
#[derive(Debug, Default)]
pub(super) struct Overlaps(Mutex<Running>);

/// Names a request that runs.
#[derive(Debug, Clone, Copy)]
#[must_use = "it runs until it is ended"]
pub(super) struct RequestId(u64);

impl Overlaps {
    /// A request begins that is to be noted.
    pub(super) fn begin_noted(&self, range: Range<u64>) -> RequestId {
        let mut running = self.0.lock();
        let id = running.id();
        let has_met = running
            .others
            .iter()
            .any(|(_, other)| overlap(&range, other));
        running.noted.push(Noted { id, range, has_met });
        RequestId(id)
    }

    /// It ends; whether an overlapping change ran beside it.
    pub(super) fn end_noted(&self, RequestId(id): RequestId) -> bool {
        let mut running = self.0.lock();
        let index = running.noted.iter().position(|noted| noted.id == id);
        index.is_none_or(|index| running.noted.swap_remove(index).has_met)
    }

    /// A change begins that is not noted.
    pub(super) fn begin_other(&self, range: Range<u64>) -> RequestId {
        let mut running = self.0.lock();
        let id = running.id();
        for noted in &mut running.noted {
            noted.has_met |= overlap(&noted.range, &range);
        }
        running.others.push((id, range));
        RequestId(id)
    }

    /// It ends.
    pub(super) fn end_other(&self, RequestId(id): RequestId) {
        let mut running = self.0.lock();
        running.others.retain(|(other, _)| *other != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_runs_beside_another_change_learns_it() {
        let overlaps = Overlaps::default();
        let before = overlaps.begin_noted(0..10);
        let apart = overlaps.begin_noted(20..30);
        let other = overlaps.begin_other(9..20);
        let after = overlaps.begin_noted(19..21);
        assert!(overlaps.end_noted(before));
        assert!(!overlaps.end_noted(apart));
        overlaps.end_other(other);
        assert!(overlaps.end_noted(after), "they ran side by side");
        let later = overlaps.begin_noted(9..20);
        assert!(!overlaps.end_noted(later));
    }
}
