//! The head of a folder (`mod.rs`) is its table of contents: what it is for, its modules, and the names that it passes
//! on. What it would hold besides is found sooner in a file that is named for it.

use anyhow::Result;

use crate::workspace::Workspace;

/// What breaks the rule.
pub fn findings(workspace: &Workspace) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for head in workspace.tracked(&["crates/*/src/*/mod.rs"])? {
        let Ok(text) = std::fs::read_to_string(workspace.root.join(&head)) else {
            continue;
        };
        if let Some(item) = first_item(&text) {
            findings.push(format!(
                "{head} holds `{item}`: the head of a folder holds modules and `use` alone"
            ));
        }
    }
    Ok(findings)
}

/// The first line of what is no module, no import and no comment, if there is any before the tests.
fn first_item(text: &str) -> Option<&str> {
    const ITEMS: [&str; 9] = [
        "fn ", "struct ", "enum ", "trait ", "type ", "const ", "static ", "impl", "async ",
    ];
    let code = text.split("\n#[cfg(test)]\nmod tests {").next();
    code.unwrap_or(text).lines().find(|line| {
        let line = line.strip_prefix("pub").unwrap_or(line).trim_start();
        let line = match line.strip_prefix('(') {
            Some(scope) => scope.split_once(") ").map_or(line, |(_, rest)| rest),
            None => line,
        };
        ITEMS.iter().any(|item| line.starts_with(item))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_told_from_modules_and_imports() {
        let head = "//! Head.\n\nmod a;\npub mod b;\n\npub use a::{\n    fn_of, A,\n};\n#[cfg(test)]\nmod tests {\n    fn f() {}\n}\n";
        assert_eq!(first_item(head), None);
        for item in [
            "pub(super) const fn a() {}",
            "impl A {",
            "pub struct A;",
            "const A: u8 = 1;",
        ] {
            assert_eq!(first_item(&format!("mod a;\n\n{item}\n")), Some(item));
        }
    }
}
