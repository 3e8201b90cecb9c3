//! [`Exposition`]: Prometheus' text format, version 0.0.4.
//!
//! The crate `prometheus-client` writes OpenMetrics, where the name of a counter's family is not that of
//! its samples; `promtool check metrics` refuses that.
//!
//! Invariant: a name is that of one family, and its samples follow each other.

use std::fmt::{Display, Write};

/// What a family's samples are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// Text that grows.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    text: String,
}

/// A family whose samples are being written.
#[derive(Debug)]
pub(super) struct Family<'a> {
    text: &'a mut String,
    name: &'static str,
    help: &'static str,
    kind: Kind,
    is_begun: bool,
}

impl Exposition {
    /// Begins a family. One without samples leaves nothing behind.
    pub(super) fn family(
        &mut self,
        name: &'static str,
        kind: Kind,
        help: &'static str,
    ) -> Family<'_> {
        Family {
            text: &mut self.text,
            name,
            help,
            kind,
            is_begun: false,
        }
    }

    /// All of it.
    pub(super) fn finish(self) -> String {
        self.text
    }
}

impl Family<'_> {
    fn begin(&mut self) {
        if std::mem::replace(&mut self.is_begun, true) {
            return;
        }
        let kind = match self.kind {
            Kind::Counter => "counter",
            Kind::Gauge => "gauge",
            Kind::Histogram => "histogram",
        };
        let (name, help) = (self.name, self.help);
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Writes a sample.
    pub(super) fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        self.begin();
        self.line("", labels, None, value);
    }

    /// Writes a histogram: how many were counted up to each bound, and in all, and their sum.
    pub(super) fn histogram(
        &mut self,
        labels: &[(&str, &str)],
        counts: impl Iterator<Item = (Option<f64>, u64)>,
        sum: f64,
    ) {
        self.begin();
        let mut total = 0;
        let mut bound_text = String::new();
        for (bound, count) in counts {
            total += count;
            bound_text.clear();
            match bound {
                Some(bound) => drop(write!(bound_text, "{bound}")),
                None => bound_text.push_str("+Inf"),
            }
            self.line("_bucket", labels, Some(&bound_text), total);
        }
        self.line("_sum", labels, None, sum);
        self.line("_count", labels, None, total);
    }

    fn line(
        &mut self,
        suffix: &str,
        labels: &[(&str, &str)],
        bound: Option<&str>,
        value: impl Display,
    ) {
        self.text.push_str(self.name);
        self.text.push_str(suffix);
        let labels = labels
            .iter()
            .copied()
            .chain(bound.map(|bound| ("le", bound)));
        let mut mark = '{';
        for (name, value) in labels {
            self.text.push(mark);
            mark = ',';
            self.text.push_str(name);
            self.text.push_str("=\"");
            push_escaped(self.text, value);
            self.text.push('"');
        }
        if mark == ',' {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }
}

fn push_escaped(text: &mut String, value: &str) {
    // Most need nothing, and bytes are looked at sooner than letters.
    if !value
        .bytes()
        .any(|byte| matches!(byte, b'\\' | b'"' | b'\n'))
    {
        return text.push_str(value);
    }
    let mut rest = value;
    while let Some(at) = rest.find(['\\', '"', '\n']) {
        text.push_str(&rest[..at]);
        text.push_str(match rest.as_bytes()[at] {
            b'\n' => "\\n",
            b'"' => "\\\"",
            _ => "\\\\",
        });
        rest = &rest[at + 1..];
    }
    text.push_str(rest);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_are_written_as_prometheus_reads_them() {
        let mut text = Exposition::default();
        let mut requests = text.family("a_requests_total", Kind::Counter, "Requests.");
        requests.sample(&[("node", "a\"b\\c\nd"), ("operation", "read")], 3);
        requests.sample(&[], 1.5);
        let _empty = text.family("b", Kind::Gauge, "Nothing.");
        let mut times = text.family("c_seconds", Kind::Histogram, "Times.");
        let counts = [(Some(0.000_004_096), 1), (Some(0.5), 0), (None, 2)];
        times.histogram(&[("export", "e")], counts.into_iter(), 2.25);
        assert_eq!(
            text.finish(),
            "# HELP a_requests_total Requests.\n\
             # TYPE a_requests_total counter\n\
             a_requests_total{node=\"a\\\"b\\\\c\\nd\",operation=\"read\"} 3\n\
             a_requests_total 1.5\n\
             # HELP c_seconds Times.\n\
             # TYPE c_seconds histogram\n\
             c_seconds_bucket{export=\"e\",le=\"0.000004096\"} 1\n\
             c_seconds_bucket{export=\"e\",le=\"0.5\"} 1\n\
             c_seconds_bucket{export=\"e\",le=\"+Inf\"} 3\n\
             c_seconds_sum{export=\"e\"} 2.25\n\
             c_seconds_count{export=\"e\"} 3\n"
        );
    }
}
