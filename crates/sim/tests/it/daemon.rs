//! Scenarios of the daemon, and that its simulator notices what is wrong. More scenarios:
//! `vellum-sim --daemon`.

use vellum_sim::daemon::{Settings, seed};
use vellum_sim::{Failure, FailureKind};

/// The first scenario that fails, with its number.
fn first_failure(settings: &Settings) -> (u64, Failure) {
    let mut scenarios = 0..400;
    let failed = scenarios.find_map(|number| Some((number, seed(number, 20, settings).err()?)));
    failed.expect("nothing was noticed")
}

/// What a disk shows that does not hold what it should.
fn is_loss(kind: FailureKind) -> bool {
    use FailureKind::{Audit, Bitmap, Check, Content, Open};
    matches!(kind, Audit | Bitmap | Check | Content | Open)
}

#[test]
fn stories_keep_their_promises() {
    for number in 0..20 {
        if let Err(failure) = seed(number, 20, &Settings::default()) {
            panic!("{failure}");
        }
    }
}

#[test]
fn equal_seeds_give_equal_stories() {
    let settings = Settings::default();
    let steps = |number| seed(number, 0, &settings).map(|played| played.totals.steps);
    assert_eq!(steps(3), steps(3));
}

/// Pages that a failed flush has dropped, when it says that all is well.
#[test]
fn flushes_that_lose_pages_silently_are_noticed() {
    let settings = Settings {
        faults: Some(vec![28]),
        only_flushes_fail: true,
        unreported: true,
        ..Settings::default()
    };
    let (_, failure) = first_failure(&settings);
    assert!(is_loss(failure.kind), "{failure}");
}
