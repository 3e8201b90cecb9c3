//! Answers, for people and for programs.

use serde_json::Value;

use super::action::Show;
use super::tables::{Column, bytes, duration, items, lines, number, percent, text};
use crate::output::Output;
use crate::report;
use crate::size::human;
use crate::style::Style;
use crate::terminal::harmless;

/// Prints an answer.
pub fn print(value: &Value, show: Show, output: Output) {
    if output == Output::Json || show == Show::Json {
        return report::print_line(format_args!("{value:#}"));
    }
    match show {
        Show::Disks => print_lines(&disks(value)),
        Show::Disk => print_disk(value),
        Show::Jobs => print_lines(&jobs(&value["jobs"])),
        Show::Exports => print_lines(&exports(value)),
        Show::Nodes => print_lines(&nodes(value)),
        Show::Stats => print_lines(&stats(&value["disks"])),
        Show::Host => print_host(value),
        Show::Space => print_lines(&space(value)),
        Show::SpaceOfAll => print_lines(&space_of_all(value)),
        Show::Chains => print_lines(&chains(value)),
        Show::Done | Show::Json => {}
    }
}

fn print_lines(lines: &[String]) {
    for line in lines {
        report::print_line(line);
    }
}

fn names(value: &Value, key: &str) -> String {
    let names: Vec<String> = match key {
        "jobs" => items(&value[key])
            .filter_map(|job| Some(job.as_str()?.to_owned()))
            .collect(),
        _ => items(&value[key])
            .map(|export| text(export, "id"))
            .collect(),
    };
    names.join(" ")
}

fn disks(value: &Value) -> Vec<String> {
    let columns: [Column<'_>; 8] = [
        ("disk", false),
        ("driver", false),
        ("size", true),
        ("allocated", true),
        ("layers", true),
        ("exports", false),
        ("jobs", false),
        ("file", false),
    ];
    let rows = items(value).map(|disk| {
        let top = &disk["layers"][0];
        vec![
            text(disk, "node-name"),
            text(disk, "driver"),
            bytes(disk, "size-bytes"),
            bytes(top, "allocated-bytes"),
            items(&disk["layers"]).count().to_string(),
            names(disk, "exports"),
            names(disk, "jobs"),
            text(top, "filename"),
        ]
    });
    lines(&columns, rows)
}

fn print_disk(disk: &Value) {
    let style = Style::for_output();
    let access = match disk["read-only"].as_bool() {
        Some(true) => "read-only",
        _ => "writable",
    };
    let size = bytes(disk, "size-bytes");
    report::print_line(format_args!(
        "{}  {}, {size}, {access}",
        style.heading(&harmless(&text(disk, "node-name"))),
        harmless(&text(disk, "driver")),
    ));
    let layers = items(&disk["layers"]).map(|layer| {
        vec![
            text(layer, "node-name"),
            text(layer, "driver"),
            bytes(layer, "size-bytes"),
            bytes(layer, "allocated-bytes"),
            bytes(layer, "file-bytes"),
            text(layer, "filename"),
        ]
    });
    let columns = [
        ("layer", false),
        ("driver", false),
        ("size", true),
        ("allocated", true),
        ("file", true),
        ("name", false),
    ];
    section(style, "Layers", &lines(&columns, layers));
    let exports = items(&disk["exports"]);
    let exports = exports.map(|one| ["id", "type", "name"].map(|key| text(one, key)).to_vec());
    let exports: Vec<Vec<String>> = exports.collect();
    if !exports.is_empty() {
        let columns = [("export", false), ("type", false), ("name", false)];
        section(style, "Exports", &lines(&columns, exports));
    }
    if items(&disk["jobs"]).next().is_some() {
        section(style, "Jobs", &[harmless(&names(disk, "jobs"))]);
    }
    section(style, "Requests", &requests(&disk["stats"]));
}

fn section(style: Style, title: &str, lines: &[String]) {
    report::print_line(format_args!("\n{}", style.heading(title)));
    print_lines(lines);
}

/// What was asked of a disk, an operation a line.
fn requests(stats: &Value) -> Vec<String> {
    let columns: [Column<'_>; 5] = [
        ("operation", false),
        ("requests", true),
        ("bytes", true),
        ("mean time", true),
        ("failed", true),
    ];
    let rows = ["read", "write", "flush", "discard"].map(|operation| {
        let counts = &stats[operation];
        vec![
            operation.to_owned(),
            text(counts, "requests"),
            bytes(counts, "bytes"),
            mean(number(counts, "time-ns"), number(counts, "requests")),
            text(counts, "failed"),
        ]
    });
    lines(&columns, rows)
}

fn mean(time_ns: u64, requests: u64) -> String {
    match requests {
        0 => String::new(),
        requests => duration(time_ns / requests),
    }
}

/// How long a job will still run, if that can be said.
fn time_left(job: &Value) -> String {
    match job["seconds-left"].as_u64() {
        None => String::new(),
        Some(seconds) => format!(
            "{}:{:02}:{:02}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60
        ),
    }
}

/// Jobs as `/v1/stats` tells of them.
pub fn jobs(value: &Value) -> Vec<String> {
    let columns: [Column<'_>; 7] = [
        ("job", false),
        ("type", false),
        ("status", false),
        ("done", true),
        ("of", true),
        ("", true),
        ("time left", true),
    ];
    let rows = items(value).map(|job| {
        vec![
            text(job, "id"),
            text(job, "type"),
            text(job, "status"),
            bytes(job, "done-bytes"),
            bytes(job, "total-bytes"),
            percent(number(job, "done-bytes"), number(job, "total-bytes")),
            time_left(job),
        ]
    });
    lines(&columns, rows)
}

fn exports(value: &Value) -> Vec<String> {
    let columns: [Column<'_>; 4] = [
        ("export", false),
        ("type", false),
        ("node", false),
        ("", false),
    ];
    let rows = items(value).map(|export| {
        let ends = export["shutting-down"].as_bool() == Some(true);
        vec![
            text(export, "id"),
            text(export, "type"),
            text(export, "node-name"),
            if ends { "ends" } else { "" }.to_owned(),
        ]
    });
    lines(&columns, rows)
}

fn nodes(value: &Value) -> Vec<String> {
    let columns: [Column<'_>; 5] = [
        ("node", false),
        ("driver", false),
        ("", false),
        ("size", true),
        ("file", false),
    ];
    let rows = items(value).map(|node| {
        let read_only = node["ro"].as_bool() == Some(true);
        vec![
            text(node, "node-name"),
            text(node, "drv"),
            if read_only { "read-only" } else { "" }.to_owned(),
            bytes(&node["image"], "virtual-size"),
            text(node, "file"),
        ]
    });
    lines(&columns, rows)
}

fn stats(value: &Value) -> Vec<String> {
    let columns: [Column<'_>; 9] = [
        ("disk", false),
        ("reads", true),
        ("read", true),
        ("mean time", true),
        ("writes", true),
        ("written", true),
        ("mean time", true),
        ("failed", true),
        ("in flight", true),
    ];
    let rows = items(value).map(|disk| {
        let time = |operation: &str| {
            let count = |what: &str| number(disk, &format!("{operation}-{what}"));
            mean(count("time-ns"), count("requests"))
        };
        vec![
            text(disk, "node-name"),
            text(disk, "read-requests"),
            bytes(disk, "read-bytes"),
            time("read"),
            text(disk, "write-requests"),
            bytes(disk, "write-bytes"),
            time("write"),
            text(disk, "failed-requests"),
            text(disk, "in-flight"),
        ]
    });
    lines(&columns, rows)
}

/// Where the space of a disk goes, a line each.
fn space(value: &Value) -> Vec<String> {
    let complete = value["complete"].as_bool() == Some(true);
    let seen = match complete {
        true => String::new(),
        false => format!(" (of the first {})", bytes(value, "walked-bytes")),
    };
    let rows = [
        ("size of the disk", "size-bytes"),
        ("data of its own image", "own-bytes"),
        ("data that images below supply", "base-bytes"),
        ("zeroes", "zero-bytes"),
        ("length of the file", "file-bytes"),
        ("what the file takes", "allocated-bytes"),
        ("metadata", "metadata-bytes"),
        ("held by snapshots alone", "snapshot-bytes"),
        ("made ahead, or leaked", "leaked-bytes"),
        ("given back since it was opened", "discarded-bytes"),
    ];
    let rows = rows.into_iter().filter(|(_, key)| !value[*key].is_null());
    let rows = rows.map(|(what, key)| {
        let note = match key {
            "own-bytes" | "base-bytes" | "zero-bytes" => &*seen,
            _ => "",
        };
        vec![format!("{what}{note}"), bytes(value, key)]
    });
    let name = text(value, "node-name");
    let columns: [Column<'_>; 2] = [(&name, false), ("bytes", true)];
    lines(&columns, rows)
}

fn space_of_all(value: &Value) -> Vec<String> {
    let columns: [Column<'_>; 6] = [
        ("disk", false),
        ("size", true),
        ("file", true),
        ("allocated", true),
        ("layers", true),
        ("allocated by all", true),
    ];
    let rows = items(value).map(|disk| {
        let top = &disk["layers"][0];
        let all = items(&disk["layers"]).map(|layer| number(layer, "allocated-bytes"));
        vec![
            text(disk, "node-name"),
            bytes(disk, "size-bytes"),
            bytes(top, "file-bytes"),
            bytes(top, "allocated-bytes"),
            items(&disk["layers"]).count().to_string(),
            human(all.sum()),
        ]
    });
    lines(&columns, rows)
}

fn chains(value: &Value) -> Vec<String> {
    let columns: [Column<'_>; 8] = [
        ("disk", false),
        ("layers", true),
        ("at most", true),
        ("overlays", true),
        ("at most", true),
        ("speed", true),
        ("job", false),
        ("", false),
    ];
    let rows = items(value).map(|chain| {
        vec![
            text(chain, "node-name"),
            text(chain, "layers"),
            text(chain, "max-layers"),
            bytes(chain, "overlay-bytes"),
            bytes(chain, "max-overlay-bytes"),
            bytes(chain, "speed"),
            text(chain, "job"),
            text(chain, "error"),
        ]
    });
    lines(&columns, rows)
}

fn print_host(host: &Value) {
    let count = |key: &str| number(host, key);
    report::print_line(format_args!(
        "vellum {}, process {}, up for {} s",
        harmless(&text(host, "version")),
        count("pid"),
        host["uptime-seconds"].as_f64().unwrap_or_default().round(),
    ));
    report::print_line(format_args!(
        "{} disks, {} nodes, {} exports, {} jobs",
        count("disks"),
        count("nodes"),
        count("exports"),
        count("jobs"),
    ));
    let rows = items(&host["file-systems"]).map(|system| {
        vec![
            text(system, "folder"),
            bytes(system, "size-bytes"),
            bytes(system, "available-bytes"),
        ]
    });
    let columns = [("file system", false), ("size", true), ("free", true)];
    let rows: Vec<Vec<String>> = rows.collect();
    if !rows.is_empty() {
        report::print_line("");
        print_lines(&lines(&columns, rows));
    }
}
