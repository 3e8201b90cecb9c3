//! The text of `info` for people.

use std::fmt::Write;

use serde_json::Value;
use vellum::qcow2::info::SnapshotInfo;
use vellum_options::json;

use super::describe::Description;
use crate::size::human;
use crate::terminal::harmless;

/// An image, line by line, with the nodes that it stands on.
pub fn image(image: &Description) -> String {
    let mut text = String::new();
    describe(&mut text, image, false);
    children(&mut text, image, "");
    text
}

/// The nodes below `node`, which stands at `path`.
fn children(text: &mut String, node: &Description, path: &str) {
    for (name, child) in &node.children {
        let path = format!("{path}/{name}");
        let mut below = String::new();
        describe(&mut below, child, child.children.is_empty());
        children(&mut below, child, &path);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "Child node '{path}':");
        for line in below.lines() {
            let _ = writeln!(text, "    {line}");
        }
    }
}

/// What one node is; a protocol at the bottom is told as such.
fn describe(text: &mut String, node: &Description, is_protocol: bool) {
    // Writing to a string cannot fail.
    let mut line = |words: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{words}");
    };
    let [name, driver, size] = match is_protocol {
        true => ["filename", "protocol type", "file length"],
        false => ["image", "file format", "virtual size"],
    };
    line(format_args!("{name}: {}", node.filename));
    line(format_args!("{driver}: {}", node.format));
    line(format_args!(
        "{size}: {} ({} bytes)",
        human(node.size_bytes),
        node.size_bytes
    ));
    match node.disk_bytes {
        Some(bytes) => line(format_args!("disk size: {}", human(bytes))),
        None => line(format_args!("disk size: unavailable")),
    }
    if node.is_encrypted() {
        line(format_args!("encrypted: yes"));
    }
    if let Some(bytes) = node.cluster_bytes {
        line(format_args!("cluster_size: {bytes}"));
    }
    if node.dirty == Some(true) {
        line(format_args!("cleanly shut down: no"));
    }
    if let Some(backing) = &node.backing {
        let name = &backing.name;
        match &backing.full {
            None => line(format_args!(
                "backing file: {name} (cannot determine actual path)"
            )),
            Some(full) if full != name => {
                line(format_args!("backing file: {name} (actual path: {full})"));
            }
            Some(_) => line(format_args!("backing file: {name}")),
        }
        if let Some(format) = &backing.format {
            line(format_args!("backing file format: {format}"));
        }
    }
    if let Some(log) = node.qcow2.as_ref().and_then(|info| info.write_log.as_ref()) {
        line(format_args!(
            "write log: {log} (holds writes that are not in the image yet; any open for writing by \
             Vellum brings them back)",
            log = harmless(&log.to_string())
        ));
    }
    if !node.snapshots.is_empty() {
        line(format_args!(
            "Snapshot list:\n{}",
            snapshots(&node.snapshots).trim_end()
        ));
    }
    let mut specific = node.format_specific();
    if let Some(Value::Object(members)) = &mut specific {
        // Told above, with what it means.
        members.remove("write-log");
    }
    if let Some(specific) = specific
        && specific
            .as_object()
            .is_some_and(|members| !members.is_empty())
    {
        line(format_args!("Format specific information:"));
        dump(text, &specific, 1);
    }
}

/// The table of snapshots.
pub fn snapshots(snapshots: &[SnapshotInfo]) -> String {
    let mut text = row(["ID", "TAG", "VM_SIZE", "DATE", "VM_CLOCK", "ICOUNT"]);
    for snapshot in snapshots {
        let seconds = snapshot.vm_clock_nanoseconds / 1_000_000_000;
        let clock = format!(
            "{:04}:{:02}:{:02}.{:03}",
            seconds / 3600,
            seconds / 60 % 60,
            seconds % 60,
            snapshot.vm_clock_nanoseconds / 1_000_000 % 1000
        );
        text.push_str(&row([
            &snapshot.id,
            &snapshot.name,
            &human(snapshot.vm_state_size_bytes),
            &crate::localtime::format(i64::from(snapshot.date_seconds)),
            &clock,
            &snapshot
                .icount
                .map(|count| count.to_string())
                .unwrap_or_default(),
        ]));
    }
    text
}

fn row(cells: [&str; 6]) -> String {
    let [id, tag, size, date, clock, icount] = cells;
    format!("{id:<7} {tag:<16} {size:>8} {date:>19} {clock:>15} {icount:>10}\n")
}

/// A tree of members, indented by four spaces a level.
fn dump(text: &mut String, value: &Value, level: usize) {
    match value {
        Value::Object(members) => {
            for (key, value) in json::ordered(members) {
                dump_member(text, &key.replace('-', " "), value, level);
            }
        }
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                dump_member(text, &format!("[{index}]"), item, level);
            }
        }
        _ => {}
    }
}

fn dump_member(text: &mut String, key: &str, value: &Value, level: usize) {
    let indent = "    ".repeat(level);
    // Writing to a string cannot fail.
    let _ = match value {
        Value::Object(_) | Value::Array(_) => writeln!(text, "{indent}{key}:"),
        Value::String(string) => writeln!(text, "{indent}{key}: {string}"),
        other => writeln!(text, "{indent}{key}: {other}"),
    };
    dump(text, value, level + 1);
}
