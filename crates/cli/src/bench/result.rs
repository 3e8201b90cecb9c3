//! The results: samples of rows, and their medians, spreads and ratios. No I/O; `run` fills them
//! in, the outputs read them.

use super::plan::{BLOCK_BYTES, Row, Table, Work};

/// What one row did in one round.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Sample {
    pub(super) operations: u64,
    pub(super) seconds: f64,
    /// CPU time of the whole process.
    pub(super) cpu_seconds: f64,
    /// How many bytes of the disk the image took, where that is asked.
    pub(super) grown_bytes: Option<u64>,
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

impl Results {
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
pub(super) mod tests {
    use super::*;
    use crate::bench::arguments::{Arguments, Topic};
    use crate::bench::plan;

    /// Results as a machine might give them: the further along a line the faster.
    pub(in crate::bench) fn sample_report() -> Report {
        let effort = Arguments::parse(Vec::new()).unwrap().effort;
        let tables = plan::made(&Topic::ALL, &effort);
        let tables = tables.into_iter().map(|table| {
            let mut results = Results::new(table);
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
                row.samples = vec![
                    Sample {
                        operations,
                        seconds: 1.0,
                        cpu_seconds: 0.5,
                        grown_bytes: growth,
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
}
