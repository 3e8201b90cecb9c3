//! Copy-on-write on a file system that shares blocks.

use vellum::Preallocation;
use vellum_sim::cut::PowerCut;
use vellum_sim::scenario::{
    Backing, Crash, ImageOptions, Op, PowerCycle, Preparation, Scenario, Step, WriteLog,
};
use vellum_sim::storage::SimFileOptions;

fn write(offset: u64, len: u64) -> Op {
    let fua = false;
    Op::Write { offset, len, fua }
}

/// A new cluster at the end of the file, part of which shares blocks with the old one: the file is made to reach the end of the
/// cluster before that, not over what is shared.
#[test]
fn a_cluster_at_the_end_keeps_the_blocks_that_it_shares() {
    let fua = false;
    let mib = 1 << 20;
    let compressed_at = |offset| Op::WriteCompressed {
        offset,
        len: mib,
        fua,
    };
    let zeroes = |offset, len, unmap| Op::WriteZeroes {
        offset,
        len,
        unmap,
        fua,
    };
    let scenario = Scenario {
        image: ImageOptions {
            refcount_order: 6,
            backing: Backing::Raw(262_144),
            write_log: WriteLog::File,
            discard_no_unref: true,
            bitmap_bits: Some(12),
            traits: SimFileOptions {
                can_punch: false,
                can_clone: true,
                ..SimFileOptions::default()
            },
            ..ImageOptions::plain(4 * mib, 20)
        },
        setup: vec![
            compressed_at(mib),
            write(mib, 65_536),
            zeroes(1_633_552, 620, false),
            write(827_288, 241),
            zeroes(703_488, 4096, true),
            compressed_at(2 * mib),
            zeroes(2 * mib, mib, true),
            compressed_at(2 * mib),
            write(3_298_304, 12_288),
            write(1_279_488, 3584),
            Op::Discard {
                offset: 2 * mib,
                len: mib,
            },
            write(0, 65_536),
        ],
        preparations: vec![Preparation::Snapshot],
        cycles: vec![PowerCycle {
            steps: vec![
                Step::Resize {
                    size_bytes: 2_188_288,
                    preallocation: Preallocation::Off,
                },
                Step::Start(write(mib, 65_536)),
            ],
            schedule_seed: 134_258_781_126_184_733,
            crash: Some(Crash {
                step: 320,
                kill: Option::None,
                cut: PowerCut { kept: vec![] },
            }),
        }],
    };
    vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();
}
