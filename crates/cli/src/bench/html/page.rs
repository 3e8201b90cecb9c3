//! The page itself: a section for each table, with its plots.

use std::path::Path;

use askama::Template;

use super::super::failure::Failure;
use super::super::plan::Shows;
use super::super::result::{Measured, Report, Results};
use super::super::tables;
use super::chart::{self, Chart, Line, Point, Tick};
use super::over_time;
use crate::html_page;

/// Widths that a plot is drawn for: a desk's screen and a telephone's.
const WIDE: f64 = 760.0;
const NARROW: f64 = 380.0;

#[derive(Template)]
#[template(path = "bench.html")]
struct Page<'a> {
    report: &'a Report,
    how: String,
    version: &'static str,
    sections: Vec<Section<'a>>,
}

/// A table with its plots.
struct Section<'a> {
    results: &'a Results,
    figures: Vec<Figure>,
    /// What the columns mean, where that is not plain.
    notes: String,
    heads: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

/// A plot, drawn twice.
struct Figure {
    id: String,
    caption: String,
    legend: Vec<Entry>,
    limit: bool,
    wide: String,
    narrow: String,
}

/// A line of the legend.
struct Entry {
    number: usize,
    marker: String,
    name: String,
}

/// Writes the page.
pub(in super::super) fn write(path: &Path, report: &Report) -> Result<(), Failure> {
    html_page::write(path, &text(report)?).map_err(Failure::Message)
}

fn text(report: &Report) -> Result<String, Failure> {
    let page = Page {
        report,
        how: tables::how(&report.about),
        version: env!("CARGO_PKG_VERSION"),
        sections: report.tables.iter().map(section).collect(),
    };
    let text = page.render();
    text.map_err(|error| Failure::Message(format!("Cannot make the page: {error}")))
}

fn section(results: &Results) -> Section<'_> {
    let mut figures = Vec::new();
    match results.table.shows {
        Shows::OverTime(_) => {
            figures.push(figure(results, "over-time", over_time::chart(results)));
        }
        _ => figures.push(figure(results, "iops", iops_chart(results))),
    }
    if results.table.shows == Shows::SpeedAndGrowth {
        figures.push(figure(results, "growth", growth_chart(results)));
    }
    Section {
        figures,
        notes: tables::notes(results).join(" "),
        heads: tables::heads(results),
        rows: results
            .rows
            .iter()
            .map(|row| {
                let mut cells = tables::cells(results, row);
                if row.row.is_limit() && cells[0].is_empty() {
                    cells[0] = "raw file".into();
                    cells[1] = "–".into();
                }
                cells
            })
            .collect(),
        results,
    }
}

fn figure(results: &Results, what: &str, chart: Chart) -> Figure {
    Figure {
        id: format!("{}-{what}", results.table.id),
        caption: chart.title.clone(),
        legend: chart
            .lines
            .iter()
            .enumerate()
            .map(|(number, line)| Entry {
                number,
                marker: chart::marker(number, (15.0, 7.0)),
                name: line.name.clone(),
            })
            .collect(),
        limit: chart.limit.is_some(),
        wide: chart.svg(WIDE),
        narrow: chart.svg(NARROW),
    }
}

fn chart(results: &Results, value: fn(&Measured) -> Option<f64>) -> Chart {
    let mut ticks: Vec<Tick> = Vec::new();
    for row in results.points() {
        if ticks.iter().all(|tick| tick.at != row.row.x) {
            // The plot has no room for what stands in brackets.
            let label = row.row.x_label.split(" (").next().unwrap_or_default();
            ticks.push(Tick {
                at: row.row.x,
                label: label.into(),
            });
        }
    }
    let point = |row: &Measured| {
        Some(Point {
            x: row.row.x,
            y: value(row)?,
            x_label: row.row.x_label.clone(),
            about: String::new(),
        })
    };
    let line = |name: &&str| Line {
        name: (*name).to_owned(),
        points: results.of(name).filter_map(point).collect(),
    };
    Chart {
        title: String::new(),
        y_title: "",
        x_title: results.table.x_title,
        x_is_log: results.table.x_is_log,
        y_is_log: false,
        ticks,
        lines: results.series().iter().map(line).collect(),
        limit: None,
    }
}

fn iops_chart(results: &Results) -> Chart {
    let mut chart = chart(results, Measured::iops);
    chart.title = "Requests per second".into();
    chart.y_title = "4K requests per second (IOPS)";
    chart.limit = results.limit();
    for point in chart.lines.iter_mut().flat_map(|line| &mut line.points) {
        let ratio = chart.limit.filter(|limit| *limit > 0.0);
        let ratio = ratio.map(|limit| format!(", {:.2} of raw", point.y / limit));
        point.about = format!(
            "{} IOPS{}",
            tables::count(point.y),
            ratio.unwrap_or_default()
        );
    }
    chart
}

fn growth_chart(results: &Results) -> Chart {
    let mut chart = chart(results, Measured::growth);
    chart.title = "How far the image grows for each byte written".into();
    chart.y_title = "bytes of disk per byte written";
    chart.y_is_log = true;
    for point in chart.lines.iter_mut().flat_map(|line| &mut line.points) {
        point.about = format!("{} bytes per byte", tables::count(point.y));
    }
    chart
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::result::tests::sample_report;
    use roxmltree::{Document, ParsingOptions};

    fn parse(page: &str) -> Document<'_> {
        let options = ParsingOptions {
            allow_dtd: true,
            ..ParsingOptions::default()
        };
        Document::parse_with_options(page, options).expect("a page that is also sound XML")
    }

    #[test]
    fn the_page_is_sound_and_complete() {
        let report = sample_report();
        let page = text(&report).unwrap();
        let document = parse(&page);
        let count = |name: &str| {
            let named = document.descendants().filter(|n| n.has_tag_name(name));
            named.count()
        };
        assert_eq!(count("figure"), 7, "five tables, two of them with growth");
        assert_eq!(count("table"), 5);
        let html = "http://www.w3.org/1999/xhtml";
        let plots = document
            .descendants()
            .filter(|n| n.tag_name().name() == "svg" && n.attribute("role") == Some("group"));
        let plots: Vec<_> = plots.collect();
        assert_eq!(plots.len(), 14, "each for two widths");
        for plot in plots {
            let label = plot.attribute("aria-label").unwrap_or_default();
            assert!(!label.is_empty());
        }
        assert!(document.root_element().tag_name().namespace() != Some(html));
        assert!(page.contains("&#60;here&#62; &#38; there"), "escaped");
    }

    #[test]
    fn nothing_is_fetched() {
        let page = text(&sample_report()).unwrap();
        for word in [
            "http:", "https:", "src=", "url(", "@import", "<script", "<link",
        ] {
            assert!(!page.contains(word), "{word}");
        }
    }
}
