//! The order in which a guest has wanted blocks: recorded once, fetched ahead the next time.
//!
//! A text: a line for each run of blocks that were wanted one after the other, `FIRST COUNT`, in
//! blocks of 64 KiB. Pure; no I/O.

use std::collections::HashSet;
use std::fmt::Write;
use std::ops::Range;

use super::layout::BLOCK_BYTES;

const FIRST_LINE: &str = "vellum boot trace 1";
/// Blocks that a trace has at most: 16 GiB.
const MOST_BLOCKS: usize = 1 << 18;

/// What is recorded.
#[derive(Debug, Default)]
pub(super) struct Trace {
    seen: HashSet<u64>,
    runs: Vec<Range<u64>>,
}

impl Trace {
    /// Notes that blocks were wanted; only the first time counts.
    pub(super) fn note(&mut self, blocks: Range<u64>) {
        for block in blocks {
            if self.seen.len() == MOST_BLOCKS || !self.seen.insert(block) {
                continue;
            }
            match self.runs.last_mut() {
                Some(run) if run.end == block => run.end += 1,
                _ => self.runs.push(block..block + 1),
            }
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }

    /// The trace as a text.
    pub(super) fn text(&self) -> String {
        let mut text = format!("{FIRST_LINE}\n");
        for run in &self.runs {
            // Writing to a text cannot fail.
            let _ = writeln!(text, "{} {}", run.start, run.end - run.start);
        }
        text
    }
}

/// The runs that a trace names of a file of this length; what lies beyond it is left out. `None` if
/// it is no trace.
pub(super) fn parse(text: &str, len_bytes: u64) -> Option<Vec<Range<u64>>> {
    let blocks = len_bytes.div_ceil(BLOCK_BYTES);
    let mut lines = text.lines();
    if lines.next()? != FIRST_LINE {
        return None;
    }
    let mut runs = Vec::new();
    for line in lines {
        let (first, count) = line.split_once(' ')?;
        let (first, count): (u64, u64) = (first.parse().ok()?, count.parse().ok()?);
        let run = first.min(blocks)..first.saturating_add(count).min(blocks);
        if !run.is_empty() && runs.len() < MOST_BLOCKS {
            runs.push(run);
        }
    }
    Some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_wanted_comes_back_in_its_order() {
        let mut trace = Trace::default();
        for blocks in [5..7, 7..8, 0..1, 6..9, 100..101] {
            trace.note(blocks);
        }
        let text = trace.text();
        assert_eq!(text, "vellum boot trace 1\n5 3\n0 1\n8 1\n100 1\n");
        let runs = parse(&text, 9 * BLOCK_BYTES).unwrap();
        assert_eq!(runs, [5..8, 0..1, 8..9]);
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        for text in [
            "",
            "x",
            "vellum boot trace 1\n1",
            "vellum boot trace 1\na b",
        ] {
            assert_eq!(parse(text, 1 << 20), None, "{text:?}");
        }
        let huge = format!("vellum boot trace 1\n0 {}\n{} 9\n", u64::MAX, u64::MAX);
        assert_eq!(parse(&huge, BLOCK_BYTES), Some(vec![0..1]));
    }
}
