//! The plot of runs over time: a line for each run, in pieces of time that are the same for all.

use super::super::tables;
use super::axis;
use super::chart::{Chart, Line, Point, Tick};
use crate::bench::result::{Measured, Results};

/// More points on a line could not be told apart.
const MOST_POINTS: usize = 40;

/// Requests a second over time, in the middle round of each row.
pub(super) fn chart(results: &Results) -> Chart {
    let timelines = || results.rows.iter().filter_map(Measured::typical);
    let longest = timelines().map(|timeline| timeline.operations.len()).max();
    let intervals = longest.unwrap_or(0).div_ceil(MOST_POINTS);
    let line = |row: &Measured| Line {
        name: row.row.series.clone(),
        points: row
            .typical()
            .into_iter()
            .flat_map(|timeline| timeline.points(intervals))
            .map(|(seconds, iops)| Point {
                x: seconds,
                y: iops,
                x_label: format!("{seconds:.2} s"),
                about: format!("{} IOPS", tables::count(iops)),
            })
            .collect(),
    };
    let lines: Vec<Line> = results.rows.iter().map(line).collect();
    let points = lines.iter().flat_map(|line| &line.points);
    let end = points.map(|point| point.x).fold(0.0, f64::max);
    let ticks = axis::linear_ticks(end, 8).into_iter();
    Chart {
        title: "Requests per second over time".into(),
        y_title: "4K writes per second (IOPS)",
        x_title: results.table.x_title,
        x_is_log: results.table.x_is_log,
        y_is_log: false,
        ticks: ticks
            .map(|at| Tick {
                at,
                label: axis::label(at),
            })
            .collect(),
        lines,
        limit: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::result::tests::sample_report;

    #[test]
    fn every_run_is_a_line_from_the_beginning() {
        let report = sample_report();
        let results = report.tables.last().unwrap();
        let chart = chart(results);
        let names: Vec<&str> = chart.lines.iter().map(|line| line.name.as_str()).collect();
        assert_eq!(
            names,
            ["raw, sparse", "without a log", "with a log of 16 MiB"]
        );
        assert_eq!(chart.ticks[0].at, 0.0);
        for line in &chart.lines {
            assert!((1..=MOST_POINTS).contains(&line.points.len()), "{line:?}");
        }
        let last = chart.ticks.last().unwrap().at;
        let mut points = chart.lines.iter().flat_map(|line| &line.points);
        assert!(points.all(|point| point.x <= last));
    }

    #[test]
    fn runs_without_a_whole_interval_give_an_empty_plot() {
        let mut report = sample_report();
        let results = report.tables.last_mut().unwrap();
        for row in &mut results.rows {
            row.samples.clear();
        }
        let svg = chart(results).svg(760.0);
        roxmltree::Document::parse(&svg).expect(&svg);
        assert!(!svg.contains("NaN"), "{svg}");
    }
}
