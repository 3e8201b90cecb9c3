//! `cargo xtask bench convert`: how long `convert` takes, from and to every other format.
//!
//! Ours and `qemu-img`, turn by turn, in memory: on a disk the writeback of one turn falls on the
//! next one. Half of the source are random bytes, a quarter is text that compresses to a third or
//! so, a quarter holes.

use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result};

use super::MEMORY_FOLDER;
use super::options::Options;
use super::report::median;
use crate::process;
use crate::random::Random;
use crate::setup;
use crate::workspace::Workspace;

/// Formats that are written, with the options of `convert`.
const TARGETS: &[(&str, &[&str])] = &[
    ("vmdk", &["-O", "vmdk"]),
    (
        "vmdk streamOptimized",
        &["-O", "vmdk", "-o", "subformat=streamOptimized"],
    ),
    (
        "vmdk monolithicFlat",
        &["-O", "vmdk", "-o", "subformat=monolithicFlat"],
    ),
    ("vhdx", &["-O", "vhdx"]),
    ("vhdx fixed", &["-O", "vhdx", "-o", "subformat=fixed"]),
    ("vpc", &["-O", "vpc"]),
    ("vpc fixed", &["-O", "vpc", "-o", "subformat=fixed"]),
    ("vdi", &["-O", "vdi"]),
    ("vdi static", &["-O", "vdi", "-o", "static=on"]),
    ("parallels", &["-O", "parallels"]),
    ("qed", &["-O", "qed"]),
    ("qcow", &["-O", "qcow"]),
];

const CHUNK_BYTES: u64 = 1 << 20;

/// What is timed.
struct Row {
    title: String,
    words: Vec<String>,
    source: PathBuf,
    target: PathBuf,
    /// Seconds, of ours and of QEMU's.
    seconds: [Vec<f64>; 2],
}

/// The task.
pub fn run(options: &Options) -> Result<()> {
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let vellum = workspace.vellum_or(options.vellum.as_deref())?;
    let folder = tempfile::tempdir_in(MEMORY_FOLDER)?;
    let source = folder.path().join("source");
    write_source(&source, options.disk_bytes / 2)?;
    let mut rows = rows(&source, folder.path(), options)?;
    for round in 0..options.rounds {
        for row in &mut rows {
            let mut order = [0, 1];
            if round % 2 == 1 {
                order.reverse();
            }
            for side in order {
                let program = match side {
                    0 => {
                        let mut ours = Command::new(&vellum);
                        ours.arg("img");
                        ours
                    }
                    _ => process::program("qemu-img")?,
                };
                let seconds = timed(program, row).with_context(|| row.title.clone())?;
                row.seconds[side].push(seconds);
            }
            let last = row.seconds.each_ref().map(|of| of.last().copied());
            eprintln!("round {}: {}: {last:?}", round + 1, row.title);
        }
    }
    println!("| convert | vellum, s | qemu-img, s | of QEMU's speed |");
    println!("| --- | ---: | ---: | ---: |");
    for row in &rows {
        let [ours, theirs] = row.seconds.clone().map(median);
        let (title, ratio) = (&row.title, theirs / ours);
        println!("| {title} | {ours:.2} | {theirs:.2} | {ratio:.2} |");
    }
    Ok(())
}

/// A row for each format, in either direction.
fn rows(source: &Path, folder: &Path, options: &Options) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let target = folder.join("target");
    for (name, words) in TARGETS {
        let row = |title: String, words: Vec<String>, source: PathBuf| Row {
            title,
            words,
            source,
            target: target.clone(),
            seconds: [Vec::new(), Vec::new()],
        };
        let words = words.iter().map(|word| (*word).to_owned());
        let words: Vec<String> = ["-f", "raw"]
            .map(str::to_owned)
            .into_iter()
            .chain(words)
            .collect();
        let (to, from) = (format!("raw to {name}"), format!("{name} to raw"));
        let image = folder.join(name.replace(' ', "-"));
        if options.wants(&from) {
            let mut convert = process::program("qemu-img")?;
            let convert = convert.arg("convert").args(&words).arg(source).arg(&image);
            process::output(convert)?;
            let format = name.split(' ').next().unwrap_or(name);
            let back = ["-f", format, "-O", "raw"].map(str::to_owned).into();
            rows.push(row(from, back, image));
        }
        if options.wants(&to) {
            rows.push(row(to, words, source.to_owned()));
        }
    }
    Ok(rows)
}

/// How long one turn takes, in seconds. What it writes is removed, and not waited for.
fn timed(mut program: Command, row: &Row) -> Result<f64> {
    let convert = program.arg("convert").args(&row.words);
    let convert = convert.arg(&row.source).arg(&row.target);
    let start = Instant::now();
    process::output(convert)?;
    let seconds = start.elapsed().as_secs_f64();
    let folder = row.target.parent().context("it lies in a folder")?;
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        // Extents have names of their own.
        if entry.file_name().to_string_lossy().starts_with("target") {
            std::fs::remove_file(entry.path())?;
        }
    }
    Ok(seconds)
}

fn write_source(path: &Path, disk_bytes: u64) -> Result<()> {
    let mut file = File::create(path)?;
    let mut random = Random::new(1);
    let mut bytes = vec![0; CHUNK_BYTES as usize];
    for chunk in 0..disk_bytes / CHUNK_BYTES {
        match chunk % 4 {
            0 | 1 => random.fill(&mut bytes),
            2 => {
                for word in bytes.chunks_exact_mut(8) {
                    let number = format!("{:7} ", random.below(100_000));
                    word.copy_from_slice(number.as_bytes());
                }
            }
            _ => {
                file.seek(SeekFrom::Current(CHUNK_BYTES as i64))?;
                continue;
            }
        }
        file.write_all(&bytes)?;
    }
    file.set_len(disk_bytes)?;
    file.sync_all()?;
    Ok(())
}
