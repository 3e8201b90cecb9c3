//! Plays a scenario with both tools, and returns what differed and the commands that led to it.

use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::access;
use super::bitmaps;
use super::compare::{self, IMAGES};
use super::runner::{Programs, Runner};
use super::scenario::{Scenario, Tool};
use super::shape::Backing;
use super::snapshots::Snapshots;

/// A difference, and the commands that led to it.
#[derive(Debug)]
pub struct Difference {
    /// What differed.
    pub what: String,
    /// The commands, as lines of a shell script.
    pub script: Vec<String>,
}

/// Plays a scenario in a folder of its own, which is removed afterwards.
pub fn play(programs: &Programs, folder: &Path, scenario: &Scenario) -> Result<(), Difference> {
    let mut runner = Runner::new(programs, folder);
    let result = std::fs::create_dir(folder)
        .context("cannot make a folder")
        .and_then(|()| play_all(&mut runner, scenario));
    let script = runner.script;
    // What cannot be removed now goes with the folder around it.
    let _ = std::fs::remove_dir_all(folder);
    result.map_err(|error| Difference {
        what: format!("{error:#}"),
        script,
    })
}

fn play_all(runner: &mut Runner, scenario: &Scenario) -> Result<()> {
    create(runner, scenario)?;
    bitmaps::apply(runner, scenario.creators, &scenario.bitmaps)?;
    prepare(runner, scenario)?;
    let mut snapshots = Snapshots::default();
    for (index, batch) in scenario.batches.iter().enumerate() {
        snapshots.change(runner, scenario.writer(index), &batch.snapshots)?;
        if let Some(options) = &batch.amend {
            // What shares its clusters with a snapshot expands differently: QEMU
            // writes zeroes over the snapshot's data. And it leaves bitmaps in images
            // that have no word for them.
            let differs = snapshots.were_taken() || !scenario.bitmaps.is_empty();
            if !(differs && options == "compat=0.10") {
                amend(runner, scenario.writer(index), options)?;
            }
        }
        if let Some(size_bytes) = batch.resize {
            resize(runner, scenario, scenario.writer(index), size_bytes)?;
        }
        bitmaps::apply(runner, [scenario.writer(index), Tool::Qemu], &batch.bitmaps)?;
        let commands: Vec<String> = batch.groups.concat();
        if commands.is_empty() {
            // Without commands the tools would talk to a person.
            continue;
        }
        let tools = [scenario.writer(index), Tool::Qemu];
        let mut answers = Vec::new();
        for (image, tool) in IMAGES.into_iter().zip(tools) {
            let mut words = command_words(&commands);
            words.extend(batch.mode.words(&scenario.shape, image));
            answers.push(runner.io(tool, &words)?);
        }
        ensure!(
            answers[0] == answers[1],
            "the tools answer differently:\nvellum: {:?}\nqemu: {:?}",
            answers[0],
            answers[1]
        );
    }
    snapshots.compare(runner)?;
    bitmaps::compare(runner, scenario)?;
    scenario.ending.play(runner, &scenario.shape)?;
    compare::compare(
        runner,
        &scenario.shape,
        scenario.ending.maps(&scenario.shape),
    )
}

/// Resizes both images; where one tool refuses, so does the other.
fn resize(runner: &mut Runner, scenario: &Scenario, writer: Tool, size_bytes: u64) -> Result<()> {
    let size = size_bytes.to_string();
    let mut answers = Vec::new();
    for (image, tool) in IMAGES.into_iter().zip([writer, Tool::Qemu]) {
        let mut words = ["resize", "--shrink"].map(str::to_owned).to_vec();
        words.extend(access::image(&scenario.shape, image));
        words.push(size.clone());
        answers.push(runner.img(tool, &words)?);
    }
    let codes = [answers[0].code, answers[1].code];
    ensure!(
        codes[0] == codes[1],
        "one tool resizes and the other does not: {answers:?}"
    );
    Ok(())
}

/// Amends both images; where one tool refuses, so does the other.
fn amend(runner: &mut Runner, writer: Tool, options: &str) -> Result<()> {
    let mut answers = Vec::new();
    for (image, tool) in IMAGES.into_iter().zip([writer, Tool::Qemu]) {
        let words = ["amend", "-f", "qcow2", "-o", options, image].map(str::to_owned);
        answers.push(runner.img(tool, &words)?);
    }
    let codes = [answers[0].code, answers[1].code];
    ensure!(
        codes[0] == codes[1],
        "one tool amends and the other does not: {answers:?}"
    );
    Ok(())
}

fn command_words(commands: &[String]) -> Vec<String> {
    commands
        .iter()
        .flat_map(|command| ["-c".to_owned(), command.clone()])
        .collect()
}

fn create(runner: &mut Runner, scenario: &Scenario) -> Result<()> {
    for backing in &scenario.shape.chain {
        create_backing(runner, backing)?;
    }
    let size = scenario.shape.size_bytes.to_string();
    for (image, tool) in IMAGES.into_iter().zip(scenario.creators) {
        if image == IMAGES[1] && scenario.shape.can_copy() {
            runner.copy_file(IMAGES[0], IMAGES[1])?;
            continue;
        }
        let options = scenario.shape.options(image);
        let mut words = vec!["create".to_owned()];
        words.extend(access::objects(&scenario.shape));
        words.extend(["-q", "-f", scenario.shape.format()].map(str::to_owned));
        if !options.is_empty() {
            words.extend(["-o".to_owned(), options]);
        }
        words.extend([image, &size].map(str::to_owned));
        runner.img_done(tool, &words).context("create")?;
    }
    Ok(())
}

fn create_backing(runner: &mut Runner, backing: &Backing) -> Result<()> {
    let mut words = vec!["create", "-q", "-f", backing.format];
    if !backing.options.is_empty() {
        words.extend(["-o", &backing.options]);
    }
    let size = backing.size_bytes.to_string();
    words.extend([backing.name.as_str(), &size]);
    let words: Vec<String> = words.into_iter().map(str::to_owned).collect();
    runner.img_done(Tool::Qemu, &words)?;
    let mut words = command_words(&backing.commands);
    if words.is_empty() {
        return Ok(());
    }
    words.extend(["-f", backing.format, &backing.name].map(str::to_owned));
    let answer = runner.io(Tool::Qemu, &words)?;
    // A compressed write to a cluster that has data already fails, and may.
    ensure!(
        answer.errors.is_empty(),
        "qemu-io on a backing file: {}",
        answer.errors
    );
    Ok(())
}

fn prepare(runner: &mut Runner, scenario: &Scenario) -> Result<()> {
    if scenario.preparation.is_empty() {
        return Ok(());
    }
    for (image, tool) in IMAGES.into_iter().zip([scenario.preparer, Tool::Qemu]) {
        let mut words = command_words(&scenario.preparation);
        words.extend(["-f", scenario.shape.format(), image].map(str::to_owned));
        let answer = runner.io(tool, &words)?;
        ensure!(
            answer.code == 0 && answer.output.is_empty() && answer.errors.is_empty(),
            "{tool:?} writes {image} compressed: {answer:?}"
        );
    }
    Ok(())
}
