//! `cargo xtask tidy`: the rules of the project that the compiler does not check.

mod cycles;
mod dependencies;
mod documents;
mod heads;
mod layers;
mod names;
mod promises;
mod self_calls;
mod sources;

use anyhow::{Result, bail};

use crate::workspace::{self, Workspace};

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    crate::no_arguments(&mut arguments)?;
    let workspace = Workspace::locate()?;
    let targets = dependencies::targets(&workspace)?;
    let mut arguments = vec!["--locked"];
    for target in &targets {
        arguments.extend(["--filter-platform", target]);
    }
    let metadata = workspace::metadata(&workspace.root.join("Cargo.toml"), &arguments)?;
    let mut findings = layers::findings(&metadata)?;
    findings.extend(dependencies::findings(&workspace, &metadata)?);
    findings.extend(cycles::findings(&workspace)?);
    findings.extend(heads::findings(&workspace)?);
    findings.extend(sources::findings(&workspace)?);
    findings.extend(names::findings(&workspace)?);
    findings.extend(promises::findings(&workspace)?);
    findings.extend(documents::findings(&workspace)?);
    for finding in &findings {
        println!("tidy: {finding}");
    }
    if !findings.is_empty() {
        bail!("{} findings", findings.len());
    }
    println!("tidy: all in order");
    Ok(())
}
