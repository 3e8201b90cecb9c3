//! A write log that an image takes into use again.

use vellum_sim::cut::{PowerCut, SurvivingPart};
use vellum_sim::scenario::{
    Backing, Crash, DataFile, FaultRates, ImageOptions, Op, PowerCycle, Preparation, Scenario, Step,
};
use vellum_sim::storage::SimFileOptions;

/// The close clears the image's bit, and the flush behind that fails. The next opening sees no bit;
/// it must not give the log away before that is durable.
#[test]
fn a_log_is_nobodys_only_once_the_bit_is_durably_gone() {
    let scenario = Scenario {
        image: ImageOptions {
            version: 3,
            cluster_bits: 14,
            refcount_order: 4,
            extended_l2: true,
            lazy_refcounts: false,
            size_bytes: 114688,
            backing: Backing::Qcow2 {
                size_bytes: 114688,
                cluster_bits: 9,
            },
            data_file: DataFile::Inside,
            encrypted: false,
            write_log: true,
            checksums: false,
            tiny_cache: true,
            eager: true,
            discard_no_unref: false,
            requests_only: false,
            bitmap_bits: None,
            traits: SimFileOptions {
                can_punch: true,
                can_zero: true,
                growable: true,
                read_only: false,
                can_clone: false,
            },
        },
        setup: vec![
            Op::Write {
                offset: 70144,
                len: 8192,
                fua: false,
            },
            Op::Write {
                offset: 16384,
                len: 32768,
                fua: false,
            },
        ],
        preparations: vec![Preparation::ZeroFlags(4), Preparation::Dirty(3)],
        cycles: vec![PowerCycle {
            steps: vec![
                Step::Start(Op::WriteCompressed {
                    offset: 49152,
                    len: 16384,
                    fua: false,
                }),
                Step::Start(Op::Write {
                    offset: 98304,
                    len: 16384,
                    fua: false,
                }),
                Step::Wait,
                Step::Start(Op::Flush),
                Step::Wait,
                Step::Start(Op::Write {
                    offset: 26624,
                    len: 512,
                    fua: false,
                }),
                Step::Start(Op::Write {
                    offset: 32256,
                    len: 512,
                    fua: false,
                }),
                Step::Start(Op::Write {
                    offset: 33280,
                    len: 1536,
                    fua: false,
                }),
                Step::Wait,
                Step::Start(Op::Read {
                    offset: 32256,
                    len: 2560,
                }),
                Step::Start(Op::Flush),
                Step::Start(Op::Write {
                    offset: 60416,
                    len: 512,
                    fua: false,
                }),
                Step::Start(Op::Write {
                    offset: 34304,
                    len: 512,
                    fua: false,
                }),
                Step::Start(Op::Write {
                    offset: 34304,
                    len: 512,
                    fua: true,
                }),
                Step::Wait,
                Step::Start(Op::Read {
                    offset: 32256,
                    len: 2560,
                }),
                Step::Start(Op::Write {
                    offset: 46080,
                    len: 512,
                    fua: false,
                }),
                Step::Fail {
                    seed: 15660546652366379380,
                    odds: FaultRates {
                        requests: 0,
                        flushes: 3,
                        forgets: false,
                    },
                },
                Step::Start(Op::Write {
                    offset: 79360,
                    len: 512,
                    fua: true,
                }),
                Step::Reopen,
            ],
            schedule_seed: 9212381583693344264,
            crash: Some(Crash {
                step: 131,
                cut: PowerCut {
                    kept: vec![SurvivingPart {
                        record: 1,
                        sectors: vec![0..8],
                        grows: true,
                    }],
                },
            }),
        }],
    };
    vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();
}
