//! Makes a failing scenario smaller while it still fails, for people who look for the cause.

use std::time::{Duration, Instant};

use super::ending::Ending;
use super::operation::Mode;
use super::play::Difference;
use super::scenario::Scenario;

/// How many smaller scenarios are tried at most.
pub const MOST_TRIES: usize = 250;
/// How long that may take: a tool that hangs takes its whole limit each time.
const MOST_TIME: Duration = Duration::from_secs(300);

/// A scenario that can be made smaller.
pub trait Shrinks: Sized {
    /// Scenarios that are a little smaller, the smallest first.
    fn smaller(&self) -> Vec<Self>;
}

impl Shrinks for Scenario {
    fn smaller(&self) -> Vec<Self> {
        candidates(self)
    }
}

/// The smallest scenario found in so many tries that still fails, with its failure.
pub fn shrink<S: Shrinks>(
    scenario: S,
    difference: Difference,
    most_tries: usize,
    mut play: impl FnMut(&S) -> Result<(), Difference>,
) -> (S, Difference) {
    let mut best = (scenario, difference);
    let mut tries = 0;
    let started = Instant::now();
    'smaller: loop {
        for candidate in best.0.smaller() {
            if tries == most_tries || started.elapsed() > MOST_TIME {
                return best;
            }
            tries += 1;
            if let Err(difference) = play(&candidate) {
                best = (candidate, difference);
                continue 'smaller;
            }
        }
        return best;
    }
}

fn candidates(scenario: &Scenario) -> Vec<Scenario> {
    let mut found = Vec::new();
    let mut add = |change: &dyn Fn(&mut Scenario)| {
        let mut smaller = scenario.clone();
        change(&mut smaller);
        found.push(smaller);
    };
    if !scenario.preparation.is_empty() {
        add(&|smaller| smaller.preparation.clear());
    }
    for index in 0..scenario.batches.len() {
        add(&|smaller| drop(smaller.batches.remove(index)));
    }
    for (index, batch) in scenario.batches.iter().enumerate() {
        for at in 0..batch.snapshots.len() {
            add(&|smaller| {
                smaller.batches[index].snapshots.remove(at);
            });
        }
        for at in 0..batch.bitmaps.len() {
            add(&|smaller| drop(smaller.batches[index].bitmaps.remove(at)));
        }
        if batch.amend.is_some() {
            add(&|smaller| smaller.batches[index].amend = None);
        }
        if batch.resize.is_some() {
            add(&|smaller| smaller.batches[index].resize = None);
        }
        if batch.mode != Mode::Plain {
            add(&|smaller| smaller.batches[index].mode = Mode::Plain);
        }
        for (start, end) in halves(batch.groups.len()) {
            add(&|smaller| drop(smaller.batches[index].groups.drain(start..end)));
        }
    }
    if scenario.ending != Ending::None {
        add(&|smaller| smaller.ending = Ending::None);
    }
    for (start, end) in halves(scenario.preparation.len()) {
        add(&|smaller| drop(smaller.preparation.drain(start..end)));
    }
    // In other formats the size of clusters may depend on it.
    if !scenario.shape.chain.is_empty() && scenario.shape.foreign.is_none() {
        add(&|smaller| {
            smaller.shape.chain.clear();
            smaller.ending = Ending::None;
        });
    }
    for (level, backing) in scenario.shape.chain.iter().enumerate() {
        for at in 0..backing.commands.len() {
            add(&|smaller| drop(smaller.shape.chain[level].commands.remove(at)));
        }
    }
    found
}

/// Ranges to leave out of so many things: halves, quarters, down to single ones.
pub fn halves(count: usize) -> Vec<(usize, usize)> {
    let mut ranges = Vec::new();
    let mut len = count / 2;
    while len > 1 {
        ranges.extend(
            (0..count)
                .step_by(len)
                .map(|start| (start, (start + len).min(count))),
        );
        len /= 2;
    }
    ranges.extend((0..count).map(|at| (at, at + 1)));
    ranges
}
