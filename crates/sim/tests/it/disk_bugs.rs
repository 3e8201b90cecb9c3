//! The engine on a disk that breaks its word at a barrier: what a wrong order of
//! writing would do on an honest one. The simulator must object, each time in the
//! way that belongs to the broken rule.

use vellum_sim::disk_bugs::{DiskBug, DiskBugKind};
use vellum_sim::generate;
use vellum_sim::rng::Rng;
use vellum_sim::scenario::{ImageOptions, Preparation, Scenario};
use vellum_sim::{Explorer, FailureKind, engine};

const SEEDS: u64 = 400;

fn scenario(seed: u64, shared: bool, bitmap_bits: Option<u32>) -> Scenario {
    let image = ImageOptions {
        bitmap_bits,
        ..ImageOptions::plain(128 << 9, 9)
    };
    let mut scenario = generate::scenario_of(image, &mut Rng::new(seed));
    scenario.preparations = if shared {
        vec![Preparation::Snapshot]
    } else {
        Vec::new()
    };
    scenario
}

fn objects(bug: DiskBug, shared: bool, kinds: &[FailureKind]) {
    objects_in(&|seed| scenario(seed, shared, None), bug, kinds);
}

/// Explores until the engine fails in one of these ways.
fn objects_in(scenario: &dyn Fn(u64) -> Scenario, bug: DiskBug, kinds: &[FailureKind]) {
    let mut explorer = Explorer::new(engine());
    explorer.bug = Some(bug);
    let mut others = Vec::new();
    for seed in 0..SEEDS {
        match explorer.scenario(&scenario(seed), &mut Rng::new(seed), 100) {
            Err(found) if kinds.contains(&found.failure.kind) => return,
            Err(found) => others.push(found.failure.to_string()),
            Ok(_) => {}
        }
    }
    panic!("none of {kinds:?}, only {others:?}");
}

#[test]
fn refcounts_after_what_points_there() {
    objects(
        DiskBug::late(DiskBugKind::Refcounts),
        false,
        &[FailureKind::Audit],
    );
}

#[test]
fn data_after_its_l2_entry() {
    objects(
        DiskBug::late(DiskBugKind::Data),
        false,
        &[FailureKind::Content],
    );
}

// An empty table in a place that reads as zeroes needs no order: copies do.
#[test]
fn a_new_l2_table_after_its_l1_entry() {
    objects(
        DiskBug::late(DiskBugKind::NewL2),
        true,
        &[FailureKind::Content, FailureKind::Audit],
    );
}

#[test]
fn a_mapping_after_the_refcount_that_it_held_up() {
    objects(DiskBug::late(DiskBugKind::L2), true, &[FailureKind::Audit]);
}

#[test]
fn a_mapping_after_the_reuse_of_what_it_dropped() {
    objects(
        DiskBug::late(DiskBugKind::L2),
        false,
        &[FailureKind::Content],
    );
}

#[test]
fn bits_after_the_data_that_they_tell_of() {
    let kinds = [FailureKind::Bitmap];
    let scenario = |seed| scenario(seed, false, Some(9));
    objects_in(&scenario, DiskBug::late(DiskBugKind::Bitmaps), &kinds);
}

#[test]
fn flushes_that_fail_and_do_not_say_so() {
    let kinds = [FailureKind::Content, FailureKind::Audit];
    let scenario = |seed| {
        let mut scenario = scenario(seed, false, None);
        let mut rng = Rng::new(seed);
        scenario
            .cycles
            .iter_mut()
            .for_each(|cycle| generate::fail(cycle, &mut rng));
        scenario
    };
    objects_in(&scenario, DiskBug::hidden_failures(), &kinds);
}

#[test]
fn a_flush_that_does_nothing() {
    objects(DiskBug::no_flush(|_| true), false, &[FailureKind::Content]);
}

#[test]
fn every_other_flush_does_nothing() {
    let kinds = [FailureKind::Content, FailureKind::Audit];
    objects(DiskBug::no_flush(|flush| flush % 2 == 0), false, &kinds);
    objects(DiskBug::no_flush(|flush| flush % 2 == 1), false, &kinds);
}
