//! Damaged file systems: whatever is looked at ends, and gives an error at most.

mod common;

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{images, xfs_image};
use vellum_files::{Contents, FileSystem, Id, Kind, ROOT, ReadAt, Source, detect};

/// What a look at one damaged image may take.
const PATIENCE: Duration = Duration::from_secs(20);
const FILES_MAX: usize = 3000;

/// Looks at everything, as far as that is bounded. Returns how much was there.
/// Of a FAT, names can be equal to short ones before them.
fn look(files: &dyn FileSystem, is_fat: bool) -> usize {
    let (mut seen, mut next) = (0, vec![(ROOT, 0)]);
    while let Some((id, depth)) = next.pop() {
        seen += 1;
        let mut ids: Vec<Id> = Vec::new();
        let mut names: HashMap<Vec<u8>, Id> = HashMap::new();
        let _ = files.list(id, 0, &mut |entry| {
            assert!(entry.name.len() <= 255 && !entry.name.contains(&b'/'));
            ids.push(entry.id);
            names.entry(entry.name.to_owned()).or_insert(entry.id);
            ids.len() < 500
        });
        let _ = files.lookup(id, b"no such name");
        for (name, first) in names {
            let found = files.lookup(id, &name).expect("it was listed");
            assert!(found == Some(first) || (found.is_some() && is_fat));
        }
        for id in ids {
            let Ok(attributes) = files.attributes(id) else {
                continue;
            };
            let size_bytes = attributes.size_bytes;
            let mut bytes = vec![0; 5000];
            for at in [
                0,
                size_bytes / 2,
                size_bytes.saturating_sub(10),
                u64::MAX - 9,
            ] {
                if let Ok(len) = files.read(id, at, &mut bytes) {
                    assert!(len <= bytes.len());
                }
            }
            let target = files.read_link(id);
            assert!(target.is_err() || attributes.kind == Kind::Link);
            if attributes.kind == Kind::Directory && depth < 20 && seen + next.len() < FILES_MAX {
                next.push((id, depth + 1));
            }
        }
    }
    seen
}

fn look_at(image: Vec<u8>) -> usize {
    let volume = Source::new(Arc::new(image));
    let contents = detect(&volume).expect("readable").contents;
    vellum_files::open(volume, contents).map_or(0, |files| look(&*files, contents == Contents::Fat))
}

/// A small tree, so that most bytes that are not zero are metadata.
fn small_tree(folder: &Path) {
    fs::create_dir_all(folder.join("a/b/c")).expect("directories");
    for number in 0..60 {
        let name = format!("a/file number {number}");
        fs::write(folder.join(name), [number; 100]).expect("a file");
    }
    // So many that an index is made.
    for number in 0..300 {
        let name = folder.join(format!("a/b/c/l{number}"));
        fs::hard_link(folder.join("a/file number 1"), name).expect("a link");
    }
    let sparse = File::create(folder.join("a/b/sparse")).expect("a file");
    use std::os::unix::fs::FileExt;
    for number in 0..40 {
        sparse
            .write_all_at(b"data", number * 9000)
            .expect("a write");
    }
    std::os::unix::fs::symlink("x".repeat(100), folder.join("link")).expect("a link");
    std::os::unix::fs::symlink("short", folder.join("a/short")).expect("a link");
}

fn damage(image: &[u8], seed: u64) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    let used: Vec<usize> = (0..image.len()).filter(|at| image[*at] != 0).collect();
    let mut damaged = image.to_vec();
    for _ in 0..random.usize(1..12) {
        let near = used[random.usize(..used.len())];
        let at = (near + random.usize(..4)).min(image.len() - 1);
        damaged[at] = match random.u8(..4) {
            0 => 0xff,
            1 => 0,
            2 => random.u8(..),
            _ => damaged[at] ^ 1 << random.u8(..8),
        };
    }
    damaged
}

fn damage_many(name: &str, image: &[u8]) {
    assert!(look_at(image.to_vec()) >= 3, "{name}");
    for seed in 0..400 {
        let begin = Instant::now();
        look_at(damage(image, seed));
        assert!(begin.elapsed() < PATIENCE, "{name}, seed {seed}");
    }
}

#[test]
fn damaged_ext_ends_with_errors_at_most() {
    let folder = tempfile::tempdir().expect("a folder");
    let tree = folder.path().join("tree");
    small_tree(&tree);
    let image = folder.path().join("image");
    let (tree, shown) = (tree.display().to_string(), image.display().to_string());
    // Without checksums, which would find most of it.
    for options in [
        &["-t", "ext2", "-b", "1024"][..],
        &["-t", "ext4", "-O", "^metadata_csum,^has_journal"],
        &[
            "-t",
            "ext4",
            "-O",
            "^metadata_csum,inline_data",
            "-b",
            "1024",
            "-I",
            "256",
        ],
        &["-t", "ext4"],
    ] {
        let _ = fs::remove_file(&image);
        let words = [
            &["-q", "-F", "-N", "256"],
            options,
            &["-d", &tree, &shown, "4M"],
        ]
        .concat();
        images::run("mke2fs", &words);
        damage_many(
            &format!("{options:?}"),
            &fs::read(&image).expect("an image"),
        );
    }
}

/// Where blocks of 1024 bytes begin for which something is so.
fn blocks_where(image: &[u8], is_so: impl Fn(&[u8]) -> bool) -> Vec<usize> {
    let blocks = image.chunks_exact(1024).enumerate();
    let found = blocks.filter(|(_, block)| is_so(block));
    found.map(|(number, _)| number * 1024).collect()
}

fn has_text(block: &[u8], text: &[u8]) -> bool {
    block.windows(text.len()).any(|window| window == text)
}

/// The names in a directory, one behind the other, or the content of a file.
fn content(image: Vec<u8>, path: &[&str]) -> Option<Vec<u8>> {
    let volume = Source::new(Arc::new(image));
    let contents = detect(&volume).expect("readable").contents;
    let files = vellum_files::open(volume, contents).ok()?;
    let mut id = ROOT;
    for name in path {
        id = files.lookup(id, name.as_bytes()).ok().flatten()?;
    }
    let mut told = Vec::new();
    match files.attributes(id).ok()?.kind {
        Kind::Directory => {
            let take = &mut |entry: &vellum_files::Entry<'_>| {
                told.extend_from_slice(entry.name);
                true
            };
            files.list(id, 0, take).ok()?;
        }
        _ => {
            told = vec![0; 360_000];
            files.read(id, 0, &mut told).ok()?;
        }
    }
    Some(told)
}

#[test]
fn what_ext4_has_checksums_of_is_never_shown_when_it_is_another() {
    let folder = tempfile::tempdir().expect("a folder");
    let tree = folder.path().join("tree");
    small_tree(&tree);
    let image = folder.path().join("image");
    let (tree, shown) = (tree.display().to_string(), image.display().to_string());
    let words = ["-q", "-F", "-t", "ext4", "-b", "1024", "-O", "^has_journal"];
    images::run(
        "mke2fs",
        &[&words[..], &["-d", &tree, &shown, "4M"]].concat(),
    );
    // Makes trees of the names of large directories. It has something to say of what it changed.
    let optimised = std::process::Command::new("e2fsck")
        .args(["-fyD", &shown])
        .output()
        .expect("e2fsck; run `cargo xtask setup`");
    assert!(
        optimised.status.code().is_some_and(|code| code < 4),
        "{optimised:?}"
    );
    let sound = fs::read(&image).expect("an image");
    let is_extents = |block: &[u8]| block[..2] == [0x0a, 0xf3] && block[6..8] == [0, 0];
    let is_names = |block: &[u8]| has_text(block, b"l123");
    // A node of the tree: names of the directory itself and of the one above, and hashes behind.
    let is_tree =
        |block: &[u8]| block[6..9] == [1, 2, b'.'] && block[16..18] == [0xf4, 3] && block[29] == 8;
    let cases: [(&str, &[&str], Vec<usize>); 3] = [
        (
            "extents",
            &["a", "b", "sparse"],
            blocks_where(&sound, is_extents),
        ),
        ("names", &["a", "b", "c"], blocks_where(&sound, is_names)),
        (
            "tree of names",
            &["a", "b", "c"],
            blocks_where(&sound, is_tree),
        ),
    ];
    for (what, path, blocks) in cases {
        let right = content(sound.clone(), path);
        assert!(right.is_some() && !blocks.is_empty(), "{what}: {blocks:?}");
        let mut noticed = 0;
        for (block, at) in blocks
            .iter()
            .flat_map(|block| (0..1024).map(move |at| (block, at)))
        {
            let mut damaged = sound.clone();
            damaged[block + at] ^= 4;
            let shown = content(damaged, path);
            noticed += usize::from(shown.is_none());
            assert!(
                shown.is_none() || shown == right,
                "{what}, byte {at} of {block}"
            );
        }
        assert!(noticed >= 40, "{what}: {noticed}");
    }
}

#[test]
fn damaged_fat_ends_with_errors_at_most() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    images::fat(&["-F", "12"], 3, folder.path(), &image);
    let bytes = fs::read(&image).expect("an image");
    assert_eq!(
        detect(&Source::new(Arc::new(bytes.clone())))
            .expect("readable")
            .contents,
        Contents::Fat
    );
    damage_many("FAT", &bytes);
}

#[test]
fn damaged_iso_ends_with_errors_at_most() {
    let folder = tempfile::tempdir().expect("a folder");
    let tree = folder.path().join("tree");
    small_tree(&tree);
    let image = folder.path().join("image");
    let (tree, shown) = (tree.display().to_string(), image.display().to_string());
    for options in [&["-R", "-z"][..], &["-J"], &["-iso-level", "1"]] {
        let common = ["-quiet", "-input-charset", "utf-8", "-o", &shown, &tree];
        images::run("genisoimage", &[options, &common].concat());
        let bytes = fs::read(&image).expect("an image");
        damage_many(&format!("{options:?}"), &bytes);
    }
}

/// An image with a few other bytes.
struct Patched {
    image: Arc<Vec<u8>>,
    patches: Vec<(usize, u8)>,
}

impl ReadAt for Patched {
    fn len_bytes(&self) -> u64 {
        self.image.len() as u64
    }

    fn read_at(&self, offset_bytes: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.image.read_at(offset_bytes, bytes)?;
        let start = offset_bytes as usize;
        for (at, byte) in &self.patches {
            if let Some(place) = at.checked_sub(start).and_then(|at| bytes.get_mut(at)) {
                *place = *byte;
            }
        }
        Ok(())
    }
}

fn damage_xfs(name: &str, image: Vec<u8>, seeds: u64) {
    let image = Arc::new(image);
    let is_log = |at: usize| {
        let number = |at: usize| u64::from_be_bytes(image[at..at + 8].try_into().expect("eight"));
        let start = number(0x30) as usize * 4096;
        (start..start + (number(0x5c) as u32 as usize) * 4096).contains(&at)
    };
    let used: Vec<usize> = (0..image.len())
        .filter(|at| image[*at] != 0 && !is_log(*at))
        .collect();
    let mut seen = 0;
    for seed in 0..seeds {
        let mut random = fastrand::Rng::with_seed(seed);
        let count = if seed == 0 { 0 } else { random.usize(1..12) };
        let patches = (0..count).map(|_| {
            let at = used[random.usize(..used.len())] + random.usize(..4);
            let at = at.min(image.len() - 1);
            let byte = match random.u8(..4) {
                0 => 0xff,
                1 => 0,
                2 => random.u8(..),
                _ => image[at] ^ 1 << random.u8(..8),
            };
            (at, byte)
        });
        let volume = Source::new(Arc::new(Patched {
            patches: patches.collect(),
            image: image.clone(),
        }));
        let begin = Instant::now();
        let files = vellum_files::open(volume, Contents::Xfs);
        seen += files.map_or(0, |files| look(&*files, false));
        assert!(seed > 0 || seen > 4, "{name}");
        assert!(begin.elapsed() < PATIENCE, "{name}, seed {seed}");
    }
}

#[test]
fn damaged_xfs_ends_with_errors_at_most() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    for (name, options, seeds) in [
        ("4", &["-m", "crc=0", "-n", "ftype=0"][..], 1500),
        ("5", &[], 300),
    ] {
        xfs_image::small_xfs(options, folder.path(), &image);
        damage_xfs(name, fs::read(&image).expect("an image"), seeds);
    }
}

/// A directory that holds itself, a file without an end, a link as long as a file may be.
#[test]
fn absurd_structures_are_errors_of_their_own_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let tree = folder.path().join("tree");
    small_tree(&tree);
    let image = folder.path().join("image");
    let (tree, shown) = (tree.display().to_string(), image.display().to_string());
    let options = ["-q", "-F", "-t", "ext4", "-d"];
    images::run("mke2fs", &[&options[..], &[&tree, &shown, "4M"]].concat());
    for command in [
        "sif link size 0x7fffffffffffffff",
        "sif /a/b/sparse size 0x7ffffffff000",
        "ln / /a/root",
        "ln /a /a/b/above",
        "sif \"/a/file number 1\" mode 0170644",
    ] {
        images::run("debugfs", &["-w", "-R", command, &shown]);
    }
    let volume = common::source(&image);
    let files = vellum_files::open(volume, Contents::Ext("ext4")).expect("sound");
    let find = |path: &[&[u8]]| {
        let find = |id, name: &&[u8]| files.lookup(id, name).expect("sound").expect("there");
        path.iter().fold(ROOT, find)
    };
    files.read_link(find(&[b"link"])).expect_err("far too long");
    assert_eq!(find(&[b"a", b"root", b"a"]), find(&[b"a"]));
    files
        .attributes(find(&[b"a", b"file number 1"]))
        .expect_err("of no kind");
    let mut bytes = [0; 100];
    let read = files.read(find(&[b"a", b"file number 2"]), 0, &mut bytes);
    assert_eq!((read.expect("sound"), bytes), (100, [2; 100]));
    let sparse = find(&[b"a", b"b", b"sparse"]);
    let far = files.read(sparse, 0x7fff_f000_0000, &mut bytes);
    assert_eq!((far.expect("a hole"), bytes), (100, [0; 100]));
    assert!(look(&*files, false) >= 3);
}
