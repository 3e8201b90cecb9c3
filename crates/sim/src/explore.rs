//! Runs stories and cuts their power.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::cut::Cut;
use crate::disk::{Disk, Mode};
use crate::drive::{Guest, drive};
use crate::exhaust::Exhaust;
use crate::failure::{Failure, FailureKind, guarded};
use crate::generate;
use crate::lies::Lie;
use crate::machine::Machine;
use crate::pages::Pages;
use crate::prepare::prepare;
use crate::record::CutPoint;
use crate::rng::Rng;
use crate::scenario::{Crash, DataFile, Leg, Story};
use crate::subject::Subject;
use crate::verify::{Depth, leaks, verify};
use crate::world::World;

/// Cuts made at one moment of a leg.
const CUTS_PER_POINT: u64 = 5;
/// One cut in so many is followed by another leg and another cut.
const SEQUEL_EVERY: u64 = 10;
/// One cut in so many is looked at thoroughly.
const THOROUGH_EVERY: u64 = 10;

/// What is explored, and with which disk.
#[derive(Debug, Clone)]
pub struct Explorer {
    /// The engine.
    pub subject: Arc<dyn Subject>,
    /// How the disk breaks its word, if it does.
    pub lie: Option<Lie>,
}

/// A failure, and the story that leads to it.
#[derive(Debug, Clone)]
pub struct Found {
    /// What went wrong.
    pub failure: Failure,
    /// The story, with all its crashes.
    pub story: Story,
}

/// What an exploration has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Power cuts made and verified.
    pub cuts: u64,
    /// Requests on the disk that were completed.
    pub steps: u64,
}

/// A leg as it goes on: called before each step with the machine as it would be if
/// the power failed now; says whether to go on.
type Watch<'a> = dyn FnMut(u64, &dyn Fn() -> (CutPoint, Machine)) -> bool + 'a;

impl Explorer {
    /// An explorer of an engine on an honest disk.
    pub fn new(subject: Arc<dyn Subject>) -> Self {
        Explorer { subject, lie: None }
    }

    /// Runs the story of a seed and cuts its power `cuts` times.
    pub fn seed(&self, seed: u64, cuts: u64) -> Result<Totals, Box<Found>> {
        let story = generate::story(seed);
        self.story(&story, &mut Rng::new(!seed), cuts)
    }

    /// Runs a story of one leg and cuts its power `cuts` times.
    pub fn story(&self, story: &Story, rng: &mut Rng, cuts: u64) -> Result<Totals, Box<Found>> {
        let found = |failure, legs| {
            Box::new(Found {
                failure,
                story: Story {
                    legs,
                    ..story.clone()
                },
            })
        };
        let machine =
            prepare(&self.subject, story).map_err(|failure| found(failure, story.legs.clone()))?;
        let Some(leg) = story.legs.first() else {
            return Ok(Totals::default());
        };
        let mut totals = Totals {
            steps: self
                .run_whole(story, &machine, leg)
                .map_err(|failure| found(failure, story.legs.clone()))?,
            ..Totals::default()
        };
        let points: BTreeSet<u64> = (0..cuts.div_ceil(CUTS_PER_POINT) * 2)
            .map(|_| rng.below(totals.steps + 1))
            .take(cuts.div_ceil(CUTS_PER_POINT) as usize)
            .collect();
        let mut left = cuts;
        let per_point = cuts.div_ceil(points.len().max(1) as u64);
        let mut broken = None;
        let ran = self.run_leg(story, &machine, leg, &mut |step, here| {
            if !points.contains(&step) {
                return left > 0;
            }
            let (point, machine) = here();
            for _ in 0..per_point.min(left) {
                left -= 1;
                totals.cuts += 1;
                let crash = Crash {
                    step,
                    cut: Cut::random(&point, rng),
                };
                let crashed = Leg {
                    crash: Some(crash),
                    ..leg.clone()
                };
                if let Err(failed) = self.follow(story, &point, machine.clone(), crashed, rng) {
                    broken = Some(failed);
                    return false;
                }
            }
            left > 0
        });
        match (broken, ran) {
            (Some((failure, legs)), _) => Err(found(failure, legs)),
            (None, Err(failure)) => Err(found(failure, story.legs.clone())),
            (None, Ok(_)) => Ok(totals),
        }
    }

    /// Verifies one crash, and now and then goes on with another leg to the next.
    fn follow(
        &self,
        story: &Story,
        point: &CutPoint,
        machine: Machine,
        leg: Leg,
        rng: &mut Rng,
    ) -> Result<(), (Failure, Vec<Leg>)> {
        let depth = if rng.chance(1, THOROUGH_EVERY) {
            Depth::Thorough
        } else {
            Depth::Quick
        };
        let recovered = self
            .crash(story, point, machine, &leg, depth)
            .map_err(|failure| (failure, vec![leg.clone()]))?;
        if !rng.chance(1, SEQUEL_EVERY) {
            return Ok(());
        }
        let mut next = generate::leg(&story.image, rng);
        let both = |next: &Leg| vec![leg.clone(), next.clone()];
        let steps = self
            .run_whole(story, &recovered, &next)
            .map_err(|failure| (failure, both(&next)))?;
        let step = rng.below(steps + 1);
        let mut reached = None;
        self.run_leg(story, &recovered, &next, &mut |now, here| {
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
            cut: Cut::random(&point, rng),
        });
        self.crash(story, &point, machine, &next, Depth::Thorough)
            .map(|_| ())
            .map_err(|failure| (failure, vec![leg, next]))
    }

    /// Cuts the power as a leg says, and verifies what is left.
    fn crash(
        &self,
        story: &Story,
        point: &CutPoint,
        mut machine: Machine,
        leg: &Leg,
        depth: Depth,
    ) -> Result<Machine, Failure> {
        let Some(crash) = &leg.crash else {
            return Ok(machine);
        };
        machine.files = crash.cut.apply(point);
        // The backing file is the last on the disk.
        let own = 1 + usize::from(story.image.data_file != DataFile::Inside);
        if let Some(backing) = machine.files.split_off(own).pop() {
            machine.backing = Some(Arc::new(backing));
        }
        verify(&self.subject, &story.image, machine, depth)
    }

    /// Runs a leg on a machine to its end, and checks what every clean close has left;
    /// gives how many requests on the disk completed.
    fn run_whole(&self, story: &Story, machine: &Machine, leg: &Leg) -> Result<u64, Failure> {
        let mut closed = Vec::new();
        let steps = self.run_leg_to(story, machine, leg, &mut |_, _| true, &mut closed)?;
        guarded(|| {
            // What is wrong with a dirty image is put right when it is opened.
            let before = leaks(&self.subject, &story.image, &machine.with_room()).unwrap_or(0);
            for (number, files) in closed.into_iter().enumerate() {
                let left = leaks(&self.subject, &story.image, &machine.with_files(files))
                    .map_err(|failure| failure.when("after a clean close"))?;
                if left > before {
                    let message =
                        format!("clean close {number} leaks {left} clusters, not {before}");
                    return Err(Failure::new(FailureKind::Leak, message));
                }
            }
            Ok(steps)
        })
    }

    /// Runs a leg on a machine; gives how many requests on the disk completed.
    fn run_leg(
        &self,
        story: &Story,
        machine: &Machine,
        leg: &Leg,
        watch: &mut Watch<'_>,
    ) -> Result<u64, Failure> {
        self.run_leg_to(story, machine, leg, watch, &mut Vec::new())
    }

    /// As [`Explorer::run_leg`]; `closed`: what the files held after each clean close.
    fn run_leg_to(
        &self,
        story: &Story,
        machine: &Machine,
        leg: &Leg,
        watch: &mut Watch<'_>,
        closed: &mut Vec<Vec<Pages>>,
    ) -> Result<u64, Failure> {
        guarded(|| {
            let plugged = machine.plug(&story.image, Mode::Scheduled);
            plugged.disk.set_lie(self.lie.clone());
            let mut world = World::new(plugged.disk.clone(), leg.schedule_seed);
            let guest = Guest::new(&self.subject, &story.image, &plugged, machine.model.clone());
            let here = |disk: &Disk| {
                let model = guest.model.borrow().after_cut();
                (disk.cut_point(), machine.with_model(model))
            };
            let driven = world.watch(
                drive(guest.clone(), leg.steps.clone()),
                &mut |step, disk| watch(step, &|| here(disk)),
            )?;
            match driven {
                None => {}
                Some(Err(failure)) => return Err(failure),
                Some(Ok(())) => {
                    watch(world.steps(), &|| here(&plugged.disk));
                }
            }
            *closed = guest.closed.take();
            Ok(world.steps())
        })
    }

    /// Makes every cut that [`Cut::next`] knows at every moment of a story of one
    /// leg; points with more than `limit` cuts are cut at random so many times.
    pub fn exhaust(&self, story: &Story, limit: u64) -> Result<Totals, Box<Found>> {
        let found = |failure, legs| {
            Box::new(Found {
                failure,
                story: Story {
                    legs,
                    ..story.clone()
                },
            })
        };
        let machine =
            prepare(&self.subject, story).map_err(|failure| found(failure, story.legs.clone()))?;
        let mut totals = Totals::default();
        let Some(leg) = story.legs.first() else {
            return Ok(totals);
        };
        let mut broken = None;
        let ran = self.run_leg(story, &machine, leg, &mut |step, here| {
            let (point, machine) = here();
            let cut = self.exhaust_point(story, &point, &machine, (leg, step), limit);
            cut.map(|cuts| totals.cuts += cuts)
                .map_err(|failed| broken = Some(failed))
                .is_ok()
        });
        match (broken, ran) {
            (Some((failure, leg)), _) => Err(found(failure, vec![leg])),
            (None, Err(failure)) => Err(found(failure, story.legs.clone())),
            (None, Ok(steps)) => Ok(Totals { steps, ..totals }),
        }
    }

    fn exhaust_point(
        &self,
        story: &Story,
        point: &CutPoint,
        machine: &Machine,
        (leg, step): (&Leg, u64),
        limit: u64,
    ) -> Result<u64, (Failure, Leg)> {
        let mut exhaust = Exhaust::new();
        let mut count = 0;
        let try_cut = |cut: Cut| {
            let leg = Leg {
                crash: Some(Crash { step, cut }),
                ..leg.clone()
            };
            self.crash(story, point, machine.clone(), &leg, Depth::Quick)
                .map_err(|failure| (failure, leg))
        };
        while count < limit && exhaust.advance() {
            count += 1;
            try_cut(Cut::next(point, &mut exhaust))?;
        }
        if count == limit {
            let mut rng = Rng::new(step);
            for _ in 0..limit {
                count += 1;
                try_cut(Cut::random(point, &mut rng))?;
            }
        }
        Ok(count)
    }

    /// Runs a story whose crashes are all given, and verifies each.
    pub fn replay(&self, story: &Story) -> Result<(), Failure> {
        let mut machine = prepare(&self.subject, story)?;
        for leg in &story.legs {
            let Some(crash) = &leg.crash else {
                self.run_whole(story, &machine, leg)?;
                continue;
            };
            let at = crash.step;
            let mut last = None;
            self.run_leg(story, &machine, leg, &mut |step, here| {
                if step >= at {
                    last = Some(here());
                }
                step < at
            })?;
            if let Some((point, here)) = last {
                machine = self.crash(story, &point, here, leg, Depth::Thorough)?;
            }
        }
        Ok(())
    }

    /// Looks for a failure of a story with any crashes at all, `tries` times.
    pub(crate) fn search(&self, story: &Story, rng: &mut Rng, tries: u64) -> Option<Found> {
        let first = Story {
            legs: story.legs.iter().take(1).cloned().collect(),
            ..story.clone()
        };
        if story.legs.len() <= 1 {
            let without: Vec<Leg> = first
                .legs
                .into_iter()
                .map(|leg| Leg { crash: None, ..leg })
                .collect();
            let story = Story {
                legs: without,
                ..story.clone()
            };
            return self.story(&story, rng, tries).err().map(|found| *found);
        }
        self.replay(story).err().map(|failure| Found {
            failure,
            story: story.clone(),
        })
    }
}
