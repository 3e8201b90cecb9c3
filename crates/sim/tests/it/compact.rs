//! Compactions beside changes of snapshots.

use vellum_sim::scenario::{
    Backing, Change, ImageOptions, Op, PowerCycle, Preparation, Scenario, Step,
};
use vellum_sim::storage::SimFileOptions;

fn write(offset: u64, len: u64) -> Step {
    Step::Start(Op::Write {
        offset,
        len,
        fua: false,
    })
}

fn discard(offset: u64, len: u64) -> Step {
    Step::Start(Op::Discard { offset, len })
}

/// A snapshot is deleted while a compaction looks whether all is counted that snapshots lead to: what that
/// one led to need not be.
#[test]
fn a_snapshot_may_be_deleted_while_a_compaction_looks() {
    let take = |change| Step::Snapshot(change);
    let compressed = Step::Start(Op::WriteCompressed {
        offset: 37_376,
        len: 1024,
        fua: false,
    });
    let zeroes = Step::Start(Op::WriteZeroes {
        offset: 37_888,
        len: 512,
        unmap: false,
        fua: false,
    });
    let steps = vec![
        write(37_376, 1024),
        Step::Wait,
        compressed,
        Step::Wait,
        write(37_376, 1024),
        Step::Wait,
        take(Change::Delete(1)),
        take(Change::TakeWithState(4907)),
        write(37_376, 1024),
        take(Change::Take),
        Step::Wait,
        take(Change::Take),
        Step::Commit,
        discard(37_888, 512),
        zeroes,
        discard(34_825, 503),
        Step::Wait,
        Step::Compact,
        discard(4096, 512),
        discard(3732, 407),
        discard(45_568, 2048),
        Step::Wait,
        Step::Compact,
        take(Change::Delete(3)),
    ];
    let scenario = Scenario {
        image: ImageOptions {
            version: 2,
            backing: Backing::Raw(53_248),
            traits: SimFileOptions {
                can_punch: true,
                can_zero: true,
                growable: true,
                read_only: false,
                can_clone: false,
            },
            ..ImageOptions::plain(48_128, 9)
        },
        setup: vec![],
        preparations: vec![Preparation::Compress(1)],
        cycles: vec![PowerCycle {
            steps,
            schedule_seed: 5_307_507_884_134_637_768,
            crash: None,
        }],
    };
    vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();
}
