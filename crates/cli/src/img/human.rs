//! The text of `info` for people.

use std::fmt::Write;

use serde_json::Value;
use vellum::qcow2::info::SnapshotInfo;
use vellum_control::json;

use super::describe::Description;
use crate::size::human;

/// An image, line by line.
pub fn image(image: &Description) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let mut line = |words: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{words}");
    };
    let disk = image
        .disk_bytes
        .map_or_else(|| "unavailable".to_owned(), human);
    line(format_args!("image: {}", image.filename));
    line(format_args!("file format: {}", image.format));
    line(format_args!(
        "virtual size: {} ({} bytes)",
        human(image.size_bytes),
        image.size_bytes
    ));
    line(format_args!("disk size: {disk}"));
    if image.luks.is_some() {
        line(format_args!("encrypted: yes"));
    }
    if let Some(info) = &image.qcow2 {
        if info.encryption.is_some() {
            line(format_args!("encrypted: yes"));
        }
        line(format_args!("cluster_size: {}", info.cluster_size_bytes));
        if info.dirty {
            line(format_args!("cleanly shut down: no"));
        }
    }
    if let Some(backing) = &image.backing {
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
    if let Some(info) = image
        .qcow2
        .as_ref()
        .filter(|info| !info.snapshots.is_empty())
    {
        line(format_args!(
            "Snapshot list:\n{}",
            snapshots(&info.snapshots).trim_end()
        ));
    }
    if let Some(specific) = image.format_specific() {
        line(format_args!("Format specific information:"));
        dump(&mut text, &specific, 1);
    }
    if image.format != image.protocol {
        text.push_str(&file(image, &disk));
    }
    text
}

/// The file below the image.
fn file(image: &Description, disk: &str) -> String {
    format!(
        "Child node '/file':\n    filename: {}\n    protocol type: {}\n    file length: {} ({} \
         bytes)\n    disk size: {disk}\n",
        image.file_name,
        image.protocol,
        human(image.file_bytes),
        image.file_bytes
    )
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
