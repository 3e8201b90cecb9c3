//! Calls of a type's own methods, where its `impl` blocks stand in several files: `self.name()` is an arrow
//! between files that no import shows.

use std::collections::{BTreeMap, BTreeSet};

/// Which files call methods through `self` that stand in which other files, of the code of some files.
pub fn arrows<K: Ord + Clone>(files: &BTreeMap<K, String>) -> BTreeMap<K, BTreeSet<K>> {
    let mut methods: BTreeMap<(&str, &str), &K> = BTreeMap::new();
    let mut blocks = Vec::new();
    for (file, code) in files {
        for (name, body) in inherent_impls(code) {
            methods.extend(defined(body).map(|method| ((name, method), file)));
            blocks.push((file, name, body));
        }
    }
    let mut found: BTreeMap<K, BTreeSet<K>> = BTreeMap::new();
    for (file, name, body) in blocks {
        let called = called(body).filter_map(|method| methods.get(&(name, method)));
        let others = called.filter(|other| **other != file);
        let arrows = found.entry(file.clone()).or_default();
        arrows.extend(others.map(|other| (*other).clone()));
    }
    found
}

/// The `impl` blocks of types, but not those of traits: the name of the type, and what stands in the block.
fn inherent_impls(code: &str) -> impl Iterator<Item = (&str, &str)> {
    let starts = code.match_indices("\nimpl").map(|(at, _)| at + 1);
    let starts = code
        .starts_with("impl")
        .then_some(0)
        .into_iter()
        .chain(starts);
    starts.filter_map(|at| {
        let (header, rest) = code[at..].split_once('{')?;
        let name = implemented(header.strip_prefix("impl")?)?;
        let (body, _) = rest.split_once("\n}").unwrap_or((rest, ""));
        Some((name, body))
    })
}

/// The type of a header such as `<'a, T: Ord> Table<'a, T> `.
fn implemented(header: &str) -> Option<&str> {
    if header.contains(" for ") {
        return None;
    }
    let mut depth = 0_usize;
    let end_of_generics = header.find(|c: char| {
        match c {
            '<' => depth += 1,
            '>' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0 && c == ' '
    })?;
    let path = header[end_of_generics..].trim_start();
    let path = path.split(['<', ' ', '\n']).next()?;
    path.rsplit("::").next().filter(|name| !name.is_empty())
}

/// The methods that stand in a block.
fn defined(body: &str) -> impl Iterator<Item = &str> {
    let lines = body.lines().filter(|line| {
        let indented = line.strip_prefix("    ");
        indented.is_some_and(|line| !line.starts_with(' '))
    });
    lines.filter_map(|line| {
        let (before, rest) = line.split_once("fn ")?;
        let is_head = before.is_empty() || before.ends_with(' ');
        is_head.then(|| name_at(rest))
    })
}

/// The methods that are called through `self`, on the same line or the next.
fn called(body: &str) -> impl Iterator<Item = &str> {
    let calls = body.match_indices("self");
    calls.filter_map(|(at, _)| {
        let is_word = !body[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '.');
        let rest = body[at + "self".len()..].trim_start().strip_prefix('.')?;
        let name = name_at(rest.trim_start());
        let rest = &rest.trim_start()[name.len()..];
        (is_word && rest.starts_with('(')).then_some(name)
    })
}

fn name_at(text: &str) -> &str {
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
    &text[..end.unwrap_or(text.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_lead_to_the_files_of_methods() {
        let files = BTreeMap::from([
            (
                "one",
                "impl<'a, T: Ord> Table<'a, T> {\n    pub fn one(&self) {\n        self\n            .two();\n        self.field.three();\n    }\n}\n".to_owned(),
            ),
            (
                "two",
                "use x;\nimpl<T> Table<'_, T> {\n    pub(crate) async fn two(&self) {}\n    fn own(&self) { self.two(); }\n}\n\nimpl Drop for Table {\n    fn drop(&mut self) { self.one() }\n}\n".to_owned(),
            ),
            ("three", "impl Other {\n    fn three(&self) { self.one(); }\n}\n".to_owned()),
        ]);
        let found = arrows(&files);
        assert_eq!(found["one"], BTreeSet::from(["two"]));
        assert!(found["two"].is_empty() && found["three"].is_empty());
    }
}
