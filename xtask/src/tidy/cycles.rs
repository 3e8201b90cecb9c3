//! No large circle of imports: files that need each other can only be understood together.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

use crate::workspace::Workspace;

/// A source folder, the module that is looked into, and how many files may need each other.
const LIMITS: &[(&str, &str, usize)] = &[("crates/engine/src", "qcow2", 4)];

type Module = Vec<String>;

/// What breaks the rule.
pub fn findings(workspace: &Workspace) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for (source, module, most) in LIMITS {
        let mut files = BTreeMap::new();
        collect(&workspace.root.join(source), &mut Vec::new(), &mut files)?;
        let imports = imports(&files);
        for circle in circles(&imports)
            .iter()
            .filter(|circle| circle.len() > *most)
        {
            let within = circle
                .iter()
                .all(|file| file.first().is_some_and(|top| top == module));
            if within {
                findings.push(told(source, circle, *most, &imports));
            }
        }
    }
    Ok(findings)
}

fn told(
    source: &str,
    circle: &[Module],
    most: usize,
    imports: &BTreeMap<Module, BTreeSet<Module>>,
) -> String {
    let count = circle.len();
    let mut told =
        format!("{source}: {count} files import each other in a circle, more than {most}:");
    for file in circle {
        let used = imports.get(file).into_iter().flatten();
        let used = used.filter(|used| circle.contains(*used));
        let used: Vec<String> = used.map(|used| used.join("::")).collect();
        told.push_str(&format!("\n  {} -> {}", file.join("::"), used.join(", ")));
    }
    told
}

/// Reads the source files below a folder, by the modules that they are.
fn collect(folder: &Path, at: &mut Module, files: &mut BTreeMap<Module, String>) -> Result<()> {
    let entries =
        std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        let Some(name) = path.file_stem().and_then(|name| name.to_str()) else {
            continue;
        };
        at.push(name.to_owned());
        if entry.file_type()?.is_dir() {
            collect(&path, at, files)?;
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let is_head = ["mod", "lib", "main"].contains(&name);
            let module = at[..at.len() - usize::from(is_head)].to_vec();
            let text = std::fs::read_to_string(&path)
                .with_context(|| format!("cannot read {}", path.display()))?;
            files.insert(module, text);
        }
        at.pop();
    }
    Ok(())
}

/// Which files each file takes something from.
fn imports(files: &BTreeMap<Module, String>) -> BTreeMap<Module, BTreeSet<Module>> {
    let found = files.iter().map(|(file, text)| {
        let mut used = BTreeSet::new();
        for path in paths(text) {
            let Some(path) = absolute(file, &path) else {
                continue;
            };
            // What names an item of a file, or the file.
            let depths = (0..=path.len()).rev();
            let found = depths
                .map(|depth| &path[..depth])
                .find(|path| files.contains_key(*path));
            // Names that a folder's head passes on are not the folder's own.
            if let Some(found) = found.filter(|found| *found != file && !found.is_empty()) {
                used.insert(found.to_vec());
            }
        }
        (file.clone(), used)
    });
    found.collect()
}

/// The paths that a file's code names from `crate` or `super` on; its tests are left out.
fn paths(text: &str) -> Vec<Module> {
    let code = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or(text);
    let lines = code
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    let code: String = lines.flat_map(|line| [line, "\n"]).collect();
    let mut paths = Vec::new();
    for start in ["crate::", "super::"] {
        for (at, _) in code.match_indices(start) {
            let before = code[..at].chars().next_back();
            if !before.is_some_and(|before| before.is_alphanumeric() || ":_$".contains(before)) {
                expand(&code[at..], &mut Vec::new(), &mut paths);
            }
        }
    }
    paths
}

/// Adds the paths of a use tree, and gives what stands behind it.
fn expand<'a>(mut rest: &'a str, at: &mut Module, paths: &mut Vec<Module>) -> &'a str {
    let depth = at.len();
    loop {
        let end = rest
            .find(|c: char| !c.is_alphanumeric() && c != '_')
            .unwrap_or(rest.len());
        if end > 0 {
            at.push(rest[..end].to_owned());
        }
        rest = &rest[end..];
        let Some(next) = rest.strip_prefix("::") else {
            break;
        };
        rest = next;
        let Some(mut inside) = rest.strip_prefix('{') else {
            continue;
        };
        while !inside.trim_start().starts_with('}') && !inside.is_empty() {
            inside = expand(inside.trim_start(), at, paths).trim_start();
            inside = inside.strip_prefix(',').unwrap_or(inside);
        }
        at.truncate(depth);
        return inside.trim_start().strip_prefix('}').unwrap_or_default();
    }
    paths.push(at.clone());
    at.truncate(depth);
    rest
}

/// A path from the crate on.
fn absolute(file: &[String], path: &[String]) -> Option<Module> {
    match path.split_first()? {
        (first, rest) if first == "crate" => Some(rest.to_vec()),
        _ => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            let above = file.get(..file.len().checked_sub(ups)?)?;
            Some([above, &path[ups..]].concat())
        }
    }
}

/// The files that reach each other, in groups of more than one.
fn circles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<Vec<Module>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = imports
        .keys()
        .map(|file| (file, reach(file, imports)))
        .collect();
    let mut circles = BTreeSet::new();
    for (file, others) in &reached {
        let back = others
            .iter()
            .filter(|other| reached[*other].contains(*file));
        let circle: BTreeSet<Module> = back.map(|other| (*other).clone()).collect();
        if circle.len() > 1 {
            circles.insert(circle);
        }
    }
    circles
        .into_iter()
        .map(|circle| circle.into_iter().collect())
        .collect()
}

fn reach<'a>(
    from: &'a Module,
    imports: &'a BTreeMap<Module, BTreeSet<Module>>,
) -> BTreeSet<&'a Module> {
    let mut found = BTreeSet::new();
    let mut left = vec![from];
    while let Some(file) = left.pop() {
        for used in imports.get(file).into_iter().flatten() {
            if found.insert(used) {
                left.push(used);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn module(path: &str) -> Module {
        path.split("::").map(str::to_owned).collect()
    }

    fn files(texts: &[(&str, &str)]) -> BTreeMap<Module, String> {
        let texts = texts.iter();
        texts
            .map(|(path, text)| (module(path), (*text).to_owned()))
            .collect()
    }

    #[test]
    fn circles_are_found_through_every_kind_of_path() {
        let files = files(&[
            ("a::one", "use super::two::Two;\nuse std::sync::Arc;\n"),
            (
                "a::two",
                "use crate::{b::three::{self, Three}, raw::Raw};\n",
            ),
            ("b::three", "fn f() { crate::a::one::g(); }\n"),
            (
                "b::four",
                "use super::three::Three;\n#[cfg(test)]\nmod tests {\n    use crate::a::one;\n",
            ),
            ("raw", "// See crate::a::two.\n"),
        ]);
        let found = circles(&imports(&files));
        assert_eq!(
            found,
            [[module("a::one"), module("a::two"), module("b::three")]]
        );
    }

    #[test]
    fn trees_are_taken_apart() {
        let text = "use crate::{a::{b, c::d}, e};\nuse super::super::f;\n";
        let found: BTreeSet<String> = paths(text).iter().map(|path| path.join("::")).collect();
        for expected in [
            "crate::a::b",
            "crate::a::c::d",
            "crate::e",
            "super::super::f",
        ] {
            assert!(found.contains(expected), "{expected}: {found:?}");
        }
    }
}
