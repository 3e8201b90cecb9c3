//! Mutants of NBD sessions and of the NBD client: with a mend taken out, the simulator fails
//! within so many scenarios, and the scenario that fails passes with the mend.

use vellum_sim::FailureKind;
use vellum_sim::daemon::{Kind, Settings, seed};
use vellum_storage::mutants::{self, Mutant};

const STORIES: u64 = 60;

/// Takes a mend out, and demands that this makes a scenario fail in a certain way.
fn killed(mutant: Mutant, kind: Kind, how: &[FailureKind]) {
    let settings = Settings {
        kind: Some(kind),
        ..Settings::default()
    };
    mutants::set(Some(mutant));
    let failed = (0..STORIES).find_map(|number| {
        let failure = seed(number, 0, &settings).err()?;
        how.contains(&failure.kind).then_some((number, failure))
    });
    mutants::set(None);
    let Some((number, failure)) = failed else {
        panic!("{mutant:?} lives through {STORIES} scenarios");
    };
    let mended = seed(number, 0, &settings);
    assert!(mended.is_ok(), "also with the mend: {mended:?}");
    println!("{mutant:?}: {failure}");
}

#[test]
fn working_for_clients_that_are_gone() {
    killed(Mutant::WorkForTheGone, Kind::Greedy, &[FailureKind::Stuck]);
}

/// A flush that succeeds although the server has lost writes.
#[test]
fn flushing_one_connection_of_several() {
    killed(
        Mutant::FlushOneConnection,
        Kind::Remote,
        &[FailureKind::Content],
    );
}
