//! One-way dependencies: a crate uses only crates below it.

use anyhow::{Context, Result};
use serde_json::Value;

/// The layers from the bottom up. A crate may use those of lower layers.
const LAYERS: &[&[&str]] = &[
    &["vellum-io"],
    &["vellum-format", "vellum-storage"],
    &["vellum-nbd", "vellum-remote"],
    &["vellum", "vellum-tls"],
    &[
        "vellum-export",
        "vellum-foreign",
        "vellum-jobs",
        "vellum-repository",
    ],
    &["vellum-options"],
    &["vellum-graph"],
    &["vellum-images"],
    &["vellum-daemon"],
    &["vellum-cli", "vellum-sim"],
];
/// Use no crate of the workspace but [`TESTING`]: they drive finished programs, or are pure.
const ALONE: &[&str] = &["xtask", "vellum-format", TESTING];
/// Clients and set-up for tests, and for `xtask`; uses no other crate.
const TESTING: &str = "vellum-testing";

/// What breaks the rule.
pub fn findings(metadata: &Value) -> Result<Vec<String>> {
    let members = metadata["workspace_members"]
        .as_array()
        .context("cargo metadata lists no members")?;
    let packages = metadata["packages"]
        .as_array()
        .context("cargo metadata lists no packages")?;
    let own: Vec<&Value> = packages
        .iter()
        .filter(|package| members.contains(&package["id"]))
        .collect();
    let names: Vec<&str> = own.iter().filter_map(|one| one["name"].as_str()).collect();
    let mut findings = Vec::new();
    for package in &own {
        let user = package["name"].as_str().unwrap_or_default();
        let dependencies = package["dependencies"].as_array().into_iter().flatten();
        for used in dependencies.filter_map(|dependency| dependency["name"].as_str()) {
            // A crate's tests may ask for a feature of the crate.
            if names.contains(&used) && used != user {
                findings.extend(broken_rule(user, used));
            }
        }
    }
    Ok(findings)
}

fn broken_rule(user: &str, used: &str) -> Option<String> {
    if used == TESTING {
        return None;
    }
    let layer = |name: &str| LAYERS.iter().position(|layer| layer.contains(&name));
    if ALONE.contains(&user) {
        return Some(format!("{user} uses {used}, but is to use no other crate"));
    }
    match (layer(user), layer(used)) {
        (Some(above), Some(below)) if above > below => None,
        (Some(_), Some(_)) => Some(format!("{user} uses {used}, which is not below it")),
        _ => Some(format!("{user} uses {used}: one of them is in no layer")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn metadata(user: &str, used: &str) -> Value {
        json!({
            "workspace_members": ["1", "2"],
            "packages": [
                {"id": "1", "name": user, "dependencies": [{"name": used}, {"name": "libc"}]},
                {"id": "2", "name": used, "dependencies": []},
                {"id": "3", "name": "libc", "dependencies": []},
            ],
        })
    }

    #[test]
    fn only_what_stands_below_may_be_used() -> Result<()> {
        assert!(findings(&metadata("vellum-cli", "vellum-format"))?.is_empty());
        assert!(findings(&metadata("vellum", "vellum-storage"))?.is_empty());
        assert!(findings(&metadata("xtask", "vellum-testing"))?.is_empty());
        for (user, used) in [
            ("vellum-format", "vellum"),
            ("vellum-format", "vellum-io"),
            ("vellum-io", "vellum-storage"),
            ("vellum-export", "vellum-jobs"),
            ("vellum-storage", "vellum-format"),
            ("xtask", "vellum"),
            ("vellum-testing", "vellum"),
            ("vellum-new", "vellum"),
        ] {
            assert_eq!(
                findings(&metadata(user, used))?.len(),
                1,
                "{user} -> {used}"
            );
        }
        Ok(())
    }
}
