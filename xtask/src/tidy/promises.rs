//! docs/SECURITY.md: each promise names the tests that prove it, and these exist.

use std::collections::HashMap;
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::Workspace;

const TABLE: &str = "docs/SECURITY.md";
/// Where the tables of promises begin and end.
const START: &str = "## Promises";
/// What stands where there is no test.
const UNPROVEN: [&str; 2] = ["not proven", "no promise"];

/// What breaks the rules.
pub fn findings(workspace: &Workspace) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(workspace.root.join(TABLE)).context(TABLE)?;
    let mut sources = HashMap::new();
    let crates = workspace.root.join("crates");
    Ok(wrong(&text, |file| read(&crates, file, &mut sources)))
}

/// The text of a file, once.
fn read(
    crates: &Path,
    file: &str,
    sources: &mut HashMap<String, Option<String>>,
) -> Option<String> {
    let text = sources
        .entry(file.to_owned())
        .or_insert_with(|| std::fs::read_to_string(crates.join(file)).ok());
    text.clone()
}

/// Rows without a test or a word about that, and tests that are not there.
fn wrong(text: &str, mut source: impl FnMut(&str) -> Option<String>) -> Vec<String> {
    let promises = text.split_once(START).map_or("", |(_, after)| after);
    let rows = promises.lines().filter(|line| line.starts_with("| "));
    let rows = rows.filter(|line| !line.starts_with("| ---") && !line.starts_with("| promise |"));
    let mut findings = Vec::new();
    let mut count = 0;
    for row in rows {
        count += 1;
        let tests: Vec<(&str, &str)> = row
            .split('`')
            .skip(1)
            .step_by(2)
            .filter_map(|word| word.split_once("::"))
            .collect();
        if tests.is_empty() && !UNPROVEN.iter().any(|word| row.contains(word)) {
            findings.push(format!("{TABLE}: no test, and no 'not proven': {row}"));
        }
        for (file, test) in tests {
            match source(file) {
                None => findings.push(format!("{TABLE}: there is no file crates/{file}")),
                Some(text) if !has_test(&text, test) => {
                    findings.push(format!("{TABLE}: crates/{file} has no test {test}"));
                }
                Some(_) => {}
            }
        }
    }
    if count == 0 {
        findings.push(format!("{TABLE}: no promise behind '{START}'"));
    }
    findings
}

/// Whether a source has a test of this name: a function under the attribute, which may have
/// others and comments around it.
fn has_test(source: &str, test: &str) -> bool {
    let head = format!("fn {test}(");
    let Some(at) = source.find(&head) else {
        return false;
    };
    let before = source[..at].lines().rev();
    let mut above = before
        .map(str::trim)
        .skip_while(|line| line.is_empty())
        .take_while(|line| line.starts_with("#[") || line.starts_with("//"));
    above.any(|line| line == "#[test]")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "#[test]\n/// Why.\n#[cfg(unix)]\nfn is_there() {}\n\nfn helper() {}\n";

    fn wrong_in(row: &str) -> Vec<String> {
        let text = format!("## Promises\n| promise | test |\n| --- | --- |\n{row}\n");
        wrong(&text, |file| (file == "a.rs").then(|| SOURCE.to_owned()))
    }

    #[test]
    fn tests_that_are_named_exist() {
        assert!(wrong_in("| x | `a.rs::is_there` |").is_empty());
        assert!(wrong_in("| x | not proven |").is_empty());
        assert_eq!(
            wrong_in("| x | `a.rs::helper` |").len(),
            1,
            "that is no test"
        );
        assert_eq!(wrong_in("| x | `a.rs::gone` |").len(), 1);
        assert_eq!(wrong_in("| x | `b.rs::is_there` |").len(), 1);
        assert_eq!(wrong_in("| x | `a.rs::is_there`, `a.rs::gone` |").len(), 1);
        assert_eq!(wrong_in("| x | somebody says so |").len(), 1);
        assert_eq!(wrong_in("").len(), 1, "an empty table proves nothing");
    }
}
