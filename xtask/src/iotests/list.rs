//! The list of tests: one a line, with what is expected of it and why.
//!
//! ```text
//! 001
//! 026 fails: the reason
//! 045 excluded: the reason
//! ```

use std::path::Path;

use anyhow::{Context, Result, bail};

/// What is expected of a test.
#[derive(Debug, PartialEq, Eq)]
pub enum Expectation {
    Passes,
    /// It is run, and known to fail for that reason.
    Fails(String),
    /// It is run only when it is named, for that reason.
    Excluded(String),
}

/// The tests in the order of the file.
#[derive(Debug)]
pub struct List(Vec<(String, Expectation)>);

impl List {
    /// Reads the file.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        parse(&text).with_context(|| path.display().to_string())
    }

    /// All but the excluded ones.
    pub fn names_to_run(&self) -> Vec<String> {
        let included = |expected: &Expectation| !matches!(expected, Expectation::Excluded(_));
        self.0
            .iter()
            .filter(|(_, expected)| included(expected))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// What the list says of a test, if it has it.
    pub fn expectation(&self, name: &str) -> Option<&Expectation> {
        let mut entries = self.0.iter();
        Some(&entries.find(|(listed, _)| listed == name)?.1)
    }
}

fn parse(text: &str) -> Result<List> {
    let mut tests: Vec<(String, Expectation)> = Vec::new();
    for line in text.lines().map(str::trim) {
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        let (name, rest) = line.split_once(' ').unwrap_or((line, ""));
        let expected = match rest.trim().split_once(": ") {
            Some(("fails", reason)) => Expectation::Fails(reason.to_owned()),
            Some(("excluded", reason)) => Expectation::Excluded(reason.to_owned()),
            None if rest.is_empty() => Expectation::Passes,
            _ => bail!("'{line}' is no test with 'fails: REASON' or 'excluded: REASON'"),
        };
        if tests.iter().any(|(listed, _)| listed == name) {
            bail!("test {name} is listed twice");
        }
        tests.push((name.to_owned(), expected));
    }
    Ok(List(tests))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_a_test_and_what_is_expected_of_it() -> Result<()> {
        let list = parse("# head\n001\n\n026 fails: its places\n045 excluded: needs a machine\n")?;
        assert_eq!(list.names_to_run(), ["001", "026"]);
        assert_eq!(list.expectation("001"), Some(&Expectation::Passes));
        let fails = Expectation::Fails("its places".to_owned());
        assert_eq!(list.expectation("026"), Some(&fails));
        assert_eq!(list.expectation("999"), None);
        Ok(())
    }

    #[test]
    fn a_mark_needs_a_reason_and_a_test_one_line() {
        assert!(parse("026 fails").is_err());
        assert!(parse("026 skipped: why").is_err());
        assert!(parse("026\n026\n").is_err());
    }
}
