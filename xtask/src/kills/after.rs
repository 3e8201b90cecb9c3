//! With daemon and guest gone: what the image holds.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{Kills, RAW};
use crate::process;

/// The guest removes older files as it makes new ones.
const KEPT_FILES: usize = 39;
/// What `qemu-img check` exits with where it finds nothing, or leaks alone.
const SOUND: [i32; 2] = [0, 3];

impl Kills<'_> {
    /// `qemu-img check` finds leaks at worst, which are told.
    pub(super) fn check(&self) -> Result<String> {
        if self.plan.format == "raw" {
            return Ok("raw".to_owned());
        }
        let words = ["check", "--output=json", self.image()];
        let checked = process::capture(self.program("qemu-img")?.args(words))?;
        let said = String::from_utf8_lossy(&checked.stdout).into_owned();
        let json: Value = serde_json::from_str(&said).context("qemu-img check prints no JSON")?;
        let is_sound = checked
            .status
            .code()
            .is_some_and(|code| SOUND.contains(&code));
        let is_whole = json["corruptions"].is_null() && json["check-errors"] == 0;
        ensure!(is_sound && is_whole, "the image is damaged: {json:#}");
        let leaks = json["leaks"].as_u64().unwrap_or(0);
        Ok(format!("{leaks} clusters leaked"))
    }

    /// Compares files with what the guest has said of them.
    pub(super) fn holds(&self, durable: &[(String, String)]) -> Result<()> {
        if self.plan.format != "raw" {
            let words = ["convert", "-f", "qcow2", "-O", "raw", self.image(), RAW];
            process::output(self.program("qemu-img")?.args(words))?;
        }
        // The journal is played first, as the next mount would; it exits with 1 if it did anything.
        let played = process::capture(self.program("e2fsck")?.args(["-p", RAW]))?;
        let code = played.status.code();
        ensure!(code.is_some_and(|code| code <= 1), "e2fsck -p: {played:?}");
        process::output(self.program("e2fsck")?.args(["-fn", RAW]))?;
        for (name, sum) in durable.iter().rev().take(KEPT_FILES) {
            let dump = format!("dump /{name} file");
            process::output(self.program("debugfs")?.args(["-R", &dump, RAW]))?;
            let found = process::output(self.program("md5sum")?.arg("file"))
                .with_context(|| format!("{name}, which was durable, is gone"))?;
            ensure!(
                found.starts_with(sum.as_str()),
                "{name} was durable with md5 {sum}, and is {found}"
            );
            std::fs::remove_file(self.folder.join("file"))?;
        }
        Ok(())
    }
}
