//! Two images that should be alike: their content, their maps, their health.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context, Result, bail, ensure};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use serde_json::Value;

use super::access;
use super::runner::Runner;
use super::scenario::Tool;
use super::shape::{DataFile, Shape};

/// The images by name; the first is the one that Vellum writes.
pub const IMAGES: [&str; 2] = ["a.img", "b.img"];

/// The exit code of `check` for formats that have none.
const NO_CHECKS: i32 = 63;
/// The exit code of `check` where clusters are lost, and nothing else is wrong.
const LEAKS: i32 = 3;

/// How many bytes of a host file are compared at once.
const CHUNK_BYTES: usize = 1 << 20;

/// How far the maps of two images must be alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SameMaps {
    /// In everything but places.
    Yes,
    /// From here on, what one image stores as data the other may know to be zero.
    ButZeroes {
        /// An offset in the images, in bytes.
        from_bytes: u64,
    },
    /// Not at all.
    No,
}

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

    /// The extent, cut where less of it must be alike and without what need not be there.
    fn parts(&self, same_maps: SameMaps) -> Vec<Extent> {
        let SameMaps::ButZeroes { from_bytes } = same_maps else {
            return vec![self.clone()];
        };
        let end = self.start + self.length;
        let middle = from_bytes.clamp(self.start, end);
        let before = Extent {
            length: middle - self.start,
            ..self.clone()
        };
        let is_own = self.depth == 0 && self.present;
        let behind = Extent {
            start: middle,
            length: end - middle,
            data: self.data && !is_own,
            zero: self.zero || is_own,
            ..self.clone()
        };
        let parts = [before, behind].into_iter();
        parts.filter(|part| part.length > 0).collect()
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

/// Compares everything about the two images; their maps as far as these are to be alike.
pub fn compare(runner: &mut Runner, shape: &Shape, same_maps: SameMaps) -> Result<()> {
    check_health(runner, shape)?;
    compare_content(runner, shape)?;
    if same_maps == SameMaps::No {
        return Ok(());
    }
    if let Some((format, _)) = shape.foreign {
        if format.has_maps {
            tell_maps(runner, shape)?;
        }
        return compare_descriptions(runner, shape);
    }
    let maps = compare_maps(runner, shape, same_maps)?;
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
        // QEMU's own program loses clusters at the end of a Parallels image.
        let codes = [NO_CHECKS, LEAKS];
        let is_refused = shape.foreign.is_some() && codes.contains(&theirs.code);
        ensure!(
            theirs.code == 0 || is_refused,
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

/// Both tools describe each image in the same words.
fn compare_descriptions(runner: &mut Runner, shape: &Shape) -> Result<()> {
    for image in IMAGES {
        for output in ["--output=json", "--output=human"] {
            let arguments = [words(&["info", output]), access::image(shape, image)].concat();
            let answers = [Tool::Vellum, Tool::Qemu].map(|tool| runner.img(tool, &arguments));
            let [ours, theirs] = answers;
            let (ours, theirs) = (ours?, theirs?);
            ensure!(
                ours == theirs,
                "the descriptions of {image} differ:\nqemu-img: {theirs:?}\nvellum: {ours:?}"
            );
        }
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
fn compare_maps(
    runner: &mut Runner,
    shape: &Shape,
    same_maps: SameMaps,
) -> Result<[Vec<Extent>; 2]> {
    let maps = tell_maps(runner, shape)?;
    let [first, second] = [0, 1].map(|index| joined(&maps[index], same_maps));
    if first != second {
        bail!(
            "the images are mapped differently:\n{}",
            difference(&first, &second)
        );
    }
    Ok(maps)
}

/// The map of each image, on which the tools agree.
fn tell_maps(runner: &mut Runner, shape: &Shape) -> Result<[Vec<Extent>; 2]> {
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
    let [first, second] = <[_; 2]>::try_from(maps).unwrap_or_default();
    Ok([first, second])
}

fn parse_map(text: &str) -> Option<Vec<Extent>> {
    let value: Value = serde_json::from_str(text).ok()?;
    value.as_array()?.iter().map(Extent::parse).collect()
}

/// Only the essence, with neighbours of one kind joined.
fn joined(map: &[Extent], same_maps: SameMaps) -> Vec<Extent> {
    let mut joined: Vec<Extent> = Vec::new();
    let parts = map.iter().flat_map(|extent| extent.parts(same_maps));
    for extent in parts.map(|part| part.essence()) {
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

/// Compares ranges of two files; beyond its end a file reads as zeroes. What is a hole
/// in both is not read.
pub fn same_bytes(files: &[&File; 2], starts: [u64; 2], len_bytes: u64) -> Result<()> {
    let mut buffers = [vec![0; CHUNK_BYTES], vec![0; CHUNK_BYTES]];
    let mut done = 0;
    while done < len_bytes {
        let holes = [0, 1].map(|index| hole_bytes(files[index], starts[index] + done));
        done = len_bytes.min(done.saturating_add(holes[0].min(holes[1])));
        let count = (len_bytes - done).min(CHUNK_BYTES as u64) as usize;
        for (index, buffer) in buffers.iter_mut().enumerate() {
            buffer.resize(count, 0);
            read_padded(files[index], buffer, starts[index] + done)?;
        }
        let [first, second] = &buffers;
        if first != second {
            let at = first.iter().zip(second).take_while(|(a, b)| a == b).count();
            let at = at as u64 + done;
            bail!("differ at {:#x} and {:#x}", starts[0] + at, starts[1] + at);
        }
        done += count as u64;
    }
    Ok(())
}

/// How far the hole reaches that a file has at an offset: 0 where it has data, and for
/// ever behind the last.
fn hole_bytes(file: &File, offset: u64) -> u64 {
    match rustix::fs::seek(file, SeekFrom::Data(offset)) {
        Ok(data) => data.saturating_sub(offset),
        Err(Errno::NXIO) => u64::MAX,
        // Where holes cannot be asked for, everything is data.
        Err(_) => 0,
    }
}

fn read_padded(file: &File, buffer: &mut [u8], offset: u64) -> Result<()> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], offset + filled as u64)? {
            0 => break,
            more => filled += more,
        }
    }
    buffer[filled..].fill(0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEN_BYTES: u64 = 8 << 30;

    fn sparse(written: &[(u64, &[u8])], len_bytes: u64) -> File {
        let file = tempfile::tempfile().expect("a temporary file");
        file.set_len(len_bytes).expect("a length");
        for (offset, bytes) in written {
            file.write_all_at(bytes, *offset).expect("written");
        }
        file
    }

    #[test]
    fn files_are_compared_where_either_has_data() {
        let zeroes: &[u8] = &[0; 4096];
        let at = 5 << 30;
        let file = sparse(&[(0, b"begin"), (at, b"data")], LEN_BYTES);
        // Zeroes are as good as a hole, and as what is behind the end.
        let other = sparse(&[(0, b"begin"), (1 << 30, zeroes), (at, b"data")], at + 4);
        let same = same_bytes(&[&file, &other], [0, 0], LEN_BYTES);
        assert!(same.is_ok(), "{same:?}");
        let moved = sparse(&[(at + 7, b"dat!")], LEN_BYTES);
        for (files, starts, found) in [
            (
                [&file, &moved],
                [at, at + 7],
                Some("0x140000003 and 0x14000000a"),
            ),
            (
                [&moved, &file],
                [at + 7, at],
                Some("0x14000000a and 0x140000003"),
            ),
            (
                [&file, &moved],
                [at, at + 7 + 4096],
                Some("0x140000000 and 0x140001007"),
            ),
            ([&file, &moved], [at + 4, at + 11], None),
        ] {
            let compared = same_bytes(&files, starts, 1 << 30).err();
            let said = compared.map(|error| error.to_string());
            assert_eq!(said, found.map(|places| format!("differ at {places}")));
        }
    }

    #[test]
    fn zeroes_are_as_good_as_data_only_from_there_on() {
        let extent = |start, length, zero: bool| Extent {
            start,
            length,
            depth: 0,
            present: true,
            zero,
            data: !zero,
            compressed: false,
            offset: None,
        };
        let stored = [extent(0, 300, false)];
        let known = [extent(0, 100, false), extent(100, 200, true)];
        let alike = |same_maps| joined(&stored, same_maps) == joined(&known, same_maps);
        assert!(!alike(SameMaps::Yes));
        assert!(!alike(SameMaps::ButZeroes { from_bytes: 101 }));
        assert!(alike(SameMaps::ButZeroes { from_bytes: 100 }));
        let below = Extent {
            depth: 1,
            ..extent(0, 300, false)
        };
        let all = SameMaps::ButZeroes { from_bytes: 0 };
        assert_ne!(joined(&[below], all), joined(&stored, all));
    }
}
