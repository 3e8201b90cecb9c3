//! `--trace`: which events are told, and where.

use vellum_io::error::io_text;
use vellum_options::Options;

use crate::report;
use crate::server::Failure;

use super::{events, subscriber};

/// Does as an option of a program says that can only end for what is wrong with it.
///
/// # Errors
/// The exit code, where the option was wrong or asked for help.
pub fn take(text: &str) -> Result<(), i32> {
    match enable(text, &|text| report::warning(text)) {
        Ok(true) => Ok(()),
        Ok(false) => Err(0),
        Err(Wrong { text, file: None }) => {
            report::error(text);
            Err(1)
        }
        Err(Wrong {
            text,
            file: Some(file),
        }) => {
            report::line_of_file(&file, text);
            Err(1)
        }
    }
}

/// Does as an option of a server says; `false` if it asked for the list of events, which is printed.
///
/// # Errors
/// In QEMU's words, for a file that cannot be had and for what is no such option.
pub fn take_for_server(text: &str, place: &str) -> Result<bool, Failure> {
    let place = |text: String| report::warning_at(place, text);
    enable(text, &place).map_err(|wrong| match wrong.file {
        Some(file) => {
            report::line_of_file(&file, wrong.text);
            Failure::AlreadyReported
        }
        None => Failure::message(wrong.text),
    })
}

/// The names of all events, one a line.
pub fn list() -> String {
    let names = events::NAMES.iter().map(|(name, _)| format!("{name}\n"));
    names.collect()
}

/// What is wrong with an option, and the file of events that it is about.
#[derive(Debug)]
struct Wrong {
    text: String,
    file: Option<String>,
}

impl From<vellum::Error> for Wrong {
    fn from(error: vellum::Error) -> Self {
        Wrong {
            text: report::error_text(&error),
            file: None,
        }
    }
}

/// `false` if the list of events was asked for. `warn` says what is wrong with the option's pattern.
fn enable(text: &str, warn: &dyn Fn(String)) -> Result<bool, Wrong> {
    let mut options = Options::parse_with_implied(text, Some("enable"))?;
    let (pattern, events) = (options.take_text("enable")?, options.take_text("events")?);
    let file = options.take_text("file")?;
    if let Some(key) = options.keys().next() {
        let text = format!("Invalid parameter '{key}'");
        return Err(Wrong { text, file: None });
    }
    if let Some(pattern) = pattern
        && !apply(&pattern, warn)
    {
        return Ok(false);
    }
    if let Some(path) = events {
        let text = read_events(&path)?;
        for (at, line) in text.lines().enumerate() {
            let place = format!("{path}:{}", at + 1);
            let warn = |text| report::line_of_file(&place, format!("warning: {text}"));
            let line = line.trim();
            if !line.starts_with('#') && !apply(line, &warn) {
                return Ok(false);
            }
        }
    }
    if let Some(path) = file {
        subscriber::write_to(&path).map_err(|error| Wrong {
            text: format!("Error opening logfile {path}: {}", io_text(&error)),
            file: None,
        })?;
    }
    Ok(true)
}

fn read_events(path: &str) -> Result<String, Wrong> {
    match std::fs::read(path) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        // As QEMU, which can open it and reads nothing.
        Err(error) if error.raw_os_error() == Some(libc::EISDIR) => Ok(String::new()),
        Err(error) => Err(Wrong {
            text: io_text(&error),
            file: Some(path.to_owned()),
        }),
    }
}

/// Turns the events of a pattern on, or off behind a `-`; `false` if the list was asked for.
fn apply(pattern: &str, warn: &dyn Fn(String)) -> bool {
    if matches!(pattern, "help" | "?") {
        report::print(list());
        return false;
    }
    let (pattern, is_on) = match pattern.strip_prefix('-') {
        Some(pattern) => (pattern, false),
        None => (pattern, true),
    };
    let matched = subscriber::switch(pattern, is_on);
    if !matched && !pattern.is_empty() && !pattern.contains('*') {
        warn(format!("trace event '{pattern}' does not exist"));
    }
    true
}
