//! How far several operations of unknown lengths are, as QEMU tells it: the length
//! of those to come is guessed from those that were.

use super::options::ProgressSink;

/// Tells how far an amendment is.
pub(super) struct Progress {
    sink: Option<ProgressSink>,
    operations: u64,
    /// Operations begun.
    begun: u64,
    /// Work of the operations that are over.
    done_before: u64,
    /// All work of the running operation.
    now_total: std::cell::Cell<u64>,
}

impl Progress {
    /// Of so many operations.
    pub(super) fn new(sink: Option<ProgressSink>, operations: u64) -> Self {
        Progress {
            sink,
            operations,
            begun: 0,
            done_before: 0,
            now_total: Default::default(),
        }
    }

    /// The next operation begins.
    pub(super) fn begin_operation(&mut self) {
        self.begun += 1;
        self.done_before += self.now_total.take();
    }

    /// `done` of `total` of the running operation is done.
    pub(super) fn report(&self, done: u64, total: u64) {
        self.now_total.set(total);
        let known = self.done_before + total;
        let begun = self.begun.max(1);
        let guessed = known * self.operations.saturating_sub(begun) / begun;
        if let Some(sink) = &self.sink {
            sink(self.done_before + done, known + guessed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    #[test]
    fn later_operations_are_guessed_to_be_as_long() {
        let told: Arc<Mutex<Vec<(u64, u64)>>> = Arc::default();
        let sink = told.clone();
        let sink: ProgressSink = Arc::new(move |done, total| {
            sink.lock().expect("one thread").push((done, total));
        });
        let mut progress = Progress::new(Some(sink), 2);
        progress.begin_operation();
        progress.report(1, 2);
        progress.report(2, 2);
        progress.begin_operation();
        progress.report(5, 10);
        progress.report(10, 10);
        let told = told.lock().expect("one thread").clone();
        assert_eq!(told, [(1, 4), (2, 4), (7, 12), (12, 12)]);
    }
}
