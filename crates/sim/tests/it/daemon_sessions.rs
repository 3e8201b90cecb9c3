//! Scenarios of NBD sessions with the daemon. More of them: `vellum-sim --daemon`.

use vellum_sim::daemon::{Kind, Settings, seed};

fn play(kind: Kind, seeds: std::ops::Range<u64>, crashes: u64) {
    let settings = Settings {
        kind: Some(kind),
        ..Settings::default()
    };
    for number in seeds {
        if let Err(failure) = seed(number, crashes, &settings) {
            panic!("{failure}");
        }
    }
}

/// No request fails of a guest whose disk is full now and then, and what was flushed outlives all
/// crashes meanwhile.
#[test]
fn on_a_disk_that_is_full_for_a_while_requests_wait() {
    let settings = Settings {
        kind: Some(Kind::Sessions),
        fills: true,
        ..Settings::default()
    };
    let seeds = std::env::var("VELLUM_SEEDS")
        .ok()
        .and_then(|count| count.parse().ok());
    for number in 0..seeds.unwrap_or(60) {
        if let Err(failure) = seed(number, 20, &settings) {
            panic!("{number}: {failure}");
        }
    }
}

#[test]
fn clients_of_sessions_lose_nothing() {
    play(Kind::Sessions, 0..6, 10);
}

#[test]
fn what_is_done_for_clients_ends_soon_after_they_leave() {
    play(Kind::Greedy, 0..6, 0);
}

#[test]
fn a_remote_disk_keeps_what_a_flush_says() {
    play(Kind::Remote, 0..60, 0);
}

#[test]
fn equal_seeds_give_equal_stories() {
    for kind in [Kind::Sessions, Kind::Greedy, Kind::Remote] {
        let settings = Settings {
            kind: Some(kind),
            ..Settings::default()
        };
        let steps = |number| seed(number, 0, &settings).map(|played| played.totals.steps);
        assert_eq!(steps(3), steps(3), "{kind:?}");
    }
}
