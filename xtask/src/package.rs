//! `cargo xtask package`: the packages that are published are whole: they are made without a
//! network, unpacked, and a program is built with them and run.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result, bail};
use lexopt::Arg;
use serde_json::Value;

use crate::process;
use crate::workspace::{self, Workspace};

/// What a package must hold besides its sources.
const FILES: &[&str] = &["LICENSE-APACHE", "LICENSE-MIT", "README.md"];
/// What its manifest must say.
const FIELDS: &[&str] = &[
    "description",
    "license",
    "repository",
    "keywords",
    "categories",
];

/// The program: the example of the library as it stands in its package.
const EXAMPLE: &str = "examples/embed.rs";

struct Package {
    name: String,
    version: String,
}

impl Package {
    fn folder(&self) -> String {
        format!("{}-{}", self.name, self.version)
    }
}

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    let mut build = true;
    while let Some(argument) = arguments.next()? {
        match argument {
            Arg::Long("no-build") => build = false,
            other => return Err(other.unexpected().into()),
        }
    }
    let workspace = Workspace::locate()?;
    let manifest = workspace.root.join("Cargo.toml");
    let metadata = workspace::metadata(&manifest, &["--no-deps", "--locked"])?;
    let packages = packages(&metadata)?;
    make(&workspace, &packages)?;
    let folder = workspace.fresh_folder("packaged")?;
    for package in &packages {
        unpack(&workspace, package, &folder)?;
    }
    println!("package: {} packages are whole", packages.len());
    if build {
        build_program(&workspace, &packages, &folder)?;
    }
    Ok(())
}

fn packages(metadata: &Value) -> Result<Vec<Package>> {
    let text = |package: &Value, key: &str| {
        let value = package[key].as_str().map(str::to_owned);
        value.with_context(|| format!("cargo metadata tells no {key}"))
    };
    let published = workspace::published(metadata)?.into_iter().map(|package| {
        Ok(Package {
            name: text(package, "name")?,
            version: text(package, "version")?,
        })
    });
    published.collect()
}

/// Has cargo make the packages, which takes those that depend on each other in their order.
fn make(workspace: &Workspace, packages: &[Package]) -> Result<()> {
    let mut command = workspace.cargo();
    command.args([
        "package",
        "--quiet",
        "--no-verify",
        "--allow-dirty",
        "--locked",
        "--offline",
    ]);
    for package in packages {
        command.args(["--package", &package.name]);
    }
    process::run(&mut command)
}

fn unpack(workspace: &Workspace, package: &Package, folder: &Path) -> Result<()> {
    let archive = format!("package/{}.crate", package.folder());
    let mut tar = process::program("tar")?;
    tar.arg("-xzf")
        .arg(workspace.target.join(archive))
        .arg("-C")
        .arg(folder);
    process::run(&mut tar)?;
    let folder = folder.join(package.folder());
    for file in FILES {
        if !folder.join(file).is_file() {
            bail!("the package {} has no {file}", package.name);
        }
    }
    let manifest = std::fs::read_to_string(folder.join("Cargo.toml"))?;
    let manifest: toml::Table = toml::from_str(&manifest)?;
    for field in FIELDS {
        if manifest["package"].get(*field).is_none() {
            bail!("the package {} tells no {field}", package.name);
        }
    }
    Ok(())
}

/// Builds the packages and a program beside them. Crates from outside are those of the
/// workspace, in the same target folder, so that only ours are built again.
fn build_program(workspace: &Workspace, packages: &[Package], folder: &Path) -> Result<()> {
    let engine = packages.iter().find(|package| package.name == "vellum");
    let engine = engine.context("the library is not published")?;
    let sources = folder.join("program/src");
    std::fs::create_dir_all(&sources)?;
    let example = folder.join(engine.folder()).join(EXAMPLE);
    std::fs::copy(example, sources.join("main.rs"))?;
    let manifest = program_manifest(&engine.version);
    std::fs::write(folder.join("program/Cargo.toml"), manifest)?;
    std::fs::write(folder.join("Cargo.toml"), workspace_manifest(packages))?;
    std::fs::copy(workspace.root.join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let cargo = |arguments: &[&str]| {
        let mut command = workspace.cargo();
        command.current_dir(folder).args(arguments);
        command
            .arg("--offline")
            .arg("--target-dir")
            .arg(&workspace.target);
        command
    };
    process::run(&mut cargo(&["check", "--quiet", "--workspace"]))?;
    let image = folder.join("disk.qcow2");
    let mut program = cargo(&["run", "--quiet", "--package", "program"]);
    process::run(program.arg("--").arg(image))
}

fn program_manifest(version: &str) -> String {
    format!(
        "[package]\nname = \"program\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [dependencies]\nvellum = \"{version}\"\n"
    )
}

/// A workspace of the unpacked packages, which stand for those of the registry.
fn workspace_manifest(packages: &[Package]) -> String {
    let mut text =
        "[workspace]\nresolver = \"3\"\nmembers = [\"*\"]\n\n[patch.crates-io]\n".to_owned();
    for package in packages {
        let _ = writeln!(
            text,
            "{} = {{ path = \"{}\" }}",
            package.name,
            package.folder()
        );
    }
    text
}
