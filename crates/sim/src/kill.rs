//! Kills of the process: the page cache keeps what it has written, and the next process opens the image before the
//! power fails.
//!
//! A power cut right after a kill loses no more than one right before it. But what the next process concludes from what it
//! reads, and makes durable, must hold without what it has read.

use crate::cut::in_any_order;
use crate::disk::{Disk, Mode};
use crate::explore::Explorer;
use crate::failure::{Failure, FailureKind, guarded};
use crate::generate;
use crate::guest::{Guest, drive};
use crate::machine::Machine;
use crate::record::CutPoint;
use crate::rng::Rng;
use crate::runtime::Runtime;
use crate::scenario::{ImageOptions, Kill, Op, Scenario, Step, WriteLog};
use crate::verify::leaks;

impl Kill {
    /// Chooses what lands, and what the next process does.
    pub(crate) fn random(image: &ImageOptions, point: &CutPoint, rng: &mut Rng) -> Kill {
        let mut landed: Vec<usize> = (point.completed..point.records.len()).collect();
        in_any_order(&mut landed, rng);
        landed.retain(|_| rng.chance(1, 2));
        let steps = generate::after_kill(image, rng);
        // An open and its first change take a few, what follows many.
        let most = *rng.pick(&[8, 16, 32, 120]);
        Kill {
            landed,
            steps,
            schedule_seed: rng.next_u64(),
            step: rng.below(most),
        }
    }
}

impl Explorer {
    /// Kills the process at `point`, and opens `machine`'s image, which was that of `first`, with another one; gives the moment at
    /// which the power fails under that.
    pub(crate) fn outlive(
        &self,
        scenario: &Scenario,
        point: &CutPoint,
        (first, machine): (&Machine, &Machine),
        kill: &Kill,
    ) -> Result<(CutPoint, Machine), Failure> {
        let second_process = || {
            let mut machine = machine.clone();
            machine.set_files(&scenario.image, point.durable.clone());
            let plugged = machine.plug(&scenario.image, Mode::Scheduled);
            plugged.disk.set_bug(self.bug.clone());
            let landed = kill.landed.iter().filter_map(|&at| point.records.get(at));
            let completed = &point.records[..point.completed];
            plugged.disk.land_unsynced(completed.iter().chain(landed));
            plugged.limit(&scenario.image);
            let mut runtime = Runtime::new(plugged.disk.clone(), kill.schedule_seed);
            // Whether a change that the kill interrupted has come about is not known: nothing is built on it.
            let is_certain = !machine.model.has_unknown_change();
            let steps = match is_certain {
                true => kill.steps.clone(),
                false => Vec::new(),
            };
            let guest = Guest::new(
                &self.engine,
                &scenario.image,
                &plugged,
                machine.model.clone(),
            );
            guest.unsettled.set(true);
            let here = |disk: &Disk| {
                let model = guest.model.borrow().after_cut();
                (disk.cut_point(), machine.with_model(model))
            };
            let mut reached = None;
            let driven = runtime.run_observed(drive(guest.clone(), steps), &mut |step, disk| {
                if step == kill.step {
                    reached = Some(here(disk));
                }
                step < kill.step
            })?;
            if let Some(done) = driven {
                done?;
                if returns_leaks(scenario) {
                    let closed = machine.with_files(plugged.all_contents());
                    self.check_leaks(scenario, first, &closed)?;
                }
            }
            Ok(reached.unwrap_or_else(|| here(&plugged.disk)))
        };
        guarded(second_process).map_err(|failure| failure.when("after a kill"))
    }

    /// What the process leaked that was killed is returned once the image was opened and `closed`.
    fn check_leaks(
        &self,
        scenario: &Scenario,
        first: &Machine,
        closed: &Machine,
    ) -> Result<(), Failure> {
        let left = leaks(&self.engine, &scenario.image, closed)?;
        // The scenario may have begun with some.
        if left == 0 || left <= leaks(&self.engine, &scenario.image, &first.with_room())? {
            return Ok(());
        }
        let message = format!("{left} clusters are leaked once the image was opened and closed");
        Err(Failure::new(FailureKind::Leak, message))
    }
}

/// Whether the open after a kill returns all leaks: only clusters leak that are counted once (FORMAT.md, A2), in an image
/// whose header can tell of them, and which is not a backing file.
fn returns_leaks(scenario: &Scenario) -> bool {
    let image = &scenario.image;
    let can_tell = image.version == 3
        && !image.lazy_refcounts
        && !image.requests_only
        && image.write_log != WriteLog::Inside;
    let is_shared = |op: &Op| matches!(op, Op::WriteCompressed { .. });
    let other = |step: &Step| match step {
        Step::Start(op) => is_shared(op),
        Step::Commit
        | Step::Flatten { .. }
        | Step::Amend(_)
        | Step::Repair(_)
        | Step::Snapshot(_)
        | Step::Fail { .. } => true,
        _ => false,
    };
    let steps = scenario.cycles.iter().flat_map(|cycle| &cycle.steps);
    can_tell
        && scenario.preparations.is_empty()
        && !scenario.setup.iter().any(is_shared)
        && !steps.into_iter().any(other)
}
