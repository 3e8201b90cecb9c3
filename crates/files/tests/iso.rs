//! ISO9660 as genisoimage and xorriso make it, beside the tree that it was made from.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::images::{self, run};
use common::listing::{self, Listing, Node};
use vellum_files::{Contents, Error, FileSystem, Id, Kind, ROOT, Source, detect};

/// A folder with a tree, and an image of it.
struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        Place { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    /// Makes `image` of `tree`.
    fn make(&self, program: &[&str], options: &[&str]) {
        let _ = fs::remove_file(self.path("image"));
        let (image, tree) = (self.text("image"), self.text("tree"));
        let words = [&program[1..], options, &["-quiet", "-o", &image, &tree]].concat();
        run(program[0], &words);
    }

    fn open(&self) -> Arc<dyn FileSystem> {
        open(common::source(&self.path("image")))
    }
}

const GENISOIMAGE: &[&str] = &["genisoimage"];
const XORRISO: &[&str] = &["xorriso", "-as", "mkisofs"];

fn open(volume: Source) -> Arc<dyn FileSystem> {
    let found = detect(&volume).expect("readable");
    assert_eq!(found.contents, Contents::Iso);
    vellum_files::open(volume, found.contents).expect("sound")
}

fn find(files: &dyn FileSystem, path: &str) -> Id {
    path.split('/').fold(ROOT, |id, name| {
        let found = files.lookup(id, name.as_bytes()).expect("sound");
        found.unwrap_or_else(|| panic!("{path}: no {name}"))
    })
}

fn read(files: &dyn FileSystem, path: &str) -> Vec<u8> {
    let id = find(files, path);
    let size_bytes = files.attributes(id).expect("sound").size_bytes;
    let mut bytes = vec![0; size_bytes as usize];
    assert_eq!(files.read(id, 0, &mut bytes).expect("sound"), bytes.len());
    bytes
}

fn without_root(mut listing: Listing) -> Listing {
    listing.remove(&b""[..]);
    listing
}

/// All that Rock Ridge keeps.
fn is_same(found: &Node, expected: &Node) -> bool {
    let mut expected = expected.clone();
    // Links to directories are counted otherwise by each program.
    if expected.mode & 0o170_000 == 0o040_000 {
        expected.links = found.links;
    }
    let (major, minor) = (expected.device >> 8 & 0xfff, expected.device & 0xff);
    expected.device = major << 8 | minor;
    *found == expected
}

#[test]
fn rock_ridge_shows_the_tree_that_it_was_made_from() {
    let place = Place::new();
    images::tree(&place.path("tree"));
    // Of so long a part of a target genisoimage writes the lowest byte of its length alone, and
    // xorriso crashes.
    fs::remove_file(place.path("tree/link of 1000")).expect("a link");
    for (name, target) in [
        ("link of parts", "../a part/".repeat(15) + "."),
        ("link to the root", "/".to_owned()),
        ("link here", ".".to_owned()),
        ("link of 240", "t".repeat(240)),
    ] {
        std::os::unix::fs::symlink(target, place.path("tree").join(name)).expect("a link");
    }
    let expected = without_root(listing::of_directory(&place.path("tree")));
    let bytes = &[
        "-input-charset",
        "iso8859-1",
        "-output-charset",
        "iso8859-1",
    ][..];
    for (program, options) in [
        (GENISOIMAGE, &["-R", "-cache-inodes"][..]),
        (GENISOIMAGE, &["-R", "-J", "-joliet-long", "-V", "A LABEL"]),
        (XORRISO, &["-R", "-D"]),
        (XORRISO, &["-R", "-J", "-joliet-long"]),
        (XORRISO, &["-R", "-rr_reloc_dir", "moved here"]),
    ] {
        let charset = if program == GENISOIMAGE { bytes } else { &[] };
        place.make(program, &[options, charset].concat());
        let files = place.open();
        assert_eq!(files.remarks(), [""; 0]);
        let mut found = without_root(common::listing(&*files));
        // The place of directories that are too deep is a directory, without those in it.
        for moved in [&b"/rr_moved"[..], b"/moved here"] {
            found.remove(moved);
        }
        let what = format!("{program:?} {options:?}");
        listing::compare(&what, &found, &expected, is_same);
    }
}

/// A few files with names that each kind of tree shows otherwise.
fn few_files(tree: &Path) {
    fs::create_dir_all(tree.join("Some Folder/below")).expect("directories");
    let put = |name: &str, content: &[u8]| fs::write(tree.join(name), content).expect("a file");
    put("README", b"without an extension");
    put("Long name of a file.html", b"long");
    put("größe äöü 漢字.txt", b"letters");
    put("piece_1.dat", &images::noise(1, 5000));
    put("piece_2.dat", &images::noise(2, 3000));
    put("Some Folder/big", &images::noise(3, 300_000));
    put("Some Folder/below/bottom", b"far down");
    for number in 0..200 {
        let name = format!("Some Folder/entry number {number}");
        put(&name, name.as_bytes());
    }
}

fn names_and_sums(listing: &Listing) -> BTreeMap<Vec<u8>, (u64, u64)> {
    let line = |(path, node): (&Vec<u8>, &Node)| (path.clone(), (node.size_bytes, node.sum));
    listing.iter().map(line).collect()
}

#[test]
fn joliet_shows_its_names_in_any_case() {
    let place = Place::new();
    few_files(&place.path("tree"));
    let expected = names_and_sums(&listing::of_directory(&place.path("tree")));
    for program in [GENISOIMAGE, XORRISO] {
        let options = ["-J", "-joliet-long", "-input-charset", "utf-8"];
        // xorriso makes Rock Ridge as well, unless it is told not to.
        let options = &options[..];
        let plain = if program == XORRISO {
            &["--norock"][..]
        } else {
            &[]
        };
        place.make(program, &[options, plain].concat());
        let files = place.open();
        let found = names_and_sums(&common::listing(&*files));
        assert_eq!(found, expected, "{program:?}");
        let same = find(&*files, "SOME folder/BIG");
        assert_eq!(same, find(&*files, "Some Folder/big"));
        assert_eq!(files.lookup(ROOT, b"none").expect("sound"), None);
    }
}

/// What isoinfo lists of an image: paths in small letters without versions, and sizes.
fn of_isoinfo(image: &str) -> BTreeMap<String, u64> {
    let output = run("isoinfo", &["-l", "-i", image]);
    let text = String::from_utf8(output.stdout).expect("text");
    let (mut listed, mut folder) = (BTreeMap::new(), String::new());
    for line in text.lines() {
        if let Some(path) = line.strip_prefix("Directory listing of ") {
            folder = path.trim().trim_end_matches('/').to_lowercase();
        }
        let Some((fields, name)) = line.split_once("] ") else {
            continue;
        };
        let name = name.trim().to_lowercase();
        if name == "." || name == ".." {
            continue;
        }
        let name = name.trim_end_matches(";1").trim_end_matches('.');
        let size = fields.split_whitespace().nth(4).expect("a size");
        let size = match fields.trim_start().starts_with('d') {
            true => 0,
            false => size.parse().expect("a number"),
        };
        listed.insert(format!("{folder}/{name}"), size);
    }
    listed
}

#[test]
fn plain_trees_show_what_isoinfo_lists() {
    let place = Place::new();
    few_files(&place.path("tree"));
    fs::remove_file(place.path("tree/größe äöü 漢字.txt")).expect("a file");
    for level in ["1", "3", "4"] {
        place.make(GENISOIMAGE, &["-iso-level", level]);
        let files = place.open();
        let found = without_root(common::listing(&*files));
        let line = |(path, node): (&Vec<u8>, &Node)| {
            let path = String::from_utf8_lossy(path).to_lowercase();
            (path, node.size_bytes)
        };
        let found: BTreeMap<String, u64> = found.iter().map(line).collect();
        assert_eq!(found, of_isoinfo(&place.text("image")), "level {level}");
        assert_eq!(found.len(), 208, "level {level}");
    }
}

/// The first place where `what` stands.
fn place_of(image: &[u8], what: &[u8]) -> usize {
    let at = image.windows(what.len()).position(|bytes| bytes == what);
    at.expect("it is there")
}

/// A record of a plain tree by its name, as it stands there.
fn record_of(image: &[u8], name: &str) -> usize {
    place_of(image, name.as_bytes()) - 33
}

fn plain_image() -> Vec<u8> {
    let place = Place::new();
    few_files(&place.path("tree"));
    place.make(GENISOIMAGE, &["-iso-level", "1", "-input-charset", "utf-8"]);
    fs::read(place.path("image")).expect("an image")
}

fn open_bytes(image: &[u8]) -> Arc<dyn FileSystem> {
    open(Source::new(Arc::new(image.to_vec())))
}

#[test]
fn files_in_pieces_are_one_and_interleaved_or_associated_ones_are_none() {
    let mut image = plain_image();
    let first = record_of(&image, "PIECE_1.DAT;1");
    let second = record_of(&image, "PIECE_2.DAT;1");
    let expected = [images::noise(1, 5000), images::noise(2, 3000)].concat();
    image[first + 25] |= 0x80;
    image[second + 33 + 6] = b'1';
    let files = open_bytes(&image);
    assert_eq!(read(&*files, "piece_1.dat"), expected);
    let mut middle = vec![0; 1000];
    let piece = find(&*files, "piece_1.dat");
    assert_eq!(files.read(piece, 4500, &mut middle).expect("sound"), 1000);
    assert_eq!(middle, expected[4500..5500]);
    let names = common::names(&*files, ROOT);
    let pieces = names.iter().filter(|(name, _)| name.starts_with(b"piece"));
    assert_eq!(pieces.count(), 1);

    // Without its last piece it is damaged, and the others are not.
    image[second + 33 + 6] = b'2';
    let files = open_bytes(&image);
    let cut_off = files.attributes(find(&*files, "piece_1.dat"));
    assert!(matches!(cut_off, Err(Error::Damaged { .. })));
    assert_eq!(read(&*files, "piece_2.dat"), images::noise(2, 3000));

    image[first + 25] = 4;
    image[second + 26] = 1;
    image[second + 27] = 1;
    let files = open_bytes(&image);
    assert_eq!(files.lookup(ROOT, b"piece_1.dat").expect("sound"), None);
    let error = files.read(find(&*files, "piece_2.dat"), 0, &mut middle);
    let error = error.expect_err("interleaved").to_string();
    assert_eq!(error, "not supported: files that are interleaved");

    // Hidden ones are shown.
    image[first + 25] = 1;
    let files = open_bytes(&image);
    assert_eq!(read(&*files, "piece_1.dat"), images::noise(1, 5000));
}

fn word(image: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(image[at..at + 4].try_into().expect("four bytes"))
}

/// Multiplies the numbers of blocks in a plain tree.
fn with_smaller_blocks(image: &mut [u8], factor: u32) {
    image[0x8080..0x8082].copy_from_slice(&(2048 / factor as u16).to_le_bytes());
    let mut directories = vec![0x809c];
    while let Some(own) = directories.pop() {
        let (block, len) = (word(image, own + 2), word(image, own + 10) as usize);
        image[own + 2..own + 6].copy_from_slice(&(block * factor).to_le_bytes());
        let start = block as usize * 2048;
        let mut at = start;
        while at < start + len {
            let record_len = usize::from(image[at]);
            if record_len == 0 {
                at = (at + 1).next_multiple_of(2048);
                continue;
            }
            let is_special = image[at + 32] == 1 && image[at + 33] < 2;
            if image[at + 25] & 2 != 0 && !is_special {
                directories.push(at);
            } else {
                let block = word(image, at + 2) * factor;
                image[at + 2..at + 6].copy_from_slice(&block.to_le_bytes());
            }
            at += record_len;
        }
    }
}

#[test]
fn blocks_may_be_smaller_than_sectors() {
    let sound = plain_image();
    let expected = common::listing(&*open_bytes(&sound));
    for factor in [2, 4] {
        let mut image = sound.clone();
        with_smaller_blocks(&mut image, factor);
        let files = open_bytes(&image);
        assert_eq!(files.blocks().0, 2048 / factor);
        let found = common::listing(&*files);
        listing::compare(&factor.to_string(), &found, &expected, |a, b| a == b);
    }
    let mut image = sound;
    image[0x8080..0x8082].copy_from_slice(&3000_u16.to_le_bytes());
    let error = vellum_files::open(Source::new(Arc::new(image)), Contents::Iso);
    assert!(matches!(error.err(), Some(Error::Damaged { .. })));
}

#[test]
fn continuations_in_circles_or_beyond_the_end_are_errors_of_their_own_files() {
    let place = Place::new();
    few_files(&place.path("tree"));
    fs::write(place.path("tree").join("l".repeat(200)), b"x").expect("a file");
    place.make(GENISOIMAGE, &["-R", "-input-charset", "utf-8"]);
    let sound = fs::read(place.path("image")).expect("an image");
    let record = record_of(&sound, "LLLLLLLL");
    let field = record + place_of(&sound[record..], b"CE\x1c\x01");
    let area = word(&sound, field + 4) as usize * 2048 + word(&sound, field + 12) as usize;
    let (mut looped, mut far, mut long) = (sound.clone(), sound.clone(), sound.clone());
    looped[area..area + 28].copy_from_slice(&sound[field..field + 28]);
    far[field + 4..field + 8].fill(0xff);
    long[field + 20..field + 24].copy_from_slice(&3000_u32.to_le_bytes());
    for image in [looped, far, long] {
        let files = open_bytes(&image);
        let names = common::names(&*files, ROOT);
        let is_long = |name: &[u8]| name.starts_with(b"ll");
        let damaged = names.iter().find(|(name, _)| is_long(name));
        let error = files.attributes(damaged.expect("a name").1);
        let error = error.expect_err("damaged").to_string();
        assert!(error.contains("what Rock Ridge has of a file"), "{error}");
        assert_eq!(read(&*files, "README"), b"without an extension");
    }
}

#[test]
fn directories_in_themselves_and_endless_files_do_no_harm() {
    let mut image = plain_image();
    // With its length before it, which the path table has elsewhere.
    let folder = place_of(&image, b"\x08SOME_FOL") - 32;
    image.copy_within(0x809e..0x80a2, folder + 2);
    let big = record_of(&image, "README.;1");
    image[big + 10..big + 14].fill(0xff);
    let files = open_bytes(&image);
    let inside = find(&*files, "some_fol/some_fol/some_fol");
    let inside = files.attributes(inside).expect("sound");
    assert_eq!(inside.kind, Kind::Directory);
    let big = find(&*files, "readme");
    let mut bytes = [0; 10];
    let size_bytes = files.attributes(big).expect("sound").size_bytes;
    assert_eq!(size_bytes, u32::MAX.into());
    assert_eq!(files.read(big, 0, &mut bytes).expect("there"), 10);
    let beyond = files.read(big, size_bytes - 5, &mut bytes);
    assert!(matches!(beyond, Err(Error::Damaged { .. })));
}

#[test]
fn compressed_files_are_named_and_an_udf_is_said() {
    let place = Place::new();
    few_files(&place.path("tree"));
    // What mkzftree writes: a mark, sizes, and where the blocks are.
    let mut head = b"\x37\xe4\x53\x96\xc9\xdb\xd6\x07".to_vec();
    head.extend(100_000_u32.to_le_bytes());
    head.extend([4, 15, 0, 0]);
    head.extend([36_u32; 5].iter().flat_map(|at| at.to_le_bytes()));
    fs::write(place.path("tree/packed"), head).expect("a file");
    let options = ["-R", "-z", "-udf", "-input-charset", "utf-8"];
    place.make(GENISOIMAGE, &options);
    let files = place.open();
    assert!(files.remarks().iter().any(|remark| remark.contains("UDF")));
    let id = find(&*files, "packed");
    assert_eq!(files.attributes(id).expect("sound").size_bytes, 100_000);
    let error = files.read(id, 0, &mut [0; 9]);
    let error = error.expect_err("compressed").to_string();
    assert_eq!(
        error,
        "not supported: files that are compressed with zisofs"
    );
    assert_eq!(read(&*files, "README"), b"without an extension");
}
