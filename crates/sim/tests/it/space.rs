//! Space: images in places of fixed length, under quotas, and in files that grow, and the daemon's jobs
//! into places of full size. More seeds: `vellum-sim --space`, `vellum-sim --daemon --space`.

use vellum_sim::daemon::{self, Settings};
use vellum_sim::{Explorer, engine};

const THREADS: u64 = 2;

/// Plays seeds on two threads.
fn play(seeds: u64, seed: impl Fn(u64) -> Result<(), String> + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let seed = &seed;
            scope.spawn(move || {
                for number in (thread..seeds).step_by(THREADS as usize) {
                    if let Err(failure) = seed(number) {
                        panic!("seed {number}: {failure}");
                    }
                }
            });
        }
    });
}

/// No ENOSPC that could be avoided, no image that sprawls, and few leaks behind a flush.
#[test]
fn room_is_used_before_requests_fail() {
    let explorer = Explorer {
        space: true,
        ..Explorer::new(engine())
    };
    play(120, |seed| {
        let played = explorer.seed(seed, 10);
        played.map(drop).map_err(|found| found.failure.to_string())
    });
}

/// Scenarios that got ENOSPC while free clusters held blocks: for a mapped hole, for a cluster of its own, and for a
/// mapped hole when other requests had left all free clusters out.
#[test]
fn blocks_of_free_clusters_are_room() {
    let explorer = Explorer {
        space: true,
        ..Explorer::new(engine())
    };
    for seed in [215, 2506, 6528] {
        if let Err(found) = explorer.seed(seed, 20) {
            panic!("seed {seed}: {}", found.failure);
        }
    }
}

/// Mirrors, backups, commits and streams into images in places of full size, and their guests.
#[test]
fn jobs_fit_into_places_of_full_size() {
    let settings = Settings {
        fixed_images: true,
        ..Settings::default()
    };
    play(60, |seed| {
        let played = daemon::seed(seed, 5, &settings);
        played.map(drop).map_err(|failure| failure.to_string())
    });
}

#[test]
fn equal_seeds_give_equal_simulations() {
    let explorer = Explorer {
        space: true,
        ..Explorer::new(engine())
    };
    for seed in 0..6 {
        let run = || match explorer.seed(seed, 5) {
            Ok(totals) => format!("{totals:?}"),
            Err(found) => found.failure.to_string(),
        };
        assert_eq!(run(), run(), "seed {seed}");
    }
}
