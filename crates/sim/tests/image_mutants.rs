//! Mutants of the engine: with a mend taken out, stories of one image fail, and the same story
//! passes with the mend. See docs/TESTING.md.

use vellum_sim::generate;
use vellum_sim::rng::Rng;
use vellum_sim::scenario::{Step, Story};
use vellum_sim::{Explorer, FailureKind, engine};
use vellum_storage::mutants::{self, Mutant};

const STORIES: u64 = 400;
const CUTS: u64 = 20;

/// Takes a mend out, and demands that this is what makes one of these stories fail.
fn killed(mutant: Mutant, stories: impl Fn(u64) -> Option<Story>) -> FailureKind {
    let explorer = Explorer::new(engine());
    let play = |seed: u64, story: &Story| explorer.story(story, &mut Rng::new(seed), CUTS);
    mutants::set(Some(mutant));
    let mut played = (0..).filter_map(|seed| Some((seed, stories(seed)?)));
    let failed = played
        .by_ref()
        .take(STORIES as usize)
        .find_map(|(seed, story)| {
            let found = play(seed, &story).err()?;
            Some((seed, story, found.failure))
        });
    mutants::set(None);
    let Some((seed, story, failure)) = failed else {
        panic!("{mutant:?} lives through {STORIES} stories");
    };
    let mended = play(seed, &story).map_err(|found| found.failure);
    assert!(mended.is_ok(), "also with the mend: {mended:?}");
    println!("{mutant:?}: seed {seed}: {failure}");
    failure.kind
}

/// The story of a seed, if its disk fails as is wanted.
fn failing(seed: u64, wanted: impl Fn(&Step) -> bool) -> Option<Story> {
    let story = generate::story(seed);
    story.legs[0].steps.iter().any(wanted).then_some(story)
}

/// The kernel drops what it could not make durable, and tells that once: the image must know.
#[test]
fn forgetting_barriers_that_failed() {
    let forgets =
        |step: &Step| matches!(step, Step::Fail { odds, .. } if odds.forgets && odds.flushes > 0);
    killed(Mutant::ForgetFullBarriers, |seed| failing(seed, forgets));
}
