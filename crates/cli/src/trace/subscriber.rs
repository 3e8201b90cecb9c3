//! [`Lines`]: hears the events that are on, and writes each as a line.
//!
//! Invariants:
//! - Nothing is installed before an event is turned on, so that one costs nothing to speak of where
//!   none is.
//! - A line is written with one call, so that lines of several threads and programs do not mix.
//! - A line that cannot be written is lost, and nothing waits for it longer than the system does.

use std::fmt::{self, Write as _};
use std::fs::File;
use std::io::{self, Write as _};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::RwLock;
use tracing::field::{Field, Visit};
use tracing::metadata::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::{Interest, Subscriber};
use tracing::{Event, Metadata};

use super::events::NAMES;
use super::log;
use crate::terminal;

/// Which events are on, by their places in the list.
static IS_ON: [AtomicBool; NAMES.len()] = [const { AtomicBool::new(false) }; NAMES.len()];

/// Which of them are written to the log of a daemon.
static IS_LOGGED: [AtomicBool; NAMES.len()] = [const { AtomicBool::new(false) }; NAMES.len()];

/// Where lines go; `None`: to standard error.
static FILE: RwLock<Option<File>> = RwLock::new(None);

/// Our events are those of our crates; others use the same macros.
const OUR_TARGETS: &str = "vellum";

/// Writes lines to a file from now on.
pub(super) fn write_to(path: &str) -> io::Result<()> {
    let file = File::create(path)?;
    *FILE.write() = Some(file);
    Ok(())
}

/// Turns the events of a pattern on or off; `false` if there are none.
pub(super) fn switch(pattern: &str, is_on: bool) -> bool {
    let mut any = false;
    for (at, (name, _)) in NAMES.iter().enumerate() {
        if matches(pattern, name) {
            IS_ON[at].store(is_on, Ordering::Relaxed);
            any = true;
        }
    }
    if any && is_on {
        install();
    }
    if any {
        tracing::callsite::rebuild_interest_cache();
    }
    any
}

/// Has events written to the log.
pub(super) fn log(names: impl Iterator<Item = &'static str>) {
    for name in names {
        if let Ok(at) = NAMES.binary_search_by(|(known, _)| (*known).cmp(name)) {
            IS_LOGGED[at].store(true, Ordering::Relaxed);
        }
    }
    install();
    tracing::callsite::rebuild_interest_cache();
}

fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // Nobody else in this program installs one.
        let _ = tracing::subscriber::set_global_default(Lines);
    });
}

/// Whether a name fits a pattern in which `*` stands for anything.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut left) = name.strip_prefix(start) else {
        return false;
    };
    let mut parts = rest.split('*').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return left.ends_with(part);
        }
        match left.find(part) {
            Some(at) => left = &left[at + part.len()..],
            None => return false,
        }
    }
    true
}

fn place_of(metadata: &Metadata<'_>) -> Option<usize> {
    if !metadata.is_event() || !metadata.target().starts_with(OUR_TARGETS) {
        return None;
    }
    let found = NAMES.binary_search_by(|(name, _)| (*name).cmp(metadata.name()));
    found.ok()
}

#[derive(Debug)]
struct Lines;

impl Subscriber for Lines {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        match self.enabled(metadata) {
            true => Interest::always(),
            false => Interest::never(),
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        place_of(metadata).is_some_and(|at| {
            IS_ON[at].load(Ordering::Relaxed) || IS_LOGGED[at].load(Ordering::Relaxed)
        })
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::TRACE)
    }

    fn event(&self, event: &Event<'_>) {
        let Some(at) = place_of(event.metadata()) else {
            return;
        };
        if IS_LOGGED[at].load(Ordering::Relaxed) {
            log::event(event);
        }
        if !IS_ON[at].load(Ordering::Relaxed) {
            return;
        }

        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        let since = since.unwrap_or_default();
        let mut line = format!(
            "{}@{}.{:06}:{}",
            std::process::id(),
            since.as_secs(),
            since.subsec_micros(),
            event.metadata().name()
        );
        event.record(&mut Arguments(&mut line));
        line.push('\n');
        // There is nobody to tell of a failure.
        let _ = match &*FILE.read() {
            Some(file) => { file }.write_all(line.as_bytes()),
            None => io::stderr().write_all(line.as_bytes()),
        };
    }

    // Spans are not used here.
    fn new_span(&self, _span: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }
    fn record(&self, _span: &Id, _values: &Record<'_>) {}
    fn record_follows_from(&self, _span: &Id, _follows: &Id) {}
    fn enter(&self, _span: &Id) {}
    fn exit(&self, _span: &Id) {}
}

/// Writes ` name value` for each argument of an event.
struct Arguments<'a>(&'a mut String);

impl Visit for Arguments<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        // A string cannot fail to be written to.
        let _ = write!(self.0, " {} {value:?}", field.name());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let text = terminal::harmless(&format!("{value:?}"));
        let _ = write!(self.0, " {} {text}", field.name());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars_stand_for_anything() {
        for (pattern, name, fits) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "ab", true),
            ("*", "", true),
            ("*b", "ab", true),
            ("*b", "aba", false),
            ("a*b*c", "axxbyc", true),
            ("a*b*c", "abc", true),
            ("a*b*c", "acb", false),
            ("a*a", "a", false),
            ("**", "abc", true),
            ("a*ab*b", "aab", false),
        ] {
            assert_eq!(matches(pattern, name), fits, "{pattern} {name}");
        }
    }
}
