//! Links between documents lead somewhere, the source files that documents name exist, and the
//! rules of docs/ARCHITECTURE.md and the code name each other.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::process;
use crate::workspace::Workspace;

const RULES: &str = "docs/ARCHITECTURE.md";
/// Documents that tell what was, with the names of that time.
const HISTORY: &[&str] = &["CHANGELOG.md", "docs/performance-history.md"];

/// What breaks the rules.
pub fn findings(workspace: &Workspace) -> Result<Vec<String>> {
    let listing = process::output(Command::new("git").current_dir(&workspace.root).args([
        "ls-files",
        "--cached",
        "--others",
        "--exclude-standard",
        "*.md",
        "*.rs",
    ]))?;
    let sources: Vec<&str> = listing
        .lines()
        .filter(|name| name.ends_with(".rs"))
        .collect();
    let mut findings = Vec::new();
    let mut named = BTreeSet::new();
    for name in listing.lines() {
        // A file may be deleted here and not yet in the index.
        let Ok(text) = std::fs::read_to_string(workspace.root.join(name)) else {
            continue;
        };
        if name.starts_with("xtask/src/tidy/") {
            // Its tests have rules of their own.
        } else if name.ends_with(".rs") {
            named.extend(numbers(&text, "ule ").map(|rule| (rule, name.to_owned())));
        } else {
            findings.extend(broken_links(&workspace.root, name, &text));
            if !HISTORY.contains(&name) {
                findings.extend(missing_sources(name, &text, &sources));
            }
        }
    }
    let text = std::fs::read_to_string(workspace.root.join(RULES)).context(RULES)?;
    findings.extend(unmatched_rules(&text, &named));
    Ok(findings)
}

/// The numbers that stand directly behind a word, as in `Rule 3`.
fn numbers<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = u32> + 'a {
    text.match_indices(word).filter_map(move |(at, _)| {
        let before = text[..at].chars().next_back();
        let digits = text[at + word.len()..].split(|c: char| !c.is_ascii_digit());
        let number = digits.into_iter().next()?.parse().ok()?;
        matches!(before, Some('r' | 'R')).then_some(number)
    })
}

/// Rules that no code names, and numbers in the code that no rule has.
fn unmatched_rules(document: &str, named: &BTreeSet<(u32, String)>) -> Vec<String> {
    let lines = document.lines();
    let lines = lines.filter_map(|line| line.strip_prefix("- **R"));
    let rules: BTreeSet<u32> = lines
        .filter_map(|line| line.strip_prefix("ule ")?.split_once(".**")?.0.parse().ok())
        .collect();
    let used: BTreeSet<u32> = named.iter().map(|(rule, _)| *rule).collect();
    let unknown = named.iter().filter(|(rule, _)| !rules.contains(rule));
    let mut findings: Vec<String> = unknown
        .map(|(rule, file)| format!("{file}: names rule {rule}, which {RULES} does not have"))
        .collect();
    let unused = rules.difference(&used);
    findings.extend(unused.map(|rule| format!("{RULES}: no code names rule {rule}")));
    if rules.is_empty() {
        findings.push(format!("{RULES}: has no rules"));
    }
    findings
}

/// Links of a document to files, or to headings, that are not there.
fn broken_links(root: &Path, name: &str, text: &str) -> Vec<String> {
    let mut findings = Vec::new();
    for link in links(text) {
        if link.contains("://") || link.starts_with("mailto:") {
            continue;
        }
        let (file, heading) = link.split_once('#').unwrap_or((link, ""));
        let folder = Path::new(name).parent().unwrap_or(Path::new(""));
        let target = match file {
            "" => PathBuf::from(name),
            file => plain(&folder.join(file)),
        };
        let path = root.join(&target);
        let shown = target.display();
        if !path.exists() {
            findings.push(format!("{name}: links to {shown}, which is not there"));
        } else if !heading.is_empty() {
            let target = std::fs::read_to_string(&path).unwrap_or_default();
            if !headings(&target).contains(heading) {
                findings.push(format!("{name}: {shown} has no heading #{heading}"));
            }
        }
    }
    findings
}

/// Source files that a document names and that are not there: the last parts of their paths
/// are enough.
fn missing_sources(name: &str, text: &str, sources: &[&str]) -> Vec<String> {
    let quoted = outside_blocks(text).flat_map(|line| line.split('`').skip(1).step_by(2));
    let files = quoted.filter(|word| word.ends_with(".rs") && !word.contains(['*', ' ']));
    let missing = files.filter(|file| {
        let is_named = |source: &str| {
            let before = source.strip_suffix(*file);
            before.is_some_and(|before| before.is_empty() || before.ends_with('/'))
        };
        !sources.iter().any(|source| is_named(source))
    });
    missing
        .map(|file| format!("{name}: there is no source file {file}"))
        .collect()
}

/// The targets of `[text](target)`, but not those in blocks of code.
fn links(text: &str) -> Vec<&str> {
    let mut found = Vec::new();
    for line in outside_blocks(text) {
        for (at, _) in line.match_indices("](") {
            let rest = &line[at + 2..];
            found.extend(rest.find(')').map(|end| &rest[..end]));
        }
    }
    found
}

fn outside_blocks(text: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    text.lines().filter(move |line| {
        let fence = line.starts_with("```");
        inside ^= fence;
        !inside && !fence
    })
}

/// The names under which a page's headings can be linked to.
fn headings(text: &str) -> BTreeSet<String> {
    let heads = outside_blocks(text).filter(|line| line.starts_with('#'));
    heads
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title
                .chars()
                .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// A path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_and_code_name_each_other() {
        let document = "- **Rule 1.** One.\n- **Rule 2.** Two.\n";
        let named = |text: &str| -> BTreeSet<(u32, String)> {
            numbers(text, "ule ")
                .map(|rule| (rule, "a.rs".to_owned()))
                .collect()
        };
        assert!(unmatched_rules(document, &named("// Rule 1: x\n/// as rule 2 says")).is_empty());
        assert_eq!(unmatched_rules(document, &named("// Rule 1")).len(), 1);
        assert_eq!(
            unmatched_rules(document, &named("Rule 1, rule 2, Rule 3")).len(),
            1
        );
        assert_eq!(unmatched_rules("", &named("module 1")).len(), 1);
    }

    #[test]
    fn named_sources_exist() {
        let sources = ["crates/a/src/one.rs"];
        let missing = |text: &str| missing_sources("a.md", text, &sources).len();
        assert_eq!(missing("`one.rs`, `src/one.rs` and `*/two.rs`"), 0);
        assert_eq!(missing("`two.rs`, `ne.rs`"), 2);
    }

    #[test]
    fn links_lead_to_files_and_headings() {
        let folder = tempfile::tempdir().expect("a folder");
        let page = "# A page: of `code`\n```\n# no heading\n[x](gone.md)\n```\n";
        std::fs::write(folder.path().join("a.md"), page).expect("a file");
        let broken = |text: &str| broken_links(folder.path(), "docs/b.md", text).len();
        assert_eq!(broken("[a](../a.md), [a](../a.md#a-page-of-code)"), 0);
        assert_eq!(broken("[x](https://example.invalid/gone)"), 0);
        assert_eq!(broken("[a](a.md)"), 1);
        assert_eq!(broken("[a](../a.md#no-heading)"), 1);
        assert_eq!(broken_links(folder.path(), "a.md", page).len(), 0);
    }
}
