//! What QMP says: greetings, answers, errors and events as lines of JSON.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use vellum::Error;
use vellum_options::{error_text, json};

/// The classes of errors that programs tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Any that has no class of its own.
    Generic,
    /// There is no such command, or not yet.
    CommandNotFound,
    /// There is no such device or node.
    DeviceNotFound,
    /// There is no such block job.
    DeviceNotActive,
}

impl Class {
    /// QMP's name of it.
    pub fn name(self) -> &'static str {
        match self {
            Class::Generic => "GenericError",
            Class::CommandNotFound => "CommandNotFound",
            Class::DeviceNotFound => "DeviceNotFound",
            Class::DeviceNotActive => "DeviceNotActive",
        }
    }
}

/// Why a command failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure {
    /// For programs.
    pub class: Class,
    /// For people.
    pub text: String,
}

impl Failure {
    /// A failure without a class of its own.
    pub fn new(text: impl Into<String>) -> Failure {
        Failure::of(Class::Generic, text)
    }

    /// A failure of a class.
    pub fn of(class: Class, text: impl Into<String>) -> Failure {
        Failure {
            class,
            text: text.into(),
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        // Hints are for people at a terminal.
        let text = error_text(&error);
        Failure::new(text.split('\n').next().unwrap_or_default())
    }
}

/// What a command gives back.
pub type Outcome = Result<Value, Failure>;

/// What a command gives back, as text of [`json::compact`].
pub type Written = Result<String, Failure>;

/// The version of QEMU whose commands and words these are, as `query-version` tells it.
pub fn version(package: &str) -> Value {
    json!({"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": package})
}

/// What a monitor says first: what it is, and what its client may enable.
pub fn greeting(package: &str, capabilities: &[&str]) -> Value {
    json!({"QMP": {"version": version(package), "capabilities": capabilities}})
}

/// What an error says to a program. Lines that follow are hints, which QEMU gives on the command line only.
pub fn without_hints(text: &str) -> &str {
    text.lines().next().unwrap_or_default()
}

/// The answer to a request.
pub fn answer(outcome: Outcome, id: Option<Value>) -> Value {
    let mut members = Map::new();
    match outcome {
        Ok(value) => members.insert("return".into(), value),
        Err(Failure { class, text }) => {
            let text = without_hints(&text);
            members.insert("error".into(), json!({"class": class.name(), "desc": text}))
        }
    };
    if let Some(id) = id {
        members.insert("id".into(), id);
    }
    Value::Object(members)
}

/// The answer to a request as it goes to a client, a line.
pub fn line(outcome: Written, id: Option<Value>) -> String {
    match (outcome, id) {
        // An answer may have megabytes, which have no second place in memory.
        (Ok(mut value), id) => {
            value.insert_str(0, "{\"return\": ");
            if let Some(id) = id {
                // As `json::compact` orders these two.
                value.push_str(", \"id\": ");
                value.push_str(&json::compact(&id));
            }
            value.push_str("}\r\n");
            value
        }
        (Err(failure), id) => text(&answer(Err(failure), id), false),
    }
}

/// Something that has happened at a time.
pub fn event(name: &str, data: Value, time: SystemTime) -> Value {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    json!({
        "timestamp": {"seconds": since.as_secs(), "microseconds": since.subsec_micros()},
        "event": name,
        "data": data,
    })
}

/// What nests deeper is written as one line: each level adds to the indentation of all in it, and a
/// client decides how deep an `id` is. What the daemon has to say is far from it.
const MAX_PRETTY_DEPTH: usize = 64;

/// Whether a message nests so many levels at most.
fn is_within(message: &Value, depth: usize) -> bool {
    let mut inside: Box<dyn Iterator<Item = &Value>> = match message {
        Value::Array(items) => Box::new(items.iter()),
        Value::Object(members) => Box::new(members.values()),
        _ => return true,
    };
    depth > 0 && inside.all(|item| is_within(item, depth - 1))
}

/// A message as it goes to a client: a line, or several of them.
pub fn text(message: &Value, pretty: bool) -> String {
    let text = match pretty && is_within(message, MAX_PRETTY_DEPTH) {
        true => json::pretty(message),
        false => json::compact(message),
    };
    text.replace('\n', "\r\n") + "\r\n"
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_deep_id_makes_no_long_answer() {
        let nested = |depth: usize| {
            let wide = json!(vec![0; 1000]);
            (0..depth).fold(wide, |inside, _| json!([inside]))
        };
        let long = |depth| text(&answer(Ok(json!({})), Some(nested(depth))), true).len();
        assert!(long(1000) < 10_000, "{}", long(1000));
        assert!(text(&answer(Ok(json!({})), Some(nested(3))), true).contains("\r\n"));
    }

    #[test]
    fn messages_look_like_qemus() {
        let time = UNIX_EPOCH + Duration::from_micros(1_000_002);
        for (message, line) in [
            (
                greeting("p", &["oob"]),
                r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "p"}, "capabilities": ["oob"]}}"#,
            ),
            (
                answer(Ok(json!({})), Some(json!({"b": 1, "a": 2}))),
                r#"{"return": {}, "id": {"a": 2, "b": 1}}"#,
            ),
            (
                answer(Err(Failure::new("no")), Some(json!(1))),
                r#"{"id": 1, "error": {"class": "GenericError", "desc": "no"}}"#,
            ),
            (
                answer(Err(Failure::new("no\nTry this:\nand that")), None),
                r#"{"error": {"class": "GenericError", "desc": "no"}}"#,
            ),
            (
                event("E", json!({"status": "created", "id": "j"}), time),
                r#"{"timestamp": {"seconds": 1, "microseconds": 2}, "event": "E", "data": {"status": "created", "id": "j"}}"#,
            ),
        ] {
            assert_eq!(text(&message, false), format!("{line}\r\n"));
        }
        assert_eq!(
            text(&answer(Ok(json!({})), None), true),
            "{\r\n    \"return\": {\r\n    }\r\n}\r\n"
        );
    }
}
