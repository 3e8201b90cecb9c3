//! `cargo xtask golden`: makes `tests/golden`, small images of every kind by the
//! real qemu-img, with what QEMU's own tools say of each.
//!
//! They pin down compatibility where QEMU is not installed, and where a newer
//! QEMU would write something else.

mod kinds;

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::checksum;
use crate::workspace::Workspace;
use crate::{process, setup};
use kinds::Kind;

/// zstd's level: the images are packed once and unpacked often.
const PACK_LEVEL: i32 = 19;
/// The smallest hole that file systems make.
const HOLE_BYTES: usize = 4096;
/// All of it stays in the repository for good.
const TOTAL_MAX_BYTES: u64 = 1 << 20;

/// The task.
pub fn run(mut arguments: lexopt::Parser) -> Result<()> {
    crate::no_arguments(&mut arguments)?;
    setup::ensure()?;
    let workspace = Workspace::locate()?;
    let golden = workspace.root.join("tests/golden");
    if golden.exists() {
        std::fs::remove_dir_all(&golden)?;
    }
    std::fs::create_dir_all(&golden)?;

    let mut records = Vec::new();
    for kind in kinds::all() {
        let record = make(&kind, &golden).with_context(|| format!("image {}", kind.name))?;
        records.push(serde_json::to_string(&record)?);
    }
    let manifest = format!("[\n{}\n]\n", records.join(",\n"));
    std::fs::write(golden.join("manifest.json"), manifest)?;

    let total = total_bytes(&golden)?;
    println!("{} images, {} KiB", records.len(), total / 1024);
    ensure!(
        total <= TOTAL_MAX_BYTES,
        "that is too much for the repository"
    );
    Ok(())
}

/// Makes one image, packs its files, and returns the manifest's record of it.
fn make(kind: &Kind, golden: &Path) -> Result<Value> {
    let folder = tempfile::tempdir()?;
    let script = format!("{}{}", kinds::PRELUDE, kind.script);
    process::output(
        Command::new("sh")
            .args(["-c", &script])
            .current_dir(&folder),
    )?;
    let _ = std::fs::remove_file(folder.path().join("source"));
    for path in files_in(folder.path())? {
        punch_holes(&path)?;
    }
    let image = format!("{}.qcow2", kind.name);
    let expected = Expected::ask(folder.path(), &image)?;

    let mut files = Vec::new();
    for path in files_in(folder.path())? {
        let name = path
            .file_name()
            .context("a file has a name")?
            .to_string_lossy();
        pack(&path, &golden.join(format!("{name}.zst")))?;
        files.push(name.into_owned());
    }
    Ok(json!({
        "image": image,
        "files": files,
        "sha256": expected.sha256,
        "info": expected.info,
        "map": expected.map,
        "check_exit": expected.check_exit,
        "check": expected.check,
    }))
}

/// What QEMU's tools say. `null` where they refuse.
struct Expected {
    sha256: Option<String>,
    info: Value,
    map: Value,
    check_exit: Option<i32>,
    check: Value,
}

impl Expected {
    fn ask(folder: &Path, image: &str) -> Result<Self> {
        let (_, mut info) = qemu_img_json(folder, "info", image)?;
        forget_disk_usage(&mut info);
        let (_, map) = qemu_img_json(folder, "map", image)?;
        let (check_exit, check) = qemu_img_json(folder, "check", image)?;
        Ok(Self {
            sha256: content_sha256(folder, image)?,
            info,
            map,
            check_exit,
            check,
        })
    }
}

fn qemu_img_json(folder: &Path, verb: &str, image: &str) -> Result<(Option<i32>, Value)> {
    let output = process::capture(process::program("qemu-img")?.current_dir(folder).args([
        verb,
        "--output=json",
        image,
    ]))?;
    let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
    Ok((output.status.code(), json))
}

/// Disk usage depends on the file system that the image lies on.
fn forget_disk_usage(info: &mut Value) {
    match info {
        Value::Object(fields) => {
            fields.shift_remove("actual-size");
            fields.values_mut().for_each(forget_disk_usage);
        }
        Value::Array(items) => items.iter_mut().for_each(forget_disk_usage),
        _ => {}
    }
}

/// The sum of the guest's bytes; `None` when QEMU cannot read them all.
fn content_sha256(folder: &Path, image: &str) -> Result<Option<String>> {
    let output = process::capture(
        process::program("qemu-img")?
            .current_dir(folder)
            .args(["convert", "-f", "qcow2", "-O", "raw", image, "content"]),
    )?;
    if !output.status.success() {
        let _ = std::fs::remove_file(folder.join("content"));
        return Ok(None);
    }
    let path = folder.join("content");
    let sum = checksum::sha256(&path)?;
    std::fs::remove_file(path)?;
    Ok(Some(sum))
}

/// Rewrites a file with a hole for every block of zeroes, as those who unpack it
/// do: what qemu-img tells of a cluster depends on holes in the file below it.
fn punch_holes(path: &Path) -> Result<()> {
    let content = std::fs::read(path)?;
    let file = std::fs::File::create(path)?;
    for (number, block) in (0_u64..).zip(content.chunks(HOLE_BYTES)) {
        if block.iter().any(|&byte| byte != 0) {
            file.write_all_at(block, number * HOLE_BYTES as u64)?;
        }
    }
    Ok(file.set_len(content.len() as u64)?)
}

fn pack(path: &Path, to: &Path) -> Result<()> {
    let packed = zstd::bulk::compress(&std::fs::read(path)?, PACK_LEVEL)?;
    std::fs::write(to, packed)?;
    Ok(())
}

fn files_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder)?.collect::<std::io::Result<Vec<_>>>()?;
    let mut paths: Vec<PathBuf> = entries.iter().map(std::fs::DirEntry::path).collect();
    paths.sort();
    Ok(paths)
}

fn total_bytes(folder: &Path) -> Result<u64> {
    let files = files_in(folder)?;
    files
        .iter()
        .map(|file| Ok(file.metadata()?.len()))
        .sum::<Result<u64>>()
}
