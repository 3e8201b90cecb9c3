//! What users are told about an image while it is in use: lines on standard error, in
//! QEMU's tools, and wherever an embedding program wants them.

use std::fmt;
use std::sync::Arc;

type Sink = dyn Fn(&str) + Send + Sync;

/// Receives lines of text; says nothing by default.
#[derive(Clone, Default)]
pub struct Messages(Option<Arc<Sink>>);

impl Messages {
    /// Messages that go to `sink`, a line (or more, with line breaks between) at a time.
    pub fn to(sink: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Messages(Some(Arc::new(sink)))
    }

    /// Passes on a line.
    pub fn say(&self, line: &str) {
        if let Some(sink) = &self.0 {
            sink(line);
        }
    }
}

impl fmt::Debug for Messages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Messages").field(&self.0.is_some()).finish()
    }
}
