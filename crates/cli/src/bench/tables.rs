//! The results as tables of text, for a terminal. No I/O.

use std::path::Path;

use comfy_table::{CellAlignment, Table as Grid, presets};

use super::result::{About, Measured, Report, Results};

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
    let mut heads = vec!["", "", "IOPS", "of raw", "CPU µs"];
    if results.table.grows {
        heads.push("growth");
    }
    heads
}

/// The cells of a row.
pub(super) fn cells(results: &Results, row: &Measured) -> Vec<String> {
    let ratio = match row.row.is_limit() {
        true => None,
        false => results.ratio(row),
    };
    let mut cells = vec![
        row.row.series.clone(),
        row.row.x_label.clone(),
        shown(row.iops()),
        ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}")),
        shown(row.cpu_us()),
    ];
    if results.table.grows {
        cells.push(shown(row.growth()));
    }
    cells
}

/// What is measured, and how.
pub(super) fn how(about: &About) -> String {
    let rounds = match about.rounds {
        1 => "one round".to_owned(),
        n => format!("medians of {n} rounds"),
    };
    format!(
        "4K requests, {} in flight, {} s a figure, {rounds}, seed {}; {} CPUs, Linux {}",
        about.depth, about.seconds, about.seed, about.cpus, about.kernel
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
    format!("\n{}\n{lines}", results.table.title)
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
}
