//! What the figures mean, in plain sentences. Pure.

use super::plan::Work;
use super::result::{Measured, Results, median};
use crate::size::human;

/// Figures closer than this are the same: one run tells no more.
const SAME: f64 = 0.9;
/// A cache that reaches this much of the best is enough.
const ENOUGH: f64 = 0.95;
/// From here on a figure is as good as the limit's.
const AS_FAST: f64 = 0.97;
/// Rounds that differ by this factor (or a figure so far beyond its limit) are noise.
const NOISY: f64 = 1.3;

/// Sentences about the tables.
pub(super) fn read(tables: &[Results]) -> Vec<String> {
    let mut sentences: Vec<String> = noise(tables).into_iter().collect();
    for results in tables {
        match results.table.id {
            "cache" => sentences.extend(cache(results)),
            "slices" => sentences.extend(slices(results)),
            _ => sentences.extend(writes(results)),
        }
    }
    sentences
}

/// A warning where the figures tell more about what else the machine did.
fn noise(tables: &[Results]) -> Option<String> {
    let rows = || tables.iter().flat_map(|results| &results.rows);
    let spread = median(rows().filter_map(Measured::spread)).unwrap_or(1.0);
    let ratios = tables
        .iter()
        .flat_map(|results| results.points().filter_map(|row| results.ratio(row)));
    let beyond = ratios.fold(1.0, f64::max);
    let noise = spread.max(beyond);
    (noise >= NOISY).then(|| {
        format!(
            "The machine was busy with other things: figures that should agree differ by a factor \
             of {noise:.1}. Measure again when it is quiet, or with more --rounds and --seconds, \
             before relying on what follows."
        )
    })
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
    let sentence = |series: &&str| {
        let (_, best) = best(results.of(series))?;
        let row = results
            .of(series)
            .find(|row| row.iops().is_some_and(|iops| iops >= ENOUGH * best))?;
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
    let sentence = |series: &&str| {
        let (fastest, best) = best(results.of(series))?;
        let measured = results
            .of(series)
            .filter_map(|row| Some((row, row.iops()?)));
        let (slowest, worst) = measured.min_by(|a, b| a.1.total_cmp(&b.1))?;
        let cache = series.replace(" cache", "");
        Some(if worst >= SAME * best {
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

/// Which clusters are fastest, and what 64K clusters cost in space.
fn writes(results: &Results) -> Vec<String> {
    let mut sentences = Vec::new();
    let overlay = results.table.id == "overlay";
    let place = if overlay {
        "Over a full backing file"
    } else {
        "Without a backing file"
    };
    if let Some((row, iops)) = best(results.points()) {
        let speed = match results.ratio(row) {
            Some(ratio) => beside(ratio, "a sparse raw file"),
            None => format!("{iops:.0} writes a second"),
        };
        sentences.push(format!(
            "{place}, 4K writes into new clusters are fastest with {}: {speed}.",
            clusters(row)
        ));
    }
    let usual = |subclusters: bool| {
        results
            .points()
            .find(|row| {
                matches!(row.row.work, Work::Write { cluster_bytes: 65536, subclusters: s, .. }
                    if s == subclusters)
            })
            .and_then(Measured::growth)
    };
    if let (Some(standard), Some(subclusters)) = (usual(false), usual(true)) {
        sentences.push(format!(
            "{place}, 64 KiB clusters grow the image by {} for each byte written; with \
             subclusters by {}.",
            bytes(standard),
            bytes(subclusters)
        ));
    }
    sentences
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
            ]
        );
    }

    #[test]
    fn noise_is_told_first() {
        let mut report = sample_report();
        for row in report.tables.iter_mut().flat_map(|table| &mut table.rows) {
            row.samples[0].seconds = 2.0;
        }
        let sentences = super::read(&report.tables);
        assert!(
            sentences[0].contains("by a factor of 2.0"),
            "{}",
            sentences[0]
        );
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
