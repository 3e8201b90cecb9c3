//! What a changed file is, in lines that can be compared.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::answer::output_lines;

/// Describes both versions of a file, which lie in two folders.
pub fn describe(name: &str, folders: &[PathBuf; 2]) -> [Vec<String>; 2] {
    let paths = &[folders[0].join(name), folders[1].join(name)];
    let kinds = [kind(&paths[0]), kind(&paths[1])];
    if kinds == [Kind::Qcow2; 2] && same_bytes(paths) {
        return [Vec::new(), Vec::new()];
    }
    let mut lines = [0, 1].map(|which| match kinds[which] {
        Kind::Qcow2 => qcow2(name, &folders[which]),
        Kind::Raw => raw(name, &paths[which]),
        Kind::Luks => vec![format!(
            "file {name}: luks, {} bytes",
            length(&paths[which])
        )],
        Kind::Other(what) => vec![format!("file {name}: {what}")],
    });
    if kinds == [Kind::Qcow2; 2] && lines[0] == lines[1] {
        let content = content(name, paths, &lines[0]);
        lines[1].extend(content);
    }
    lines
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Qcow2,
    Luks,
    Raw,
    Other(&'static str),
}

fn kind(path: &Path) -> Kind {
    let Ok(metadata) = std::fs::symlink_metadata(path) else {
        return Kind::Other("missing");
    };
    if metadata.is_dir() {
        return Kind::Other("a folder");
    }
    if !metadata.is_file() {
        return Kind::Other("something special");
    }
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read(&mut magic));
    match read {
        Ok(_) if magic == *b"QFI\xfb" => Kind::Qcow2,
        Ok(_) if magic == *b"LUKS" => Kind::Luks,
        Ok(_) => Kind::Raw,
        Err(_) => Kind::Other("unreadable"),
    }
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |metadata| metadata.len())
}

/// Whether all of `bytes` are there on the host, or some, or none.
fn allocation(path: &Path, bytes: u64) -> &'static str {
    let allocated = std::fs::metadata(path).map_or(0, |metadata| metadata.blocks() * 512);
    match allocated {
        0 => "nothing",
        _ if allocated >= bytes => "all",
        _ => "some",
    }
}

/// Whether two files are the same byte by byte, which ours often are.
fn same_bytes(paths: &[PathBuf; 2]) -> bool {
    let bytes = length(&paths[0]);
    let sum = |path: &Path| File::open(path).map(|file| checksum(&file, bytes)).ok();
    bytes == length(&paths[1])
        && allocation(&paths[0], bytes) == allocation(&paths[1], bytes)
        && sum(&paths[0]) == sum(&paths[1])
}

const PIECE_BYTES: usize = 64 << 10;

/// Length, allocation and a sum of the content.
fn raw(name: &str, path: &Path) -> Vec<String> {
    let bytes = length(path);
    let sum = File::open(path).map_or(0, |file| checksum(&file, bytes));
    let allocated = allocation(path, bytes);
    vec![format!(
        "file {name}: raw, {bytes} bytes, {allocated} allocated, content {sum:016x}"
    )]
}

/// FNV-1a over every piece that is not all zeroes, and its place.
fn checksum(file: &File, len_bytes: u64) -> u64 {
    const PRIME: u64 = 0x0100_0000_01b3;
    let mut sum = 0xcbf2_9ce4_8422_2325_u64;
    let mut add = |byte: u8| sum = (sum ^ u64::from(byte)).wrapping_mul(PRIME);
    let mut piece = vec![0; PIECE_BYTES];
    let mut at = 0;
    while at < len_bytes {
        // Holes need no reading.
        let data = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)).unwrap_or(len_bytes);
        at = data / PIECE_BYTES as u64 * PIECE_BYTES as u64;
        if data >= len_bytes {
            break;
        }
        let read = file.read_at(&mut piece, at).unwrap_or(0);
        if piece[..read].iter().any(|byte| *byte != 0) {
            at.to_le_bytes().into_iter().for_each(&mut add);
            piece[..read].iter().copied().for_each(&mut add);
        }
        at += PIECE_BYTES as u64;
    }
    sum
}

/// What the real tool says of an image: its header, its map, its health.
fn qcow2(name: &str, folder: &Path) -> Vec<String> {
    let path = folder.join(name);
    let folder = folder.display().to_string();
    let mut lines = vec![format!("file {name}: qcow2")];
    let mut tell = |arguments: &[&str], keep: fn(&str) -> Option<String>| {
        let output = Command::new("qemu-img")
            .args(arguments)
            .args(["-f", "qcow2", "-U"])
            .arg(&path)
            .env("LC_ALL", "C")
            .output()
            .expect("qemu-img; run `cargo xtask setup`");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let told = output_lines("out", keep(&text).unwrap_or(text).as_bytes(), &folder);
        let errors = output_lines("err", &output.stderr, &folder);
        let told = told.iter().chain(&errors);
        lines.extend(told.map(|line| format!("file {name}: {line}")));
    };
    tell(&["info", "--output=json"], |_| None);
    tell(&["map", "--output=json"], |text| Some(map(text)));
    tell(&["check"], |_| None);
    lines
}

/// A map without what depends on where an allocator puts things: host offsets, and
/// whether written data lies in a hole of the host's file.
fn map(text: &str) -> String {
    let entries = serde_json::from_str(text).unwrap_or_default();
    let entries: Vec<serde_json::Map<String, Value>> = entries;
    let mut lines: Vec<(u64, String)> = Vec::new();
    for mut entry in entries {
        let is_data = entry.get("data") == Some(&Value::Bool(true));
        let length = entry.get("length").and_then(Value::as_u64);
        entry.retain(|key, _| {
            let is_place = matches!(key.as_str(), "start" | "length" | "offset");
            !(is_place || is_data && key == "zero")
        });
        let what = Value::Object(entry).to_string();
        match lines.last_mut() {
            Some((sum, last)) if *last == what => *sum += length.unwrap_or(0),
            _ => lines.push((length.unwrap_or(0), what)),
        }
    }
    let lines = lines.iter();
    lines
        .map(|(length, what)| format!("map {length} {what}\n"))
        .collect()
}

/// Whether both images show the guest the same bytes; nothing if they do.
fn content(name: &str, paths: &[PathBuf; 2], told: &[String]) -> Option<String> {
    // What holds nothing, or cannot be opened without more words, has been compared by
    // its header and map.
    let closed = ["\"encrypted\": true", ": err: "];
    let holds_data = told.iter().any(|line| line.contains("\"data\":true"));
    if !holds_data
        || told
            .iter()
            .any(|line| closed.iter().any(|word| line.contains(word)))
    {
        return None;
    }
    let output = Command::new("qemu-img")
        .args(["compare", "-f", "qcow2", "-F", "qcow2"])
        .args(paths)
        .output()
        .expect("qemu-img");
    match output.status.success() {
        true => None,
        false => Some(format!(
            "file {name}: content: {}{}",
            String::from_utf8_lossy(&output.stdout).trim(),
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}
