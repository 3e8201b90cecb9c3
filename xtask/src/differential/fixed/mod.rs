//! `--fixed-length`: images in places of fixed length, beside QEMU's programs.
//!
//! Each program gets an image on a device (a "place") of the same length, derived from what `measure`
//! reports. The same script runs on both: fills in several orders, discards and rewrites, conversions,
//! commits, rebases, jobs of a daemon. If QEMU's tool succeeds, ours must succeed. If the contract of
//! `measure` guarantees space, ours must succeed even if QEMU's fails. If both succeed, both images have
//! the same content and no leaked clusters.

mod copies;
mod jobs;
mod load;
mod options;
mod play;
mod scenario;
mod verdict;

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Found;
use super::runner::Programs;
use super::scenario::Tool;
use super::shrink;
use crate::fixed_length::Kind;
use play::Setting;
use scenario::{Scenario, Script};
use verdict::Outcome;

/// A campaign of scenarios, and counts of their outcomes.
#[derive(Debug)]
pub struct FixedLength {
    setting: Setting,
    tally: Tally,
}

#[derive(Debug, Default)]
struct Tally {
    io: AtomicU64,
    convert: AtomicU64,
    commit: AtomicU64,
    rebase: AtomicU64,
    job: AtomicU64,
    refused_by_both: AtomicU64,
    refused_by_qemu: AtomicU64,
    leaked_clusters: AtomicU64,
}

impl FixedLength {
    /// In places of a kind; with QEMU's programs on both sides the scenarios themselves are tried.
    pub fn new(kind: Kind, is_qemu_twice: bool) -> Self {
        let first = if is_qemu_twice {
            Tool::Qemu
        } else {
            Tool::Vellum
        };
        FixedLength {
            setting: Setting {
                kind,
                tools: [first, Tool::Qemu],
                keeps_promises: !is_qemu_twice,
            },
            tally: Tally::default(),
        }
    }

    /// Plays a seed; a failure is made small.
    pub fn play(
        &self,
        programs: &Programs,
        seed: u64,
        folder: &Path,
        tries: usize,
    ) -> Option<Found> {
        let scenario = Scenario::random(seed);
        let play = |scenario: &Scenario| play::play(self.setting, programs, folder, scenario);
        match play(&scenario) {
            Ok(outcome) => {
                self.tally.add(&scenario, outcome);
                None
            }
            Err(difference) => {
                let before = scenario.weight();

                let again = |smaller: &Scenario| play(smaller).map(|_| ());
                let (small, difference) = shrink::shrink(scenario, difference, tries, again);
                let what = format!(
                    "{} ({:?}, {} bytes, place {:?})",
                    difference.what, small.options, small.size_bytes, small.room
                );
                Some(Found {
                    before,
                    after: small.weight(),
                    what,
                    script: difference.script,
                })
            }
        }
    }

    /// The counts of all outcomes, for people.
    pub fn summary(&self) -> String {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let tally = &self.tally;
        format!(
            "passed: {} fills, {} conversions, {} commits, {} rebases, {} jobs; QEMU found no room in {}, in {} of \
             them neither side did; {} clusters leaked there",
            get(&tally.io),
            get(&tally.convert),
            get(&tally.commit),
            get(&tally.rebase),
            get(&tally.job),
            get(&tally.refused_by_qemu) + get(&tally.refused_by_both),
            get(&tally.refused_by_both),
            get(&tally.leaked_clusters),
        )
    }
}

impl Tally {
    fn add(&self, scenario: &Scenario, outcome: Outcome) {
        let count = |sum: &AtomicU64, more: u64| sum.fetch_add(more, Ordering::Relaxed);
        match scenario.script {
            Script::Io(_) => count(&self.io, 1),
            Script::Convert(_) => count(&self.convert, 1),
            Script::Commit { .. } => count(&self.commit, 1),
            Script::Rebase { .. } => count(&self.rebase, 1),
            Script::Job(_) => count(&self.job, 1),
        };
        count(&self.refused_by_both, outcome.refused_by_both.into());
        count(&self.refused_by_qemu, outcome.refused_by_qemu.into());
        count(&self.leaked_clusters, outcome.leaked_clusters);
    }
}
