//! The last step of the demo: with the server gone, both tools check and compare the files.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::stages::{Outcome, Stages, Watch};
use super::{BASE, Demo, FILE_SYSTEM_BYTES, OVERLAY, WRITTEN};
use crate::process;

impl Demo {
    /// `vellum` and QEMU check and compare the images and must agree.
    pub(super) fn verify(&self, stages: &mut Stages) -> Result<()> {
        for image in [OVERLAY, BASE] {
            let title = format!("vellum check and qemu-img check: {image}");
            stages.run(&title, Watch::Nothing, |_| {
                Ok(((), Outcome::Said(self.agreed_check(image)?)))
            })?;
        }
        let compare = ["compare", "-f", "raw", "-F", "qcow2", "final.raw", OVERLAY];
        stages.run("vellum compare, disk and copy", Watch::Nothing, |_| {
            self.vellum_output(&compare)?;
            Ok(((), Outcome::Said("identical".into())))
        })?;
        stages.run("qemu-img compare, disk and copy", Watch::Nothing, |_| {
            self.qemu_img(&compare)?;
            self.qemu_img(&["compare", "copy.qcow2", OVERLAY])?;
            Ok(((), Outcome::Said("identical".into())))
        })?;
        stages.run("e2fsck, and the guests' files", Watch::Nothing, |_| {
            self.file_system_holds()?;
            Ok(((), Outcome::Said("clean; md5 agrees".into())))
        })
    }

    /// Both tools find nothing wrong and count the same.
    fn agreed_check(&self, image: &str) -> Result<String> {
        let arguments = ["check", "--output=json", image];
        let ours: Value = serde_json::from_str(&self.vellum_output(&arguments)?)?;
        let theirs: Value = serde_json::from_str(&self.qemu_img(&arguments)?)?;
        ensure!(
            ours == theirs,
            "the checks differ\nvellum: {ours:#}\nqemu-img: {theirs:#}"
        );
        ensure!(
            ours["leaks"].is_null() && ours["corruptions"].is_null(),
            "both checks find faults: {ours:#}"
        );
        Ok(format!(
            "clean, {} of {} clusters allocated",
            ours["allocated-clusters"], ours["total-clusters"]
        ))
    }

    /// The copied file system is sound and holds what the guest said it wrote.
    fn file_system_holds(&self) -> Result<()> {
        cut(&self.folder.join("final.raw"), FILE_SYSTEM_BYTES)?;
        process::output(self.program("e2fsck")?.args(["-fn", "final.raw"]))?;
        for (name, sum_file) in WRITTEN {
            let dump = format!("dump {name} random");
            process::output(self.program("debugfs")?.args(["-R", &dump, "final.raw"]))?;
            let sum = process::output(self.program("md5sum")?.arg("random"))?;
            let expected = std::fs::read_to_string(self.folder.join(sum_file))?;
            ensure!(
                sum.starts_with(&expected),
                "the guest wrote {name} with md5 {expected}, outside it is {sum}"
            );
        }
        Ok(())
    }
}

/// The word that follows `key` on the guest's console.
pub fn guest_word(console: &str, key: &str) -> Result<String> {
    console
        .lines()
        .find_map(|line| line.trim().strip_prefix(key))
        .map(str::to_owned)
        .with_context(|| format!("the guest never said '{key}…'; its console:\n{console}"))
}

/// Bytes that a file takes on disk.
pub fn allocated_bytes(path: &Path) -> Result<u64> {
    const STAT_BLOCK_BYTES: u64 = 512;
    Ok(path.metadata()?.blocks() * STAT_BLOCK_BYTES)
}

/// Cuts a file to a length.
pub fn cut(path: &Path, len_bytes: u64) -> Result<()> {
    let file = std::fs::File::options().write(true).open(path)?;
    Ok(file.set_len(len_bytes)?)
}
