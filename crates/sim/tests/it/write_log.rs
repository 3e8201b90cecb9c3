//! A write log that an image takes into use again.

use vellum_sim::cut::{PowerCut, SurvivingPart};
use vellum_sim::scenario::{
    Backing, BitmapChange, Change, Crash, DataFile, FaultRates, ImageOptions, Kill, Op, Place,
    PowerCycle, Preparation, Scenario, Step, WriteLog,
};
use vellum_sim::storage::SimFileOptions;

fn write(offset: u64, len: u64, fua: bool) -> Op {
    Op::Write { offset, len, fua }
}

fn compressed(offset: u64, len: u64, fua: bool) -> Op {
    Op::WriteCompressed { offset, len, fua }
}

fn read(offset: u64, len: u64) -> Op {
    Op::Read { offset, len }
}

/// The close clears the image's bit, and the flush behind that fails. The next opening sees no bit;
/// it must not give the log away before that is durable.
#[test]
#[expect(clippy::too_many_lines, reason = "a scenario as it was found")]
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
            write_log: WriteLog::File,
            checksums: false,
            data_cache: true,
            tiny_cache: true,
            eager: true,
            discard_no_unref: false,
            requests_only: false,
            bitmap_bits: None,
            traits: SimFileOptions::default(),
            place: Place::Unchecked,
        },
        setup: vec![write(70144, 8192, false), write(16384, 32768, false)],
        preparations: vec![Preparation::ZeroFlags(4), Preparation::Dirty(3)],
        cycles: vec![PowerCycle {
            steps: vec![
                Step::Start(compressed(49152, 16384, false)),
                Step::Start(write(98304, 16384, false)),
                Step::Wait,
                Step::Start(Op::Flush),
                Step::Wait,
                Step::Start(write(26624, 512, false)),
                Step::Start(write(32256, 512, false)),
                Step::Start(write(33280, 1536, false)),
                Step::Wait,
                Step::Start(read(32256, 2560)),
                Step::Start(Op::Flush),
                Step::Start(write(60416, 512, false)),
                Step::Start(write(34304, 512, false)),
                Step::Start(write(34304, 512, true)),
                Step::Wait,
                Step::Start(read(32256, 2560)),
                Step::Start(write(46080, 512, false)),
                Step::Fail {
                    seed: 15660546652366379380,
                    odds: FaultRates {
                        requests: 0,
                        flushes: 3,
                        forgets: false,
                    },
                },
                Step::Start(write(79360, 512, true)),
                Step::Reopen,
            ],
            schedule_seed: 9212381583693344264,
            crash: Some(Crash {
                step: 131,
                kill: Option::None,
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

/// A sync fails while a later write is still in the caches of the operating system: the guest reads that once the image
/// is opened anew, and a flush must make it durable, although nothing was written since.
#[test]
fn a_flush_covers_what_was_written_before_the_image_was_opened() {
    let start = |op| Step::Start(op);
    let zeroes = Op::WriteZeroes {
        offset: 262_144,
        len: 65_536,
        unmap: true,
        fua: false,
    };
    let discard = Op::Discard {
        offset: 262_144,
        len: 65_536,
    };
    let odds = FaultRates {
        requests: 110,
        flushes: 7,
        forgets: false,
    };
    let seed = 7_805_595_666_134_812_781;
    let scenario = Scenario {
        image: ImageOptions {
            backing: Backing::Qcow2 {
                size_bytes: 262_144,
                cluster_bits: 10,
            },
            data_file: DataFile::External,
            write_log: WriteLog::File,
            ..ImageOptions::plain(524_288, 18)
        },
        setup: vec![write(486_912, 1024, false), write(342_575, 806, false)],
        preparations: vec![],
        cycles: vec![PowerCycle {
            steps: vec![
                Step::Fail { seed, odds },
                start(discard),
                start(Op::Flush),
                start(zeroes),
                start(write(262_144, 65_536, false)),
                start(write(410_112, 512, false)),
                start(write(410_112, 512, false)),
                start(read(409_088, 3584)),
                start(write(23_552, 512, false)),
                start(write(409_600, 1536, false)),
                start(write(409_088, 1536, true)),
                start(write(412_160, 512, false)),
                start(write(409_600, 512, false)),
                Step::Reopen,
                start(Op::Flush),
            ],
            schedule_seed: 6_383_332_974_875_971_326,
            crash: Some(Crash {
                step: 90,
                kill: Option::None,
                cut: PowerCut { kept: vec![] },
            }),
        }],
    };
    vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();
}

/// A process is killed as it closes the image, with the log's last superblock in the page cache only: the next one must
/// not take the log into use as if it were nobody's on disk as well.
#[test]
fn a_log_that_a_killed_process_gave_up_is_given_up_on_disk_before_it_is_used() {
    let start = |op| Step::Start(op);
    let kill = Kill {
        landed: vec![],
        steps: vec![
            start(Op::Flush),
            start(write(28_672, 3072, true)),
            Step::Wait,
            start(write(20_992, 2048, true)),
            Step::Wait,
            start(Op::Flush),
        ],
        schedule_seed: 12_991_775_446_728_720_323,
        step: 10,
    };
    let scenario = Scenario {
        image: ImageOptions {
            write_log: WriteLog::File,
            traits: SimFileOptions {
                growable: false,
                can_clone: false,
                can_punch: false,
                ..SimFileOptions::default()
            },
            ..ImageOptions::plain(31_744, 12)
        },
        setup: vec![
            write(16_384, 4096, false),
            Op::WriteCompressed {
                offset: 16_384,
                len: 8192,
                fua: false,
            },
        ],
        preparations: vec![],
        cycles: vec![PowerCycle {
            steps: vec![],
            schedule_seed: 12_500_486_350_058_116_709,
            crash: Some(Crash {
                step: 14,
                kill: Some(kill),
                cut: PowerCut { kept: vec![] },
            }),
        }],
    };
    vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();
}

/// A barrier fails of a change of the image's bitmaps: no flush may succeed after that, though the guest has
/// changed nothing since the last one.
#[test]
fn no_flush_succeeds_after_a_barrier_that_failed() {
    let start = |op| Step::Start(op);
    let odds = FaultRates {
        requests: 49,
        flushes: 6,
        forgets: true,
    };
    let discard = Op::Discard {
        offset: 262_144,
        len: 65_536,
    };
    let compressed = Op::WriteCompressed {
        offset: 262_144,
        len: 262_144,
        fua: false,
    };
    let scenario = Scenario {
        image: ImageOptions {
            write_log: WriteLog::Inside,
            bitmap_bits: Some(9),
            traits: SimFileOptions {
                can_punch: true,
                can_zero: true,
                growable: true,
                read_only: false,
                can_clone: false,
            },
            ..ImageOptions::plain(1_310_720, 18)
        },
        setup: vec![compressed],
        preparations: vec![],
        cycles: vec![PowerCycle {
            steps: vec![
                Step::Snapshot(Change::Take),
                Step::Fail {
                    seed: 11_627_488_209_560_559_074,
                    odds,
                },
                Step::Reopen,
                Step::Compact,
                start(discard),
                Step::Wait,
                start(Op::Flush),
                Step::Bitmap(BitmapChange::Disable),
                Step::Snapshot(Change::Apply(2)),
                start(Op::Flush),
            ],
            schedule_seed: 17_022_794_860_374_317_933,
            crash: None,
        }],
    };
    vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();
}
