//! A plot of lines as SVG. Colours and fonts are the page's (classes `s0` to `s3`).

use std::fmt::Write;

use super::axis::{self, Axis};
use crate::html_page::svg::escape;

/// A mark on the horizontal axis.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Tick {
    pub(super) at: f64,
    pub(super) label: String,
}

/// A measured value.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Point {
    pub(super) x: f64,
    pub(super) y: f64,
    pub(super) x_label: String,
    /// The value in words.
    pub(super) about: String,
}

/// Values that belong together.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<Point>,
}

/// A plot.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Chart {
    pub(super) title: String,
    pub(super) y_title: &'static str,
    pub(super) x_title: &'static str,
    pub(super) x_is_log: bool,
    pub(super) y_is_log: bool,
    pub(super) ticks: Vec<Tick>,
    pub(super) lines: Vec<Line>,
    /// A value that nothing can pass: a dashed line.
    pub(super) limit: Option<f64>,
}

/// Room around the plotted area.
const LEFT: f64 = 48.0;
const RIGHT: f64 = 18.0;
const TOP: f64 = 34.0;
const BOTTOM: f64 = 50.0;
/// Room between the axes and the outermost points.
const INSET: f64 = 16.0;
/// Width of a letter of the small font, on average.
const LETTER: f64 = 6.5;

/// The places of everything.
struct Frame {
    width: f64,
    height: f64,
    x: Axis,
    y: Axis,
    y_ticks: Vec<f64>,
}

impl Chart {
    /// The plot at a width.
    pub(super) fn svg(&self, width: f64) -> String {
        let frame = self.frame(width);
        let mut svg = format!(
            r#"<svg viewBox="0 0 {width} {}" role="group" aria-label="{}">"#,
            frame.height,
            escape(&self.summary())
        );
        self.draw_axes(&mut svg, &frame);
        self.draw_limit(&mut svg, &frame);
        for (index, line) in self.lines.iter().enumerate() {
            draw_line(&mut svg, &frame, index, line);
        }
        for (index, line) in self.lines.iter().enumerate() {
            for point in &line.points {
                draw_tip(&mut svg, &frame, index, &line.name, point);
            }
        }
        svg.push_str("</svg>");
        svg
    }

    /// The plot in words, for who cannot see it.
    fn summary(&self) -> String {
        let names: Vec<&str> = self.lines.iter().map(|line| line.name.as_str()).collect();
        format!(
            "{}: {} by {}; lines: {}. The table below has the figures.",
            self.title,
            self.y_title,
            self.x_title,
            names.join(", ")
        )
    }

    fn frame(&self, width: f64) -> Frame {
        let height = if width > 500.0 { 360.0 } else { 320.0 };
        let values = || self.lines.iter().flat_map(|line| &line.points).map(|p| p.y);
        let high = values().chain(self.limit).fold(0.0, f64::max);
        let y_ticks = match self.y_is_log {
            true => axis::log_ticks(values().fold(f64::INFINITY, f64::min).min(high), high),
            false => axis::linear_ticks(high * 1.02, 5),
        };
        let ends = |ticks: &[f64]| {
            let low = ticks.iter().copied().fold(f64::INFINITY, f64::min);
            (low, ticks.iter().copied().fold(low, f64::max))
        };
        let xs: Vec<f64> = self.ticks.iter().map(|tick| tick.at).collect();
        Frame {
            width,
            height,
            x: Axis::new(
                ends(&xs),
                self.x_is_log,
                (LEFT + INSET, width - RIGHT - INSET),
            ),
            y: Axis::new(ends(&y_ticks), self.y_is_log, (height - BOTTOM, TOP)),
            y_ticks,
        }
    }

    fn draw_axes(&self, svg: &mut String, frame: &Frame) {
        let (right, bottom) = (frame.width - RIGHT, frame.height - BOTTOM);
        text(svg, "axis-title", "start", (4.0, 14.0), self.y_title);
        for value in &frame.y_ticks {
            let y = frame.y.place(*value);
            put(
                svg,
                format_args!(
                    r#"<line class="grid" x1="{LEFT}" y1="{y:.1}" x2="{right:.1}" y2="{y:.1}"/>"#
                ),
            );
            let at = (LEFT - 8.0, y + 4.0);
            text(svg, "tick", "end", at, &axis::label(*value));
        }
        let mut free_from = f64::NEG_INFINITY;
        for tick in &self.ticks {
            let x = frame.x.place(tick.at);
            put(
                svg,
                format_args!(
                    r#"<line class="mark" x1="{x:.1}" y1="{bottom:.1}" x2="{x:.1}" y2="{:.1}"/>"#,
                    bottom + 5.0
                ),
            );
            // A label that would touch its neighbour is left out; the mark stays.
            let half = LETTER * tick.label.chars().count() as f64 / 2.0;
            if x - half >= free_from {
                text(svg, "tick", "middle", (x, bottom + 20.0), &tick.label);
                free_from = x + half + LETTER;
            }
        }
        let middle = (LEFT + right) / 2.0;
        let at = (middle, frame.height - 8.0);
        text(svg, "axis-title", "middle", at, self.x_title);
    }

    fn draw_limit(&self, svg: &mut String, frame: &Frame) {
        let Some(limit) = self.limit else { return };
        let (y, right) = (frame.y.place(limit), frame.width - RIGHT);
        put(
            svg,
            format_args!(
                r#"<line class="limit" x1="{LEFT}" y1="{y:.1}" x2="{right:.1}" y2="{y:.1}"/>"#
            ),
        );
    }
}

/// Adds to a string, which cannot fail.
fn put(svg: &mut String, what: std::fmt::Arguments<'_>) {
    let _ = svg.write_fmt(what);
}

fn text(svg: &mut String, class: &str, anchor: &str, (x, y): (f64, f64), content: &str) {
    let content = escape(content);
    put(
        svg,
        format_args!(
            r#"<text class="{class}" text-anchor="{anchor}" x="{x:.1}" y="{y:.1}">{content}</text>"#
        ),
    );
}

fn draw_line(svg: &mut String, frame: &Frame, index: usize, line: &Line) {
    let mut path = String::new();
    for (number, point) in line.points.iter().enumerate() {
        let verb = if number == 0 { 'M' } else { 'L' };
        let (x, y) = (frame.x.place(point.x), frame.y.place(point.y));
        put(&mut path, format_args!("{verb}{x:.1} {y:.1} "));
    }
    let path = path.trim_end();
    put(
        svg,
        format_args!(r#"<path class="line s{index}" d="{path}"/>"#),
    );
    for point in &line.points {
        let at = (frame.x.place(point.x), frame.y.place(point.y));
        svg.push_str(&marker(index, at));
    }
}

/// A line's own shape, so that colour is not all that tells lines apart.
pub(super) fn marker(index: usize, (x, y): (f64, f64)) -> String {
    let shape = match index % 4 {
        0 => return format!(r#"<circle class="dot s{index}" cx="{x:.1}" cy="{y:.1}" r="4.5"/>"#),
        1 => [(-4.2, -4.2), (4.2, -4.2), (4.2, 4.2), (-4.2, 4.2)].as_slice(),
        2 => &[(0.0, -5.5), (5.2, 4.2), (-5.2, 4.2)],
        _ => &[(0.0, -6.0), (6.0, 0.0), (0.0, 6.0), (-6.0, 0.0)],
    };
    let points: Vec<String> = shape
        .iter()
        .map(|(dx, dy)| format!("{:.1},{:.1}", x + dx, y + dy))
        .collect();
    let points = points.join(" ");
    format!(r#"<polygon class="dot s{index}" points="{points}"/>"#)
}

/// What shows while the pointer (or the focus) is at a point.
fn draw_tip(svg: &mut String, frame: &Frame, index: usize, name: &str, point: &Point) {
    const HEIGHT: f64 = 42.0;
    let (x, y) = (frame.x.place(point.x), frame.y.place(point.y));
    let head = format!("{name}, {}", point.x_label);
    let letters = head.chars().count().max(point.about.chars().count());
    let width = LETTER * letters as f64 + 20.0;
    let left = (x - width / 2.0).clamp(2.0, (frame.width - width - 2.0).max(2.0));
    // Above the point, or below it where there is no room.
    let top = match y - HEIGHT - 12.0 {
        above if above >= 0.0 => above,
        _ => y + 12.0,
    };
    let label = escape(&format!("{head}: {}", point.about));
    put(
        svg,
        format_args!(
            r#"<g class="point s{index}" tabindex="0" role="img" aria-label="{label}"><circle class="hit" cx="{x:.1}" cy="{y:.1}" r="13"/><g class="tip"><rect x="{left:.1}" y="{top:.1}" width="{width:.1}" height="{HEIGHT}" rx="5"/>"#
        ),
    );
    text(svg, "tip-head", "start", (left + 10.0, top + 17.0), &head);
    text(
        svg,
        "tip-body",
        "start",
        (left + 10.0, top + 33.0),
        &point.about,
    );
    svg.push_str("</g></g>");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(values: &[f64]) -> Chart {
        let points = values.iter().enumerate().map(|(index, y)| Point {
            x: 2f64.powi(index as i32),
            y: *y,
            x_label: index.to_string(),
            about: format!("{y} <things>"),
        });
        Chart {
            title: "t".into(),
            y_title: "y",
            x_title: "x",
            x_is_log: true,
            y_is_log: false,
            ticks: vec![
                Tick {
                    at: 1.0,
                    label: "first".into(),
                },
                Tick {
                    at: 1.01,
                    label: "touches".into(),
                },
                Tick {
                    at: 64.0,
                    label: "last".into(),
                },
            ],
            lines: vec![Line {
                name: "a & b".into(),
                points: points.collect(),
            }],
            limit: Some(10.0),
        }
    }

    #[test]
    fn plots_are_sound_xml_whatever_they_hold() {
        for values in [&[][..], &[0.0], &[1.0, 5.0, 12.0], &[1e9, 1e-3]] {
            for width in [760.0, 380.0] {
                let svg = chart(values).svg(width);
                roxmltree::Document::parse(&svg).expect(&svg);
                assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            }
        }
    }

    #[test]
    fn labels_that_would_touch_are_left_out() {
        let svg = chart(&[1.0]).svg(380.0);
        assert!(svg.contains(">first<") && svg.contains(">last<"));
        assert!(!svg.contains(">touches<"));
    }
}
