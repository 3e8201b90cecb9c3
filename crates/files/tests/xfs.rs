//! XFS as mkfs.xfs and the kernel make it, beside what the kernel shows of it. Needs root, loop
//! devices and a kernel with XFS.

mod common;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use common::images::{self, run};
use common::listing::{self, Listing, Node};
use common::xfs_image;
use vellum_files::{Contents, Error, FileSystem, Id, Kind, ROOT, detect};

fn open(image: &Path) -> Arc<dyn FileSystem> {
    let volume = common::source(image);
    let found = detect(&volume).expect("readable");
    assert_eq!(found.contents, Contents::Xfs);
    assert_eq!(found.label.as_deref(), Some("a label"));
    vellum_files::open(volume, found.contents).expect("sound")
}

fn is_same(found: &Node, expected: &Node) -> bool {
    let mut expected = expected.clone();
    let (major, minor) = (expected.device >> 8 & 0xfff, expected.device & 0xff);
    expected.device = major << 8 | minor;
    *found == expected
}

/// An XFS that the kernel has mounted.
struct Mounted {
    folder: tempfile::TempDir,
}

impl Mounted {
    fn new(options: &[&str]) -> Mounted {
        let folder = tempfile::tempdir().expect("a folder");
        let mounted = Mounted { folder };
        fs::create_dir(mounted.root()).expect("a directory");
        let image = mounted.image().display().to_string();
        let target = format!("name={image},size=320m,file=1");
        let words = [&["-q", "-L", "a label", "-d", &target], options].concat();
        run("mkfs.xfs", &words);
        mounted.mount();
        mounted
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("root")
    }

    fn image(&self) -> PathBuf {
        self.folder.path().join("image")
    }

    fn mount(&self) {
        let (image, root) = (self.image(), self.root());
        let words = ["-t", "xfs", "-o", "loop", &image.display().to_string()];
        run(
            "mount",
            &[&words[..], &[&root.display().to_string()]].concat(),
        );
    }

    fn unmount(&self) {
        run("umount", &[&self.root().display().to_string()]);
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // It may be unmounted already.
        let _ = std::process::Command::new("umount")
            .args(["-q", "-l"])
            .arg(self.root())
            .output();
    }
}

/// Files in many pieces, with holes and with room that was not written yet.
fn pieces(root: &Path, block_bytes: u64) {
    let file = File::create(root.join("pieces")).expect("a file");
    for number in 0..3000 {
        let at = number * 2 * block_bytes;
        file.write_all_at(&images::noise(number, 100), at)
            .expect("a write");
    }
    let name = |name: &str| root.join(name).display().to_string();
    run("fallocate", &["-l", "3m", &name("reserved")]);
    let reserved = File::options().write(true).open(root.join("reserved"));
    let reserved = reserved.expect("a file");
    reserved
        .write_all_at(b"written", 1_000_000)
        .expect("a write");
    fs::write(root.join("beyond the end"), b"short").expect("a file");
    run("fallocate", &["-n", "-l", "1m", &name("beyond the end")]);
    let far = File::create(root.join("far")).expect("a file");
    far.write_all_at(b"far", (1 << 42) + 5).expect("a write");
    far.set_len(0).expect("a length");
    far.write_all_at(b"far", 5 << 20).expect("a write");
}

#[test]
fn every_kind_shows_what_the_kernel_shows() {
    for (options, block_bytes) in [
        (&[][..], 4096),
        (
            &[
                "-b",
                "size=1024",
                "-n",
                "size=8192",
                "-m",
                "bigtime=0,reflink=0",
            ],
            1024,
        ),
        (
            &[
                "-i",
                "size=1024,nrext64=1",
                "-m",
                "rmapbt=1",
                "-b",
                "size=2048",
            ],
            2048,
        ),
        (
            &[
                "-d",
                "agcount=3",
                "-i",
                "size=2048,sparse=0",
                "-s",
                "size=4096",
            ],
            4096,
        ),
    ] {
        let what = format!("{options:?}");
        let mounted = Mounted::new(options);
        let root = mounted.root();
        images::tree(&root);
        pieces(&root, block_bytes);
        if !what.contains("reflink=0") {
            let (from, to) = (root.join("big"), root.join("shared"));
            let words = [from.display().to_string(), to.display().to_string()];
            run("cp", &["--reflink=always", &words[0], &words[1]]);
            let shared = File::options().write(true).open(&to).expect("a file");
            shared.write_all_at(b"its own", 70_000).expect("a write");
        }
        // Directories with gaps.
        for number in (0..5000).filter(|number| number % 50 > 3) {
            let name = format!("many/entry number {number}");
            fs::remove_file(root.join(name)).expect("a file");
        }
        mounted.unmount();
        mounted.mount();
        let expected = listing::of_directory(&root);
        mounted.unmount();
        let files = open(&mounted.image());
        assert_eq!(files.remarks(), [""; 0], "{what}");
        assert_eq!(files.blocks().0, block_bytes as u32);
        let found = common::listing(&*files);
        listing::compare(&what, &found, &expected, is_same);
    }
}

/// Version 4, which newer kernels do not mount, and small ones of version 5: what mkfs.xfs put
/// there.
#[test]
fn version_4_shows_what_it_was_made_from() {
    for options in [
        &["-m", "crc=0", "-n", "ftype=0"][..],
        &["-m", "crc=0", "-n", "ftype=1", "-i", "size=256"],
        &["-m", "crc=0", "-b", "size=512", "-n", "size=4096"],
        &["-b", "size=1024"],
        &["-i", "size=1024"],
    ] {
        let folder = tempfile::tempdir().expect("a folder");
        let image = folder.path().join("image");
        let expected = xfs_image::small_xfs(options, folder.path(), &image);
        let files = open(&image);
        assert_eq!(files.remarks(), [""; 0], "{options:?}");
        let found = common::listing(&*files);
        for (path, bytes) in &expected {
            let node = &found[format!("/{path}").as_bytes()];
            let sum = listing::sum_of_bytes(bytes);
            assert_eq!(
                (node.size_bytes, node.sum),
                (bytes.len() as u64, sum),
                "{path}"
            );
        }
        // The root, directories, devices and links beside.
        assert_eq!(found.len(), expected.len() + 1 + 4 + 5, "{options:?}");
        let of = |path: &str| &found[path.as_bytes()];
        assert_eq!((of("").owner, of("/node").owner), ((3, 4), (5, 6)));
        assert_eq!(
            (of("/disk").device, of("/tty").device),
            (259 << 8 | 7, 4 << 8 | 7)
        );
        assert_eq!(of("/set").mode, 0o104_755);
        if options.contains(&"crc=0") {
            let long = format!("/{}", "t".repeat(900));
            assert_eq!(of("/long").sum, listing::sum_of_bytes(long.as_bytes()));
        }
        assert_eq!(of("/link").sum, listing::sum_of_bytes(b"some/where"));
    }
}

#[test]
fn one_that_was_not_unmounted_is_shown_with_a_remark() {
    let mounted = Mounted::new(&[]);
    let root = mounted.root();
    fs::write(root.join("old"), b"in its place").expect("a file");
    mounted.unmount();
    mounted.mount();
    fs::write(root.join("new"), b"in the log").expect("a file");
    run("sync", &["-f", &root.display().to_string()]);
    let copy = mounted.folder.path().join("copy");
    let words = [
        mounted.image().display().to_string(),
        copy.display().to_string(),
    ];
    run("cp", &["--sparse=always", &words[0], &words[1]]);
    mounted.unmount();
    let files = open(&copy);
    assert!(files.remarks()[0].contains("its log is not replayed"));
    let mut bytes = [0; 12];
    let old = files.lookup(ROOT, b"old").expect("sound").expect("there");
    assert_eq!(files.read(old, 0, &mut bytes).expect("sound"), 12);
    assert_eq!(&bytes, b"in its place");
    assert_eq!(open(&mounted.image()).remarks(), [""; 0]);
}

fn find(files: &dyn FileSystem, path: &str) -> Id {
    path.split('/').fold(ROOT, |id, name| {
        let found = files.lookup(id, name.as_bytes()).expect("sound");
        found.unwrap_or_else(|| panic!("{path}: no {name}"))
    })
}

/// Changes a structure with xfs_db, which makes its checksum anew.
fn change(image: &Path, place: &str, what: &str) {
    let shown = image.display().to_string();
    let output = run("xfs_db", &["-x", "-f", "-c", place, "-c", what, &shown]);
    assert!(output.stderr.is_empty(), "{output:?}");
}

/// Sizes, extents and entries that cannot be: errors of their own files.
#[test]
fn absurd_structures_are_errors_of_their_own_files() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    xfs_image::small_xfs(&[], folder.path(), &image);
    let inode = |path: &str| {
        let files = open(&image);
        let id = find(&*files, path);
        format!("inode {}", files.attributes(id).expect("sound").inode)
    };
    let root = format!("write u3.sfdir3.list[1].inumber.i4 {}", {
        let files = open(&image);
        files.attributes(ROOT).expect("sound").inode
    });
    change(
        &image,
        &inode("block/entry7"),
        "write core.size 9223372036854775807",
    );
    change(
        &image,
        &inode("block/entry8"),
        "write core.nextents 1000000",
    );
    change(
        &image,
        &inode("block/entry9"),
        "write u3.bmx[0].startblock 4503599627370495",
    );
    change(
        &image,
        &inode("block/entry10"),
        "write u3.bmx[0].blockcount 2097151",
    );
    change(
        &image,
        &inode("block/entry10"),
        "write core.size 4000000000",
    );
    change(&image, &inode("link"), "write core.size 1000");
    change(&image, &inode("inside"), &root);
    let files = open(&image);
    let mut bytes = [0; 100];
    let mut read = |path, at| files.read(find(&*files, path), at, &mut bytes);
    assert_eq!(read("block/entry7", 1 << 62).expect("a hole"), 100);
    assert_eq!(
        read("block/entry7", i64::MAX as u64 - 5).expect("a hole"),
        5
    );
    for (path, at) in [
        ("block/entry8", 0),
        ("block/entry9", 0),
        ("block/entry10", 3_000_000_000),
    ] {
        let error = read(path, at).expect_err("damaged");
        assert!(matches!(error, Error::Damaged { .. }), "{path}: {error}");
    }
    assert_eq!(read("block/entry11", 0).expect("sound"), 100);
    files
        .read_link(find(&*files, "link"))
        .expect_err("too long");
    let looped = find(&*files, "inside/entry1/inside/entry1");
    assert_eq!(looped, ROOT);
    assert_eq!(
        files.attributes(looped).expect("sound").kind,
        Kind::Directory
    );
}

/// A changed bit is an error of the file that it belongs to.
#[test]
fn checksums_are_compared() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    xfs_image::small_xfs(&[], folder.path(), &image);
    let sound = fs::read(&image).expect("an image");
    let files = open(&image);
    let inode = files
        .attributes(find(&*files, "block/entry7"))
        .expect("sound")
        .inode;
    let opened = |bytes: &[u8]| {
        fs::write(&image, bytes).expect("an image");
        open(&image)
    };
    let mut damaged = sound.clone();
    let mark = [b"IN", &0o100_644_u16.to_be_bytes()[..]].concat();
    let is_it = |at: &usize| {
        sound[*at..].starts_with(&mark) && sound[*at + 0x98..*at + 0xa0] == inode.to_be_bytes()
    };
    let at = (0..sound.len())
        .step_by(512)
        .find(is_it)
        .expect("its inode");
    damaged[at + 0x21] ^= 1;
    let files = opened(&damaged);
    let error = files
        .attributes(find(&*files, "block/entry7"))
        .expect_err("damaged");
    assert!(
        error.to_string().contains("the checksum of inode"),
        "{error}"
    );
    files
        .attributes(find(&*files, "block/entry8"))
        .expect("sound");

    let mut damaged = sound.clone();
    let block = (0..sound.len()).step_by(4096);
    let block = block.clone().find(|at| sound[*at..].starts_with(b"XDB3"));
    damaged[block.expect("a directory's block") + 100] ^= 1;
    let files = opened(&damaged);
    let mut names = Listing::new();
    let error = files.list(find(&*files, "block"), 0, &mut |entry| {
        names.insert(
            entry.name.to_vec(),
            common::listing(&*files)[&b""[..]].clone(),
        );
        true
    });
    assert!(matches!(error, Err(Error::Damaged { .. })));
    assert!(names.is_empty());
    find(&*files, "leaf/entry150");

    let mut damaged = sound;
    damaged[0x6c] ^= 1;
    fs::write(&image, damaged).expect("an image");
    let error = vellum_files::open(common::source(&image), Contents::Xfs).err();
    let error = error.expect("damaged").to_string();
    assert!(error.contains("the checksum of the superblock"), "{error}");
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let folder = tempfile::tempdir().expect("a folder");
    let image = folder.path().join("image");
    xfs_image::small_xfs(&[], folder.path(), &image);
    let sound = fs::read(&image).expect("an image");
    for (at, number, text) in [
        (0xd8, 0x10b_u64, "XFS with directories of metadata"),
        (0xd8, 0x800b, "XFS with features 0x8000"),
        (0xd8, 0xb, ""),
        (0x30, 0, "XFS whose log is on another device"),
    ] {
        let mut changed = sound.clone();
        match at {
            0xd8 => changed[at..at + 4].copy_from_slice(&(number as u32).to_be_bytes()),
            _ => changed[at..at + 8].copy_from_slice(&number.to_be_bytes()),
        }
        changed[0xe0..0xe4].fill(0);
        let sum = crc32c::crc32c(&changed[..512]);
        changed[0xe0..0xe4].copy_from_slice(&sum.to_le_bytes());
        fs::write(&image, changed).expect("an image");
        let error = vellum_files::open(common::source(&image), Contents::Xfs).err();
        let found = error.map_or(String::new(), |error| error.to_string());
        let is_expected = found.ends_with(text) && found.is_empty() == text.is_empty();
        assert!(is_expected, "{at:#x}: {found}");
    }
}
