//! Two images that should be alike: their content, their maps, their health.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::access;
use super::runner::Runner;
use super::scenario::Tool;
use super::shape::{DataFile, Shape};

/// The images by name; the first is the one that Vellum writes.
pub const IMAGES: [&str; 2] = ["a.qcow2", "b.qcow2"];

/// How many bytes of a host file are compared at once.
const CHUNK_BYTES: usize = 1 << 20;

/// One entry of `map --output=json`.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Extent {
    start: u64,
    length: u64,
    depth: u64,
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    offset: Option<u64>,
}

impl Extent {
    fn parse(value: &Value) -> Option<Extent> {
        let flag = |key: &str| value[key].as_bool();
        Some(Extent {
            start: value["start"].as_u64()?,
            length: value["length"].as_u64()?,
            depth: value["depth"].as_u64()?,
            present: flag("present")?,
            zero: flag("zero")?,
            data: flag("data")?,
            compressed: flag("compressed")?,
            offset: value["offset"].as_u64(),
        })
    }

    /// Without what depends on where an allocator puts things: the host offset,
    /// and whether written data happens to lie in a hole of the host file.
    fn essence(&self) -> Extent {
        Extent {
            offset: None,
            zero: self.zero && !self.data,
            ..self.clone()
        }
    }

    fn same_kind(&self, next: &Extent) -> bool {
        let mut moved = self.clone();
        (moved.start, moved.length) = (next.start, next.length);
        moved == *next
    }

    /// Where this image's own data lies, if it can be read there.
    fn host_range(&self) -> Option<(u64, u64)> {
        let offset = self.offset?;
        (self.data && self.depth == 0 && !self.compressed).then_some((offset, self.length))
    }
}

/// Compares everything about the two images; their maps only if these are to be alike.
pub fn compare(runner: &mut Runner, shape: &Shape, same_maps: bool) -> Result<()> {
    check_health(runner, shape)?;
    compare_content(runner, shape)?;
    if !same_maps {
        return Ok(());
    }
    let maps = compare_maps(runner, shape)?;
    compare_host_bytes(runner, shape, &maps)?;
    if shape.data_file == DataFile::ExternalRaw {
        compare_raw_files(runner, shape)?;
    }
    Ok(())
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

/// Both tools say of both images the same, and that nothing is wrong.
fn check_health(runner: &mut Runner, shape: &Shape) -> Result<()> {
    for image in IMAGES {
        let arguments = [words(&["check"]), access::image(shape, image)].concat();
        let theirs = runner.img(Tool::Qemu, &arguments)?;
        ensure!(
            theirs.code == 0,
            "qemu-img check of {image} ends with {}:\n{}{}",
            theirs.code,
            theirs.output,
            theirs.errors
        );
        let ours = runner.img(Tool::Vellum, &arguments)?;
        ensure!(
            ours == theirs,
            "the checks of {image} differ:\nqemu-img: {theirs:?}\nvellum: {ours:?}"
        );
    }
    Ok(())
}

fn compare_content(runner: &mut Runner, shape: &Shape) -> Result<()> {
    for tool in [Tool::Qemu, Tool::Vellum] {
        let arguments = [words(&["compare"]), access::two_images(shape, IMAGES)].concat();
        let answer = runner.img(tool, &arguments)?;
        ensure!(
            answer.code == 0 && answer.output == "Images are identical.\n",
            "the content differs, as {tool:?} reads it: {}{}",
            answer.output,
            answer.errors
        );
    }
    Ok(())
}

/// The tools agree on each image, and the images on everything but places.
fn compare_maps(runner: &mut Runner, shape: &Shape) -> Result<[Vec<Extent>; 2]> {
    let mut maps = Vec::new();
    for image in IMAGES {
        let arguments = [
            words(&["map", "--output=json"]),
            access::image(shape, image),
        ]
        .concat();
        let theirs = runner.img(Tool::Qemu, &arguments)?;
        let ours = runner.img(Tool::Vellum, &arguments)?;
        ensure!(
            theirs.code == 0,
            "qemu-img map of {image} fails: {}",
            theirs.errors
        );
        ensure!(
            ours == theirs,
            "the maps of {image} differ:\nqemu-img:\n{}vellum:\n{}{}",
            theirs.output,
            ours.output,
            ours.errors
        );
        maps.push(parse_map(&theirs.output).context("qemu-img's map is not as expected")?);
    }
    let [first, second] = [joined(&maps[0]), joined(&maps[1])];
    if first != second {
        bail!(
            "the images are mapped differently:\n{}",
            difference(&first, &second)
        );
    }
    let [first, second] = <[_; 2]>::try_from(maps).unwrap_or_default();
    Ok([first, second])
}

fn parse_map(text: &str) -> Option<Vec<Extent>> {
    let value: Value = serde_json::from_str(text).ok()?;
    value.as_array()?.iter().map(Extent::parse).collect()
}

/// Only the essence, with neighbours of one kind joined.
fn joined(map: &[Extent]) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::new();
    for extent in map.iter().map(Extent::essence) {
        match joined.last_mut() {
            Some(last) if last.same_kind(&extent) => last.length += extent.length,
            _ => joined.push(extent),
        }
    }
    joined
}

/// The first entries that differ.
fn difference(first: &[Extent], second: &[Extent]) -> String {
    let same = first.iter().zip(second).take_while(|(a, b)| a == b).count();
    let show = |map: &[Extent]| -> String {
        map.iter()
            .skip(same)
            .take(3)
            .map(|extent| format!("    {extent:?}\n"))
            .collect()
    };
    format!(
        "{}:\n{}{}:\n{}",
        IMAGES[0],
        show(first),
        IMAGES[1],
        show(second)
    )
}

/// Where both maps say that data lies, the same bytes lie.
fn compare_host_bytes(runner: &Runner, shape: &Shape, maps: &[Vec<Extent>; 2]) -> Result<()> {
    let suffix = match shape.data_file {
        DataFile::Inside => "",
        _ => ".data",
    };
    let open = |image: &str| File::open(runner.folder().join(format!("{image}{suffix}")));
    let files = [open(IMAGES[0])?, open(IMAGES[1])?];
    for left in &maps[0] {
        let Some((left_host, _)) = left.host_range() else {
            continue;
        };
        for right in maps[1].iter().filter(|right| overlaps(left, right)) {
            let Some((right_host, _)) = right.host_range() else {
                continue;
            };
            let start = left.start.max(right.start);
            let end = (left.start + left.length).min(right.start + right.length);
            let hosts = [
                left_host + (start - left.start),
                right_host + (start - right.start),
            ];
            same_bytes(&[&files[0], &files[1]], hosts, end - start)
                .with_context(|| format!("host bytes of guest offset {start}"))?;
        }
    }
    Ok(())
}

fn overlaps(left: &Extent, right: &Extent) -> bool {
    left.start < right.start + right.length && right.start < left.start + left.length
}

fn compare_raw_files(runner: &Runner, shape: &Shape) -> Result<()> {
    let open = |image: &str| File::open(runner.folder().join(format!("{image}.data")));
    let files = [open(IMAGES[0])?, open(IMAGES[1])?];
    same_bytes(&[&files[0], &files[1]], [0, 0], shape.size_bytes).context("raw data files")
}

/// Compares ranges of two files; beyond its end a file reads as zeroes.
pub fn same_bytes(files: &[&File; 2], starts: [u64; 2], len_bytes: u64) -> Result<()> {
    let mut done = 0;
    while done < len_bytes {
        let count = (len_bytes - done).min(CHUNK_BYTES as u64) as usize;
        let read = |index: usize| -> Result<Vec<u8>> {
            let mut bytes = vec![0; count];
            let mut filled = 0;
            while filled < count {
                let at = starts[index] + done + filled as u64;
                match files[index].read_at(&mut bytes[filled..], at)? {
                    0 => break,
                    more => filled += more,
                }
            }
            Ok(bytes)
        };
        let (first, second) = (read(0)?, read(1)?);
        if let Some(at) = first.iter().zip(&second).position(|(a, b)| a != b) {
            let at = at as u64 + done;
            bail!("differ at {:#x} and {:#x}", starts[0] + at, starts[1] + at);
        }
        done += count as u64;
    }
    Ok(())
}
