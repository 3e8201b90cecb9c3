//! Rules for source files: how long they may be, and which crates forbid unsafe code.

use std::path::Path;

use anyhow::Result;

use crate::workspace::Workspace;

/// Past this, a file is about more than one thing. Its tests do not count.
const FILE_MAX_LINES: usize = 600;
const TESTS_START: &str = "#[cfg(test)]\nmod ";
/// Crates that must hold no unsafe code, and say so to the compiler.
const WITHOUT_UNSAFE: &[&str] = &["crates/engine/src/lib.rs", "crates/format/src/lib.rs"];
const FORBID_UNSAFE: &str = "#![forbid(unsafe_code)]";

/// What breaks the rules.
pub fn findings(workspace: &Workspace) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for name in workspace.tracked(&["*.rs"])? {
        let path = workspace.root.join(&name);
        if let Ok(text) = std::fs::read_to_string(&path) {
            findings.extend(too_long(&name, &text));
        }
    }
    for name in WITHOUT_UNSAFE {
        findings.extend(lacks_forbid(&workspace.root, name)?);
    }
    Ok(findings)
}

fn too_long(name: &str, text: &str) -> Option<String> {
    let code = text.split(TESTS_START).next().unwrap_or(text);
    let lines = code.lines().count();
    (lines > FILE_MAX_LINES)
        .then(|| format!("{name}: {lines} lines before its tests, more than {FILE_MAX_LINES}"))
}

fn lacks_forbid(root: &Path, name: &str) -> Result<Option<String>> {
    let text = std::fs::read_to_string(root.join(name))?;
    Ok((!text.contains(FORBID_UNSAFE)).then(|| format!("{name}: lacks {FORBID_UNSAFE}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_do_not_count_as_lines() {
        let long = "x\n".repeat(FILE_MAX_LINES);
        let tests = format!("{long}{TESTS_START}tests {{\n{long}}}\n");
        assert_eq!(too_long("a.rs", &tests), None);
        assert!(too_long("a.rs", &format!("{long}x\n")).is_some());
    }
}
