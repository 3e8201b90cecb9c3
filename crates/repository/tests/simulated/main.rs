//! Pushes, removals and collections side by side on a store that loses, delays and repeats requests, and
//! under kills: every disk that can be named is whole, and none goes that was not removed.
//!
//! `VELLUM_REPOSITORY_SEEDS=20000` runs more of them; a failure names its seed, and
//! `VELLUM_REPOSITORY_SEED=N` runs that one alone.

mod damage;
mod races;
mod store;
mod world;

use world::World;

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is a number")),
    )
}

#[test]
fn no_disk_is_lost_and_none_leads_to_nothing() {
    let seeds = match number("VELLUM_REPOSITORY_SEED") {
        Some(seed) => seed..seed + 1,
        None => 0..number("VELLUM_REPOSITORY_SEEDS").unwrap_or(200),
    };
    let (mut faults, mut kills, mut pushed, mut removed) = (0, 0, 0, 0);
    for seed in seeds.clone() {
        let world = World::run(seed);
        faults += world.faults;
        kills += world.kills;
        pushed += world.pushed();
        removed += world.removed();
    }
    println!(
        "seeds {seeds:?}: {faults} faults, {kills} kills, {pushed} pushes, {removed} objects removed"
    );
    if seeds.end - seeds.start > 100 {
        assert!(faults > 100 && kills > 100 && pushed > 100 && removed > 100);
    }
}
