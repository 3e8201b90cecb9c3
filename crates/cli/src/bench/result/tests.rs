//! Results as a machine might give them, for the tests of whatever shows results, and what they come to.

use super::*;
use crate::bench::arguments::Arguments;
use crate::bench::plan;

/// A second in intervals, slower from the 28th on.
fn timeline(operations: u64) -> Timeline {
    let each = operations / 40;
    let operations = (0..40).map(|index| match index {
        28.. => each * 4 / 5,
        _ => each,
    });
    Timeline {
        interval_seconds: 0.025,
        operations: operations.collect(),
        request_us: Some(1500.0),
        flush_us: Some(2000.0),
        close_seconds: 0.25,
    }
}

/// Results as a machine might give them: the further along a line the faster.
pub(in crate::bench) fn sample_report() -> Report {
    let effort = Arguments::parse(Vec::new()).unwrap().effort;
    let tables = plan::made(&Topic::ALL, &effort);
    let tables = tables.into_iter().map(|table| {
        let mut results = Results::new(table);
        let over_time = matches!(results.table.shows, plan::Shows::OverTime(_));
        for (index, row) in results.rows.iter_mut().enumerate() {
            let operations = match row.row.is_limit() {
                true => 50_000,
                false => 20_000 + 2_000 * index as u64,
            };
            let growth = match row.row.work {
                Work::Write {
                    cluster_bytes,
                    subclusters: false,
                    ..
                } => Some(operations * cluster_bytes),
                Work::Write { .. } => Some(operations * 4300),
                _ => None,
            };
            let timeline = over_time.then(|| timeline(operations));
            row.samples = vec![
                Sample {
                    operations,
                    seconds: 1.0,
                    cpu_seconds: 0.5,
                    grown_bytes: growth,
                    timeline,
                };
                3
            ];
        }
        results
    });
    let tables: Vec<Results> = tables.collect();
    Report {
        about: About {
            subject: "images of 4 GiB in <here> & there".into(),
            image: None,
            directory: Some("<here> & there".into()),
            size_bytes: effort.size_bytes,
            depth: effort.depth,
            topics: Topic::ALL.to_vec(),
            seconds: effort.seconds,
            rounds: effort.rounds,
            seed: effort.seed,
            cpus: 2,
            kernel: "6.1".into(),
            direct: true,
            notes: vec!["a note".into()],
        },
        reading: super::super::reading::read(&tables),
        tables,
    }
}

#[test]
fn medians() {
    assert_eq!(median([]), None);
    assert_eq!(median([3.0, 1.0, 2.0]), Some(2.0));
    assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
}

#[test]
fn a_run_with_a_log_is_compared_with_the_one_without() {
    let mut results = sample_report().tables.pop().unwrap();
    let below = |results: &Results| results.below(&results.rows[2]);
    assert_eq!(results.below(&results.rows[0]), None, "no log");
    assert_eq!(results.below(&results.rows[1]), None, "no log");
    assert_eq!(below(&results), Some(Below::Never));
    for sample in &mut results.rows[2].samples {
        sample.timeline.as_mut().unwrap().operations[5..15].fill(1);
    }
    assert_eq!(below(&results), Some(Below::AtItsLowest));
    for sample in &mut results.rows[2].samples {
        sample.operations /= 2;
    }
    assert_eq!(below(&results), Some(Below::OnTheWhole));
}

#[test]
fn the_middle_round_is_shown() {
    let mut results = sample_report().tables.pop().unwrap();
    let row = &mut results.rows[0];
    for (sample, operations) in row.samples.iter_mut().zip([7, 9, 8]) {
        sample.operations = operations;
        sample.timeline.as_mut().unwrap().operations = vec![operations];
    }
    assert_eq!(row.typical().unwrap().operations, [8]);
    row.samples.pop();
    assert_eq!(row.typical().unwrap().operations, [7], "the slower of two");
}

#[test]
fn ratios_and_growth() {
    let report = sample_report();
    let writes = &report.tables[2];
    let first = writes.points().next().unwrap();
    assert_eq!(writes.limit(), Some(50_000.0));
    assert_eq!(writes.ratio(first), Some(0.44));
    assert_eq!(first.growth(), Some(4.0), "16K for each 4K");
    assert_eq!(first.cpu_us(), Some(1e6 * 0.5 / 22_000.0));
    assert_eq!(writes.series(), ["standard", "subclusters"]);
}
