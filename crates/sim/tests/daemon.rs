//! Stories of the daemon, and that its simulator notices what is wrong. More stories:
//! `vellum-sim --daemon`.

use vellum_sim::daemon::{Settings, seed};
use vellum_sim::{Failure, FailureKind};

/// The first failure of some seeds.
fn first_failure(settings: &Settings) -> Failure {
    let failure = (0..300).find_map(|number| seed(number, 20, settings).err());
    failure.expect("nothing was noticed")
}

/// What a disk shows that did not make durable what it was told to.
fn is_loss(kind: FailureKind) -> bool {
    use FailureKind::{Audit, Check, Content, Open};
    matches!(kind, Audit | Check | Content | Open)
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
    let steps = |number| seed(number, 0, &settings).map(|totals| totals.steps);
    assert_eq!(steps(3), steps(3));
}

/// What users leave must be durable when they are led away: what they flush later does not
/// reach it.
#[test]
fn an_image_that_is_left_unflushed_is_noticed() {
    let settings = Settings {
        faults: Some(Vec::new()),
        left_unflushed: true,
        ..Settings::default()
    };
    let failure = first_failure(&settings);
    assert!(is_loss(failure.kind), "{failure}");
}

/// Pages that a failed flush has dropped, when the next one says that all is well.
#[test]
fn flushes_that_lose_pages_silently_are_noticed() {
    let settings = Settings {
        faults: Some(vec![28]),
        only_flushes_fail: true,
        unreported: true,
        ..Settings::default()
    };
    let failure = first_failure(&settings);
    assert!(is_loss(failure.kind), "{failure}");
}
