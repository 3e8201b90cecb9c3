//! Plays a scenario in two places of the same length, one for each program.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::super::play::Difference;
use super::super::runner::{Answer, Programs, Runner};
use super::super::scenario::Tool;
use super::copies;
use super::jobs;
use super::load::Batch;
use super::scenario::{Room, Scenario, Script};
use super::verdict::{Outcome, refusal, verdict};
use crate::fixed_length::{Address, Kind, Place};

/// The files behind the places; the first is that of the program under test.
const FILES: [&str; 2] = ["a.place", "b.place"];
/// A backing file that both images share.
pub const BASE: &str = "base.qcow2";

/// Prefix of the line of `check` that reports the end of the last cluster in use.
const END: &str = "Image end offset: ";
/// How much farther than a tenth more than QEMU's an image may reach.
const MORE_BYTES: u64 = 1 << 20;

/// How scenarios are played.
#[derive(Debug, Clone, Copy)]
pub struct Setting {
    /// What fixes the length.
    pub kind: Kind,
    /// Who does things to the two images.
    pub tools: [Tool; 2],
    /// ENOSPC where the contract of `measure` guarantees space is a failure even if QEMU fails too, as it
    /// does for some requests of several clusters.
    pub keeps_promises: bool,
}

/// Plays a scenario in a folder of its own, which is removed afterwards.
pub fn play(
    setting: Setting,
    programs: &Programs,
    folder: &Path,
    scenario: &Scenario,
) -> Result<Outcome, Difference> {
    let mut game = Game {
        setting,
        runner: Runner::new(programs, folder),
        scenario,
        outcome: Outcome::default(),
    };
    let result = std::fs::create_dir(folder)
        .context("cannot make a folder")
        .and_then(|()| game.play());
    let own = folder.display().to_string();
    let lines = game.runner.script.iter();
    let script = lines.map(|line| line.replace(&own, "$PWD")).collect();
    // What cannot be removed now goes with the folder around it.
    let _ = std::fs::remove_dir_all(folder);
    match result {
        Ok(()) => Ok(game.outcome),
        Err(error) => Err(Difference {
            what: format!("{error:#}"),
            script,
        }),
    }
}

/// A scenario being played.
pub struct Game<'a> {
    /// Who does what.
    pub setting: Setting,
    /// Runs the tools.
    pub runner: Runner<'a>,
    /// What is played.
    pub scenario: &'a Scenario,
    /// Its outcome so far.
    pub outcome: Outcome,
}

/// Sizes that `measure` reports, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    required: u64,
    full: u64,
    bitmaps: u64,
}

impl Measured {
    fn parse(text: &str) -> Option<Measured> {
        let value: Value = serde_json::from_str(text).ok()?;
        Some(Measured {
            required: value["required"].as_u64()?,
            full: value["fully-allocated"].as_u64()?,
            bitmaps: value["bitmaps"].as_u64().unwrap_or(0),
        })
    }

    /// The length of a place.
    pub fn place_bytes(self, room: Room, with_bitmaps: bool) -> u64 {
        let bitmaps = if with_bitmaps { self.bitmaps } else { 0 };
        match room {
            Room::Full => self.full + bitmaps,
            Room::Ample => 4 * self.full,
            Room::Slack(bytes) => self.full + bitmaps + bytes,
            Room::Required => self.required + bitmaps,
            Room::Part(thousandths) => (self.full * thousandths / 1000 / 512 * 512).max(4096),
        }
    }
}

impl Game<'_> {
    fn play(&mut self) -> Result<()> {
        match &self.scenario.script {
            Script::Io(batches) => self.play_io(batches),
            Script::Convert(convert) => copies::convert(self, convert),
            Script::Commit {
                base,
                overlay,
                keeps_overlay,
            } => copies::commit(self, base, overlay, *keeps_overlay),
            Script::Rebase {
                base,
                overlay,
                alone,
            } => copies::rebase(self, base, overlay, *alone),
            Script::Job(job) => jobs::play(self, job),
        }
    }

    fn play_io(&mut self, batches: &[Batch]) -> Result<()> {
        let mut backing = Vec::new();
        if let Some(base) = &self.scenario.backing {
            self.fill_file(BASE, 16, base)?;
            let path = self.runner.folder().join(BASE).display().to_string();
            backing = words(&["-b", &path, "-F", "qcow2"]);
        }
        let size = self.scenario.size_bytes.to_string();
        let measured = self.measure(&["--size", &size])?;
        let len_bytes = measured.place_bytes(self.scenario.room, false);
        let Some(places) = self.create(len_bytes, &backing)? else {
            return Ok(());
        };
        for batch in batches.iter().filter(|batch| !batch.groups.is_empty()) {
            let mut answers = Vec::new();
            for (place, tool) in places.iter().zip(self.setting.tools) {
                let image = self.scenario.options.image(&place.address);
                answers.push(self.runner.io(tool, &io_words(batch, image))?);
            }
            if !verdict(self, &answers)? {
                return self.check_refused(&places[0]);
            }
        }
        self.compare(&places)?;
        if self.scenario.room == Room::Ample {
            self.compare_ends(&places)?;
        }
        Ok(())
    }

    /// The image reaches little farther into its place than QEMU's, which takes the first free cluster.
    fn compare_ends(&mut self, places: &[Place; 2]) -> Result<()> {
        let mut ends = [0; 2];
        for (end, place) in ends.iter_mut().zip(places) {
            let answer = self.check_by(Tool::Qemu, &place.address)?;
            let line = answer
                .output
                .lines()
                .find_map(|line| line.strip_prefix(END));
            *end = line
                .and_then(|end| end.parse().ok())
                .context("check says no end")?;
        }
        let [ours, theirs] = ends;
        ensure!(
            ours <= theirs + theirs / 10 + MORE_BYTES,
            "the image ends at {ours}, QEMU's at {theirs}"
        );
        Ok(())
    }

    /// What both programs say of the size of an image.
    pub fn measure(&mut self, what: &[&str]) -> Result<Measured> {
        let mut all = words(&["measure", "--output=json", "-O", "qcow2", "-o"]);
        all.push(self.scenario.options.value());
        all.extend(self.scenario.options.objects());
        all.extend(words(what));
        let [ours, theirs] = self.both(|runner, tool| runner.img(tool, &all))?;
        // QEMU counts no refcounts of a LUKS header, nor of bitmaps.
        let is_larger = self.scenario.options.is_encrypted || ours.output.contains("bitmaps");
        ensure!(
            ours.output == theirs.output || is_larger,
            "`measure` says {} where QEMU's says {}{}",
            ours.output,
            theirs.output,
            theirs.errors,
        );
        Measured::parse(&ours.output)
            .with_context(|| format!("`measure` says {}{}", ours.output, ours.errors))
    }

    fn both(
        &mut self,
        mut run: impl FnMut(&mut Runner<'_>, Tool) -> Result<Answer>,
    ) -> Result<[Answer; 2]> {
        let [first, second] = self.setting.tools;
        Ok([
            run(&mut self.runner, first)?,
            run(&mut self.runner, second)?,
        ])
    }

    /// A file of QEMU's, with what a batch writes.
    pub fn fill_file(&mut self, name: &str, cluster_bits: u32, batch: &Batch) -> Result<()> {
        let options = format!("cluster_size={}", 1_u64 << cluster_bits);
        let size = self.scenario.size_bytes.to_string();
        let create = words(&["create", "-q", "-f", "qcow2", "-o", &options, name, &size]);
        self.runner.img_done(Tool::Qemu, &create)?;
        self.write_file(name, batch)
    }

    /// Has QEMU write to an image in a file.
    pub fn write_file(&mut self, name: &str, batch: &Batch) -> Result<()> {
        if batch.groups.is_empty() {
            return Ok(());
        }
        let all = io_words(batch, words(&["-f", "qcow2", name]));
        let answer = self.runner.io(Tool::Qemu, &all)?;
        ensure!(answer.code == 0, "qemu-io fails on {name}: {answer:?}");
        Ok(())
    }

    /// Opens a place with what its file holds, and its length.
    pub fn open(&mut self, index: usize, len_bytes: u64) -> Result<Place> {
        let file = FILES[index];
        let path = self.runner.folder().join(file);
        let handle = std::fs::OpenOptions::new()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)?;
        handle.set_len(len_bytes)?;
        let place = Place::open(self.setting.kind, self.runner.folder(), file)?;
        self.runner
            .script
            .push(format!("truncate -s {len_bytes} {file}"));
        self.runner.script.push(place.script(file));
        Ok(place)
    }

    /// Opens both places with a copy of a file in each.
    pub fn open_copies(&mut self, file: &str, len_bytes: u64) -> Result<[Place; 2]> {
        let own = std::fs::metadata(self.runner.folder().join(file))?.len();
        let len_bytes = len_bytes.max(own);
        let mut open = |index: usize| {
            self.runner.copy_file(file, FILES[index])?;
            self.open(index, len_bytes)
        };
        Ok([open(0)?, open(1)?])
    }

    /// Both places with an empty image in each; `None` if the place is too small for one.
    pub fn create(&mut self, len_bytes: u64, more: &[String]) -> Result<Option<[Place; 2]>> {
        let first = self.open(0, len_bytes)?;
        let ours = match self.scenario.is_created_by_qemu {
            true => Tool::Qemu,
            false => self.setting.tools[0],
        };
        let mut answers = vec![self.create_image(ours, &first.address, more)?];
        if self.scenario.options.is_encrypted {
            // To make a key slot takes either tool a second.
            self.runner.copy_file(FILES[0], FILES[1])?;
        }
        let second = self.open(1, len_bytes)?;
        if !self.scenario.options.is_encrypted {
            answers.push(self.create_image(Tool::Qemu, &second.address, more)?);
        } else if refusal(&answers[0]).is_some() {
            return Ok(None);
        }
        if answers.len() == 2 && !verdict(self, &answers)? {
            return Ok(None);
        }
        Ok(Some([first, second]))
    }

    fn create_image(&mut self, tool: Tool, address: &Address, more: &[String]) -> Result<Answer> {
        let options = &self.scenario.options;
        let mut all = words(&["create", "-q", "-f", "qcow2", "-o", &options.value()]);
        all.extend(options.objects());
        all.extend_from_slice(more);
        all.extend([address.name(), self.scenario.size_bytes.to_string()]);
        self.runner.img(tool, &all)
    }

    /// Both images hold the same, and nothing is wrong with them.
    pub fn compare(&mut self, places: &[Place; 2]) -> Result<()> {
        let addresses = [&places[0].address, &places[1].address];
        let [own, _] = self.setting.tools;
        for tool in [own, Tool::Qemu] {
            for address in addresses {
                self.check(address, tool, &[0])?;
            }
            let mut all = words(&["compare"]);
            all.extend(self.scenario.options.two_images(addresses));
            let answer = self.runner.img(tool, &all)?;
            ensure!(answer.code == 0, "{tool:?} compares: {answer:?}");
        }
        Ok(())
    }

    /// Checks the image of the program under test behind a request that was refused: it may have
    /// leaks. QEMU 10 damages images with small clusters there, so its own is not checked.
    pub fn check_refused(&mut self, place: &Place) -> Result<()> {
        if self.setting.tools[0] == Tool::Qemu {
            return Ok(());
        }
        let answer = self.check_by(Tool::Vellum, &place.address)?;
        ensure!(matches!(answer.code, 0 | 3), "behind a refusal: {answer:?}");
        self.outcome.note_leaks(&answer);
        self.check(&place.address, Tool::Qemu, &[0, 3])
    }

    /// Has a program check an image, which must end with one of these codes.
    fn check(&mut self, address: &Address, tool: Tool, codes: &[i32]) -> Result<()> {
        let answer = self.check_by(tool, address)?;
        let name = address.name();
        ensure!(
            codes.contains(&answer.code),
            "{tool:?} checks {name}: {answer:?}"
        );
        Ok(())
    }

    fn check_by(&mut self, tool: Tool, address: &Address) -> Result<Answer> {
        let mut all = words(&["check"]);
        all.extend(self.scenario.options.image(address));
        self.runner.img(tool, &all)
    }
}

/// The words of a run of `qemu-io`.
fn io_words(batch: &Batch, image: Vec<String>) -> Vec<String> {
    let commands = batch.groups.iter().flatten();
    let mut all: Vec<String> = commands
        .flat_map(|command| ["-c".to_owned(), command.clone()])
        .collect();
    if batch.unmaps {
        all.extend(words(&["-d", "unmap"]));
    }
    if let Some(cache) = batch.cache {
        all.extend(words(&["-t", cache]));
    }
    all.extend(image);
    all
}

/// Words of a command line.
pub fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}
