//! The guest where space is checked: what it notes in the ledger, and which ENOSPC it accepts.

use std::cell::RefCell;

use vellum::{Error, ErrorKind};

use super::Guest;
use crate::failure::{Failure, FailureKind};
use crate::model::LogicalTime;
use crate::scenario::Op;
use crate::space::Ledger;
use crate::space::checks::CycleEnd;
use crate::space::ledger::Entry;

/// Quiet flushes of a cycle behind which the process is killed.
const MOST_KILLS: usize = 4;

impl Guest {
    /// Notes in the ledger that a request begins.
    pub(super) fn begin_entry(&self, op: Op) -> Option<Entry> {
        let ledger = self.ledger.as_ref()?;
        Some(ledger.borrow_mut().begin(op))
    }

    /// Notes in the ledger that a request has ended; whether it got ENOSPC, and rightly so.
    ///
    /// # Errors
    /// ENOSPC that the engine could have avoided.
    pub(super) fn end_entry(
        &self,
        op: Op,
        entry: Option<Entry>,
        error: Option<&Error>,
    ) -> Result<bool, Failure> {
        let (Some(ledger), Some(entry)) = (&self.ledger, entry) else {
            return Ok(false);
        };
        let mut ledger = ledger.borrow_mut();
        let is_right = ledger.end(op, entry, error.is_none());
        let Some(error) = error.filter(|error| error.kind() == ErrorKind::NoSpace) else {
            return Ok(false);
        };
        if !is_right {
            let failure = Failure::error(FailureKind::NoSpace, op, error);
            return Err(failure.when(&ledger.describe()));
        }
        Ok(true)
    }

    /// Notes that a flush has succeeded, and what is there if nothing was in flight beside it.
    pub(super) fn note_flushed(&self, begun: LogicalTime, entry: Option<Entry>) {
        let (Some(ledger), Some(entry)) = (&self.ledger, entry) else {
            return;
        };
        ledger.borrow_mut().end_flush(entry);
        let model = self.model.borrow();
        let mut flushed = self.flushed.borrow_mut();
        if model.is_idle() && model.now() == begun && flushed.len() < MOST_KILLS {
            flushed.push(self.plugged.contents());
        }
    }

    /// Whether a close may end like this: what was acknowledged found no room.
    pub(super) fn may_close_without_room(&self, error: &Error) -> bool {
        let is_full = error.kind() == ErrorKind::NoSpace;
        let was_short = |ledger: &RefCell<Ledger>| ledger.borrow_mut().was_short_since_flush();
        is_full && self.ledger.as_ref().is_some_and(was_short)
    }

    /// Changes the quota.
    pub(super) fn set_quota(&self, blocks: u64) {
        if let Some(ledger) = &self.ledger {
            ledger.borrow_mut().set_quota(blocks);
            self.plugged.disk.set_quota(0, Some(blocks));
        }
    }

    /// Removes the quota, so that a close must succeed.
    pub(super) fn lift_quota(&self) {
        if self.quota().is_some() {
            self.plugged.disk.set_quota(0, None);
        }
    }

    /// Sets the quota again.
    pub(super) fn restore_quota(&self) {
        if let Some(blocks) = self.quota() {
            self.plugged.disk.set_quota(0, Some(blocks));
        }
    }

    fn quota(&self) -> Option<u64> {
        self.ledger.as_ref()?.borrow().quota()
    }

    /// What the cycle has left to be checked.
    pub(crate) fn cycle_end(&self) -> CycleEnd {
        let peak = |ledger: &RefCell<Ledger>| ledger.borrow().peak_bytes();
        CycleEnd {
            closed: self.closed.take(),
            flushed: self.flushed.take(),
            peak_bytes: self.ledger.as_ref().map(peak),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;
    use crate::disk::Mode;
    use crate::engine;
    use crate::guest::drive;
    use crate::prepare::prepare;
    use crate::runtime::Runtime;
    use crate::scenario::{ImageOptions, Place, Scenario, Step};

    const BLOCKS: u64 = 1000;
    const FEW_BLOCKS: u64 = 16;

    /// Writes 64 clusters of 4 KiB once `shrink` has been called.
    fn write_after(shrink: impl FnOnce(&Rc<Guest>)) -> Result<(), Failure> {
        let image = ImageOptions {
            place: Place::Quota { blocks: BLOCKS },
            ..ImageOptions::plain(256 << 10, 12)
        };
        let scenario = Scenario {
            image: image.clone(),
            setup: Vec::new(),
            preparations: Vec::new(),
            cycles: Vec::new(),
        };
        let machine = prepare(&engine(), &scenario).expect("a new image");
        let plugged = machine.plug(&image, Mode::Scheduled);
        plugged.limit(&image);
        let guest = Guest::new(&engine(), &image, &plugged, machine.model.clone());
        shrink(&guest);
        let write = |cluster: u64| {
            Step::Start(Op::Write {
                offset: cluster * 4096,
                len: 4096,
                fua: false,
            })
        };
        let mut steps: Vec<Step> = (0..64).map(write).collect();
        steps.extend([Step::Wait, Step::Start(Op::Flush), Step::Wait]);
        let mut runtime = Runtime::new(plugged.disk.clone(), 1);
        runtime.block_on(drive(guest, steps)).expect("it ends")
    }

    #[test]
    fn enospc_is_right_where_the_quota_is_too_small() {
        let written = write_after(|guest| guest.set_quota(FEW_BLOCKS));
        assert_eq!(written, Ok(()));
    }

    /// The disk has fewer blocks than the ledger knows of: as if the engine did not use them.
    #[test]
    fn enospc_is_a_failure_where_the_quota_would_do() {
        let written = write_after(|guest| {
            guest.plugged.disk.set_quota(0, Some(FEW_BLOCKS));
        });
        let failure = written.expect_err("it is noticed");
        assert_eq!(failure.kind, FailureKind::NoSpace, "{failure}");
    }
}
