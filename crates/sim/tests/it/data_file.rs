//! An image whose guest data lies in a file of its own.

use vellum::Preallocation;
use vellum_sim::cut::{PowerCut, SurvivingPart};
use vellum_sim::scenario::{Crash, DataFile, ImageOptions, Op, PowerCycle, Scenario, Step};
use vellum_sim::storage::SimFileOptions;

/// A raw data file of a fixed size keeps its length as the disk shrinks. What the disk gave up must not be there as
/// it grows again.
#[test]
fn a_raw_data_device_does_not_show_what_the_disk_gave_up() {
    let resize = |size_bytes, preallocation| Step::Resize {
        size_bytes,
        preallocation,
    };
    let scenario = Scenario {
        image: ImageOptions {
            data_file: DataFile::ExternalRaw,
            data_cache: true,
            eager: false,
            traits: SimFileOptions {
                can_zero: false,
                growable: false,
                can_clone: false,
                ..SimFileOptions::default()
            },
            ..ImageOptions::plain(238_080, 12)
        },
        setup: vec![],
        preparations: vec![],
        cycles: vec![PowerCycle {
            steps: vec![
                Step::Start(Op::Write {
                    offset: 94_208,
                    len: 512,
                    fua: false,
                }),
                resize(79_360, Preallocation::Off),
                resize(217_088, Preallocation::Metadata),
            ],
            schedule_seed: 8_686_001_758_923_413_356,
            crash: Some(Crash {
                step: 21,
                kill: Option::None,
                cut: PowerCut {
                    kept: vec![SurvivingPart {
                        record: 0,
                        sectors: vec![0..1],
                        grows: true,
                    }],
                },
            }),
        }],
    };
    vellum_sim::replay(&vellum_sim::engine(), &scenario).unwrap();
}
