//! Whole images that are written into a place: conversions, commits, rebases.

use anyhow::{Context, Result, ensure};

use super::super::runner::Answer;
use super::super::scenario::Tool;
use super::load::Batch;
use super::play::{BASE, Game, words};
use super::scenario::{Convert, Scenario};
use super::verdict::{refusal, verdict};
use crate::fixed_length::Place;

/// The source of a conversion.
pub const SOURCE: &str = "source.qcow2";
/// An image that stands on another one.
pub const OVERLAY: &str = "over.qcow2";
/// Overlays, each on the image in one of the places.
pub const OVERLAYS: [&str; 2] = ["a.over", "b.over"];

/// Converts a file into both places.
pub fn convert(game: &mut Game<'_>, convert: &Convert) -> Result<()> {
    make_source(game, convert)?;
    let with_bitmaps = !convert.bitmaps.is_empty();
    let measured = game.measure(&["-f", "qcow2", SOURCE])?;
    let len_bytes = measured.place_bytes(game.scenario.room, with_bitmaps);
    let places = match convert.into_existing {
        true => game.create(len_bytes, &[])?,
        false => Some([game.open(0, len_bytes)?, game.open(1, len_bytes)?]),
    };
    let Some(places) = places else {
        return Ok(());
    };
    let mut answers = Vec::new();
    for (place, tool) in places.iter().zip(game.setting.tools) {
        let all = convert_words(game.scenario, convert, place);
        answers.push(game.runner.img(tool, &all)?);
    }
    if !verdict(game, &answers)? {
        return Ok(());
    }
    game.compare(&places)?;
    let mut all = words(&["compare", "-f", "qcow2", "-F", "qcow2", SOURCE]);
    all.push(places[0].address.name());
    let answer = game.runner.img(Tool::Qemu, &all)?;
    ensure!(answer.code == 0, "the target differs: {answer:?}");
    compare_bitmaps(game, convert, &places)
}

fn make_source(game: &mut Game<'_>, convert: &Convert) -> Result<()> {
    let nothing = Batch {
        groups: Vec::new(),
        ..convert.source.clone()
    };
    game.fill_file(SOURCE, convert.source_bits, &nothing)?;
    for bitmap in &convert.bitmaps {
        // The name of the bitmap stands behind that of the image.
        let (name, options) = bitmap.split_last().context("a bitmap has a name")?;
        let mut all = words(&["bitmap", "-f", "qcow2"]);
        all.extend_from_slice(options);
        all.extend([SOURCE.to_owned(), name.clone()]);
        game.runner.img_done(Tool::Qemu, &all)?;
    }
    game.write_file(SOURCE, &convert.source)
}

fn convert_words(scenario: &Scenario, convert: &Convert, place: &Place) -> Vec<String> {
    let mut all = words(&["convert", "-f", "qcow2", "-O", "qcow2"]);
    if convert.into_existing {
        all.push("-n".into());
    } else {
        all.extend(["-o".to_owned(), scenario.options.value()]);
    }
    let without = |word: &&String| *word != "--bitmaps" || !convert.bitmaps.is_empty();
    all.extend(convert.words.iter().filter(without).cloned());
    all.extend([SOURCE.to_owned(), place.address.name()]);
    all
}

fn compare_bitmaps(game: &mut Game<'_>, convert: &Convert, places: &[Place; 2]) -> Result<()> {
    for name in convert.bitmaps.iter().filter_map(|bitmap| bitmap.last()) {
        let mut answers: Vec<Answer> = Vec::new();
        for place in places {
            let image = place.address.name();
            answers.push(game.runner.dirty(Tool::Qemu, &image, name)?);
        }
        ensure!(
            answers[0] == answers[1],
            "{name} differs: {} and {}",
            answers[0].output,
            answers[1].output
        );
    }
    Ok(())
}

/// An image and its overlay, both in files.
pub fn make_chain(game: &mut Game<'_>, base: &Batch, overlay: &Batch) -> Result<()> {
    let options = game.scenario.options.value();
    let size = game.scenario.size_bytes.to_string();
    let path = game.runner.folder().join(BASE).display().to_string();
    let create = ["create", "-q", "-f", "qcow2", "-o", &options];
    let below = words(&[&create[..], &[BASE, &size]].concat());
    let above = words(&[&create[..], &["-b", &path, "-F", "qcow2", OVERLAY, &size]].concat());
    game.runner.img_done(Tool::Qemu, &below)?;
    game.write_file(BASE, base)?;
    game.runner.img_done(Tool::Qemu, &above)?;
    game.write_file(OVERLAY, overlay)
}

/// Commits an overlay into an image that is in the place.
pub fn commit(game: &mut Game<'_>, base: &Batch, overlay: &Batch, keeps: bool) -> Result<()> {
    make_chain(game, base, overlay)?;
    let measured = game.measure(&["-f", "qcow2", OVERLAY])?;
    let len_bytes = measured.place_bytes(game.scenario.room, false);
    let places = game.open_copies(BASE, len_bytes)?;
    let mut answers = Vec::new();
    for ((place, over), tool) in places.iter().zip(OVERLAYS).zip(game.setting.tools) {
        game.runner.copy_file(OVERLAY, over)?;
        let name = place.address.name();
        let rebase = [
            "rebase", "-u", "-f", "qcow2", "-b", &name, "-F", "qcow2", over,
        ];
        game.runner.img_done(Tool::Qemu, &words(&rebase))?;
        let mut all = words(&["commit", "-f", "qcow2"]);
        all.extend(keeps.then(|| "-d".to_owned()));
        if tool == Tool::Vellum {
            // Under its own name it writes only to what is named.
            all.extend(words(&["-b", &name]));
        }
        all.push(over.to_owned());
        answers.push(game.runner.img(tool, &all)?);
    }
    conclude(game, &places, &answers)
}

/// Rebases an image that is in the place.
pub fn rebase(game: &mut Game<'_>, base: &Batch, overlay: &Batch, alone: bool) -> Result<()> {
    make_chain(game, base, overlay)?;
    let size = game.scenario.size_bytes.to_string();
    let other = game.runner.folder().join("other.qcow2");
    let other = other.display().to_string();
    if !alone {
        let create = words(&["create", "-q", "-f", "qcow2", "other.qcow2", &size]);
        game.runner.img_done(Tool::Qemu, &create)?;
    }
    let measured = game.measure(&["--size", &size])?;
    let len_bytes = measured.place_bytes(game.scenario.room, false);
    let places = game.open_copies(OVERLAY, len_bytes)?;
    let mut answers = Vec::new();
    for (place, tool) in places.iter().zip(game.setting.tools) {
        let mut all = match alone {
            true => words(&["rebase", "-b", ""]),
            false => words(&["rebase", "-b", &other, "-F", "qcow2"]),
        };
        all.extend(game.scenario.options.image(&place.address));
        answers.push(game.runner.img(tool, &all)?);
    }
    conclude(game, &places, &answers)
}

/// Judges what came of it, and the images.
pub fn conclude(game: &mut Game<'_>, places: &[Place; 2], answers: &[Answer]) -> Result<()> {
    if verdict(game, answers)? {
        return game.compare(places);
    }
    if refusal(&answers[0]).is_none() {
        return Ok(());
    }
    game.check_refused(&places[0])
}
