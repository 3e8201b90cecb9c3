//! The engine on a disk that breaks its word at a barrier: what a wrong order of
//! writing would do on an honest one. The simulator must object, each time in the
//! way that belongs to the broken rule.

use vellum_sim::generate;
use vellum_sim::lies::{Kind, Lie};
use vellum_sim::rng::Rng;
use vellum_sim::scenario::{ImageOptions, Preparation, Story};
use vellum_sim::{Explorer, FailureKind, engine};

const SEEDS: u64 = 400;

fn story(seed: u64, shared: bool, bitmap_bits: Option<u32>) -> Story {
    let image = ImageOptions {
        bitmap_bits,
        ..ImageOptions::plain(128 << 9, 9)
    };
    let mut story = generate::story_of(image, &mut Rng::new(seed));
    story.preparations = if shared {
        vec![Preparation::Snapshot]
    } else {
        Vec::new()
    };
    story
}

fn objects(lie: Lie, shared: bool, kinds: &[FailureKind]) {
    objects_in(&|seed| story(seed, shared, None), lie, kinds);
}

/// Explores until the engine fails in one of these ways.
fn objects_in(story: &dyn Fn(u64) -> Story, lie: Lie, kinds: &[FailureKind]) {
    let explorer = Explorer {
        subject: engine(),
        lie: Some(lie),
    };
    let mut others = Vec::new();
    for seed in 0..SEEDS {
        match explorer.story(&story(seed), &mut Rng::new(seed), 100) {
            Err(found) if kinds.contains(&found.failure.kind) => return,
            Err(found) => others.push(found.failure.to_string()),
            Ok(_) => {}
        }
    }
    panic!("none of {kinds:?}, only {others:?}");
}

#[test]
fn refcounts_after_what_points_there() {
    objects(Lie::late(Kind::Refcounts), false, &[FailureKind::Audit]);
}

#[test]
fn data_after_its_l2_entry() {
    objects(Lie::late(Kind::Data), false, &[FailureKind::Content]);
}

// An empty table in a place that reads as zeroes needs no order: copies do.
#[test]
fn a_new_l2_table_after_its_l1_entry() {
    objects(
        Lie::late(Kind::NewL2),
        true,
        &[FailureKind::Content, FailureKind::Audit],
    );
}

#[test]
fn a_mapping_after_the_refcount_that_it_held_up() {
    objects(Lie::late(Kind::L2), true, &[FailureKind::Audit]);
}

#[test]
fn a_mapping_after_the_reuse_of_what_it_dropped() {
    objects(Lie::late(Kind::L2), false, &[FailureKind::Content]);
}

#[test]
fn bits_after_the_data_that_they_tell_of() {
    let kinds = [FailureKind::Bitmap];
    let story = |seed| story(seed, false, Some(9));
    objects_in(&story, Lie::late(Kind::Bitmaps), &kinds);
}

#[test]
fn flushes_that_fail_and_do_not_say_so() {
    let kinds = [FailureKind::Content, FailureKind::Audit];
    let story = |seed| {
        let mut story = story(seed, false, None);
        let mut rng = Rng::new(seed);
        story
            .legs
            .iter_mut()
            .for_each(|leg| generate::fail(leg, &mut rng));
        story
    };
    objects_in(&story, Lie::hidden_failures(), &kinds);
}

#[test]
fn a_flush_that_does_nothing() {
    objects(Lie::no_flush(|_| true), false, &[FailureKind::Content]);
}

#[test]
fn every_other_flush_does_nothing() {
    let kinds = [FailureKind::Content, FailureKind::Audit];
    objects(Lie::no_flush(|flush| flush % 2 == 0), false, &kinds);
    objects(Lie::no_flush(|flush| flush % 2 == 1), false, &kinds);
}
