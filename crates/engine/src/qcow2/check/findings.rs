//! [`Findings`]: counts what is found, and passes it on.

use super::report::{CheckReport, Finding, FindingKind, FindingSink};

/// Counts and passes on what is found.
pub(super) struct Findings {
    pub(super) report: CheckReport,
    sink: Option<FindingSink>,
}

impl Findings {
    pub(super) fn new(sink: Option<FindingSink>) -> Self {
        Findings {
            report: CheckReport::default(),
            sink,
        }
    }

    /// Counts a finding `times` times, and reports it as often.
    pub(super) fn report(
        &mut self,
        kind: FindingKind,
        times: u64,
        message: impl FnOnce() -> String,
    ) {
        match kind {
            FindingKind::Corruption => self.report.corruptions += times,
            FindingKind::Leak => self.report.leaks += times,
            FindingKind::CheckError | FindingKind::Unreadable => self.report.check_errors += times,
            FindingKind::Repair | FindingKind::Note => {}
        }
        if let Some(sink) = &self.sink {
            let finding = Finding {
                kind,
                message: message(),
            };
            (0..times).for_each(|_| sink(&finding));
        }
    }

    pub(super) fn corruption(&mut self, message: impl FnOnce() -> String) {
        self.report(FindingKind::Corruption, 1, message);
    }

    /// A corruption that is met `times` times because as many L1 tables lead to it.
    pub(super) fn corruptions(&mut self, times: u64, message: impl FnOnce() -> String) {
        self.report(FindingKind::Corruption, times, message);
    }

    /// Says what a repair does; the one who does it counts it.
    pub(super) fn repair(&mut self, message: impl FnOnce() -> String) {
        self.report(FindingKind::Repair, 1, message);
    }

    pub(super) fn note(&mut self, message: impl FnOnce() -> String) {
        self.report(FindingKind::Note, 1, message);
    }

    /// A corruption, or one that is repaired on the spot.
    pub(super) fn corruption_or_repair(
        &mut self,
        repaired: bool,
        message: impl FnOnce() -> String,
    ) {
        if repaired {
            self.report.corruptions_fixed += 1;
            self.repair(|| format!("Repairing {}", message()));
        } else {
            self.corruption(|| format!("ERROR {}", message()));
        }
    }

    /// The corruptions so far, which count here no longer.
    pub(super) fn take_corruptions(&mut self) -> u64 {
        std::mem::take(&mut self.report.corruptions)
    }
}
