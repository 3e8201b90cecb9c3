//! Stories of the daemon, and that its simulator notices what is wrong.

use vellum_sim::daemon::{Settings, seed};
use vellum_sim::{Failure, FailureKind};

/// The first failure of some seeds.
fn first_failure(seeds: std::ops::Range<u64>, settings: &Settings) -> Option<Failure> {
    seeds
        .into_iter()
        .find_map(|number| seed(number, 20, settings).err())
}

fn env(name: &str, otherwise: u64) -> u64 {
    let value = std::env::var(name).ok();
    value.map_or(otherwise, |value| value.parse().expect("a number"))
}

#[test]
fn stories_keep_their_promises() {
    let from = env("DAEMON_SEED", 0);
    let to = from + env("DAEMON_SEEDS", 40);
    for number in from..to {
        if let Err(failure) = seed(number, 20, &Settings::default()) {
            panic!("{failure}");
        }
    }
}

#[test]
fn equal_seeds_give_equal_stories() {
    let settings = Settings::default();
    let steps = |number| seed(number, 0, &settings).map(|totals| totals.steps);
    assert_eq!(steps(3), steps(3));
}

/// No descriptor of the kernel remembers that a flush has failed, and with most errors the
/// engine takes a later success for one.
#[test]
fn flushes_that_are_forgotten_are_noticed() {
    let settings = Settings {
        faults: Some(vec![28]),
        only_flushes_fail: true,
        forgets: true,
    };
    let failure = first_failure(0..200, &settings).expect("nothing was noticed");
    assert!(
        matches!(
            failure.kind,
            FailureKind::Content | FailureKind::Audit | FailureKind::Check | FailureKind::Open
        ),
        "{failure}"
    );
}
