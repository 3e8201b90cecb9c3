//! Mutants of the engine: with a mend taken out, scenarios of one image fail, and the same scenario
//! passes with the mend. See docs/TESTING.md.

use vellum_sim::generate;
use vellum_sim::rng::Rng;
use vellum_sim::scenario::{DataFile, ImageOptions, Op, Scenario, Step, WriteLog};
use vellum_sim::{Explorer, FailureKind, engine};
use vellum_storage::mutants::{self, Mutant};

const STORIES: u64 = 400;
const CUTS: u64 = 40;
const CLUSTER: u64 = 4096;

/// Takes a mend out, and demands that this is what makes one of these scenarios fail.
fn killed(mutant: Mutant, scenarios: impl Fn(u64) -> Option<Scenario>) -> FailureKind {
    let explorer = Explorer::new(engine());
    let play =
        |seed: u64, scenario: &Scenario| explorer.scenario(scenario, &mut Rng::new(seed), CUTS);
    mutants::set(Some(mutant));
    let mut played = (0..).filter_map(|seed| Some((seed, scenarios(seed)?)));
    let failed = played
        .by_ref()
        .take(STORIES as usize)
        .find_map(|(seed, scenario)| {
            let found = play(seed, &scenario).err()?;
            Some((seed, scenario, found.failure))
        });
    mutants::set(None);
    let Some((seed, scenario, failure)) = failed else {
        panic!("{mutant:?} lives through {STORIES} scenarios");
    };
    let mended = play(seed, &scenario).map_err(|found| found.failure);
    assert!(mended.is_ok(), "also with the mend: {mended:?}");
    println!("{mutant:?}: seed {seed}: {failure}");
    failure.kind
}

/// The scenario of a seed, if its disk fails as is wanted.
fn failing(seed: u64, wanted: impl Fn(&Step) -> bool) -> Option<Scenario> {
    let scenario = generate::scenario(seed);
    scenario.cycles[0]
        .steps
        .iter()
        .any(wanted)
        .then_some(scenario)
}

/// The kernel drops what it could not make durable, and tells that once: the image must know.
#[test]
fn forgetting_barriers_that_failed() {
    let forgets =
        |step: &Step| matches!(step, Step::Fail { odds, .. } if odds.forgets && odds.flushes > 0);
    killed(Mutant::ForgetFullBarriers, |seed| failing(seed, forgets));
}

/// The scenario of a seed, if its image has a write log.
fn logged(seed: u64) -> Option<Scenario> {
    let scenario = generate::scenario(seed);
    (scenario.image.write_log != WriteLog::None).then_some(scenario)
}

/// Each rule of the write log (FORMAT.md, section 7b), broken.
#[test]
fn breaking_the_rules_of_the_write_log() {
    for mutant in [
        Mutant::AppendWithoutFlush,
        Mutant::NoteInAnyOrder,
        Mutant::MoveTailUnflushed,
        Mutant::KeepRecordsLive,
        Mutant::GoAroundLive,
        Mutant::MarkLate,
        Mutant::ReplayUnflushed,
    ] {
        killed(mutant, logged);
    }
    killed(Mutant::NoteBesideOthers, parts_beside_whole_clusters);
    killed(Mutant::NameSuperblockEarly, appends_beside_moving_tails);
}

/// The rule of the checksums (FORMAT.md, section 7c) that each change relies on, broken.
#[test]
fn breaking_the_rules_of_checksums() {
    let summed = |seed| {
        let scenario = generate::scenario(seed);
        scenario.image.checksums.then_some(scenario)
    };
    killed(Mutant::OpenRegionsLate, summed);
}

/// Rule 13: what an open concludes from the writes of a process that was killed must hold without them.
#[test]
fn building_on_what_is_not_durable() {
    let fua = false;
    let zeroes = |offset, len| Op::WriteZeroes {
        offset,
        len,
        unmap: true,
        fua,
    };
    killed(Mutant::ChangeUnsynced, |seed| {
        Some(mapped_by_turns(seed, DataFile::External, zeroes))
    });
    let discard = |offset, len| Op::Discard { offset, len };
    killed(Mutant::FreeLeaksUnsynced, |seed| {
        Some(mapped_by_turns(seed, DataFile::Inside, discard))
    });
}

/// Two clusters are written and dropped by turns, each durably: what a killed process leaves relies on the last mapping.
fn mapped_by_turns(seed: u64, data_file: DataFile, drop: impl Fn(u64, u64) -> Op) -> Scenario {
    let mut scenario = of_a_logged_image(seed, Vec::new());
    let (offset, len, fua) = (0, 2 * CLUSTER, false);
    scenario.image = ImageOptions {
        data_file,
        data_cache: false,
        // Whoever frees leaks syncs before that.
        eager: false,
        ..ImageOptions::plain(len, 12)
    };
    let durably = |op| {
        let steps = [Step::Start(op), Step::Wait];
        steps
            .into_iter()
            .chain([Step::Start(Op::Flush), Step::Wait])
    };
    scenario.cycles[0].steps = (0..8)
        .flat_map(|_| [Op::Write { offset, len, fua }, drop(offset, len)])
        .flat_map(durably)
        .collect();
    scenario
}

/// A scenario of an image with a log in a file, of which only the seeds of a generated one are kept.
fn of_a_logged_image(seed: u64, steps: Vec<Step>) -> Scenario {
    let mut scenario = generate::scenario(seed);
    scenario.image = ImageOptions {
        write_log: WriteLog::File,
        data_cache: false,
        ..ImageOptions::plain(64 * CLUSTER, 12)
    };
    (scenario.setup, scenario.preparations) = (Vec::new(), Vec::new());
    scenario.cycles[0].steps = steps;
    scenario
}

/// Flushes that fill a quarter of the log again and again, and others while its tail moves on.
fn appends_beside_moving_tails(seed: u64) -> Option<Scenario> {
    let write = |cluster: u64| {
        Step::Start(Op::Write {
            offset: cluster * CLUSTER,
            len: 512,
            fua: false,
        })
    };
    let appended = |cluster| [write(cluster), Step::Start(Op::Flush), Step::Wait];
    Some(of_a_logged_image(
        seed,
        (0..60).flat_map(appended).collect(),
    ))
}

/// Writes of parts of sectors beside compressed ones of their cluster, which are not noted, again
/// and again.
fn parts_beside_whole_clusters(seed: u64) -> Option<Scenario> {
    let mut steps = Vec::new();
    for cluster in 8..20 {
        let offset = cluster * CLUSTER;
        steps.extend([
            Step::Start(Op::Write {
                offset: offset + 850,
                len: 279,
                fua: false,
            }),
            Step::Start(Op::WriteCompressed {
                offset,
                len: CLUSTER,
                fua: false,
            }),
            Step::Wait,
            Step::Start(Op::Flush),
            Step::Wait,
            Step::Start(Op::Write {
                offset: (cluster + 30) * CLUSTER,
                len: 512,
                fua: true,
            }),
        ]);
    }
    Some(of_a_logged_image(seed, steps))
}

/// What the mapping dropped is there for a request that needs room.
#[test]
fn keeping_room_that_a_request_needs() {
    let mutant = Mutant::KeepPendingFrees;
    let kind = killed(mutant, |seed| Some(generate::space::scenario(seed)));
    assert_eq!(kind, FailureKind::NoSpace, "{mutant:?}");
}

/// What was counted ahead, or set aside for a sequential writer, is there for any other.
#[test]
fn keeping_what_is_set_aside() {
    let mutant = Mutant::KeepReserve;
    let kind = killed(mutant, |seed| Some(generate::space::scenario(seed)));
    assert_eq!(kind, FailureKind::NoSpace, "{mutant:?}");
}
