//! Internal snapshots: both tools take, apply and delete them, and show in the end what
//! is in them.

use std::fs::File;

use anyhow::{Context, Result, ensure};

use super::compare::{IMAGES, same_bytes};
use super::runner::Runner;
use super::scenario::Tool;
use crate::random::Random;

/// A change of the snapshots. Those that there are have numbers from 0 on, which begin
/// anew after the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// Takes one.
    Take,
    /// Makes the disk what it was.
    Apply(u64),
    /// Deletes one.
    Delete(u64),
}

impl Change {
    /// One out of all there are.
    pub fn random(random: &mut Random) -> Change {
        match random.below(10) {
            0..6 => Change::Take,
            6..8 => Change::Apply(random.below(4)),
            _ => Change::Delete(random.below(4)),
        }
    }
}

/// The snapshots of both images.
#[derive(Debug, Default)]
pub struct Snapshots {
    names: Vec<String>,
    taken: u64,
}

impl Snapshots {
    /// Changes those of both images; what one tool refuses the other must refuse too.
    pub fn change(&mut self, runner: &mut Runner, writer: Tool, changes: &[Change]) -> Result<()> {
        for &change in changes {
            let Some((flag, name)) = self.words(change) else {
                continue;
            };
            let mut codes = Vec::new();
            for (image, tool) in IMAGES.into_iter().zip([writer, Tool::Qemu]) {
                let words = ["snapshot", flag, &name, image].map(str::to_owned);
                codes.push(runner.img(tool, &words)?);
            }
            ensure!(
                codes[0].code == codes[1].code,
                "{change:?} ends differently: {codes:?}"
            );
            match change {
                _ if codes[0].code != 0 => {}
                Change::Take => self.names.push(name),
                Change::Apply(_) => {}
                Change::Delete(_) => self.names.retain(|other| *other != name),
            }
        }
        Ok(())
    }

    /// Whether there were ever any.
    pub fn were_taken(&self) -> bool {
        self.taken > 0
    }

    fn words(&mut self, change: Change) -> Option<(&'static str, String)> {
        let name = |number: u64| {
            let index = number.checked_rem(self.names.len() as u64)?;
            Some(self.names[index as usize].clone())
        };
        Some(match change {
            Change::Take => {
                self.taken += 1;
                ("-c", format!("s{}", self.taken))
            }
            Change::Apply(number) => ("-a", name(number)?),
            Change::Delete(number) => ("-d", name(number)?),
        })
    }

    /// Both tools list and show the same snapshots, and what is in them is the same in
    /// both images.
    pub fn compare(&self, runner: &mut Runner) -> Result<()> {
        for image in IMAGES {
            let words = ["snapshot", "-l", image].map(str::to_owned);
            let answers = [
                runner.img(Tool::Vellum, &words)?,
                runner.img(Tool::Qemu, &words)?,
            ];
            ensure!(
                answers[0] == answers[1],
                "the lists of {image} differ: {answers:?}"
            );
            let listed = answers[0].output.lines().count().saturating_sub(2);
            ensure!(listed == self.names.len(), "{image} has {listed} snapshots");
        }
        for name in &self.names {
            self.compare_one(runner, name)
                .with_context(|| format!("snapshot {name}"))?;
        }
        Ok(())
    }

    fn compare_one(&self, runner: &mut Runner, name: &str) -> Result<()> {
        let mut copy = |tool: Tool, image: &str, to: &str| -> Result<(File, u64)> {
            let words = ["convert", "-l", name, "-O", "raw", image, to];
            runner.img_done(tool, &words.map(str::to_owned))?;
            let copy = File::open(runner.folder().join(to))?;
            let len_bytes = copy.metadata()?.len();
            Ok((copy, len_bytes))
        };
        let (ours, our_bytes) = copy(Tool::Vellum, IMAGES[0], "ours")?;
        let (theirs, their_bytes) = copy(Tool::Qemu, IMAGES[0], "theirs")?;
        let (twin, twin_bytes) = copy(Tool::Vellum, IMAGES[1], "twin")?;
        ensure!(
            our_bytes == twin_bytes,
            "it has {our_bytes} bytes in one image and {twin_bytes} in the other"
        );
        same_bytes(&[&ours, &twin], [0, 0], our_bytes).context("in the two images")?;
        // QEMU shows it with the size of today's disk.
        let shown = our_bytes.min(their_bytes);
        same_bytes(&[&ours, &theirs], [0, 0], shown).context("as the two tools show it")
    }
}
