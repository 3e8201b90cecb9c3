//! What is measured: which tables the user's topics give, and which rows each of them has. No I/O;
//! `run` carries the plan out.

use std::time::Duration;

use super::arguments::{Effort, Sustained, Topic};
use super::timeline::SMOOTHED_INTERVALS;
use crate::size::human;

/// Cluster size of the images that reads are measured on.
pub(super) const READ_CLUSTER_BYTES: u64 = 64 << 10;
/// Size of a request.
pub(super) const BLOCK_BYTES: u64 = 4096;
/// A random write each this many bytes of the image, as the classical tables have
/// it: most writes then meet a cluster of their own.
const BYTES_PER_WRITE: u64 = 128 * BLOCK_BYTES;

/// Writes between two flushes of a sustained run.
pub(super) const WRITES_PER_FLUSH: u64 = 32;
/// Whoever writes so many times a log's length has filled it long before the end.
pub(super) const LOGS_WRITTEN: u64 = 10;
/// A sustained run that takes all its time has so many intervals.
const INTERVALS: f64 = 400.0;
const SHORTEST_INTERVAL_SECONDS: f64 = 0.005;

const KIB: u64 = 1 << 10;

/// In which order the clusters of an image lie in its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// As the guest sees them.
    InOrder,
    /// Far from their neighbours.
    Scattered,
}

/// What one row does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Reads the file below: the limit.
    RawRead,
    /// Reads through the image.
    Read {
        layout: Layout,
        cache_bytes: u64,
        entry_bytes: u64,
    },
    /// Writes into a sparse raw file: the limit.
    RawWrite,
    /// Writes into a new image.
    Write {
        cluster_bytes: u64,
        subclusters: bool,
        backed: bool,
    },
    /// Writes with flushes into a sparse raw file, over time: the limit.
    SustainedRaw,
    /// The same into a new overlay, with a write log of this length or without one.
    Sustained { log_bytes: Option<u64> },
}

/// What a table shows of its rows.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Shows {
    Speed,
    SpeedAndGrowth,
    OverTime(Sustained),
}

/// A row of a table, a point of its plot.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    /// The line of the plot; empty for the limit.
    pub(super) series: String,
    /// Where on the axis: a number, and how it is written.
    pub(super) x: f64,
    pub(super) x_label: String,
    pub(super) work: Work,
}

impl Row {
    pub(super) fn is_limit(&self) -> bool {
        matches!(
            self.work,
            Work::RawRead | Work::RawWrite | Work::SustainedRaw
        )
    }
}

/// Rows that are measured in turn and shown together.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Table {
    pub(super) id: &'static str,
    pub(super) title: String,
    /// What it shows, for people.
    pub(super) explains: String,
    pub(super) x_title: &'static str,
    /// Positions on the axis are even steps of a factor.
    pub(super) x_is_log: bool,
    pub(super) shows: Shows,
    pub(super) rows: Vec<Row>,
}

/// What the reads of an image need to be planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Metadata {
    /// Bytes that the L2 entries of the whole image take.
    pub(super) l2_bytes: u64,
    pub(super) cluster_bytes: u64,
}

impl Metadata {
    /// Of an image of `size_bytes` that is made here.
    pub(super) fn made(size_bytes: u64) -> Metadata {
        Metadata {
            l2_bytes: size_bytes.div_ceil(READ_CLUSTER_BYTES) * 8,
            cluster_bytes: READ_CLUSTER_BYTES,
        }
    }

    /// The cache that holds `percent` of the entries, in whole slices.
    fn cache_bytes(&self, percent: u64, entry_bytes: u64) -> u64 {
        let wanted = self.l2_bytes.saturating_mul(percent).div_ceil(100);
        wanted.next_multiple_of(entry_bytes).max(2 * entry_bytes)
    }
}

impl Sustained {
    /// How many writes a run makes at most.
    pub(super) fn writes(self) -> u64 {
        (LOGS_WRITTEN * self.log_bytes / BLOCK_BYTES).next_multiple_of(WRITES_PER_FLUSH)
    }

    /// What is measured together. The same for all runs, so that they can be compared.
    pub(super) fn interval(self) -> Duration {
        Duration::from_secs_f64((self.seconds / INTERVALS).max(SHORTEST_INTERVAL_SECONDS))
    }

    /// How long the time is whose slowest is told.
    pub(super) fn smoothed_seconds(self) -> f64 {
        self.interval().as_secs_f64() * SMOOTHED_INTERVALS as f64
    }
}

/// Bytes of the disk that the images and the log take, when they are as large as they can get.
pub(super) fn needed_bytes(topics: &[Topic], effort: &Effort) -> u64 {
    let full_image = topics.iter().any(|topic| *topic != Topic::Writes);
    let is_written = |topic: &Topic| !matches!(topic, Topic::Cache | Topic::Slices);
    let new_image = topics.iter().any(is_written);
    let images = u64::from(full_image) + u64::from(new_image);
    let log_bytes = match topics.contains(&Topic::Journal) {
        true => effort.sustained.log_bytes,
        false => 0,
    };
    images * effort.size_bytes + log_bytes
}

/// How many random writes a row of an image of `size_bytes` makes at most.
pub(super) fn write_count(size_bytes: u64) -> u64 {
    size_bytes / BYTES_PER_WRITE
}

/// The tables about images that are made here.
pub(super) fn made(topics: &[Topic], effort: &Effort) -> Vec<Table> {
    let metadata = Metadata::made(effort.size_bytes);
    let table = |topic: &Topic| match topic {
        Topic::Cache => cache_table(
            metadata,
            &[
                ("in order", Layout::InOrder),
                ("scattered", Layout::Scattered),
            ],
        ),
        Topic::Slices => slice_table(metadata, Layout::Scattered),
        Topic::Writes => write_table(false, effort.full),
        Topic::Overlay => write_table(true, effort.full),
        Topic::Journal => journal_table(effort.sustained),
    };
    topics.iter().map(table).collect()
}

/// The tables about an image that exists.
pub(super) fn given(topics: &[Topic], metadata: Metadata) -> Vec<Table> {
    let table = |topic: &Topic| match topic {
        Topic::Slices => slice_table(metadata, Layout::InOrder),
        _ => cache_table(metadata, &[("this image", Layout::InOrder)]),
    };
    topics.iter().map(table).collect()
}

fn limit(work: Work) -> Row {
    Row {
        series: String::new(),
        x: 0.0,
        x_label: "raw".into(),
        work,
    }
}

fn cache_table(metadata: Metadata, layouts: &[(&str, Layout)]) -> Table {
    let entry_bytes = (4 * KIB).min(metadata.cluster_bytes);
    let mut rows = vec![limit(Work::RawRead)];
    for &(series, layout) in layouts {
        for percent in [10, 20, 40, 60, 80, 100] {
            let cache_bytes = metadata.cache_bytes(percent, entry_bytes);
            rows.push(Row {
                series: series.into(),
                x: percent as f64,
                x_label: format!("{percent} % ({})", human(cache_bytes)),
                work: Work::Read {
                    layout,
                    cache_bytes,
                    entry_bytes,
                },
            });
        }
    }
    // Several shares of a small image are the same number of slices.
    rows.dedup_by(|next, row| next.series == row.series && next.work == row.work);
    Table {
        id: "cache",
        title: "Random 4K reads by L2 cache size".into(),
        explains: format!(
            "An L2 cache of 100 % is {}: it holds the mapping of every cluster as it is on the \
             disk. A read whose mapping is not there costs a second read.",
            human(metadata.l2_bytes)
        ),
        x_title: "L2 cache size, % of the image's L2 entries",
        x_is_log: false,
        shows: Shows::Speed,
        rows,
    }
}

fn slice_table(metadata: Metadata, layout: Layout) -> Table {
    let mut rows = vec![limit(Work::RawRead)];
    let entries = [4 * KIB, 16 * KIB, 64 * KIB];
    for percent in [25, 60] {
        for &entry_bytes in entries.iter().filter(|&&e| e <= metadata.cluster_bytes) {
            rows.push(Row {
                series: format!("{percent} % cache"),
                x: entry_bytes as f64,
                x_label: human(entry_bytes),
                work: Work::Read {
                    layout,
                    cache_bytes: metadata.cache_bytes(percent, entry_bytes),
                    entry_bytes,
                },
            });
        }
    }
    Table {
        id: "slices",
        title: "Random 4K reads by cache entry size".into(),
        explains: "The cache loads tables in slices of this size (l2-cache-entry-size). Larger \
                   ones read more at a miss and leave room for fewer."
            .into(),
        x_title: "cache entry (slice) size",
        x_is_log: true,
        shows: Shows::Speed,
        rows,
    }
}

fn write_table(backed: bool, full: bool) -> Table {
    let clusters: &[u64] = match full {
        true => &[16, 32, 64, 128, 256, 512, 1024, 2048],
        false => &[16, 64, 256, 1024],
    };
    let mut rows = vec![limit(Work::RawWrite)];
    for (series, subclusters) in [("standard", false), ("subclusters", true)] {
        for cluster_bytes in clusters.iter().map(|kib| kib * KIB) {
            rows.push(Row {
                series: series.into(),
                x: cluster_bytes as f64,
                x_label: human(cluster_bytes),
                work: Work::Write {
                    cluster_bytes,
                    subclusters,
                    backed,
                },
            });
        }
    }
    let (id, place, explains) = match backed {
        false => (
            "writes",
            "a new image",
            "Each write meets a cluster that does not exist yet: it is allocated and mapped. The \
             limit is a sparse raw file. With subclusters (extended_l2) a 32nd of a cluster can \
             stand alone.",
        ),
        true => (
            "overlay",
            "an overlay of a full backing file",
            "Each write meets a cluster that only the backing file has: without subclusters \
             (extended_l2) the rest of the cluster is copied.",
        ),
    };
    Table {
        id,
        title: format!("Random 4K writes into {place}, by cluster size"),
        explains: explains.into(),
        x_title: "cluster size",
        x_is_log: true,
        shows: Shows::SpeedAndGrowth,
        rows,
    }
}

fn journal_table(sustained: Sustained) -> Table {
    let log = human(sustained.log_bytes);
    let row = |series: String, work: Work| Row {
        series,
        x: 0.0,
        x_label: String::new(),
        work,
    };
    let with = Work::Sustained {
        log_bytes: Some(sustained.log_bytes),
    };
    let rows = vec![
        row("raw, sparse".into(), Work::SustainedRaw),
        row("without a log".into(), Work::Sustained { log_bytes: None }),
        row(format!("with a log of {log}"), with),
    ];
    Table {
        id: "journal",
        title: format!(
            "Random 4K writes into an overlay of a full backing file, a flush after each \
             {WRITES_PER_FLUSH}, over time"
        ),
        explains: format!(
            "With a write log (journal=on) a flush is one write to the log, and the image follows. \
             When the log is full, writes wait for that: so each run ends only after {} ({} times \
             the log's length), or after {} s.",
            human(sustained.writes() * BLOCK_BYTES),
            LOGS_WRITTEN,
            sustained.seconds
        ),
        x_title: "seconds since the run began",
        x_is_log: false,
        shows: Shows::OverTime(sustained),
        rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn caches_are_whole_slices_and_two_at_least() {
        let metadata = Metadata::made(4 << 30);
        assert_eq!(metadata.l2_bytes, 512 * KIB);
        assert_eq!(metadata.cache_bytes(25, 64 * KIB), 128 * KIB);
        assert_eq!(metadata.cache_bytes(10, 4 * KIB), 52 * KIB);
        assert_eq!(metadata.cache_bytes(1, 64 * KIB), 128 * KIB);
        assert_eq!(metadata.cache_bytes(100, 4 * KIB), 512 * KIB);
    }

    #[test]
    fn shares_that_are_the_same_cache_are_measured_once() {
        let metadata = Metadata::made(64 << 20);
        let table = cache_table(metadata, &[("x", Layout::InOrder)]);
        assert_eq!(table.rows.len(), 2, "8 KiB are two slices at any share");
    }

    #[test]
    fn every_table_has_one_limit() {
        let effort = super::super::arguments::Arguments::parse(vec!["--full".into()]);
        let effort = effort.unwrap().effort;
        let tables = made(&Topic::ALL, &effort);
        assert_eq!(tables.len(), Topic::ALL.len());
        for table in tables {
            let limits = table.rows.iter().filter(|row| row.is_limit()).count();
            assert_eq!(limits, 1, "{}", table.id);
        }
    }

    #[test]
    fn space_is_needed_for_what_is_made() {
        let effort = super::super::arguments::Arguments::parse(Vec::new());
        let effort = effort.unwrap().effort;
        let gib = |topics: &[Topic]| needed_bytes(topics, &effort) as f64 / (1 << 30) as f64;
        assert_eq!(gib(&[Topic::Cache, Topic::Slices]), 4.0);
        assert_eq!(gib(&[Topic::Writes]), 4.0);
        assert_eq!(gib(&[Topic::Overlay]), 8.0);
        assert_eq!(gib(&[Topic::Writes, Topic::Cache]), 8.0);
        assert_eq!(gib(&[Topic::Journal]), 8.0 + 1.0 / 64.0);
    }

    #[test]
    fn a_sustained_run_writes_ten_logs_in_whole_batches() {
        let sustained = Sustained {
            log_bytes: 72 * KIB,
            seconds: 10.0,
        };
        assert_eq!(sustained.writes(), 192, "180 are no multiple of 32");
        assert_eq!(sustained.interval(), Duration::from_millis(25));
        assert_eq!(sustained.smoothed_seconds(), 0.25);
    }

    #[test]
    fn entries_are_not_larger_than_clusters() {
        let metadata = Metadata {
            l2_bytes: 1 << 20,
            cluster_bytes: 2048,
        };
        let tables = given(&[Topic::Cache, Topic::Slices], metadata);
        for row in tables.iter().flat_map(|table| &table.rows) {
            if let Work::Read { entry_bytes, .. } = row.work {
                assert!(entry_bytes <= 2048);
            }
        }
    }
}
