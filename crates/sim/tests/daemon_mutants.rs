//! Mutants of the daemon: with a mend taken out, the daemon's simulator fails within so many
//! scenarios, and the scenario that fails passes with the mend. See docs/TESTING.md.

use vellum_sim::daemon::{Kind, Settings, seed};
use vellum_sim::{Failure, FailureKind};
use vellum_storage::mutants::{self, Mutant};

const STORIES: u64 = 1000;

/// Takes a mend out, and demands that this is what makes a scenario fail.
/// `crashes` is how many there are in each.
fn killed(mutant: Mutant, crashes: u64, settings: &Settings) -> Failure {
    let settings = &Settings {
        kind: Some(Kind::Graph),
        ..settings.clone()
    };
    mutants::set(Some(mutant));
    let failed =
        (0..STORIES).find_map(|number| Some((number, seed(number, crashes, settings).err()?)));
    mutants::set(None);
    let Some((number, failure)) = failed else {
        panic!("{mutant:?} lives through {STORIES} scenarios");
    };
    let mended = seed(number, crashes, settings);
    assert!(mended.is_ok(), "also with the mend: {mended:?}");
    println!("{mutant:?}: {failure}");
    failure
}

/// What somebody sees that is not what it should be.
fn is_loss(failure: &Failure) -> bool {
    use FailureKind::{Audit, Check, Content, Open};
    matches!(failure.kind, Audit | Check | Content | Open)
}

/// No request fails.
fn sound() -> Settings {
    Settings {
        faults: Some(Vec::new()),
        ..Settings::default()
    }
}

/// What users leave must be durable when they are led away: what they flush later does not
/// reach it.
#[test]
fn leaving_what_is_not_durable() {
    assert!(is_loss(&killed(Mutant::LeaveUnflushed, 20, &sound())));
}

/// What a node has in memory when it is opened anew must be in its file.
#[test]
fn reopening_what_is_not_written() {
    assert!(is_loss(&killed(Mutant::ReopenUnflushed, 0, &sound())));
}

/// What was brought up from below must be durable before the header says that it is not below.
#[test]
fn renaming_the_backing_file_too_early() {
    assert!(is_loss(&killed(Mutant::RenameUnflushed, 20, &sound())));
}

/// Users go on with the target of a mirror as if all of it were durable.
#[test]
fn switching_to_what_is_not_durable() {
    assert!(is_loss(&killed(Mutant::SwitchUnflushed, 20, &sound())));
}

/// What is zeroed while a mirror runs shows old bytes in its target.
#[test]
fn forgetting_to_mark_zeroes() {
    assert!(is_loss(&killed(Mutant::ForgetDirtyZeroes, 0, &sound())));
}

/// The kernel drops what it could not make durable, tells that once, and so do descriptors
/// here: the image must know.
#[test]
fn forgetting_barriers_that_failed() {
    let settings = Settings {
        faults: Some(vec![28]),
        only_flushes_fail: true,
        forgets: true,
        ..Settings::default()
    };
    assert!(is_loss(&killed(Mutant::ForgetFullBarriers, 20, &settings)));
}

/// After the error of one of several writes the clusters of all are given back. Before and
/// after what is written to a large cluster there are zeroes to write.
#[test]
fn telling_the_first_of_several_errors() {
    let settings = Settings {
        faults: Some(vec![28]),
        no_flush_fails: true,
        requests_one_in: Some(15),
        uncached: true,
        cluster_bits: Some(18),
        ..Settings::default()
    };
    assert!(is_loss(&killed(Mutant::TellTheFirstError, 0, &settings)));
}

#[test]
fn exchanging_devices_under_requests() {
    killed(Mutant::DrainNothing, 20, &sound());
}

#[test]
fn ignoring_fua() {
    assert!(is_loss(&killed(Mutant::IgnoreFua, 20, &sound())));
}

#[test]
fn reusing_what_is_still_read() {
    // Small clusters are freed and taken again often.
    let settings = Settings {
        cluster_bits: Some(9),
        ..sound()
    };
    assert!(is_loss(&killed(Mutant::ReuseWhileRead, 0, &settings)));
}
