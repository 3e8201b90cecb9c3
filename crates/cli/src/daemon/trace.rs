//! `--trace`: what can be asked to be traced. There are no events, so names of some are
//! answered as QEMU answers those that it does not know, and patterns match nothing.

use std::fs::File;

use vellum_control::Options;
use vellum_io::error::io_text;

use super::arguments::Item;
use crate::report;
use crate::server::Failure;

/// Does as an option says.
pub(super) fn enable(item: &Item) -> Result<(), Failure> {
    let mut options = Options::parse_with_implied(&item.text, Some("enable"))?;
    let (pattern, events) = (options.take_text("enable")?, options.take_text("events")?);
    let file = options.take_text("file")?;
    if let Some(key) = options.keys().next() {
        return Err(Failure::message(format!("Invalid parameter '{key}'")));
    }
    if let Some(pattern) = pattern {
        warn(&pattern, &item.to_string());
    }
    if let Some(path) = events {
        let text = std::fs::read_to_string(&path)
            .map_err(|error| Failure::message(format!("{path}: {}", io_text(&error))))?;
        for (at, line) in text.lines().enumerate() {
            warn(line.trim(), &format!("{path}:{}", at + 1));
        }
    }
    if let Some(path) = file {
        File::create(&path).map_err(|error| {
            let text = io_text(&error);
            Failure::message(format!("Error opening logfile {path}: {text}"))
        })?;
    }
    Ok(())
}

/// Says that there is no event of a name.
fn warn(pattern: &str, place: &str) {
    let name = pattern.strip_prefix('-').unwrap_or(pattern);
    if !name.is_empty() && !name.starts_with('#') && !name.contains('*') {
        report::warning_at(place, format_args!("trace event '{name}' does not exist"));
    }
}
