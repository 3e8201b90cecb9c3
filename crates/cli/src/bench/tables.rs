//! The results as tables of text, for a terminal. No I/O.

use std::path::Path;

use comfy_table::{CellAlignment, Table as Grid, presets};

use super::arguments::{Sustained, Topic};
use super::plan::{BLOCK_BYTES, Shows};
use super::result::{About, Below, Measured, Report, Results};
use crate::size::human;

/// A count as people read it: no more digits than mean something.
pub(super) fn count(value: f64) -> String {
    match value {
        large if large >= 99.95 => group(large.round() as u64),
        medium if medium >= 9.95 => format!("{medium:.1}"),
        small => format!("{small:.2}"),
    }
}

/// `12345` as `12,345`.
fn group(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.char_indices() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

fn shown(value: Option<f64>) -> String {
    value.map_or_else(|| "-".into(), count)
}

/// The heads of a table's columns.
pub(super) fn heads(results: &Results) -> Vec<&'static str> {
    match results.table.shows {
        Shows::Speed => vec!["", "", "IOPS", "of raw", "CPU µs"],
        Shows::SpeedAndGrowth => vec!["", "", "IOPS", "of raw", "CPU µs", "growth"],
        Shows::OverTime(_) => vec![
            "",
            "time",
            "IOPS",
            "of raw",
            "CPU µs",
            "lowest",
            "write ms",
            "flush ms",
            "close s",
            "below no log",
        ],
    }
}

/// What the columns mean, where that is not plain: sentences.
pub(super) fn notes(results: &Results) -> Vec<String> {
    let Shows::OverTime(sustained) = results.table.shows else {
        return Vec::new();
    };
    vec![
        format!("A run ends {}.", end(sustained)),
        format!(
            "lowest: IOPS of the slowest {} s.",
            sustained.smoothed_seconds()
        ),
        "write ms, flush ms: all but one in a thousand take no longer (p99.9).".into(),
        "close s: until the image has everything, also what a log held.".into(),
        "below no log: whether the run with a log is slower than the one without, by more than \
         a tenth and than rounds differ."
            .into(),
    ]
}

fn end(sustained: Sustained) -> String {
    let written = human(sustained.writes() * BLOCK_BYTES);
    format!("after {written} or {} s", sustained.seconds)
}

/// The cells of a row.
pub(super) fn cells(results: &Results, row: &Measured) -> Vec<String> {
    let ratio = match row.row.is_limit() {
        true => None,
        false => results.ratio(row),
    };
    let milliseconds = |us: Option<f64>| shown(us.map(|us| us / 1e3));
    let mut cells = vec![
        row.row.series.clone(),
        row.row.x_label.clone(),
        shown(row.iops()),
        ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
        shown(row.cpu_us()),
    ];
    match results.table.shows {
        Shows::Speed => {}
        Shows::SpeedAndGrowth => cells.push(shown(row.growth())),
        Shows::OverTime(_) => {
            cells[1] = format!("{} s", shown(row.seconds()));
            cells.push(shown(row.lowest_iops()));
            cells.push(milliseconds(row.request_us()));
            cells.push(milliseconds(row.flush_us()));
            cells.push(shown(row.close_seconds()));
            cells.push(results.below(row).map_or("-", Below::name).into());
        }
    }
    cells
}

/// What is measured, and how.
pub(super) fn how(about: &About) -> String {
    let rounds = match about.rounds {
        1 => "one round".to_owned(),
        n => format!("medians of {n} rounds"),
    };
    let time = match about.topics.as_slice() {
        [Topic::Journal] => format!("at most {} s a run", about.seconds),
        _ => format!("{} s a figure", about.seconds),
    };
    format!(
        "4K requests, {} in flight, {time}, {rounds}, seed {}; {} CPUs, Linux {}",
        about.depth, about.seed, about.cpus, about.kernel
    )
}

/// What comes before the tables.
pub(super) fn beginning(about: &About) -> String {
    let mut text = format!("Measuring {}\n{}\n", about.subject, how(about));
    for note in &about.notes {
        text.push_str(&format!("Note: {note}\n"));
    }
    text
}

/// One table.
pub(super) fn table(results: &Results) -> String {
    let mut grid = Grid::new();
    grid.load_preset(presets::NOTHING);
    grid.set_header(heads(results));
    let mut series = "";
    for row in &results.rows {
        let mut cells = cells(results, row);
        // A name stands at the first of its rows only.
        if cells[0] == series {
            cells[0].clear();
        } else {
            series = &row.row.series;
        }
        grid.add_row(cells);
    }
    for column in grid.column_iter_mut().skip(2) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let lines: String = grid
        .lines()
        .map(|line| format!(" {}\n", line.trim_end()))
        .collect();
    let notes = notes(results);
    let notes: String = notes.iter().map(|note| format!("   {note}\n")).collect();
    format!("\n{}\n{lines}{notes}", results.table.title)
}

/// What comes after the tables.
pub(super) fn ending(report: &Report, page: Option<&Path>) -> String {
    let mut text = String::new();
    if !report.reading.is_empty() {
        text.push('\n');
    }
    for sentence in &report.reading {
        text.push_str(&format!("* {sentence}\n"));
    }
    if let Some(page) = page {
        text.push_str(&format!("\nThe page with the plots: {}\n", page.display()));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::result::tests::sample_report;

    #[test]
    fn numbers_are_readable() {
        let cases = [
            (0.5, "0.50"),
            (12.34, "12.3"),
            (999.6, "1,000"),
            (1_234_567.0, "1,234,567"),
        ];
        for (value, text) in cases {
            assert_eq!(count(value), text);
        }
    }

    #[test]
    fn columns_are_aligned() {
        let report = sample_report();
        let text = table(&report.tables[2]);
        let lines: Vec<&str> = text.lines().skip(2).collect();
        assert_eq!(lines.len(), 1 + report.tables[2].rows.len());
        let width = |line: &str| line.chars().count();
        assert!(
            lines.iter().all(|line| width(line) == width(lines[0])),
            "{text}"
        );
        assert!(lines[2].starts_with("  standard     16 KiB"), "{text}");
        assert!(!lines[3].contains("standard"), "{text}");
    }

    #[test]
    fn runs_over_time_tell_how_low_they_get() {
        let report = sample_report();
        let results = report.tables.last().unwrap();
        let text = table(results);
        for part in [
            "raw, sparse           1.00 s  50,000       -    10.0  40,000      1.50      2.00     0.25             -",
            "with a log of 16 MiB  1.00 s  24,000    0.48    20.8  19,200",
            "never",
            "A run ends after 160 MiB or 10 s.",
            "lowest: IOPS of the slowest 0.25 s.",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }
}
