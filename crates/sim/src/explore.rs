//! Runs scenarios and cuts their power.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::cut::PowerCut;
use crate::disk::{Disk, Mode};
use crate::disk_bugs::DiskBug;
use crate::exhaustive::ExhaustiveChoices;
use crate::failure::{Failure, FailureKind, guarded};
use crate::foreign::ForeignFormat;
use crate::generate;
use crate::guest::{Guest, drive};
use crate::image_engine::ImageEngine;
use crate::machine::Machine;
use crate::prepare::prepare;
use crate::record::CutPoint;
use crate::rng::Rng;
use crate::runtime::Runtime;
use crate::scenario::{Crash, Kill, Place, PowerCycle, Scenario};
use crate::space::checks::{self, CycleEnd};
use crate::verify::{Depth, leaks, verify};

/// Cuts made at one moment of a cycle.
const CUTS_PER_POINT: u64 = 5;
/// One cut in so many is followed by another cycle and another cut.
const SEQUEL_EVERY: u64 = 10;
/// Before one cut in so many the process is killed, and another one opens the image.
const KILL_EVERY: u64 = 4;
/// One cut in so many is looked at thoroughly.
const THOROUGH_EVERY: u64 = 10;

/// What is explored, and with which disk.
#[derive(Debug, Clone)]
pub struct Explorer {
    /// The engine.
    pub engine: Arc<dyn ImageEngine>,
    /// How the disk breaks its word, if it does.
    pub bug: Option<DiskBug>,
    /// Seeds play with images that have checksums only; others have nothing to play.
    pub always_checksums: bool,
    /// Seeds play scenarios about space; see [`crate::space`].
    pub space: bool,
    /// Seeds play with images of this format.
    pub foreign: Option<ForeignFormat>,
}

/// A failure, and the scenario that leads to it.
#[derive(Debug, Clone)]
pub struct Found {
    /// What went wrong.
    pub failure: Failure,
    /// The scenario, with all its crashes.
    pub scenario: Scenario,
}

/// What an exploration has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Power cuts made and verified.
    pub cuts: u64,
    /// Requests on the disk that were completed.
    pub steps: u64,
}

/// A cycle as it goes on: called before each step with the machine as it would be if
/// the power failed now; says whether to go on.
type StepObserver<'a> = dyn FnMut(u64, &dyn Fn() -> (CutPoint, Machine)) -> bool + 'a;

/// Repeats a scenario with all its crashes.
pub fn replay(engine: &Arc<dyn ImageEngine>, scenario: &Scenario) -> Result<(), Failure> {
    Explorer::new(engine.clone()).replay(scenario)
}

impl Explorer {
    /// An explorer of an engine on an honest disk.
    pub fn new(engine: Arc<dyn ImageEngine>) -> Self {
        Explorer {
            engine,
            bug: None,
            always_checksums: false,
            space: false,
            foreign: None,
        }
    }

    /// An explorer of images of another format.
    pub fn foreign(format: ForeignFormat) -> Self {
        Explorer {
            foreign: Some(format),
            ..Explorer::new(Arc::new(format))
        }
    }

    /// Runs the scenario of a seed and cuts its power `cuts` times.
    pub fn seed(&self, seed: u64, cuts: u64) -> Result<Totals, Box<Found>> {
        if let Some(format) = self.foreign {
            return self.scenario(&format.scenario(seed), &mut Rng::new(!seed), cuts);
        }
        if self.space {
            return self.scenario(&generate::space::scenario(seed), &mut Rng::new(!seed), cuts);
        }
        let scenario = match self.always_checksums {
            false => generate::scenario(seed),
            true => match generate::scenario_with_checksums(seed) {
                Some(scenario) => scenario,
                None => return Ok(Totals::default()),
            },
        };
        self.scenario(&scenario, &mut Rng::new(!seed), cuts)
    }

    /// Runs a scenario of one cycle and cuts its power `cuts` times.
    pub fn scenario(
        &self,
        scenario: &Scenario,
        rng: &mut Rng,
        cuts: u64,
    ) -> Result<Totals, Box<Found>> {
        let found = |failure, cycles| {
            Box::new(Found {
                failure,
                scenario: Scenario {
                    cycles,
                    ..scenario.clone()
                },
            })
        };
        let machine = prepare(&self.engine, scenario)
            .map_err(|failure| found(failure, scenario.cycles.clone()))?;
        let Some(cycle) = scenario.cycles.first() else {
            return Ok(Totals::default());
        };
        let mut totals = Totals {
            steps: self
                .run_whole(scenario, &machine, cycle)
                .map_err(|failure| found(failure, scenario.cycles.clone()))?,
            ..Totals::default()
        };
        let points: BTreeSet<u64> = (0..cuts.div_ceil(CUTS_PER_POINT) * 2)
            .map(|_| rng.below(totals.steps + 1))
            .take(cuts.div_ceil(CUTS_PER_POINT) as usize)
            .collect();
        let mut left = cuts;
        let per_point = cuts.div_ceil(points.len().max(1) as u64);
        let mut broken = None;
        let ran = self.run_cycle(scenario, &machine, cycle, &mut |step, here| {
            if !points.contains(&step) {
                return left > 0;
            }
            let moment = here();
            for _ in 0..per_point.min(left) {
                left -= 1;
                totals.cuts += 1;
                if let Err(failed) = self.crash_at(scenario, (step, &machine), &moment, cycle, rng)
                {
                    broken = Some(failed);
                    return false;
                }
            }
            left > 0
        });
        match (broken, ran) {
            (Some((failure, cycles)), _) => Err(found(failure, cycles)),
            (None, Err(failure)) => Err(found(failure, scenario.cycles.clone())),
            (None, Ok(_)) => Ok(totals),
        }
    }

    /// Cuts the power at a moment, or kills the process there and cuts the power under the next one.
    fn crash_at(
        &self,
        scenario: &Scenario,
        (step, first): (u64, &Machine),
        (point, machine): &(CutPoint, Machine),
        cycle: &PowerCycle,
        rng: &mut Rng,
    ) -> Result<(), (Failure, Vec<PowerCycle>)> {
        let kill = rng
            .chance(1, KILL_EVERY)
            .then(|| Kill::random(&scenario.image, point, rng));
        let crashed = |kill, cut| PowerCycle {
            crash: Some(Crash { step, kill, cut }),
            ..cycle.clone()
        };
        let Some(kill) = kill else {
            let crashed = crashed(None, PowerCut::random(point, rng));
            return self.follow(scenario, point, machine.clone(), crashed, rng);
        };
        let (point, machine) = self
            .outlive(scenario, point, (first, machine), &kill)
            .map_err(|failure| {
                (
                    failure,
                    vec![crashed(Some(kill.clone()), PowerCut::default())],
                )
            })?;
        let crashed = crashed(Some(kill), PowerCut::random(&point, rng));
        self.follow(scenario, &point, machine, crashed, rng)
    }

    /// Verifies one crash, and now and then goes on with another cycle to the next.
    fn follow(
        &self,
        scenario: &Scenario,
        point: &CutPoint,
        machine: Machine,
        cycle: PowerCycle,
        rng: &mut Rng,
    ) -> Result<(), (Failure, Vec<PowerCycle>)> {
        let depth = if rng.chance(1, THOROUGH_EVERY) {
            Depth::Thorough
        } else {
            Depth::Quick
        };
        let recovered = self
            .crash(scenario, point, machine, &cycle, depth)
            .map_err(|failure| (failure, vec![cycle.clone()]))?;
        if !rng.chance(1, SEQUEL_EVERY) {
            return Ok(());
        }
        let mut next = match scenario.image.place {
            Place::Unchecked => generate::cycle(&scenario.image, rng),
            _ => generate::space::cycle(&scenario.image, rng),
        };
        let both = |next: &PowerCycle| vec![cycle.clone(), next.clone()];
        let steps = self
            .run_whole(scenario, &recovered, &next)
            .map_err(|failure| (failure, both(&next)))?;
        let step = rng.below(steps + 1);
        let mut reached = None;
        self.run_cycle(scenario, &recovered, &next, &mut |now, here| {
            if now == step {
                reached = Some(here());
            }
            now < step
        })
        .map_err(|failure| (failure, both(&next)))?;
        let Some((point, machine)) = reached else {
            return Ok(());
        };
        next.crash = Some(Crash {
            step,
            kill: None,
            cut: PowerCut::random(&point, rng),
        });
        self.crash(scenario, &point, machine, &next, Depth::Thorough)
            .map(|_| ())
            .map_err(|failure| (failure, vec![cycle, next]))
    }

    /// Cuts the power as a cycle says, and verifies what is left.
    fn crash(
        &self,
        scenario: &Scenario,
        point: &CutPoint,
        mut machine: Machine,
        cycle: &PowerCycle,
        depth: Depth,
    ) -> Result<Machine, Failure> {
        let Some(crash) = &cycle.crash else {
            return Ok(machine);
        };
        machine.set_files(&scenario.image, crash.cut.apply(point));
        verify(&self.engine, &scenario.image, machine, depth)
    }

    /// Runs a cycle on a machine to its end, and checks what every clean close has left;
    /// gives how many requests on the disk completed.
    fn run_whole(
        &self,
        scenario: &Scenario,
        machine: &Machine,
        cycle: &PowerCycle,
    ) -> Result<u64, Failure> {
        let mut end = CycleEnd::default();
        let steps = self.run_cycle_to(scenario, machine, cycle, &mut |_, _| true, &mut end)?;
        guarded(|| {
            // What is wrong with a dirty image is put right when it is opened.
            let before = leaks(&self.engine, &scenario.image, &machine.with_room()).unwrap_or(0);
            for (number, files) in end.closed.iter().enumerate() {
                let machine = machine.with_files(files.clone());
                let left = leaks(&self.engine, &scenario.image, &machine)
                    .map_err(|failure| failure.when("after a clean close"))?;
                if left > before {
                    let message =
                        format!("clean close {number} leaks {left} clusters, not {before}");
                    return Err(Failure::new(FailureKind::Leak, message));
                }
            }
            checks::check(&self.engine, &scenario.image, machine, &end)?;
            Ok(steps)
        })
    }

    /// Runs a cycle on a machine; gives how many requests on the disk completed.
    fn run_cycle(
        &self,
        scenario: &Scenario,
        machine: &Machine,
        cycle: &PowerCycle,
        watch: &mut StepObserver<'_>,
    ) -> Result<u64, Failure> {
        self.run_cycle_to(scenario, machine, cycle, watch, &mut CycleEnd::default())
    }

    /// As [`Explorer::run_cycle`]; `end`: what the cycle has left to be checked.
    fn run_cycle_to(
        &self,
        scenario: &Scenario,
        machine: &Machine,
        cycle: &PowerCycle,
        watch: &mut StepObserver<'_>,
        end: &mut CycleEnd,
    ) -> Result<u64, Failure> {
        guarded(|| {
            let plugged = machine.plug(&scenario.image, Mode::Scheduled);
            plugged.disk.set_bug(self.bug.clone());
            plugged.limit(&scenario.image);
            let mut runtime = Runtime::new(plugged.disk.clone(), cycle.schedule_seed);
            let guest = Guest::new(
                &self.engine,
                &scenario.image,
                &plugged,
                machine.model.clone(),
            );
            let here = |disk: &Disk| {
                let model = guest.model.borrow().after_cut();
                (disk.cut_point(), machine.with_model(model))
            };
            let driven = runtime.run_observed(
                drive(guest.clone(), cycle.steps.clone()),
                &mut |step, disk| watch(step, &|| here(disk)),
            )?;
            match driven {
                None => {}
                Some(Err(failure)) => return Err(failure),
                Some(Ok(())) => {
                    watch(runtime.steps(), &|| here(&plugged.disk));
                }
            }
            *end = guest.cycle_end();
            Ok(runtime.steps())
        })
    }

    /// Makes every cut that [`PowerCut::next`] knows at every moment of a scenario of one
    /// cycle; points with more than `limit` cuts are cut at random so many times.
    pub fn exhaust(&self, scenario: &Scenario, limit: u64) -> Result<Totals, Box<Found>> {
        let found = |failure, cycles| {
            Box::new(Found {
                failure,
                scenario: Scenario {
                    cycles,
                    ..scenario.clone()
                },
            })
        };
        let machine = prepare(&self.engine, scenario)
            .map_err(|failure| found(failure, scenario.cycles.clone()))?;
        let mut totals = Totals::default();
        let Some(cycle) = scenario.cycles.first() else {
            return Ok(totals);
        };
        let mut broken = None;
        let ran = self.run_cycle(scenario, &machine, cycle, &mut |step, here| {
            let (point, machine) = here();
            let cut = self.exhaust_point(scenario, &point, &machine, (cycle, step), limit);
            cut.map(|cuts| totals.cuts += cuts)
                .map_err(|failed| broken = Some(failed))
                .is_ok()
        });
        match (broken, ran) {
            (Some(broken), _) => {
                let (failure, cycle) = *broken;
                Err(found(failure, vec![cycle]))
            }
            (None, Err(failure)) => Err(found(failure, scenario.cycles.clone())),
            (None, Ok(steps)) => Ok(Totals { steps, ..totals }),
        }
    }

    fn exhaust_point(
        &self,
        scenario: &Scenario,
        point: &CutPoint,
        machine: &Machine,
        (cycle, step): (&PowerCycle, u64),
        limit: u64,
    ) -> Result<u64, Box<(Failure, PowerCycle)>> {
        let mut exhaust = ExhaustiveChoices::new();
        let mut count = 0;
        let try_cut = |cut: PowerCut| {
            let cycle = PowerCycle {
                crash: Some(Crash {
                    step,
                    kill: None,
                    cut,
                }),
                ..cycle.clone()
            };
            self.crash(scenario, point, machine.clone(), &cycle, Depth::Quick)
                .map_err(|failure| Box::new((failure, cycle)))
        };
        while count < limit && exhaust.advance() {
            count += 1;
            try_cut(PowerCut::next(point, &mut exhaust))?;
        }
        if count == limit {
            let mut rng = Rng::new(step);
            for _ in 0..limit {
                count += 1;
                try_cut(PowerCut::random(point, &mut rng))?;
            }
        }
        Ok(count)
    }

    /// Runs a scenario whose crashes are all given, and verifies each.
    pub fn replay(&self, scenario: &Scenario) -> Result<(), Failure> {
        let mut machine = prepare(&self.engine, scenario)?;
        for cycle in &scenario.cycles {
            let Some(crash) = &cycle.crash else {
                self.run_whole(scenario, &machine, cycle)?;
                continue;
            };
            let at = crash.step;
            let mut last = None;
            self.run_cycle(scenario, &machine, cycle, &mut |step, here| {
                if step >= at {
                    last = Some(here());
                }
                step < at
            })?;
            if let Some((mut point, mut here)) = last {
                if let Some(kill) = &crash.kill {
                    (point, here) = self.outlive(scenario, &point, (&machine, &here), kill)?;
                }
                machine = self.crash(scenario, &point, here, cycle, Depth::Thorough)?;
            }
        }
        Ok(())
    }

    /// Looks for a failure of a scenario with any crashes at all, `tries` times.
    pub(crate) fn search(&self, scenario: &Scenario, rng: &mut Rng, tries: u64) -> Option<Found> {
        let first = Scenario {
            cycles: scenario.cycles.iter().take(1).cloned().collect(),
            ..scenario.clone()
        };
        if scenario.cycles.len() <= 1 {
            let without: Vec<PowerCycle> = first
                .cycles
                .into_iter()
                .map(|cycle| PowerCycle {
                    crash: None,
                    ..cycle
                })
                .collect();
            let scenario = Scenario {
                cycles: without,
                ..scenario.clone()
            };
            return self
                .scenario(&scenario, rng, tries)
                .err()
                .map(|found| *found);
        }
        self.replay(scenario).err().map(|failure| Found {
            failure,
            scenario: scenario.clone(),
        })
    }
}
