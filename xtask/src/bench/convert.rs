//! `cargo xtask bench convert`: how long `convert` takes, from and to every other format; of those that are
//! only read, from images that are made here.
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

use super::options::Options;
use super::report::median;
use super::{MEMORY_FOLDER, made};
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
    (
        "vmdk twoGbMaxExtentSparse",
        &["-O", "vmdk", "-o", "subformat=twoGbMaxExtentSparse"],
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
    /// By its names for our program and for QEMU's.
    sources: [String; 2],
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
                let seconds =
                    timed(program, row, &row.sources[side]).with_context(|| row.title.clone())?;
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

/// Rows for each format: in either direction where it is written.
fn rows(source: &Path, folder: &Path, options: &Options) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let target = folder.join("target");
    let row = |title: String, words: &[&str], sources: [String; 2]| Row {
        title,
        words: words.iter().map(|word| (*word).to_owned()).collect(),
        sources,
        target: target.clone(),
        seconds: [Vec::new(), Vec::new()],
    };
    let same = |path: &Path| [0, 1].map(|_| path.display().to_string());
    for (name, words) in TARGETS {
        let words = [&["-f", "raw"], *words].concat();
        let (to, from) = (format!("raw to {name}"), format!("{name} to raw"));
        let image = folder.join(name.replace(' ', "-"));
        if options.wants(&from) {
            let mut convert = process::program("qemu-img")?;
            let convert = convert.arg("convert").args(&words).arg(source).arg(&image);
            process::output(convert)?;
            let format = name.split(' ').next().unwrap_or(name);
            rows.push(row(from, &["-f", format, "-O", "raw"], same(&image)));
        }
        if options.wants(&to) {
            rows.push(row(to, &words, same(source)));
        }
    }
    for (name, make) in made::FORMATS {
        let from = format!("{name} to raw");
        if options.wants(&from) {
            let image = folder.join(name);
            make(source, &image)?;
            rows.push(row(from, &["-f", name, "-O", "raw"], same(&image)));
        }
    }
    let from = "ova to raw".to_owned();
    if options.wants(&from) {
        rows.push(row(from, &["-O", "raw"], made::package(source, folder)?));
    }
    Ok(rows)
}

/// How long one turn takes, in seconds. What it writes is removed, and not waited for.
fn timed(mut program: Command, row: &Row, source: &str) -> Result<f64> {
    let convert = program.arg("convert").args(&row.words);
    let convert = convert.arg(source).arg(&row.target);
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
