//! The results as JSON (`--output json`), for programs. No I/O.

use serde_json::{Value, json};

use super::plan::{Shows, WRITES_PER_FLUSH, Work};
use super::result::{About, Below, Measured, Report, Results, Sample};
use super::timeline::Timeline;

/// Grows when a member is renamed or means something else.
const SCHEMA: u32 = 1;

/// The report as JSON text.
pub(super) fn text(report: &Report) -> String {
    let value = json!({
        "schema": SCHEMA,
        "program": format!("vellum {}", env!("CARGO_PKG_VERSION")),
        "run": run(&report.about),
        "tables": report.tables.iter().map(table).collect::<Vec<_>>(),
        "reading": report.reading,
    });
    format!("{value:#}\n")
}

fn run(about: &About) -> Value {
    json!({
        "image": about.image,
        "directory": about.directory,
        "size-bytes": about.size_bytes,
        "depth": about.depth,
        "seconds": about.seconds,
        "rounds": about.rounds,
        "seed": about.seed,
        "cpus": about.cpus,
        "kernel": about.kernel,
        "direct": about.direct,
        "notes": about.notes,
    })
}

fn table(results: &Results) -> Value {
    let rows = results.rows.iter().map(|measured| row(results, measured));
    json!({
        "id": results.table.id,
        "title": results.table.title,
        "raw-iops": results.limit(),
        "noise": results.noise(),
        "noisy": results.is_noisy(),
        "rows": rows.collect::<Vec<_>>(),
    })
}

fn row(results: &Results, measured: &Measured) -> Value {
    let samples: Vec<Value> = measured.samples.iter().map(sample).collect();
    let mut value = json!({
        "series": measured.row.series,
        "x": measured.row.x_label,
        "limit": measured.row.is_limit(),
        "iops": measured.iops(),
        "spread": measured.spread(),
        "of-raw": results.ratio(measured),
        "cpu-us": measured.cpu_us(),
        "growth": measured.growth(),
        "samples": samples,
    });
    if let Shows::OverTime(_) = results.table.shows {
        value["lowest-iops"] = json!(measured.lowest_iops());
        value["request-p99.9-us"] = json!(measured.request_us());
        value["flush-p99.9-us"] = json!(measured.flush_us());
        value["close-seconds"] = json!(measured.close_seconds());
        value["below-no-log"] = json!(results.below(measured).map(Below::name));
    }
    value["settings"] = settings(measured.row.work);
    value
}

fn sample(sample: &Sample) -> Value {
    let mut value = json!({
        "operations": sample.operations,
        "seconds": sample.seconds,
        "cpu-seconds": sample.cpu_seconds,
        "grown-bytes": sample.grown_bytes,
    });
    if let Some(timeline) = &sample.timeline {
        value["over-time"] = over_time(timeline);
    }
    value
}

fn over_time(timeline: &Timeline) -> Value {
    json!({
        "interval-seconds": timeline.interval_seconds,
        "operations": timeline.operations,
        "lowest-iops": timeline.lowest_iops(),
        "request-p99.9-us": timeline.request_us,
        "flush-p99.9-us": timeline.flush_us,
        "close-seconds": timeline.close_seconds,
    })
}

fn settings(work: Work) -> Value {
    match work {
        Work::Read {
            cache_bytes,
            entry_bytes,
            ..
        } => json!({ "l2-cache-size": cache_bytes, "l2-cache-entry-size": entry_bytes }),
        Work::Write {
            cluster_bytes,
            subclusters,
            backed,
        } => json!({
            "cluster-size": cluster_bytes,
            "extended-l2": subclusters,
            "backing-file": backed,
        }),
        Work::SustainedRaw => json!({ "writes-per-flush": WRITES_PER_FLUSH }),
        Work::Sustained { log_bytes } => json!({
            "writes-per-flush": WRITES_PER_FLUSH,
            "journal-size": log_bytes,
        }),
        Work::RawRead | Work::RawWrite => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::result::tests::sample_report;

    #[test]
    fn programs_find_every_figure() {
        let value: Value = serde_json::from_str(&text(&sample_report())).unwrap();
        assert_eq!(value["schema"], 1);
        assert_eq!(value["run"]["depth"], 32);
        let writes = &value["tables"][2];
        assert_eq!(writes["id"], "writes");
        assert_eq!(writes["raw-iops"], 50_000.0);
        let row = &writes["rows"][1];
        assert_eq!(row["settings"]["cluster-size"], 16384);
        assert_eq!(row["settings"]["extended-l2"], false);
        assert_eq!(row["of-raw"], 0.44);
        assert_eq!(row["growth"], 4.0);
        assert_eq!(row["spread"], 1.0);
        assert_eq!(writes["noise"], 1.0);
        assert_eq!(writes["noisy"], false);
        assert_eq!(row["samples"].as_array().map(Vec::len), Some(3));
        assert_eq!(writes["rows"][0]["limit"], true);
        assert!(value["reading"].is_array());
        let with_log = &value["tables"][4]["rows"][2];
        assert_eq!(with_log["settings"]["journal-size"], 16 << 20);
        assert_eq!(with_log["lowest-iops"], 19_200.0);
        assert_eq!(with_log["flush-p99.9-us"], 2000.0);
        assert_eq!(with_log["below-no-log"], "never");
        let over_time = &with_log["samples"][0]["over-time"];
        assert_eq!(over_time["interval-seconds"], 0.025);
        assert_eq!(over_time["operations"].as_array().map(Vec::len), Some(40));
        assert_eq!(row.get("lowest-iops"), None);
    }
}
