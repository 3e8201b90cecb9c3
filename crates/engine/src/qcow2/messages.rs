//! What users are told about an image while it is in use: lines on standard error, in
//! QEMU's tools, and wherever an embedding program wants them.
//!
//! Invariant: how many lines an image has a program say does not depend on what is in it,
//! unless the program asks for all of them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::qcow2::check::CheckReport;

type Sink = dyn Fn(&str) + Send + Sync;
type CorruptionSink = dyn Fn(&Corruption<'_>) + Send + Sync;

/// Metadata of an image that contradicts itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corruption<'a> {
    /// What is wrong.
    pub message: &'a str,
    /// Where, in bytes of the image's file, if that is known.
    pub offset_bytes: Option<u64>,
    /// The image takes no more changes.
    pub is_fatal: bool,
}

/// So many lines of one repair are said; of the others their number.
const MOST_LINES: u64 = 16;

/// Receives lines of text; says nothing by default.
#[derive(Clone, Default)]
pub struct Messages {
    sink: Option<Arc<Sink>>,
    corruption: Option<Arc<CorruptionSink>>,
    in_full: bool,
}

impl Messages {
    /// Messages that go to `sink`, a line (or more, with line breaks between) at a time. Of
    /// what a repair finds, as an image is opened that was not closed cleanly, these are
    /// the first lines and a sum. Requests wait for `sink`.
    pub fn to(sink: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Messages {
            sink: Some(Arc::new(sink)),
            corruption: None,
            in_full: false,
        }
    }

    /// As [`Messages::to`], with every line of such a repair, as QEMU's tools print them:
    /// two or more for each cluster.
    pub fn in_full(sink: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Messages {
            in_full: true,
            ..Messages::to(sink)
        }
    }

    /// The same, and `sink` is told of metadata that contradicts itself, beside the line about it.
    /// The request that met it waits for `sink`.
    #[must_use]
    pub fn on_corruption(self, sink: impl Fn(&Corruption<'_>) + Send + Sync + 'static) -> Self {
        Messages {
            corruption: Some(Arc::new(sink)),
            ..self
        }
    }

    pub(super) fn tell_corruption(&self, corruption: &Corruption<'_>) {
        if let Some(sink) = &self.corruption {
            sink(corruption);
        }
    }

    /// Passes on a line.
    pub fn say(&self, line: &str) {
        if let Some(sink) = &self.sink {
            sink(line);
        }
    }

    /// What is going to be said of a repair.
    pub(super) fn of_repair(&self) -> RepairMessages {
        RepairMessages {
            messages: self.clone(),
            lines: AtomicU64::new(0),
        }
    }
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Messages")
            .field(&self.sink.is_some())
            .finish()
    }
}

/// What a repair says: not more than a few lines, unless all are wanted.
#[derive(Debug)]
pub(super) struct RepairMessages {
    messages: Messages,
    lines: AtomicU64,
}

impl RepairMessages {
    /// Passes on one of the first lines, and counts the others.
    pub(super) fn say(&self, line: &str) {
        let before = self.lines.fetch_add(1, Ordering::Relaxed);
        if self.messages.in_full || before < MOST_LINES {
            self.messages.say(line);
        }
    }

    /// Says how much was not said; `report`: what was found, if the repair got so far.
    pub(super) fn say_sum(&self, report: Option<&CheckReport>) {
        let lines = self.lines.load(Ordering::Relaxed);
        let hidden = lines.saturating_sub(MOST_LINES);
        if self.messages.in_full || hidden == 0 {
            return;
        }
        let sum = report.map_or_else(String::new, |report| {
            format!(
                "; repaired as the image was opened: {} leaked clusters, {} errors",
                report.leaks_fixed, report.corruptions_fixed
            )
        });
        self.messages
            .say(&format!("qcow2: {hidden} more lines like these{sum}"));
    }
}
