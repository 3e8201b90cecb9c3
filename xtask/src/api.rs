//! `cargo xtask api`: the public items of the libraries that others build on, one a line, in
//! docs/api, so that a change of them shows in a diff.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use lexopt::Arg;
use serde_json::Value;

use crate::process;
use crate::workspace::Workspace;

const FOLDER: &str = "docs/api";

/// What others build on: changes of these are told. Other libraries that are published are so only because
/// one of these needs them.
const PROMISED: [&str; 6] = [
    "vellum",
    "vellum-format",
    "vellum-graph",
    "vellum-io",
    "vellum-options",
    "vellum-storage",
];

/// The format of rustdoc's JSON that the crate `public-api` reads.
const JSON_FORMAT: u64 = 57;

/// rustdoc as a nightly one, which alone writes JSON. Were the variable set for cargo, build
/// scripts that look at it would run again.
const RUSTDOC: &str = "#!/bin/sh\nRUSTC_BOOTSTRAP=1 exec rustdoc \"$@\"\n";

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    let mut check = false;
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("check") => check = true,
            other => return Err(other.unexpected().into()),
        }
    }
    let workspace = Workspace::locate()?;
    let rustdoc = write_rustdoc(&workspace)?;
    let folder = workspace.root.join(FOLDER);
    std::fs::create_dir_all(&folder)?;
    let mut stale = Vec::new();
    for package in PROMISED {
        let json = write_json(&workspace, &rustdoc, package)?;
        let format = json_format(&json)?;
        if check && format != JSON_FORMAT {
            println!("api: not checked: {}", other_toolchain(format));
            return Ok(());
        }
        if format != JSON_FORMAT {
            bail!("{}", other_toolchain(format));
        }
        let listing = listing(&json)?;
        let path = folder.join(format!("{package}.txt"));
        if std::fs::read_to_string(&path).is_ok_and(|old| old == listing) {
            continue;
        }
        if check {
            stale.push(format!("{FOLDER}/{package}.txt"));
        } else {
            std::fs::write(&path, listing)?;
        }
    }
    if !stale.is_empty() {
        let stale = stale.join(", ");
        bail!("out of date: {stale}; run `cargo xtask api` and look at the difference");
    }
    Ok(())
}

fn write_rustdoc(workspace: &Workspace) -> Result<PathBuf> {
    let path = workspace.fresh_folder("api")?.join("rustdoc");
    std::fs::write(&path, RUSTDOC)?;
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))?;
    Ok(path)
}

fn write_json(workspace: &Workspace, rustdoc: &Path, package: &str) -> Result<PathBuf> {
    process::run(
        workspace
            .cargo()
            .env("RUSTDOC", rustdoc)
            .env_remove("RUSTDOCFLAGS")
            .args([
                "rustdoc",
                "--quiet",
                "--lib",
                "--locked",
                "--package",
                package,
            ])
            .args(["--", "-Zunstable-options", "--output-format=json"]),
    )?;
    let library = package.replace('-', "_");
    Ok(workspace.target.join(format!("doc/{library}.json")))
}

fn json_format(json: &Path) -> Result<u64> {
    let text = std::fs::read(json).with_context(|| format!("cannot read {}", json.display()))?;
    let format = serde_json::from_slice::<Value>(&text)?["format_version"].as_u64();
    format.with_context(|| format!("{} tells no format", json.display()))
}

fn other_toolchain(format: u64) -> String {
    format!(
        "this rustdoc writes JSON in format {format}, and this task reads {JSON_FORMAT}, that of \
         Rust 1.95: use that, or change the version of the crate public-api"
    )
}

fn listing(json: &Path) -> Result<String> {
    let api = public_api::Builder::from_rustdoc_json(json)
        .omit_blanket_impls(true)
        .omit_auto_trait_impls(true)
        .omit_auto_derived_impls(true)
        .build()
        .with_context(|| format!("cannot read {}", json.display()))?;
    Ok(api.items().map(|item| format!("{item}\n")).collect())
}
