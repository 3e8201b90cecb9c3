//! Conclusions from the results, as sentences for people. No I/O.
//!
//! Invariant: a sentence about speed rests on differences that are larger than those between rounds
//! that should agree; where these are too large, or nobody measured them, it says so.

use super::plan::{Shows, Work};
use super::result::{Measured, Results, median};
use crate::size::human;

/// Figures closer than this are the same, however quiet the machine was.
const SAME: f64 = 0.9;
/// A cache that reaches this much of the best is enough.
const ENOUGH: f64 = 0.95;
/// From here on a figure is as good as the limit's.
const AS_FAST: f64 = 0.97;
/// Rounds that differ by this factor (or a figure so far beyond its limit) are noise.
const NOISY: f64 = 1.3;

/// Sentences about the tables.
pub(super) fn read(tables: &[Results]) -> Vec<String> {
    let mut sentences = Vec::new();
    for results in tables.iter().filter(|results| results.is_measured()) {
        match too_noisy(results) {
            Some(why) => sentences.push(why),
            None => match results.table.id {
                "cache" => sentences.extend(cache(results)),
                "slices" => sentences.extend(slices(results)),
                "journal" => sentences.extend(write_log(results)),
                _ => sentences.extend(fastest_writes(results)),
            },
        }
        // How far an image grows is counted, not timed.
        sentences.extend(growth(results));
    }
    sentences
}

/// Why a table's times tell nothing, if they do not.
fn too_noisy(results: &Results) -> Option<String> {
    let title = &results.table.title;
    let Some(noise) = results.noise() else {
        return Some(format!(
            "{title}: one round cannot tell differences from noise; measure with --rounds=3 or \
             more."
        ));
    };
    (noise >= NOISY).then(|| {
        format!(
            "{title}: too noisy to tell, the machine was busy with other things; figures that \
             should agree differ by a factor of {noise:.1}. Measure again when it is quiet, or \
             with more --rounds and --seconds."
        )
    })
}

impl Results {
    /// By which factor figures differ that should agree: the rounds of a row, at the middle
    /// of all rows, or a figure and the limit that it is beyond. `None` if no row was
    /// measured twice.
    pub(super) fn noise(&self) -> Option<f64> {
        let spread = median(self.rows.iter().filter_map(Measured::spread))?;
        if let Shows::OverTime(_) = self.table.shows {
            // The flushes of a raw file are no limit: one write to a log can be less work.
            return Some(spread);
        }
        let ratios = self.points().filter_map(|row| self.ratio(row));
        Some(ratios.fold(spread, f64::max))
    }

    /// Whether conclusions about speed are drawn from it.
    pub(super) fn is_noisy(&self) -> bool {
        self.noise().is_none_or(|noise| noise >= NOISY)
    }

    /// Figures that are this close, in parts of one, cannot be told apart.
    pub(super) fn same(&self) -> f64 {
        SAME.min(1.0 / self.noise().unwrap_or(1.0))
    }

    fn is_measured(&self) -> bool {
        self.points().any(|row| row.iops().is_some())
    }
}

/// How much of an image's mapping is in use.
pub(super) fn used(used_bytes: u64, whole_bytes: u64) -> String {
    format!(
        "The mapping of this image's data takes {} of L2 tables; that of the whole image would \
         take {}.",
        human(used_bytes),
        human(whole_bytes)
    )
}

/// A speed beside the limit's; what is that close is the same.
fn beside(ratio: f64, limit: &str) -> String {
    match ratio {
        same if same >= AS_FAST => format!("as fast as {limit}"),
        less => format!("{:.0} % of {limit}", 100.0 * less),
    }
}

fn best<'a>(rows: impl Iterator<Item = &'a Measured>) -> Option<(&'a Measured, f64)> {
    let measured = rows.filter_map(|row| Some((row, row.iops()?)));
    measured.max_by(|a, b| a.1.total_cmp(&b.1))
}

/// One sentence a line: from which cache on it is as fast as it gets.
fn cache(results: &Results) -> Vec<String> {
    let enough = ENOUGH.min(1.0 / results.noise().unwrap_or(1.0));
    let sentence = |series: &&str| {
        let (_, best) = best(results.of(series))?;
        let row = results
            .of(series)
            .find(|row| row.iops().is_some_and(|iops| iops >= enough * best))?;
        let cache = human(row.row.work.cache_bytes()?);
        let speed = match results.ratio(row) {
            Some(ratio) => beside(ratio, "raw"),
            None => format!("{:.0} reads a second", row.iops()?),
        };
        let which = match *series {
            "this image" => "this image".to_owned(),
            order => format!("an image whose clusters lie {order}"),
        };
        let share = format!("{} % of what its L2 entries take", row.row.x);
        Some(format!(
            "An L2 cache of {cache} ({share}) is enough for {which}: {speed}."
        ))
    };
    results.series().iter().filter_map(sentence).collect()
}

/// Whether the size of a slice matters.
fn slices(results: &Results) -> Vec<String> {
    let same = results.same();
    let sentence = |series: &&str| {
        let (fastest, best) = best(results.of(series))?;
        let measured = results
            .of(series)
            .filter_map(|row| Some((row, row.iops()?)));
        let (slowest, worst) = measured.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let cache = series.replace(" cache", "");
        Some(if worst >= same * best {
            format!("With a cache of {cache} the entry size makes no difference worth naming.")
        } else {
            format!(
                "With a cache of {cache}, entries of {} are {:.1} times as fast as entries of {}.",
                fastest.row.x_label,
                best / worst.max(f64::MIN_POSITIVE),
                slowest.row.x_label
            )
        })
    };
    results.series().iter().filter_map(sentence).collect()
}

/// Where the writes of a table go.
fn place(results: &Results) -> &'static str {
    match results.table.id {
        "overlay" => "Over a full backing file",
        _ => "Without a backing file",
    }
}

/// Which clusters are fastest: the first, and those that noise keeps from being told apart.
fn fastest_writes(results: &Results) -> Option<String> {
    let place = place(results);
    let (row, iops) = best(results.points())?;
    let speed = match results.ratio(row) {
        Some(ratio) => beside(ratio, "a sparse raw file"),
        None => format!("{iops:.0} writes a second"),
    };
    let noise = results.noise().unwrap_or(1.0);
    let alike = |other: &&Measured| other.iops().is_some_and(|other| other * noise >= iops);
    let others = results.points().filter(alike).count() - 1;
    let which = clusters(row);
    Some(match others {
        0 => format!("{place}, 4K writes into new clusters are fastest with {which}: {speed}."),
        _ => format!(
            "{place}, 4K writes into new clusters are fastest with {which}, which cannot be told \
             from {others} more: {speed}."
        ),
    })
}

/// What 64K clusters cost in space.
fn growth(results: &Results) -> Option<String> {
    let place = place(results);
    let usual = |subclusters: bool| {
        results
            .points()
            .find(|row| {
                matches!(row.row.work, Work::Write { cluster_bytes: 65536, subclusters: s, .. }
                    if s == subclusters)
            })
            .and_then(Measured::growth)
    };
    let (standard, subclusters) = (usual(false)?, usual(true)?);
    Some(format!(
        "{place}, 64 KiB clusters grow the image by {} for each byte written; with subclusters by \
         {}.",
        bytes(standard),
        bytes(subclusters)
    ))
}

/// What a write log brings, and whether that lasts when it is full.
fn write_log(results: &Results) -> Option<String> {
    let (without, with) = results.logs()?;
    let Work::Sustained { log_bytes } = with.row.work else {
        return None;
    };
    let log = human(log_bytes?);
    let same = results.same();
    let factor = with.iops()? / without.iops()?.max(f64::MIN_POSITIVE);
    let speed = match factor {
        slower if slower < same => format!("{:.0} % as fast as", 100.0 * slower),
        alike if alike * same <= 1.0 => "as fast as".to_owned(),
        faster => format!("{faster:.1} times as fast as"),
    };
    let (lowest, lowest_without) = (with.lowest_iops()?, without.lowest_iops()?);
    let lasts = match lowest < same * lowest_without {
        true => "it falls below at times",
        false => "it does not fall below",
    };
    Some(format!(
        "With a log of {log}, writes with flushes over a full backing file are {speed} without \
         one. The slowest part of that run did {lowest:.0} writes a second, that of the run \
         without a log {lowest_without:.0}: {lasts}."
    ))
}

fn clusters(row: &Measured) -> String {
    let size = &row.row.x_label;
    match row.row.work {
        Work::Write {
            subclusters: true, ..
        } => format!("{size} clusters and subclusters"),
        _ => format!("{size} clusters"),
    }
}

fn bytes(growth: f64) -> String {
    match growth {
        many if many >= 9.95 => format!("{many:.1} bytes"),
        few => format!("{few:.2} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use crate::bench::result::tests::sample_report;

    #[test]
    fn the_tables_are_put_into_words() {
        let report = sample_report();
        assert_eq!(
            report.reading,
            [
                "An L2 cache of 512 KiB (100 % of what its L2 entries take) is enough for an image \
                 whose clusters lie in order: 64 % of raw.",
                "An L2 cache of 412 KiB (80 % of what its L2 entries take) is enough for an image \
                 whose clusters lie scattered: 84 % of raw.",
                "With a cache of 25 %, entries of 64 KiB are 1.2 times as fast as entries of 4 KiB.",
                "With a cache of 60 %, entries of 64 KiB are 1.1 times as fast as entries of 4 KiB.",
                "Without a backing file, 4K writes into new clusters are fastest with 1 MiB \
                 clusters and subclusters: 72 % of a sparse raw file.",
                "Without a backing file, 64 KiB clusters grow the image by 16.0 bytes for each \
                 byte written; with subclusters by 1.05 bytes.",
                "Over a full backing file, 4K writes into new clusters are fastest with 1 MiB \
                 clusters and subclusters: 72 % of a sparse raw file.",
                "Over a full backing file, 64 KiB clusters grow the image by 16.0 bytes for each \
                 byte written; with subclusters by 1.05 bytes.",
                "With a log of 16 MiB, writes with flushes over a full backing file are as fast as \
                 without one. The slowest part of that run did 19200 writes a second, that of the \
                 run without a log 17600: it does not fall below.",
            ]
        );
    }

    /// What the rounds of every row differ by.
    fn with_noise(factor: f64) -> Vec<String> {
        let mut report = sample_report();
        for row in report.tables.iter_mut().flat_map(|table| &mut table.rows) {
            row.samples[0].seconds = factor;
        }
        super::read(&report.tables)
    }

    #[test]
    fn a_noisy_run_leads_to_no_conclusion_about_speed() {
        let sentences = with_noise(2.0);
        let noisy = sentences.iter().filter(|s| s.contains("too noisy to tell"));
        assert_eq!(noisy.count(), 5, "{sentences:?}");
        assert!(sentences[0].contains("by a factor of 2.0"), "{sentences:?}");
        let text = sentences.join(" ");
        for conclusion in [
            "enough",
            "times as fast",
            "fastest",
            "no difference",
            "fall below",
        ] {
            assert!(!text.contains(conclusion), "{conclusion}: {text}");
        }
        // What is counted does not depend on what else the machine did.
        assert!(text.contains("64 KiB clusters grow the image"), "{text}");
    }

    #[test]
    fn differences_within_the_noise_are_none() {
        let text = with_noise(1.25).join(" ");
        assert!(text.contains("makes no difference worth naming"), "{text}");
        assert!(text.contains("cannot be told from"), "{text}");
        assert!(!text.contains("times as fast"), "{text}");
    }

    #[test]
    fn one_round_tells_no_noise_and_so_nothing_else() {
        let mut report = sample_report();
        for row in report.tables.iter_mut().flat_map(|table| &mut table.rows) {
            row.samples.truncate(1);
        }
        let text = super::read(&report.tables).join(" ");
        assert!(text.contains("one round cannot tell"), "{text}");
        assert!(!text.contains("fastest"), "{text}");
    }

    #[test]
    fn tables_without_samples_say_nothing() {
        let mut report = sample_report();
        for row in report.tables.iter_mut().flat_map(|table| &mut table.rows) {
            row.samples.clear();
        }
        assert!(super::read(&report.tables).is_empty());
    }
}
