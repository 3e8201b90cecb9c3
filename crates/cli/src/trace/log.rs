//! `--log text|json`: a line on standard error for each thing that happens to a daemon, with its time,
//! how bad it is, what it is, and what it is about.
//!
//! The events are some of those of `--trace`; errors, warnings and what is told of clients become
//! lines of the same form. Without the option nothing of that is written, and errors are as ever.
//!
//! Invariant: a line that nobody reads is dropped, and stops nobody.

use std::fmt;
use std::fmt::Write as _;
use std::sync::OnceLock;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::Event;
use tracing::field::{Field, Visit};
use vellum_graph::stderr;

use super::subscriber;
use crate::localtime;
use crate::report::{self, Level};
use crate::terminal;

/// How lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// `TIME LEVEL EVENT KEY=VALUE...`
    Text,
    /// An object.
    Json,
}

static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// The events that are written, and how bad they are.
const LOGGED: [(&str, Level); 21] = [
    ("bdrv_open_common", Level::Info),
    ("block_export_added", Level::Info),
    ("block_export_removed", Level::Info),
    ("config_applied", Level::Info),
    ("daemon_started", Level::Info),
    ("daemon_stopping", Level::Info),
    ("export_has_room", Level::Info),
    ("export_request_failed", Level::Error),
    ("export_waits_for_room", Level::Warning),
    ("job_completed", Level::Info),
    ("job_state_transition", Level::Info),
    ("nbd_accept_failed", Level::Warning),
    ("nbd_client_connected", Level::Info),
    ("nbd_client_disconnected", Level::Info),
    ("node_closed", Level::Info),
    ("node_exchanged", Level::Info),
    ("node_reopen_failed", Level::Error),
    ("qcow2_changes_stopped", Level::Error),
    ("space_warning", Level::Warning),
    ("vhost_user_client_connected", Level::Info),
    ("vhost_user_client_disconnected", Level::Info),
];

/// What messages without a name of their own are called.
const MESSAGE: &str = "message";

impl LogFormat {
    /// The format of a word.
    pub fn of(word: &str) -> Option<LogFormat> {
        match word {
            "text" => Some(LogFormat::Text),
            "json" => Some(LogFormat::Json),
            _ => None,
        }
    }
}

/// Writes lines from now on; the first call decides how.
pub fn start(format: LogFormat) {
    if FORMAT.set(format).is_err() {
        return;
    }
    subscriber::log(LOGGED.iter().map(|(name, _)| *name));
    report::set_log(|level, message| {
        let fields = Map::from_iter([(MESSAGE.to_owned(), Value::from(message))]);
        write(level, MESSAGE, &fields);
    });
    stderr::set_shape(|line| {
        let fields = Map::from_iter([(MESSAGE.to_owned(), Value::from(line))]);
        shape(Level::Warning, MESSAGE, &fields)
    });
}

/// Writes an event.
pub(super) fn event(event: &Event<'_>) {
    let name = event.metadata().name();
    let level = LOGGED.iter().find(|(known, _)| *known == name);
    let mut fields = Fields(Map::new());
    event.record(&mut fields);
    write(
        level.map_or(Level::Info, |(_, level)| *level),
        name,
        &fields.0,
    );
}

fn write(level: Level, event: &str, fields: &Map<String, Value>) {
    stderr::print_shaped(&shape(level, event, fields));
}

fn shape(level: Level, event: &str, fields: &Map<String, Value>) -> String {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    let time = localtime::utc(since.as_secs() as i64, since.subsec_micros());
    line(
        FORMAT.get().copied().unwrap_or(LogFormat::Text),
        &time,
        (level, event),
        fields,
    )
}

fn line(
    format: LogFormat,
    time: &str,
    (level, event): (Level, &str),
    fields: &Map<String, Value>,
) -> String {
    let level = match level {
        Level::Error => "error",
        Level::Warning => "warning",
        Level::Info => "info",
    };
    match format {
        LogFormat::Json => {
            let mut all = Map::new();
            for (key, value) in [("time", time), ("level", level), ("event", event)] {
                all.insert(key.to_owned(), Value::from(value));
            }
            all.extend(fields.clone());
            Value::Object(all).to_string()
        }
        LogFormat::Text => {
            let mut text = format!("{time} {level} {event}");
            for (key, value) in fields {
                let is_plain = |text: &str| {
                    !text.is_empty() && text.chars().all(|c| c.is_ascii_graphic() && c != '"')
                };
                // A string cannot fail to be written to.
                let _ = match value {
                    Value::String(value) if is_plain(value) => write!(text, " {key}={value}"),
                    other => write!(text, " {key}={other}"),
                };
            }
            terminal::harmless(&text)
        }
    }
}

/// What an event is about.
struct Fields(Map<String, Value>);

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.0.insert(field.name().to_owned(), Value::from(value));
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.0.insert(field.name().to_owned(), Value::from(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.0.insert(field.name().to_owned(), Value::from(value));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.0.insert(field.name().to_owned(), Value::from(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = format!("{value:?}");
        self.0.insert(field.name().to_owned(), Value::from(text));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_line_is_whole_whatever_is_in_it() {
        let fields = json!({"id": "a", "why": "no \"file\"\n\u{1b}[31m", "count": 3});
        let fields = fields.as_object().expect("members");
        let what = (Level::Error, "e");
        assert_eq!(
            line(LogFormat::Text, "t", what, fields),
            r#"t error e id=a why="no \"file\"\n\u001b[31m" count=3"#
        );
        let json = line(LogFormat::Json, "t", what, fields);
        let value: Value = serde_json::from_str(&json).expect("JSON");
        assert_eq!(value["why"], "no \"file\"\n\u{1b}[31m");
        assert!(!json.contains('\n'));
    }

    #[test]
    fn every_event_that_is_written_exists() {
        for (name, _) in LOGGED {
            assert!(
                super::super::list().lines().any(|known| known == name),
                "{name}"
            );
        }
    }
}
