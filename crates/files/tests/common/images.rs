//! Images of file systems, made by the programs of `cargo xtask setup`, and what is in them.
//! The tests of the program use this file as well.

use std::ffi::{CString, OsStr};
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Ways to make ext2, ext3 and ext4, and how large in MiB.
pub const EXT: &[(&str, &[&str], u64)] = &[
    ("ext2-1k", &["-t", "ext2", "-b", "1024"], 40),
    (
        "ext2-bare",
        &[
            "-t",
            "ext2",
            "-b",
            "4096",
            "-I",
            "128",
            "-O",
            "^filetype,^dir_index",
        ],
        40,
    ),
    ("ext3", &["-t", "ext3", "-b", "4096"], 40),
    ("ext4", &["-t", "ext4"], 64),
    (
        "ext4-1k-inline",
        &["-t", "ext4", "-b", "1024", "-O", "inline_data"],
        48,
    ),
    (
        "ext4-4k-inline",
        &["-t", "ext4", "-b", "4096", "-I", "512", "-O", "inline_data"],
        64,
    ),
    (
        "ext4-no-extents",
        &["-t", "ext4", "-O", "^extents,^64bit"],
        64,
    ),
    (
        "ext4-meta-groups",
        &[
            "-t",
            "ext4",
            "-b",
            "1024",
            "-g",
            "1024",
            "-O",
            "meta_bg,^resize_inode",
        ],
        48,
    ),
    (
        "ext4-clusters",
        &["-t", "ext4", "-O", "bigalloc", "-C", "16384"],
        256,
    ),
    (
        "ext4-old",
        &[
            "-t",
            "ext4",
            "-I",
            "128",
            "-O",
            "^64bit,^metadata_csum,^flex_bg",
        ],
        48,
    ),
    (
        "ext4-new",
        &[
            "-t",
            "ext4",
            "-O",
            "metadata_csum_seed,sparse_super2,large_dir,encrypt,project,quota",
        ],
        64,
    ),
];

/// Runs a program that must succeed.
pub fn must(program: &str, words: &[&OsStr]) -> Output {
    let output = Command::new(program)
        .args(words)
        .env(
            "PATH",
            "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        )
        .output()
        .unwrap_or_else(|error| panic!("{program}, of `cargo xtask setup`: {error}"));
    assert!(output.status.success(), "{program} {words:?}: {output:?}");
    output
}

/// Runs a program with words that are plain text.
pub fn run(program: &str, words: &[&str]) -> Output {
    let words: Vec<&OsStr> = words.iter().map(OsStr::new).collect();
    must(program, &words)
}

/// Bytes that differ from place to place.
pub fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| random.u8(..)).collect()
}

fn name(bytes: &[u8]) -> &OsStr {
    OsStr::from_bytes(bytes)
}

/// A tree with all that a file system is asked for. Needs root, for devices.
pub fn tree(root: &Path) {
    let put = |path: &Path, content: &[u8]| fs::write(path, content).expect("a file");
    let make = |path: &Path| fs::create_dir_all(path).expect("a directory");
    make(root);
    for len in [
        0, 1, 59, 60, 61, 100, 155, 160, 1023, 1024, 4095, 4096, 4097, 70_000,
    ] {
        put(
            &root.join(format!("of {len} bytes")),
            &noise(len, len as usize),
        );
    }
    put(&root.join("big"), &noise(2, 6_000_000));
    let sparse = File::create(root.join("sparse")).expect("a file");
    for at in [0, 5_000_000, 59_999_990] {
        sparse.write_all_at(b"not a hole", at).expect("a write");
    }

    let mut deep = root.join("deep");
    for level in 0..40 {
        deep.push(format!("level {level}"));
    }
    make(&deep);
    put(&deep.join("bottom"), b"far down");
    let many = root.join("many");
    make(&many);
    for number in 0..5000 {
        let name = format!("entry number {number}");
        put(&many.join(&name), name.as_bytes());
    }
    let few = root.join("few");
    make(&few);
    put(&few.join("a"), b"1");
    make(&root.join("empty"));

    put(&root.join(name(&[b'n'; 255])), b"a long name");
    put(&root.join(name(b"not \xff\xfe UTF-8 \xc3")), b"bytes");
    put(&root.join("größe 漢字"), b"letters");
    make(&root.join(name(b"\x80\x81")));
    put(
        &root.join(name(b"\x80\x81")).join(name(b"\x82 x")),
        b"inside",
    );
    for len in [1, 58, 59, 60, 61, 100, 1000] {
        let target = format!("/{}", "t".repeat(len - 1));
        symlink(target, root.join(format!("link of {len}"))).expect("a link");
    }
    symlink(name(b"../\xff"), root.join("link to bytes")).expect("a link");
    fs::hard_link(root.join("of 100 bytes"), few.join("the same")).expect("a link");
    fs::hard_link(root.join("of 100 bytes"), few.join("and again")).expect("a link");
    special_files(root);
}

fn special_files(root: &Path) {
    let make = |name: &str, mode, device| {
        let path = root.join(name);
        let path = CString::new(path.as_os_str().as_bytes()).expect("a path");
        run("mknod", &[path.to_str().expect("text"), mode, device, "7"]);
    };
    make("tty", "c", "4");
    make("disk", "b", "259");
    let fifo = root.join("pipe").display().to_string();
    run("mkfifo", &[&fifo]);
    let set = |name: &str, mode| {
        let permissions = fs::Permissions::from_mode(mode);
        fs::set_permissions(root.join(name), permissions).expect("a mode");
    };
    set("of 1 bytes", 0o4755);
    set("of 59 bytes", 0o000);
    set("empty", 0o1777);
    let of = root.join("of 60 bytes").display().to_string();
    run("chown", &["70000:80001", &of]);
    for (name, time) in [
        ("of 61 bytes", "1969-07-20T20:17:40Z"),
        ("of 100 bytes", "2040-02-29T12:34:56Z"),
    ] {
        let path = root.join(name).display().to_string();
        run("touch", &["-d", time, &path]);
    }
}

/// A file system of [`EXT`] with what is below `tree`.
pub fn ext(number: usize, tree: &Path, image: &Path) {
    let (_, options, mebibytes) = EXT[number];
    let _ = fs::remove_file(image);
    let (tree, image) = (tree.display().to_string(), image.display().to_string());
    let size = format!("{mebibytes}M");
    let words = [
        &["-q", "-F", "-L", "a label"],
        options,
        &["-d", &tree, &image, &size],
    ]
    .concat();
    run("mke2fs", &words);
}

/// What a FAT of `mebibytes` can hold, from where it was copied to the file system.
pub fn fat(options: &[&str], mebibytes: u64, folder: &Path, image: &Path) -> PathBuf {
    let tree = folder.join("fat tree");
    let _ = fs::remove_dir_all(&tree);
    let deep = tree.join("One Folder/another/LOUD/x.y.z");
    fs::create_dir_all(&deep).expect("a directory");
    let put = |path: PathBuf, content: &[u8]| fs::write(path, content).expect("a file");
    for len in [0, 1, 511, 512, 513, 2048, 2049, 33_000] {
        put(
            tree.join(format!("of {len} bytes")),
            &noise(len, len as usize),
        );
    }
    put(tree.join("big"), &noise(3, 700_000));
    put(tree.join("SHORT.TXT"), b"short");
    put(tree.join("lower.txt"), b"lower");
    put(tree.join("größe äöü.ext"), b"letters");
    put(tree.join("漢字かな"), b"more letters");
    put(tree.join("l".repeat(200)), b"a long name");
    put(deep.join("bottom"), b"far down");
    let many = tree.join("many");
    fs::create_dir(&many).expect("a directory");
    for number in 0..300 {
        let name = format!("entry number {number}");
        put(many.join(&name), name.as_bytes());
    }
    let file = File::create(image).expect("an image");
    file.set_len(mebibytes << 20).expect("a length");
    let shown = image.display().to_string();
    run("mkfs.vfat", &[options, &["-n", "A LABEL", &shown]].concat());
    // No locale: names are taken as UTF-8 anyway.
    let mut words = vec!["-i", &shown, "-s", "-m", "-Q"];
    let entries: Vec<String> = fs::read_dir(&tree)
        .expect("a directory")
        .map(|entry| entry.expect("an entry").path().display().to_string())
        .collect();
    words.extend(entries.iter().map(String::as_str));
    words.push("::/");
    let output = Command::new("mcopy")
        .args(&words)
        .env("LC_ALL", "C.UTF-8")
        .output()
        .expect("mcopy, of `cargo xtask setup`");
    assert!(output.status.success(), "{output:?}");
    tree
}
