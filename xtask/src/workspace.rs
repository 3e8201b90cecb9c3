//! Where the work tree, its build output and its programs are.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::process;

/// The work tree that this program was built from.
#[derive(Debug, Clone)]
pub struct Workspace {
    /// The folder that holds the workspace's Cargo.toml.
    pub root: PathBuf,
    /// Cargo's target folder; the only place where tasks leave anything.
    pub target: PathBuf,
}

/// The absolute path of what a user names, which must exist.
pub fn existing(path: PathBuf) -> Result<PathBuf> {
    let found = path.canonicalize();
    found.with_context(|| path.display().to_string())
}

impl Workspace {
    /// Asks cargo, so that every way of moving the target folder is respected.
    pub fn locate() -> Result<Self> {
        // Two clones may share one target folder: what cargo says now beats what it said at build time.
        let package = std::env::var_os("CARGO_MANIFEST_DIR")
            .unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
        let metadata = metadata(&Path::new(&package).join("Cargo.toml"), &["--no-deps"])?;
        let folder = |key: &str| {
            metadata[key]
                .as_str()
                .map(PathBuf::from)
                .with_context(|| format!("cargo metadata names no {key}"))
        };
        Ok(Self {
            root: folder("workspace_root")?,
            target: folder("target_directory")?,
        })
    }

    /// The files that git knows and that match its patterns, by their paths in the work tree. One may be deleted, and
    /// not yet in the index.
    pub fn tracked(&self, patterns: &[&str]) -> Result<Vec<String>> {
        let mut list = Command::new("git");
        list.current_dir(&self.root).arg("ls-files").args(patterns);
        let listing = process::output(&mut list)?;
        Ok(listing.lines().map(str::to_owned).collect())
    }

    /// A cargo command that runs in the work tree.
    pub fn cargo(&self) -> Command {
        let mut command = Command::new(cargo_program());
        command.current_dir(&self.root);
        command
    }

    /// The program that was named, or else the one of this workspace, built if it is not.
    pub fn vellum_or(&self, named: Option<&Path>) -> Result<PathBuf> {
        match named {
            Some(path) => Ok(path.to_owned()),
            None => self.build_vellum(),
        }
    }

    /// Builds the release program and returns its path.
    pub fn build_vellum(&self) -> Result<PathBuf> {
        process::run(
            self.cargo()
                .args(["build", "--release", "--package", "vellum-cli"]),
        )?;
        Ok(self.target.join("release/vellum"))
    }

    /// An empty folder of that name in the target folder; an earlier one is removed.
    pub fn fresh_folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.target.join(name);
        if folder.exists() {
            std::fs::remove_dir_all(&folder)
                .with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(folder)
    }
}

/// What `cargo metadata` tells of a manifest.
pub fn metadata(manifest: &Path, arguments: &[&str]) -> Result<Value> {
    let text = process::output(
        Command::new(cargo_program())
            .args(["metadata", "--format-version=1", "--manifest-path"])
            .arg(manifest)
            .args(arguments),
    )?;
    serde_json::from_str(&text).context("cargo metadata printed no JSON")
}

/// The packages of `metadata` that are meant to be published.
pub fn published(metadata: &Value) -> Result<Vec<&Value>> {
    let packages = metadata["packages"].as_array();
    let packages = packages.context("cargo metadata lists no packages")?;
    // `publish = false` reads as an empty list of registries.
    let published = packages
        .iter()
        .filter(|package| package["publish"].is_null());
    Ok(published.collect())
}

fn cargo_program() -> std::ffi::OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}
