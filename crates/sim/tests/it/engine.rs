//! The engine under power cuts: a slice of the seeds that `vellum-sim` runs, and
//! short scripts with every cut that there is.

use vellum::Preallocation;
use vellum_sim::cut::{PowerCut, SurvivingPart};
use vellum_sim::generate;
use vellum_sim::rng::Rng;
use vellum_sim::scenario::Op::{Discard, Flush, Write, WriteCompressed, WriteZeroes};
use vellum_sim::scenario::Step::{Start, Wait};
use vellum_sim::scenario::{
    Amendment, Backing, Change, Crash, FaultRates, ImageOptions, Op, PowerCycle, Preparation,
    Scenario, Step, WriteLog,
};
use vellum_sim::storage::SimFileOptions;
use vellum_sim::{Explorer, engine};

#[test]
fn seeds_of_every_kind_survive_power_cuts() {
    const THREADS: u64 = 2;
    const SEEDS: u64 = 160;
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                let explorer = Explorer::new(engine());
                for seed in (thread..SEEDS).step_by(THREADS as usize) {
                    if let Err(found) = explorer.seed(seed, 60) {
                        panic!("seed {seed}: {}\n{:#?}", found.failure, found.scenario);
                    }
                }
            });
        }
    });
}

/// Requests that a failing disk holds behind all others end before the image is opened anew:
/// the simulator once waited for them with requests of its own, for ever.
#[test]
fn requests_that_are_held_up_end_before_an_image_is_opened_anew() {
    let seed = 21_634;
    if let Err(found) = Explorer::new(engine()).seed(seed, 5) {
        panic!("seed {seed}: {}\n{:#?}", found.failure, found.scenario);
    }
}

#[test]
fn equal_seeds_give_equal_simulations() {
    let explorer = Explorer::new(engine());
    for seed in 0..20 {
        let scenario = generate::scenario(seed);
        let run = || explorer.scenario(&scenario, &mut Rng::new(7), 10).unwrap();
        assert_eq!(run(), run(), "seed {seed}");
    }
}

const CLUSTER: u64 = 512;

fn write(cluster: u64, count: u64) -> Step {
    Start(Write {
        offset: cluster * CLUSTER,
        len: count * CLUSTER,
        fua: false,
    })
}

fn image() -> ImageOptions {
    ImageOptions::plain(80 * CLUSTER, 9)
}

/// Makes every cut of a script, on several schedules.
fn exhaust(name: &str, image: &ImageOptions, preparations: &[Preparation], steps: &[Step]) {
    const LIMIT: u64 = 2000;
    let explorer = Explorer::new(engine());
    let setup: Vec<Op> = (0..3)
        .map(|n| Write {
            offset: n * CLUSTER,
            len: CLUSTER,
            fua: false,
        })
        .collect();
    let mut cuts = 0;
    for schedule_seed in 0..4 {
        let cycle = PowerCycle {
            steps: steps.to_vec(),
            schedule_seed,
            crash: None,
        };
        let scenario = Scenario {
            image: image.clone(),
            setup: setup.clone(),
            preparations: preparations.to_vec(),
            cycles: vec![cycle],
        };
        match explorer.exhaust(&scenario, LIMIT) {
            Ok(totals) => cuts += totals.cuts,
            Err(found) => panic!("{name}: {}\n{:#?}", found.failure, found.scenario),
        }
    }
    assert!(cuts > 20, "{name}: only {cuts} cuts");
}

#[test]
fn every_cut_of_a_first_write() {
    exhaust("first write", &image(), &[], &[write(70, 1), Start(Flush)]);
}

#[test]
fn every_cut_of_an_overwrite_beside_a_flush() {
    exhaust(
        "overwrite",
        &image(),
        &[],
        &[write(0, 2), Start(Flush), write(1, 1)],
    );
}

#[test]
fn every_cut_of_a_discard_and_the_reuse_of_its_clusters() {
    let discard = Start(Discard {
        offset: 0,
        len: 2 * CLUSTER,
    });
    let steps = [
        discard,
        Wait,
        Start(Flush),
        Wait,
        write(5, 2),
        Wait,
        Start(Flush),
    ];
    exhaust("discard and reuse", &image(), &[], &steps);
}

#[test]
fn every_cut_of_a_write_to_shared_clusters() {
    let steps = [write(0, 1), Wait, Start(Flush)];
    exhaust(
        "shared clusters",
        &image(),
        &[Preparation::Snapshot],
        &steps,
    );
}

#[test]
fn every_cut_of_zeroes_beside_a_write() {
    let zeroes = Start(WriteZeroes {
        offset: 0,
        len: 2 * CLUSTER,
        unmap: true,
        fua: false,
    });
    exhaust(
        "zeroes",
        &image(),
        &[],
        &[zeroes, write(1, 1), Wait, Start(Flush)],
    );
}

#[test]
fn every_cut_over_a_compressed_cluster() {
    let steps = [write(3, 2), Wait, Start(Flush)];
    exhaust("compressed", &image(), &[Preparation::Compress(2)], &steps);
}

fn compressed(cluster: u64, count: u64) -> Step {
    Start(WriteCompressed {
        offset: cluster * CLUSTER,
        len: count * CLUSTER,
        fua: false,
    })
}

#[test]
fn every_cut_of_compressed_data_that_is_added_to_durable_data() {
    // Two clusters' data share a sector; the first is durable when the other comes.
    let steps = [
        compressed(70, 1),
        Wait,
        Start(Flush),
        Wait,
        compressed(71, 1),
        Start(Flush),
    ];
    exhaust("compressed data added", &roomy(), &[], &steps);
}

#[test]
fn every_cut_of_compressed_clusters_that_replace_each_other() {
    let steps = [
        compressed(0, 2),
        Wait,
        Start(Flush),
        Wait,
        compressed(0, 1),
        write(1, 1),
        Wait,
        Start(Flush),
        Wait,
        compressed(2, 1),
        Start(Flush),
    ];
    exhaust("compressed data replaced", &roomy(), &[], &steps);
}

/// Clusters whose data takes a part of a sector.
fn roomy() -> ImageOptions {
    ImageOptions {
        cluster_bits: 10,
        size_bytes: 80 << 10,
        ..image()
    }
}

#[test]
fn every_cut_of_a_repair() {
    exhaust("repair", &image(), &[Preparation::Dirty(2)], &[write(0, 1)]);
}

/// A disk with a backing file and a write log, whose header has room for the log's name.
fn logged() -> ImageOptions {
    ImageOptions {
        write_log: WriteLog::File,
        backing: Backing::Raw(64 << 10),
        ..ImageOptions::plain(16 << 12, 12)
    }
}

/// One sector, which needs a copy of what the backing file has around it.
fn write_sector(sector: u64) -> Step {
    Start(Write {
        offset: sector * CLUSTER,
        len: CLUSTER,
        fua: false,
    })
}

#[test]
fn every_cut_of_a_flush_to_a_log_in_the_image() {
    let inside = ImageOptions {
        write_log: WriteLog::Inside,
        ..logged()
    };
    let steps = [write_sector(17), Start(Flush)];
    exhaust("a flush to a log in the image", &inside, &[], &steps);
}

#[test]
fn every_cut_of_a_flush_to_the_log() {
    let steps = [write_sector(17), Start(Flush)];
    exhaust("a flush to the log", &logged(), &[], &steps);
}

#[test]
fn every_cut_of_flushes_to_the_log_one_after_another() {
    let steps = [
        write_sector(17),
        Wait,
        Start(Flush),
        write_sector(18),
        write_sector(17),
        Wait,
        Start(Flush),
        Wait,
        write_sector(40),
    ];
    exhaust("flushes to the log", &logged(), &[], &steps);
}

#[test]
fn every_cut_of_a_flush_that_goes_past_the_log() {
    let large = Start(WriteZeroes {
        offset: 0,
        len: 24 << 12,
        unmap: false,
        fua: false,
    });
    let image = ImageOptions {
        size_bytes: 32 << 12,
        ..logged()
    };
    let steps = [
        write_sector(17),
        Wait,
        Start(Flush),
        Wait,
        large,
        Start(Flush),
    ];
    exhaust("a flush past the log", &image, &[], &steps);
}

#[test]
fn every_cut_of_the_end_of_a_log() {
    let steps = [write_sector(17), Start(Flush), Wait, Step::Reopen];
    exhaust("the end of a log", &logged(), &[], &steps);
}

#[test]
fn jobs_pass_what_they_do_not_poll() {
    // A job asked for the next piece while the read that loads its table waited.
    let write = |offset, len| {
        Start(Write {
            offset,
            len,
            fua: false,
        })
    };
    let scenario = Scenario {
        image: ImageOptions {
            cluster_bits: 16,
            size_bytes: 786_432,
            backing: Backing::Qcow2 {
                size_bytes: 262_144,
                cluster_bits: 9,
            },
            eager: true,
            ..image()
        },
        setup: vec![],
        preparations: vec![Preparation::Snapshot],
        cycles: vec![PowerCycle {
            steps: vec![
                write(65_536, 32_768),
                Step::Reopen,
                write(438_272, 512),
                write(356_864, 512),
                Step::Commit,
                Step::Flatten { compress: false },
            ],
            schedule_seed: 15_044_870_419_462_882_482,
            crash: None,
        }],
    };
    vellum_sim::replay(&engine(), &scenario).unwrap();
}

#[test]
fn tables_that_a_crash_leaves_counted_too_often_can_be_amended() {
    let write = |offset, len| Write {
        offset,
        len,
        fua: false,
    };
    let scenario = Scenario {
        image: ImageOptions {
            size_bytes: 5632,
            backing: Backing::Qcow2 {
                size_bytes: 5632,
                cluster_bits: 10,
            },
            ..image()
        },
        setup: vec![write(4096, 1536)],
        preparations: vec![Preparation::ZeroFlags(2), Preparation::Snapshot],
        cycles: vec![
            PowerCycle {
                steps: vec![
                    compressed(6, 1),
                    Start(write(3072, 512)),
                    Step::Resize {
                        size_bytes: 5632,
                        preallocation: Preallocation::Off,
                    },
                ],
                schedule_seed: 16_171_228_596_396_113_774,
                crash: Some(Crash {
                    step: 22,
                    kill: Option::None,
                    cut: PowerCut { kept: vec![] },
                }),
            },
            PowerCycle {
                steps: vec![
                    Start(write(3584, 1024)),
                    Step::Amend(Amendment {
                        version: Some(2),
                        refcount_order: Some(4),
                        lazy_refcounts: None,
                        data_file_name_len: None,
                        not_raw: false,
                    }),
                ],
                schedule_seed: 5_853_819_653_218_528_710,
                crash: None,
            },
        ],
    };
    vellum_sim::replay(&engine(), &scenario).unwrap();
}

#[test]
fn the_refcount_table_does_not_move_as_a_snapshot_of_nothing_comes_into_force() {
    let scenario = Scenario {
        image: ImageOptions {
            size_bytes: 33792,
            ..image()
        },
        setup: vec![],
        preparations: vec![Preparation::Snapshot, Preparation::FullTable(3)],
        cycles: vec![PowerCycle {
            steps: vec![
                Step::Snapshot(Change::Take),
                Start(Write {
                    offset: 27648,
                    len: 512,
                    fua: false,
                }),
            ],
            schedule_seed: 1_698_509_022_606_955_041,
            crash: Some(Crash {
                step: 25,
                kill: Option::None,
                cut: PowerCut {
                    kept: vec![SurvivingPart {
                        record: 2,
                        sectors: vec![0..1],
                        grows: true,
                    }],
                },
            }),
        }],
    };
    vellum_sim::replay(&engine(), &scenario).unwrap();
}

/// The refcount table moves, and where it was, beyond everything else, data goes. An entry that leads
/// there is none beyond the end of the file, as a file has that was cut: the data's clusters were
/// counted once more at the close.
#[test]
fn data_where_a_refcount_table_was_leaks_nothing() {
    let write = |offset, len| Write {
        offset,
        len,
        fua: false,
    };
    let scenario = Scenario {
        image: ImageOptions {
            cluster_bits: 9,
            lazy_refcounts: true,
            size_bytes: 26624,
            eager: false,
            bitmap_bits: Some(10),
            traits: SimFileOptions {
                can_punch: true,
                can_zero: true,
                growable: true,
                read_only: false,
                can_clone: false,
            },
            ..image()
        },
        setup: vec![write(8704, 1536)],
        preparations: vec![Preparation::FullTable(1)],
        cycles: vec![PowerCycle {
            steps: vec![
                Start(write(11776, 1024)),
                Step::Snapshot(Change::Take),
                Step::Snapshot(Change::Delete(1)),
                Start(Op::WriteCompressed {
                    offset: 11776,
                    len: 1024,
                    fua: false,
                }),
            ],
            schedule_seed: 15_958_065_237_848_680_272,
            crash: None,
        }],
    };
    vellum_sim::replay(&engine(), &scenario).unwrap();
}

#[test]
fn a_snapshot_goes_although_a_crash_left_its_table_counted_too_often() {
    let write = |offset, len| {
        Start(Write {
            offset,
            len,
            fua: false,
        })
    };
    let crash = |step| {
        Some(Crash {
            step,
            kill: Option::None,
            cut: PowerCut { kept: vec![] },
        })
    };
    let scenario = Scenario {
        image: ImageOptions {
            size_bytes: 14848,
            eager: true,
            discard_no_unref: true,
            traits: SimFileOptions {
                can_punch: true,
                can_zero: false,
                growable: false,
                read_only: false,
                can_clone: false,
            },
            ..image()
        },
        setup: vec![],
        preparations: vec![],
        cycles: vec![
            PowerCycle {
                steps: vec![
                    write(14336, 512),
                    Step::Snapshot(Change::Take),
                    write(9216, 320),
                    Step::Snapshot(Change::TakeWithState(4986)),
                ],
                schedule_seed: 3_010_217_918_465_195_715,
                crash: crash(37),
            },
            PowerCycle {
                steps: vec![
                    write(10752, 512),
                    Step::Snapshot(Change::Apply(1)),
                    Step::Snapshot(Change::Delete(0)),
                ],
                schedule_seed: 5_830_485_819_755_014_241,
                crash: crash(43),
            },
        ],
    };
    vellum_sim::replay(&engine(), &scenario).unwrap();
}

/// The first of two writes fails as it marks the bitmaps as kept: what it wrote of the header is
/// lost, and can be read. The second must not mark them as in use after that.
#[test]
fn nothing_is_built_on_a_header_that_a_failed_flush_has_lost() {
    let write = |offset| {
        Start(Write {
            offset,
            len: 512,
            fua: false,
        })
    };
    let odds = FaultRates {
        requests: 199,
        flushes: 4,
        forgets: false,
    };
    let seed = 9_532_972_499_355_156_205;
    let scenario = Scenario {
        image: ImageOptions {
            eager: false,
            bitmap_bits: Some(11),
            ..ImageOptions::plain(64000, 12)
        },
        setup: vec![],
        preparations: vec![],
        cycles: vec![PowerCycle {
            steps: vec![
                write(55808),
                Step::Fail { seed, odds },
                write(40960),
                Start(Flush),
                Start(Flush),
            ],
            schedule_seed: 9_008_624_742_614_551_613,
            crash: Some(Crash {
                step: 16,
                kill: Option::None,
                cut: PowerCut {
                    kept: vec![SurvivingPart {
                        record: 1,
                        sectors: vec![0..1],
                        grows: true,
                    }],
                },
            }),
        }],
    };
    vellum_sim::replay(&engine(), &scenario).unwrap();
}
