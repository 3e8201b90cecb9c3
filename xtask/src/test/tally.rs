//! Counts tests by the closing lines that their runners print.

use std::fmt;
use std::ops::AddAssign;

/// How many tests ended how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tally {
    /// Tests that passed.
    pub passed: u64,
    /// Tests that failed.
    pub failed: u64,
    /// Tests that were not run.
    pub skipped: u64,
}

impl Tally {
    /// Reads a closing line: of `cargo test`, or a plain `N passed, N failed`.
    pub fn from_closing_line(line: &str) -> Option<Self> {
        let counts = match line.trim().strip_prefix("test result: ") {
            Some(rest) => rest.split_once(". ")?.1,
            None => line.trim(),
        };
        let mut tally = Self::default();
        let mut counted = 0;
        for part in counts.split([';', ',']) {
            let Some((number, what)) = part.trim().split_once(' ') else {
                continue;
            };
            let slot = match what {
                "passed" => &mut tally.passed,
                "failed" => &mut tally.failed,
                "ignored" | "skipped" => &mut tally.skipped,
                _ => continue,
            };
            *slot = number.parse().ok()?;
            counted += 1;
        }
        (counted >= 2).then_some(tally)
    }
}

impl AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            passed,
            failed,
            skipped,
        } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closing_lines_are_read() {
        let line = "test result: FAILED. 12 passed; 1 failed; 2 ignored; 0 measured; \
                    0 filtered out; finished in 0.11s";
        let expected = Tally {
            passed: 12,
            failed: 1,
            skipped: 2,
        };
        assert_eq!(Tally::from_closing_line(line), Some(expected));
        assert_eq!(
            Tally::from_closing_line(&expected.to_string()),
            Some(expected)
        );
        assert_eq!(
            Tally::from_closing_line("60 passed, 0 failed").map(|tally| tally.passed),
            Some(60)
        );
    }

    #[test]
    fn other_lines_are_not() {
        for line in [
            "",
            "running 3 tests",
            "test a ... ok",
            "1 failed",
            "x passed, y failed",
        ] {
            assert_eq!(Tally::from_closing_line(line), None, "{line}");
        }
    }

    #[test]
    fn tallies_add_up() {
        let mut tally = Tally::default();
        tally += Tally {
            passed: 2,
            failed: 1,
            skipped: 0,
        };
        tally += tally;
        assert_eq!(tally.to_string(), "4 passed, 2 failed, 0 skipped");
    }
}
