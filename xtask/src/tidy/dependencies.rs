//! What others wrote: each crate has a line in docs/DEPENDENCIES.md, and licences and
//! duplicate versions keep to the rules in `deny.toml`. cargo-deny reads the same file and knows more (advisories);
//! this needs nothing installed and no network.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

use crate::workspace::Workspace;

const DOCUMENT: &str = "docs/DEPENDENCIES.md";
const OWN: &str = "vellum";

/// The part of cargo-deny's configuration that is read here.
#[derive(Deserialize)]
struct Rules {
    graph: Graph,
    licenses: Licences,
    bans: Bans,
}

#[derive(Deserialize)]
struct Graph {
    targets: Vec<String>,
}

#[derive(Deserialize)]
struct Licences {
    allow: BTreeSet<String>,
}

#[derive(Deserialize)]
struct Bans {
    #[serde(default)]
    skip: Vec<Skipped>,
}

#[derive(Deserialize)]
struct Skipped {
    #[serde(rename = "crate")]
    name: String,
}

fn rules(workspace: &Workspace) -> Result<Rules> {
    let path = workspace.root.join("deny.toml");
    let text = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}", path.display()))?;
    toml::from_str(&text).context("deny.toml")
}

/// The systems that we build for: what crates bring for others is in no program of ours.
pub fn targets(workspace: &Workspace) -> Result<Vec<String>> {
    Ok(rules(workspace)?.graph.targets)
}

/// What breaks the rules.
pub fn findings(workspace: &Workspace, metadata: &Value) -> Result<Vec<String>> {
    let rules = rules(workspace)?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let mut findings = unknown_licences(packages, &rules.licenses.allow);
    findings.extend(duplicates(packages, &rules.bans.skip));
    let manifest = std::fs::read_to_string(workspace.root.join("Cargo.toml"))?;
    let manifest: toml::Table = toml::from_str(&manifest).context("Cargo.toml")?;
    let declared = manifest["workspace"]["dependencies"].as_table();
    let declared = declared.context("Cargo.toml declares no dependencies")?;
    let document = std::fs::read_to_string(workspace.root.join(DOCUMENT)).context(DOCUMENT)?;
    findings.extend(unexplained(declared.keys().map(String::as_str), &document));
    Ok(findings)
}

/// Dependencies that the document does not explain, and explained ones that are not there.
fn unexplained<'a>(declared: impl Iterator<Item = &'a str>, document: &str) -> Vec<String> {
    let rows = document.lines().filter(|line| line.starts_with("| `"));
    let explained: BTreeSet<&str> = rows
        .filter_map(|row| row.split('|').nth(1))
        .flat_map(|names| names.split('`').skip(1).step_by(2))
        .collect();
    let declared: BTreeSet<&str> = declared.filter(|name| !name.starts_with(OWN)).collect();
    let missing = declared.difference(&explained);
    let missing = missing.map(|name| format!("{DOCUMENT}: does not say what {name} is for"));
    let gone = explained.difference(&declared);
    let gone = gone.map(|name| format!("{DOCUMENT}: {name} is not a dependency"));
    missing.chain(gone).collect()
}

fn unknown_licences(packages: &[Value], allowed: &BTreeSet<String>) -> Vec<String> {
    packages
        .iter()
        .filter_map(|package| {
            let licence = package["license"].as_str().unwrap_or("no licence");
            let refused = !is_allowed(licence, allowed);
            refused.then(|| format!("{} is under {licence}", package["name"]))
        })
        .collect()
}

/// Whether an SPDX expression can be met with allowed licences. Parentheses
/// around alternatives are all that real crates nest.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let words = expression.replace(['(', ')'], " ").replace('/', " OR ");
    let grouped = expression.contains('(');
    let known = |licence: &str| allowed.contains(licence.trim());
    if grouped && words.contains(" AND ") {
        // Nested both ways: careful rather than clever, every name has to be allowed.
        return words
            .split(" AND ")
            .flat_map(|part| part.split(" OR "))
            .all(known);
    }
    words
        .split(" OR ")
        .any(|alternative| alternative.split(" AND ").all(known))
}

/// Crates that are there in two versions whose interfaces differ.
fn duplicates(packages: &[Value], skipped: &[Skipped]) -> Vec<String> {
    let mut versions: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for package in packages {
        if let (Some(name), Some(version)) = (package["name"].as_str(), package["version"].as_str())
        {
            versions.entry(name).or_default().insert(version);
        }
    }
    versions
        .into_iter()
        .filter(|(_, versions)| versions.len() > 1)
        .filter(|(name, _)| !skipped.iter().any(|skip| skip.name == *name))
        .map(|(name, versions)| {
            let list = versions.into_iter().collect::<Vec<_>>().join(" and ");
            format!("{name} is there as {list}")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn licence_expressions_are_understood() {
        let allowed = ["MIT", "Apache-2.0", "Unicode-3.0"]
            .map(str::to_owned)
            .into();
        for fine in [
            "MIT",
            "MIT OR Apache-2.0",
            "MIT/GPL-2.0",
            "Unlicense OR MIT",
            "(MIT OR Apache-2.0) AND Unicode-3.0",
        ] {
            assert!(is_allowed(fine, &allowed), "{fine}");
        }
        for refused in ["GPL-3.0", "MIT AND GPL-2.0", "(MIT OR X) AND Y", ""] {
            assert!(!is_allowed(refused, &allowed), "{refused}");
        }
    }

    #[test]
    fn each_dependency_is_explained() {
        let document = "| crate | what for |\n| `a`, `b` (c) | x |\n";
        let unexplained_in = |names: &[&'static str]| unexplained(names.iter().copied(), document);
        assert!(unexplained_in(&["a", "b", "vellum-io"]).is_empty());
        assert_eq!(unexplained_in(&["a"]).len(), 1);
        assert_eq!(unexplained_in(&["a", "b", "c"]).len(), 1);
    }

    #[test]
    fn a_second_version_is_found() {
        let packages = [
            json!({"name": "a", "version": "1.0.0"}),
            json!({"name": "a", "version": "2.0.0"}),
            json!({"name": "b", "version": "1.0.0"}),
        ];
        assert_eq!(
            duplicates(&packages, &[]),
            ["a is there as 1.0.0 and 2.0.0"]
        );
        let skip = [Skipped { name: "a".into() }];
        assert!(duplicates(&packages, &skip).is_empty());
    }
}
