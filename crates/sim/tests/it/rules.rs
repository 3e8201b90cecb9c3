//! The simulator on a toy engine: it accepts one that keeps the rules of ordering,
//! and objects, for the right reason, to one that breaks any of them.

use std::sync::Arc;
use std::time::Duration;

use crate::toy::{Break, CLUSTER_BITS, ToySubject};
use vellum_sim::generate;
use vellum_sim::rng::Rng;
use vellum_sim::scenario::{ImageOptions, Preparation, Scenario};
use vellum_sim::shrink::shrink;
use vellum_sim::{Explorer, FailureKind, Found};

fn scenario(seed: u64) -> Scenario {
    let image = ImageOptions {
        requests_only: true,
        ..ImageOptions::plain(16 << CLUSTER_BITS, CLUSTER_BITS)
    };
    let mut scenario = generate::scenario_of(image, &mut Rng::new(seed));
    scenario
        .preparations
        .retain(|preparation| *preparation == Preparation::Snapshot);
    scenario
}

fn explorer(broken: Break) -> Explorer {
    Explorer::new(Arc::new(ToySubject(broken)))
}

/// Explores until the engine fails in one of these ways, and tells the other ways.
fn hunt(broken: Break, seeds: u64, kinds: &[FailureKind]) -> Result<Found, Vec<String>> {
    let explorer = explorer(broken);
    let mut others = Vec::new();
    for seed in 0..seeds {
        match explorer.scenario(&scenario(seed), &mut Rng::new(seed), 100) {
            Err(found) if kinds.contains(&found.failure.kind) => return Ok(*found),
            Err(found) => others.push(found.failure.to_string()),
            Ok(_) => {}
        }
    }
    Err(others)
}

fn objects(broken: Break, kinds: &[FailureKind]) {
    if let Err(others) = hunt(broken, 400, kinds) {
        panic!("{broken:?}: none of {kinds:?}, only {others:?}");
    }
}

#[test]
fn a_right_engine_is_accepted() {
    let others = hunt(Break::Nothing, 100, &[]).expect_err("no failure is expected");
    assert!(others.is_empty(), "{others:?}");
}

#[test]
fn refcounts_must_rise_before_anything_points_there() {
    objects(Break::RefcountsWithMapping, &[FailureKind::Audit]);
}

#[test]
fn data_must_be_there_before_its_l2_entry() {
    objects(Break::DataWithMapping, &[FailureKind::Content]);
}

#[test]
fn a_new_l2_table_must_be_there_before_its_l1_entry() {
    objects(Break::L2WithL1, &[FailureKind::Content]);
}

#[test]
fn refcounts_must_not_fall_before_the_mapping_has_changed() {
    objects(Break::RefcountsDownEarly, &[FailureKind::Audit]);
}

#[test]
fn a_dropped_cluster_must_not_be_used_again_too_early() {
    objects(
        Break::ReuseEarly,
        &[FailureKind::Content, FailureKind::Audit],
    );
}

#[test]
fn a_dropped_cluster_must_not_be_punched_too_early() {
    objects(Break::PunchEarly, &[FailureKind::Content]);
}

#[test]
fn a_dropped_cluster_must_not_be_used_again_while_a_request_uses_it() {
    objects(Break::ReuseWhileUsed, &[FailureKind::Content]);
}

#[test]
fn a_flush_must_end_with_a_barrier() {
    objects(Break::NoLastBarrier, &[FailureKind::Content]);
}

#[test]
fn a_failure_shrinks_to_a_short_test_that_still_fails() {
    let found = hunt(Break::PunchEarly, 400, &[FailureKind::Content]).expect("noticed");
    let explorer = explorer(Break::PunchEarly);
    let small = shrink(&explorer, found, Duration::from_secs(20));
    let replayed = explorer
        .replay(&small.scenario)
        .expect_err("the shrunk scenario still fails");
    assert_eq!(replayed.kind, FailureKind::Content);
    let cycle = &small.scenario.cycles[0];
    assert!(
        small.scenario.cycles.len() == 1 && cycle.steps.len() <= 4,
        "{:#?}",
        small.scenario
    );
    let text = small
        .scenario
        .to_test("shrunk", "A cluster was punched too early.");
    assert!(
        text.contains("steps: vec![") && text.contains("crash: Some("),
        "{text}"
    );
}
