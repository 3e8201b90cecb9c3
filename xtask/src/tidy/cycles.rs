//! No large import cycle: files that need each other can only be understood together. Calls of a type's own methods in
//! other files count as imports.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};

use super::self_calls;
use crate::workspace::Workspace;

/// How many files of a source folder may need each other.
struct Limit {
    source: &'static str,
    /// Only cycles inside this module count; `None`: all.
    module: Option<&'static str>,
    max_files: usize,
    heads: Heads,
}

/// What the head of a folder (`mod.rs`, `main.rs`) takes from the files below it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Heads {
    /// It does not count.
    Ignored,
    /// It counts, but for names that the head only passes on (`pub use`): who uses such a name
    /// uses the file that it comes from.
    Counted,
}

/// The largest cycle that can be understood at once.
const MAX_FILES: usize = 4;

/// All files of a crate, the heads of its folders too.
const fn whole(source: &'static str, max_files: usize) -> Limit {
    Limit {
        source,
        module: None,
        max_files,
        heads: Heads::Counted,
    }
}

const LIMITS: &[Limit] = &[
    Limit {
        source: "crates/engine/src",
        module: Some("qcow2"),
        max_files: MAX_FILES,
        heads: Heads::Ignored,
    },
    whole("crates/cli/src", MAX_FILES),
    whole("crates/daemon/src", MAX_FILES),
    whole("crates/export/src", MAX_FILES),
    whole("crates/foreign/src", MAX_FILES),
    whole("crates/format/src", MAX_FILES),
    whole("crates/graph/src", MAX_FILES),
    whole("crates/images/src", MAX_FILES),
    whole("crates/io/src", MAX_FILES),
    whole("crates/jobs/src", MAX_FILES),
    whole("crates/nbd/src", MAX_FILES),
    whole("crates/options/src", MAX_FILES),
    whole("crates/remote/src", MAX_FILES),
    whole("crates/repository/src", MAX_FILES),
    whole("crates/sim/src", MAX_FILES),
    whole("crates/storage/src", MAX_FILES),
    whole("crates/tls/src", MAX_FILES),
    // Still to be divided: this number only falls.
    whole("crates/engine/src", 51),
];

type Module = Vec<String>;

/// What breaks the rule.
pub fn findings(workspace: &Workspace) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for limit in LIMITS {
        let mut files = BTreeMap::new();
        let folder = workspace.root.join(limit.source);
        collect(&folder, &mut Vec::new(), &mut files)?;
        let imports = arrows(&files, limit.heads);
        findings.extend(against_the_order(limit.source, &imports));
        let found = cycles(&imports);
        let too_large = found.iter().filter(|cycle| limit.forbids(cycle));
        findings.extend(too_large.map(|cycle| describe(limit, cycle, &imports)));
    }
    Ok(findings)
}

impl Limit {
    fn forbids(&self, cycle: &[Module]) -> bool {
        let counts = |file: &Module| match self.module {
            Some(module) => file.first().is_some_and(|top| top == module),
            None => true,
        };
        cycle.len() > self.max_files && cycle.iter().all(counts)
    }
}

fn describe(
    limit: &Limit,
    cycle: &[Module],
    imports: &BTreeMap<Module, BTreeSet<Module>>,
) -> String {
    let (source, max_files, count) = (limit.source, limit.max_files, cycle.len());
    let mut text =
        format!("{source}: {count} files import each other in a cycle, more than {max_files}:");
    for file in cycle {
        let used = imports.get(file).into_iter().flatten();
        let used = used.filter(|used| cycle.contains(*used));
        let used: Vec<String> = used.map(|used| used.join("::")).collect();
        text.push_str(&format!("\n  {} -> {}", file.join("::"), used.join(", ")));
    }
    text
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

/// Folders of a crate from the bottom up: a file imports nothing from a later folder.
const ORDERS: &[(&str, &[&str])] = &[(
    "crates/graph/src",
    &["node", "live", "open", "drivers", "change"],
)];

fn against_the_order(source: &str, imports: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<String> {
    let order = ORDERS.iter().find(|(crate_, _)| *crate_ == source);
    let order = order.map_or(&[][..], |(_, order)| order);
    let place = |file: &Module| {
        order
            .iter()
            .position(|folder| file.first().is_some_and(|top| top == folder))
    };
    let mut findings = Vec::new();
    for (file, used) in imports {
        let above = used.iter().filter(|used| match (place(file), place(used)) {
            (Some(own), Some(other)) => other > own,
            _ => false,
        });
        findings.extend(above.map(|used| {
            let (file, used) = (file.join("::"), used.join("::"));
            format!("{source}: {file} imports {used}, which is in a folder above it")
        }));
    }
    findings
}

/// What each file takes from others, and calls there through `self`.
fn arrows(files: &BTreeMap<Module, String>, heads: Heads) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut arrows = imports(files, heads);
    if heads == Heads::Counted {
        let code: BTreeMap<Module, String> = files
            .iter()
            .map(|(file, text)| (file.clone(), code(text)))
            .collect();
        for (file, called) in self_calls::arrows(&code) {
            arrows.entry(file).or_default().extend(called);
        }
    }
    arrows
}

/// Which files each file takes something from.
fn imports(files: &BTreeMap<Module, String>, heads: Heads) -> BTreeMap<Module, BTreeSet<Module>> {
    let mut passed_on = BTreeMap::new();
    if heads == Heads::Counted {
        for (file, text) in files {
            passed_on.extend(reexports(file, text));
        }
        // A file may hold, and a head pass on, a function with the name of the file.
        passed_on.retain(|name, _| !files.contains_key(name));
    }
    let found = files.iter().map(|(file, text)| {
        let (text, children) = match heads {
            Heads::Ignored => (code(text), Vec::new()),
            Heads::Counted => (without_reexports(&code(text)), children(file, files)),
        };
        let mut used = BTreeSet::new();
        for path in paths(&text, &children) {
            let Some(path) = absolute(file, &path) else {
                continue;
            };
            let path = origin(path, &passed_on);
            // What names an item of a file, or the file.
            let depths = (0..=path.len()).rev();
            let found = depths
                .map(|depth| &path[..depth])
                .find(|path| files.contains_key(*path));
            // The root has no items but modules.
            if let Some(found) = found.filter(|found| *found != file && !found.is_empty()) {
                used.insert(found.to_vec());
            }
        }
        (file.clone(), used)
    });
    found.collect()
}

/// The names of the files and folders right below a folder's head.
fn children<'a>(file: &Module, files: &'a BTreeMap<Module, String>) -> Vec<&'a str> {
    let below = files.keys().filter_map(|other| {
        let (name, folder) = other.split_last()?;
        (folder == file.as_slice()).then_some(name.as_str())
    });
    below.collect()
}

/// The part of a `pub use` statement behind `use`, and what stands before and behind the
/// statement.
fn next_reexport(code: &str) -> Option<(&str, &str, &str)> {
    let mut at = 0;
    loop {
        let start = at + code[at..].find("pub")?;
        let rest = &code[start + "pub".len()..];
        let rest = match rest.strip_prefix('(') {
            Some(scope) => scope.split_once(')').map_or("", |(_, rest)| rest),
            None => rest,
        };
        if let Some((names, behind)) = rest
            .strip_prefix(" use ")
            .and_then(|rest| rest.split_once(';'))
        {
            return Some((&code[..start], names, behind));
        }
        at = start + "pub".len();
    }
}

fn without_reexports(code: &str) -> String {
    match next_reexport(code) {
        Some((before, _, behind)) => format!("{before}{}", without_reexports(behind)),
        None => code.to_owned(),
    }
}

/// The names that a file passes on from others, and where each comes from.
fn reexports(file: &Module, text: &str) -> Vec<(Module, Module)> {
    let mut found = Vec::new();
    let text = code(text);
    let mut rest = text.as_str();
    while let Some((_, names, behind)) = next_reexport(rest) {
        let mut paths = Vec::new();
        expand(names, &mut Vec::new(), &mut paths);
        for path in paths {
            let name = [file.as_slice(), &path[path.len().saturating_sub(1)..]].concat();
            found.extend(absolute(file, &path).map(|origin| (name, origin)));
        }
        rest = behind;
    }
    found
}

/// The path to where the item is, past the heads that pass its name on.
fn origin(mut path: Module, passed_on: &BTreeMap<Module, Module>) -> Module {
    // A name that is passed on in a circle would not compile.
    while let Some((depth, from)) = (1..=path.len())
        .rev()
        .find_map(|depth| Some((depth, passed_on.get(&path[..depth])?)))
        .filter(|(depth, from)| **from != path[..*depth])
    {
        path = [from.as_slice(), &path[depth..]].concat();
    }
    path
}

/// A file's code without its tests and comments.
fn code(text: &str) -> String {
    let end = text
        .match_indices("#[cfg(test)]\n")
        .find(|(at, attribute)| {
            let next = text[at + attribute.len()..].lines().next();
            next.is_some_and(|line| line.ends_with("mod tests {"))
        });
    let text = end.map_or(text, |(at, _)| &text[..at]);
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

/// The paths that code names from `crate` or `super` on, or from one of the `children` on.
fn paths(code: &str, children: &[&str]) -> Vec<Module> {
    let mut paths = Vec::new();
    for start in ["crate", "super"].iter().chain(children) {
        for (at, _) in code.match_indices(&format!("{start}::")) {
            let before = &code[..at];
            let is_inside =
                before.ends_with(|before: char| before.is_alphanumeric() || ":_$".contains(before));
            // `pub(in crate::module)` uses nothing.
            if !is_inside && !before.ends_with("(in ") {
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
fn cycles(imports: &BTreeMap<Module, BTreeSet<Module>>) -> Vec<Vec<Module>> {
    let reached: BTreeMap<&Module, BTreeSet<&Module>> = imports
        .keys()
        .map(|file| (file, reach(file, imports)))
        .collect();
    let mut cycles = BTreeSet::new();
    for (file, others) in &reached {
        let back = others
            .iter()
            .filter(|other| reached[*other].contains(*file));
        let cycle: BTreeSet<Module> = back.map(|other| (*other).clone()).collect();
        if cycle.len() > 1 {
            cycles.insert(cycle);
        }
    }
    cycles
        .into_iter()
        .map(|cycle| cycle.into_iter().collect())
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
    fn cycles_are_found_through_every_kind_of_path() {
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
        let found = cycles(&imports(&files, Heads::Ignored));
        assert_eq!(
            found,
            [[module("a::one"), module("a::two"), module("b::three")]]
        );
    }

    #[test]
    fn heads_of_folders_count_where_that_is_wanted() {
        let files = files(&[
            (
                "a",
                "mod one;\nmod two;\npub use two::Two;\nfn f() { one::g(); }\n",
            ),
            ("a::one", "use super::Two;\n"),
            ("a::two", "use crate::b;\npub(in crate::a) struct Two;\n"),
            ("b", "use crate::a;\n"),
        ]);
        assert!(cycles(&imports(&files, Heads::Ignored)).is_empty());
        let found = cycles(&imports(&files, Heads::Counted));
        let expected = ["a", "a::one", "a::two", "b"].map(module);
        assert_eq!(found, [expected]);
    }

    #[test]
    fn names_that_are_passed_on_belong_to_their_file() {
        let files = files(&[
            ("a", "pub use one::{One, one};\npub use crate::b::B;\n"),
            ("a::one", "pub struct One;\npub fn one() {}\n"),
            ("b", "use crate::a::One;\n"),
            ("c", "use crate::a::B;\n"),
        ]);
        let imports = imports(&files, Heads::Counted);
        assert_eq!(imports[&module("b")], BTreeSet::from([module("a::one")]));
        assert_eq!(imports[&module("c")], BTreeSet::from([module("b")]));
        assert!(imports[&module("a")].is_empty());
    }

    #[test]
    fn trees_are_taken_apart() {
        let text = "use crate::{a::{b, c::d}, e};\nuse super::super::f;\n";
        let found: BTreeSet<String> = paths(text, &[])
            .iter()
            .map(|path| path.join("::"))
            .collect();
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
