//! Dirty bitmaps in a scenario: made on both images, changed between the batches, and compared.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::compare::IMAGES;
use super::runner::{Answer, Runner};
use super::scenario::{Scenario, Tool};
use super::shape::Shape;
use crate::random::Random;

/// The bitmaps that a command may name; the first two are there from the start.
const NAMES: [&str; 3] = ["one", "two", "three"];

/// Commands that make bitmaps; none in most scenarios.
pub fn made_first(random: &mut Random, shape: &Shape) -> Vec<Vec<String>> {
    if shape.version < 3 || shape.encrypted || !random.chance(30) {
        return Vec::new();
    }
    let named = &NAMES[..random.between(1, 2) as usize];
    named.iter().map(|name| addition(random, name)).collect()
}

/// Commands that change bitmaps, where there are some.
pub fn changes(random: &mut Random) -> Vec<Vec<String>> {
    let count = random.below(3);
    (0..count).map(|_| change(random)).collect()
}

fn addition(random: &mut Random, name: &str) -> Vec<String> {
    let mut words = vec!["--add".to_owned()];
    if random.chance(70) {
        let bits = random.between(9, 21);
        words.extend(["-g".to_owned(), (1_u64 << bits).to_string()]);
    }
    if random.chance(20) {
        words.push("--disable".to_owned());
    }
    words.push(name.to_owned());
    words
}

fn change(random: &mut Random) -> Vec<String> {
    let name = random.pick(&NAMES);
    let words = match random.below(7) {
        0 => return addition(random, name),
        1 => vec!["--remove", name],
        2 => vec!["--clear", name],
        3 => vec!["--disable", name],
        4 => vec!["--merge", random.pick(&NAMES), name],
        _ => vec!["--enable", name],
    };
    words.into_iter().map(str::to_owned).collect()
}

/// Does the same to the bitmaps of both images; where one tool refuses, so does the
/// other.
pub fn apply(runner: &mut Runner, tools: [Tool; 2], commands: &[Vec<String>]) -> Result<()> {
    for command in commands {
        let mut answers = Vec::new();
        for (image, tool) in IMAGES.into_iter().zip(tools) {
            let mut words = vec!["bitmap".to_owned()];
            words.extend_from_slice(command);
            // The name of the bitmap comes last.
            words.insert(words.len() - 1, image.to_owned());
            answers.push(without_numbers(runner.img(tool, &words)?));
        }
        ensure!(
            answers[0] == answers[1],
            "the tools answer differently to {command:?}:\nvellum: {:?}\nqemu: {:?}",
            answers[0],
            answers[1]
        );
    }
    Ok(())
}

/// Nodes have numbers in QEMU's messages.
fn without_numbers(mut answer: Answer) -> Answer {
    answer.errors.retain(|letter| !letter.is_ascii_digit());
    answer
}

/// Both tools list the same bitmaps of both images, and see the same in them. What
/// growing adds is dirty in Vellum's alone.
pub fn compare(runner: &mut Runner, scenario: &Scenario) -> Result<()> {
    if scenario.bitmaps.is_empty() {
        return Ok(());
    }
    let resized = scenario.batches.iter().any(|batch| batch.resize.is_some());
    let mut lists = Vec::new();
    let mut seen = Vec::new();
    for image in IMAGES {
        let [ours, theirs] = [
            list(runner, Tool::Vellum, image)?,
            list(runner, Tool::Qemu, image)?,
        ];
        ensure!(
            ours == theirs,
            "the bitmaps of {image} are listed differently:\nvellum: {ours}\nqemu: {theirs}"
        );
        let names = theirs.as_array().into_iter().flatten();
        for name in names.filter_map(|bitmap| bitmap["name"].as_str()) {
            let ours = runner.dirty(Tool::Vellum, image, name)?;
            let theirs = runner.dirty(Tool::Qemu, image, name)?;
            ensure!(
                ours == theirs,
                "bitmap {name} of {image} is shown differently:\nvellum: {ours:?}\nqemu: {theirs:?}"
            );
            seen.push(theirs);
        }
        lists.push(theirs);
    }
    ensure!(
        lists[0] == lists[1],
        "the images have other bitmaps: {} and {}",
        lists[0],
        lists[1]
    );
    let half = seen.len() / 2;
    let (first, second) = seen.split_at(half);
    ensure!(
        resized || first == second,
        "the bitmaps {} hold different things:\n{first:?}\n{second:?}",
        lists[0]
    );
    Ok(())
}

fn list(runner: &mut Runner, tool: Tool, image: &str) -> Result<Value> {
    let words = ["info", "-f", "qcow2", "--output=json", image].map(str::to_owned);
    let answer = runner.img(tool, &words)?;
    let info: Value = serde_json::from_str(&answer.output)
        .with_context(|| format!("info of {image}: {answer:?}"))?;
    Ok(info["format-specific"]["data"]["bitmaps"].clone())
}
