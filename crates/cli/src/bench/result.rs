//! The results: samples of rows, and their medians, spreads and ratios. No I/O; `run` fills them
//! in, the outputs read them.

use super::arguments::Topic;
use super::plan::{BLOCK_BYTES, Row, Table, Work};
use super::timeline::Timeline;

/// What one row did in one round.
#[derive(Debug, Clone, PartialEq, Default)]
pub(super) struct Sample {
    pub(super) operations: u64,
    pub(super) seconds: f64,
    /// CPU time of the whole process.
    pub(super) cpu_seconds: f64,
    /// How many bytes of the disk the image took, where that is asked.
    pub(super) grown_bytes: Option<u64>,
    /// How it went, where that is asked.
    pub(super) timeline: Option<Timeline>,
}

/// A row with its samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Measured {
    pub(super) row: Row,
    pub(super) samples: Vec<Sample>,
}

/// A table with its samples.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Results {
    pub(super) table: Table,
    pub(super) rows: Vec<Measured>,
}

/// What a page or a terminal shows beside the tables.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct About {
    /// What was measured, for people: an image's name or a folder.
    pub(super) subject: String,
    pub(super) image: Option<String>,
    pub(super) directory: Option<String>,
    pub(super) size_bytes: u64,
    pub(super) depth: usize,
    pub(super) topics: Vec<Topic>,
    pub(super) seconds: f64,
    pub(super) rounds: usize,
    pub(super) seed: u64,
    pub(super) cpus: usize,
    pub(super) kernel: String,
    /// Requests went around the page cache.
    pub(super) direct: bool,
    /// What should be known about the figures.
    pub(super) notes: Vec<String>,
}

/// Everything.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Report {
    pub(super) about: About,
    pub(super) tables: Vec<Results>,
    /// What it means, in sentences.
    pub(super) reading: Vec<String>,
}

/// The middle value; of an even number of values the mean of the two.
pub(super) fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        n if n % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

impl Sample {
    fn iops(&self) -> f64 {
        self.operations as f64 / self.seconds.max(f64::MIN_POSITIVE)
    }
}

impl Measured {
    pub(super) fn new(row: Row) -> Measured {
        Measured {
            row,
            samples: Vec::new(),
        }
    }

    /// Requests a second.
    pub(super) fn iops(&self) -> Option<f64> {
        median(self.samples.iter().map(Sample::iops))
    }

    /// The best round in parts of the worst, where there are several.
    pub(super) fn spread(&self) -> Option<f64> {
        let rates = || self.samples.iter().map(Sample::iops);
        let worst = rates().fold(f64::INFINITY, f64::min);
        let several = self.samples.len() > 1 && worst > 0.0;
        several.then(|| rates().fold(0.0, f64::max) / worst)
    }

    /// CPU time a request, in microseconds.
    pub(super) fn cpu_us(&self) -> Option<f64> {
        let used = self.samples.iter().filter(|s| s.operations > 0);
        median(used.map(|s| 1e6 * s.cpu_seconds / s.operations as f64))
    }

    /// Bytes that the image grew for each byte written.
    pub(super) fn growth(&self) -> Option<f64> {
        median(self.samples.iter().filter_map(|sample| {
            let written = (sample.operations * BLOCK_BYTES).max(1);
            Some(sample.grown_bytes? as f64 / written as f64)
        }))
    }
}

impl Measured {
    fn timelines(&self) -> impl Iterator<Item = &Timeline> {
        self.samples.iter().filter_map(|s| s.timeline.as_ref())
    }

    /// Requests a second where a run was slowest.
    pub(super) fn lowest_iops(&self) -> Option<f64> {
        median(self.timelines().filter_map(Timeline::lowest_iops))
    }

    /// How long requests take at most, but for one in a thousand, in microseconds.
    pub(super) fn request_us(&self) -> Option<f64> {
        median(self.timelines().filter_map(|timeline| timeline.request_us))
    }

    /// The same of flushes.
    pub(super) fn flush_us(&self) -> Option<f64> {
        median(self.timelines().filter_map(|timeline| timeline.flush_us))
    }

    /// How long the image took to close.
    pub(super) fn close_seconds(&self) -> Option<f64> {
        median(self.timelines().map(|timeline| timeline.close_seconds))
    }

    /// How long a run took.
    pub(super) fn seconds(&self) -> Option<f64> {
        median(self.samples.iter().map(|sample| sample.seconds))
    }

    /// The course of the middle round.
    pub(super) fn typical(&self) -> Option<&Timeline> {
        let mut samples: Vec<&Sample> = self.samples.iter().collect();
        samples.sort_by(|a, b| a.iops().total_cmp(&b.iops()));
        let middle = samples.len().checked_sub(1)? / 2;
        samples[middle].timeline.as_ref()
    }
}

/// Whether a run with a write log is slower than the one without, by more than noise. Single intervals differ too much
/// between rounds to be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Below {
    Never,
    /// Only the slowest part of the one is slower than the slowest of the other.
    AtItsLowest,
    OnTheWhole,
}

impl Below {
    pub(super) fn name(self) -> &'static str {
        match self {
            Below::Never => "never",
            Below::AtItsLowest => "at its lowest",
            Below::OnTheWhole => "on the whole",
        }
    }
}

impl Results {
    /// The row without a write log, and that with one.
    pub(super) fn logs(&self) -> Option<(&Measured, &Measured)> {
        let find = |wanted: bool| {
            self.rows.iter().find(|row| {
                matches!(row.row.work, Work::Sustained { log_bytes } if log_bytes.is_some() == wanted)
            })
        };
        Some((find(false)?, find(true)?))
    }

    /// Whether a row, if it has a write log, falls below the one without.
    pub(super) fn below(&self, row: &Measured) -> Option<Below> {
        let (without, with) = self.logs().filter(|(_, with)| *with == row)?;
        let same = self.same();
        let on_the_whole = with.iops()? < same * without.iops()?;
        let lowest = with.lowest_iops().zip(without.lowest_iops());
        Some(match lowest {
            _ if on_the_whole => Below::OnTheWhole,
            Some((with, without)) if with < same * without => Below::AtItsLowest,
            _ => Below::Never,
        })
    }

    pub(super) fn new(table: Table) -> Results {
        let rows = table.rows.iter().cloned().map(Measured::new).collect();
        Results { table, rows }
    }

    /// The limit's figure.
    pub(super) fn limit(&self) -> Option<f64> {
        self.rows.iter().find(|row| row.row.is_limit())?.iops()
    }

    /// A row's figure in parts of the limit's.
    pub(super) fn ratio(&self, row: &Measured) -> Option<f64> {
        let limit = self.limit().filter(|limit| *limit > 0.0)?;
        Some(row.iops()? / limit)
    }

    /// Names of the lines, in order.
    pub(super) fn series(&self) -> Vec<&str> {
        let mut names: Vec<&str> = Vec::new();
        for row in self.points() {
            if !names.contains(&row.row.series.as_str()) {
                names.push(&row.row.series);
            }
        }
        names
    }

    /// The rows that are not the limit.
    pub(super) fn points(&self) -> impl Iterator<Item = &Measured> {
        self.rows.iter().filter(|row| !row.row.is_limit())
    }

    /// The rows of one line.
    pub(super) fn of<'a>(&'a self, series: &'a str) -> impl Iterator<Item = &'a Measured> {
        self.points().filter(move |row| row.row.series == series)
    }
}

impl Work {
    /// Bytes of the L2 cache, where one is set.
    pub(super) fn cache_bytes(&self) -> Option<u64> {
        match *self {
            Work::Read { cache_bytes, .. } => Some(cache_bytes),
            _ => None,
        }
    }
}

#[cfg(test)]
pub(super) mod tests;
