//! Images made by the real qemu-img 10, of every kind, must look to `vellum` as
//! they look to QEMU: the same bytes, info, map and check. `tests/golden` is
//! made by `cargo xtask golden`; QEMU itself is not needed to run this.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use sha2::{Digest, Sha256};
use tempfile::TempDir;

/// One image of the manifest, unpacked.
struct Image {
    record: Value,
    folder: TempDir,
}

impl Image {
    fn name(&self) -> &str {
        self.record["image"].as_str().expect("an image has a name")
    }

    /// QEMU could not open it, or not read all of it.
    fn is_unreadable(&self) -> bool {
        self.record["sha256"].is_null()
    }

    fn vellum(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_vellum"))
            .args(arguments)
            .current_dir(&self.folder)
            .output()
            .expect("vellum starts")
    }

    fn vellum_json(&self, verb: &str) -> (Option<i32>, Value) {
        let output = self.vellum(&[verb, "--output=json", self.name()]);
        let json = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        (output.status.code(), json)
    }
}

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden")
}

fn images() -> impl Iterator<Item = Image> {
    let text = std::fs::read(golden().join("manifest.json")).expect("the manifest is there");
    let records: Vec<Value> = serde_json::from_slice(&text).expect("the manifest is JSON");
    assert!(records.len() > 50, "the manifest lists every kind of image");
    records.into_iter().map(|record| {
        let folder = tempfile::tempdir().expect("a folder can be made");
        for file in record["files"].as_array().expect("an image has files") {
            unpack(file.as_str().expect("a file has a name"), folder.path());
        }
        Image { record, folder }
    })
}

fn unpack(file: &str, folder: &Path) {
    let packed = std::fs::File::open(golden().join(format!("{file}.zst"))).expect(file);
    let content = zstd::decode_all(packed).expect(file);
    write_with_holes(&folder.join(file), &content).expect(file);
}

/// Zero blocks become holes, as they were when QEMU was asked: what a map tells of
/// a cluster depends on holes in the file below it.
fn write_with_holes(path: &Path, content: &[u8]) -> std::io::Result<()> {
    const HOLE_BYTES: usize = 4096;
    let file = std::fs::File::create(path)?;
    for (number, block) in (0_u64..).zip(content.chunks(HOLE_BYTES)) {
        if block.iter().any(|&byte| byte != 0) {
            file.write_all_at(block, number * HOLE_BYTES as u64)?;
        }
    }
    file.set_len(content.len() as u64)
}

/// Looks at every image and reports all that differ, not only the first.
fn all_agree(disagreement: impl Fn(&Image) -> Option<String>) {
    let differences: Vec<String> = images()
        .filter_map(|image| disagreement(&image).map(|text| format!("{}: {text}", image.name())))
        .collect();
    assert!(differences.is_empty(), "{}", differences.join("\n"));
}

fn difference(ours: &Value, theirs: &Value) -> Option<String> {
    (ours != theirs).then(|| format!("\n  vellum:   {ours}\n  qemu-img: {theirs}"))
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

#[test]
fn content_agrees() {
    all_agree(|image| {
        let arguments = [
            "convert",
            "-f",
            "qcow2",
            "-O",
            "raw",
            image.name(),
            "content",
        ];
        let output = image.vellum(&arguments);
        if image.is_unreadable() {
            let refused = output.status.code() == Some(1) && !output.stderr.is_empty();
            return (!refused).then(|| format!("QEMU refuses it, vellum ends with {output:?}"));
        }
        if !output.status.success() {
            return Some(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let content = std::fs::read(image.folder.path().join("content")).expect("it was written");
        let sum: String = Sha256::digest(content)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        (image.record["sha256"] != *sum).then(|| "other bytes".to_owned())
    });
}

#[test]
fn info_agrees() {
    all_agree(|image| {
        let (_, mut ours) = image.vellum_json("info");
        forget_disk_usage(&mut ours);
        difference(&ours, &image.record["info"])
    });
}

#[test]
fn map_agrees() {
    all_agree(|image| {
        let (_, ours) = image.vellum_json("map");
        difference(&ours, &image.record["map"])
    });
}

#[test]
fn check_agrees() {
    all_agree(|image| {
        let (exit, ours) = image.vellum_json("check");
        let exits = (exit != image.record["check_exit"].as_i64().map(|code| code as i32))
            .then(|| format!("exit {exit:?} instead of {}", image.record["check_exit"]));
        exits.or_else(|| difference(&ours, &image.record["check"]))
    });
}
