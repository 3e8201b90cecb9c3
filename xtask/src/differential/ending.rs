//! The last step of a scenario: a rebase or a commit, which changes what both images stand on, or
//! nothing.

use anyhow::{Context, Result, ensure};

use super::access;
use super::compare::{IMAGES, SameMaps};
use super::runner::Runner;
use super::scenario::Tool;
use super::shape::Shape;
use crate::random::Random;

/// The last thing that is done to both images.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// Nothing.
    None,
    /// `rebase` to the deepest backing file, or to none.
    Rebase {
        /// Stand alone afterwards.
        alone: bool,
    },
    /// `commit`, each image into a copy of the backing file.
    Commit {
        /// Leave the image as it is (`-d`).
        drop: bool,
    },
}

impl Ending {
    /// An ending that fits a shape.
    pub fn random(random: &mut Random, shape: &Shape) -> Ending {
        if shape.chain.is_empty() || shape.foreign.is_some() || random.chance(40) {
            return Ending::None;
        }
        match random.chance(50) {
            true => Ending::Rebase {
                alone: random.chance(60),
            },
            false => Ending::Commit {
                drop: random.chance(30),
            },
        }
    }

    /// How far both images must be mapped alike afterwards. QEMU commits pieces of 64
    /// KiB at least, and so maps more than the image held. Where the file that an image
    /// stood on ends inside a subcluster, a rebase of QEMU's stores zeroes as data for
    /// some way behind that end.
    pub fn maps(self, shape: &Shape) -> SameMaps {
        let unit = shape.subcluster_bytes();
        match (self, shape.chain.last()) {
            (Ending::Commit { .. }, _) => SameMaps::No,
            (Ending::Rebase { .. }, Some(old)) if !old.size_bytes.is_multiple_of(unit) => {
                SameMaps::ButZeroes {
                    from_bytes: old.size_bytes.next_multiple_of(unit),
                }
            }
            _ => SameMaps::Yes,
        }
    }

    /// Does it to both images; Vellum does it to the first.
    pub fn play(self, runner: &mut Runner, shape: &Shape) -> Result<()> {
        match self {
            Ending::None => Ok(()),
            Ending::Rebase { alone } => rebase(runner, shape, alone),
            Ending::Commit { drop } => commit(runner, shape, drop),
        }
    }
}

const TOOLS: [Tool; 2] = [Tool::Vellum, Tool::Qemu];

fn rebase(runner: &mut Runner, shape: &Shape, alone: bool) -> Result<()> {
    let deepest = shape.chain.first().context("a chain")?;
    let name = match shape.encrypted {
        // QEMU resolves no relative name beside an image that options name.
        true => runner.folder().join(&deepest.name).display().to_string(),
        false => deepest.name.clone(),
    };
    let mut answers = Vec::new();
    for (image, tool) in IMAGES.into_iter().zip(TOOLS) {
        let words = match alone {
            true => vec!["rebase", "-b", ""],
            false => vec!["rebase", "-b", &name, "-F", deepest.format],
        };
        let words = [owned(&words), access::image(shape, image)].concat();
        answers.push(runner.img(tool, &words)?);
    }
    ensure!(
        answers[0] == answers[1],
        "the tools rebase differently:\nvellum: {:?}\nqemu: {:?}",
        answers[0],
        answers[1]
    );
    Ok(())
}

fn commit(runner: &mut Runner, shape: &Shape, drop: bool) -> Result<()> {
    let nearest = shape.chain.last().context("a chain")?;
    let mut answers = Vec::new();
    for (image, tool) in IMAGES.into_iter().zip(TOOLS) {
        let base = format!("{image}.base");
        runner.copy_file(&nearest.name, &base)?;
        let words = ["rebase", "-u", "-b", &base, "-F", nearest.format];
        let words = [owned(&words), access::image(shape, image)].concat();
        runner.img_done(Tool::Qemu, &words)?;
        let mut words = owned(&["commit"]);
        words.extend(drop.then(|| "-d".to_owned()));
        if tool == Tool::Vellum {
            // Under its own name it writes only to what is named.
            words.extend(owned(&["-b", &base]));
        }
        words.extend(access::image(shape, image));
        answers.push(runner.img(tool, &words)?);
    }
    ensure!(
        answers[0] == answers[1],
        "the tools commit differently:\nvellum: {:?}\nqemu: {:?}",
        answers[0],
        answers[1]
    );
    let bases = IMAGES.map(|image| format!("{image}.base"));
    let format = nearest.format;
    let words = ["compare", "-f", format, "-F", format, &bases[0], &bases[1]];
    runner
        .img_done(Tool::Qemu, &owned(&words))
        .context("the backing files hold different things")?;
    if format == "qcow2" {
        let words = ["check", "-f", format, &bases[0]];
        runner.img_done(Tool::Qemu, &owned(&words))?;
    }
    Ok(())
}

fn owned(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}
