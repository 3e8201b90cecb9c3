//! `vellum mount --files`: the files on a disk, through the kernel.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use crate::images::{self, EXT};
use crate::listing::{self, Listing};
use crate::place::{Place, Server, is_mounted};

const FOLDER: &str = "look";

impl Place {
    /// `vellum mount --files` of `image` below [`FOLDER`].
    fn mount_files(&self, options: &[&str], image: &str) -> Server {
        let _ = fs::create_dir(self.path(FOLDER));
        let words = [&["mount", "--files"], options, &[image, FOLDER]].concat();
        self.start_at(FOLDER, &words)
    }

    /// What it says where it does not mount.
    fn refused(&self, options: &[&str], image: &str) -> String {
        let _ = fs::create_dir(self.path(FOLDER));
        let words = [&["mount", "--files"], options, &[image, FOLDER]].concat();
        let output = self.run(env!("CARGO_BIN_EXE_vellum"), &words);
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// Inode, mode, user, group and size of a file, as debugfs lists it.
type Line = (u64, u32, u32, u32, u64);

/// What debugfs lists below the root directory, by paths.
fn of_debugfs(place: &Place, image: &str) -> BTreeMap<Vec<u8>, Line> {
    let mut lines = BTreeMap::new();
    let mut directories = vec![(2_u64, Vec::new())];
    while !directories.is_empty() {
        let script = directories
            .iter()
            .map(|(inode, _)| format!("ls -p <{inode}>\n"));
        fs::write(place.path("script"), script.collect::<String>()).expect("a script");
        let output = place.run("/usr/sbin/debugfs", &["-f", "script", image]);
        let mut listed = output.stdout.split(|byte| *byte == b'\n').peekable();
        let mut next = Vec::new();
        for (_, path) in std::mem::take(&mut directories) {
            listed.next_if(|line| line.starts_with(b"debugfs: "));
            while let Some(line) = listed.next_if(|line| !line.starts_with(b"debugfs: ")) {
                let Some(line) = line.strip_prefix(b"/") else {
                    continue;
                };
                let fields: Vec<&[u8]> = line.split(|byte| *byte == b'/').collect();
                let number = |at: usize, radix| {
                    let text = String::from_utf8_lossy(fields[at]);
                    u64::from_str_radix(&text, radix).unwrap_or(0)
                };
                let (inode, mode, name) = (number(0, 10), number(1, 8) as u32, fields[4]);
                if inode == 0 || name == b"." || name == b".." {
                    continue;
                }
                let path = [&path[..], b"/", name].concat();
                if mode & 0o170_000 == 0o040_000 {
                    next.push((inode, path.clone()));
                }
                let line = (
                    inode,
                    mode,
                    number(2, 10) as u32,
                    number(3, 10) as u32,
                    number(5, 10),
                );
                lines.insert(path, line);
            }
        }
        directories = next;
    }
    lines
}

/// The same of what the kernel shows.
fn lines(root: &Path, listing: &Listing) -> BTreeMap<Vec<u8>, Line> {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let paths = listing.iter().filter(|(path, _)| !path.is_empty());
    let line = |(path, node): (&Vec<u8>, &listing::Node)| {
        let metadata = fs::symlink_metadata(root.join(OsStr::from_bytes(&path[1..])));
        let inode = metadata.expect("a file").ino();
        let (user, group) = node.owner;
        (
            path.clone(),
            (inode, node.mode, user, group, node.size_bytes),
        )
    };
    paths.map(line).collect()
}

#[test]
fn images_of_every_kind_show_what_debugfs_lists() {
    let place = Place::new("8M");
    let tree = place.path("tree");
    images::tree(&tree);
    let mut expected = listing::of_directory(&tree);
    expected.remove(&b""[..]);
    for (number, (name, ..)) in EXT.iter().enumerate() {
        images::ext(number, &tree, &place.path("raw"));
        let from = ["convert", "-q", "-f", "raw", "-O", "qcow2", "raw", "image"];
        place.must("qemu-img", &from);
        let server = place.mount_files(&["-f", "qcow2"], "image");
        let root = place.path(FOLDER);
        let mut found = listing::of_directory(&root);
        assert_eq!(lines(&root, &found), of_debugfs(&place, "raw"), "{name}");
        server.end();
        found.retain(|path, _| !path.is_empty() && !path.starts_with(b"/lost+found"));
        listing::compare(name, &found, &expected, |found, expected| {
            let mut expected = expected.clone();
            // mke2fs keeps 32 bits of a time.
            expected.modified = i64::from(expected.modified as i32);
            *found == expected
        });
    }
}

/// A disk with a FAT, an ext4 and a btrfs.
fn partitioned(place: &Place, label: &str) -> Listing {
    let tree = images::fat(&["-F", "16"], 40, &place.path(""), &place.path("fat"));
    let small = place.path("small");
    fs::create_dir(&small).expect("a directory");
    fs::write(small.join("file"), b"in ext4").expect("a file");
    let small = small.display().to_string();
    place.must(
        "mke2fs",
        &["-q", "-F", "-t", "ext4", "-d", &small, "ext4", "32M"],
    );
    File::create(place.path("btrfs"))
        .and_then(|volume| volume.set_len(320 << 20))
        .expect("a volume");
    place.must("mkfs.btrfs", &["-q", "btrfs"]);
    File::create(place.path("raw"))
        .and_then(|disk| disk.set_len(500 << 20))
        .expect("a disk");
    let table = format!("label: {label}\nstart=2048, size=40M\nsize=34M\nsize=330M\n");
    fs::write(place.path("table"), table).expect("a table");
    place.must("sh", &["-c", "sfdisk -q raw < table"]);
    for (name, at) in [("fat", "1M"), ("ext4", "41M"), ("btrfs", "75M")] {
        let (from, to) = (format!("if={name}"), format!("seek={at}"));
        let words = [
            &from,
            "of=raw",
            "bs=64k",
            "oflag=seek_bytes",
            &to,
            "conv=notrunc,sparse",
        ];
        place.must("dd", &words);
    }
    let mut listing = listing::of_directory(&tree);
    listing.remove(&b""[..]);
    listing
}

#[test]
fn partitions_are_chosen_by_number_in_raw_images_and_overlays() {
    for label in ["gpt", "dos"] {
        let place = Place::new("8M");
        let expected = partitioned(&place, label);
        let overlay = [
            "create", "-q", "-f", "qcow2", "-b", "raw", "-F", "raw", "overlay",
        ];
        place.must("qemu-img", &overlay);
        for (format, image) in [("raw", "raw"), ("qcow2", "overlay")] {
            let several = place.refused(&["-f", format], image);
            assert!(
                several.contains("choose one by --partition NUMBER"),
                "{several}"
            );
            assert!(
                several.contains("\n  partition 1: 40 MiB, FAT 'A LABEL' ("),
                "{several}"
            );
            assert!(
                several.contains("\n  partition 3: 330 MiB, btrfs ("),
                "{several}"
            );
            let foreign = place.refused(&["-f", format, "--partition", "3"], image);
            let text = format!("partition 3 of '{image}' holds btrfs, which vellum cannot read;");
            assert!(foreign.contains(&text), "{foreign}");
            let missing = place.refused(&["-f", format, "--partition", "4"], image);
            assert!(
                missing.contains("has no partition 4, but these:"),
                "{missing}"
            );

            let server = place.mount_files(&["-f", format, "--partition=1"], image);
            let mut found = listing::of_directory(&place.path(FOLDER));
            server.end();
            found.remove(&b""[..]);
            listing::compare(label, &found, &expected, |found, expected| {
                (found.size_bytes, found.sum) == (expected.size_bytes, expected.sum)
            });
            let server = place.mount_files(&["-f", format, "--partition=2"], image);
            let file = fs::read(place.path(FOLDER).join("file")).expect("a file");
            assert_eq!(file, b"in ext4");
            server.end();
        }
    }
}

/// An ISO9660 that starts from disks too is shown as a whole; its partitions on demand.
#[test]
fn hybrid_images_are_shown_as_a_whole() {
    let place = Place::new("8M");
    let tree = place.path("tree");
    fs::create_dir(&tree).expect("a directory");
    fs::write(tree.join("A Name.txt"), b"of the whole").expect("a file");
    place.must("mkfs.vfat", &["-C", "efi", "2048"]);
    fs::write(place.path("inside"), b"of a partition").expect("a file");
    place.must("mcopy", &["-i", "efi", "inside", "::/"]);
    for table in [
        &[][..],
        &["-appended_part_as_gpt"],
        &["-partition_offset", "16"],
    ] {
        let options = [
            "-as",
            "mkisofs",
            "-quiet",
            "-R",
            "-J",
            "-append_partition",
            "2",
            "0xef",
            "efi",
        ];
        let words = [&options[..], table, &["-o", "raw", "tree"]].concat();
        place.must("xorriso", &words);
        let server = place.mount_files(&["-f", "raw"], "raw");
        let read = fs::read(place.path(FOLDER).join("A Name.txt"));
        assert_eq!(read.expect("a file"), b"of the whole", "{table:?}");
        server.end();
        let server = place.mount_files(&["-f", "raw", "--partition=2"], "raw");
        let read = fs::read(place.path(FOLDER).join("inside"));
        assert_eq!(read.expect("a file"), b"of a partition", "{table:?}");
        server.end();
    }

    // One that was there before the partitions is none.
    let words = ["-as", "mkisofs", "-quiet", "-R", "-o", "raw", "tree"];
    place.must("xorriso", &words);
    let disk = File::options()
        .write(true)
        .open(place.path("raw"))
        .expect("a disk");
    disk.set_len(8 << 20).expect("a length");
    place.must("sh", &["-c", "echo start=4096,size=4096 | sfdisk -q raw"]);
    place.must(
        "dd",
        &["if=efi", "of=raw", "bs=1M", "seek=2", "conv=notrunc"],
    );
    let server = place.mount_files(&["-f", "raw"], "raw");
    let read = fs::read(place.path(FOLDER).join("inside"));
    assert_eq!(read.expect("a file"), b"of a partition");
    server.end();
}

/// Somebody who is not root, in a place that is theirs: mounting, reading, replacing what a killed
/// server has left, and unmounting. Where only root may open `/dev/fuse`, another node for the
/// same device lies over it, for this test alone.
#[test]
fn a_user_who_is_not_root_looks_into_images() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::new("8M");
    let tree = place.path("tree");
    fs::create_dir(&tree).expect("a directory");
    fs::write(tree.join("secret"), b"of root").expect("a file");
    let only_root = fs::Permissions::from_mode(0o600);
    fs::set_permissions(tree.join("secret"), only_root).expect("a mode");
    place.must(
        "mke2fs",
        &["-q", "-F", "-t", "ext4", "-d", "tree", "raw", "32M"],
    );
    // Folders of tests, and what was built, may be closed to others.
    let program = place.path("program");
    fs::copy(env!("CARGO_BIN_EXE_vellum"), &program).expect("a copy");
    fs::create_dir(place.path(FOLDER)).expect("a directory");
    fs::set_permissions(place.path(""), fs::Permissions::from_mode(0o755)).expect("a mode");
    place.must("chown", &["-R", "65534:65534", "."]);
    place.must("mknod", &["-m", "666", "node", "c", "10", "229"]);
    let script = r#"
        set -eu
        mount --bind node /dev/fuse
        user() { setpriv --reuid 65534 --regid 65534 --clear-groups "$@"; }
        look() { user ./program mount --fork --pid-file=pid --files -f raw raw look; }
        look
        user cat look/secret; echo
        cat look/secret 2> /dev/null || echo root may not
        kill -9 $(cat pid)
        until ! user ls look 2> /dev/null; do sleep 0.1; done
        look
        user ls look
        user fusermount3 -u look
        while user test -e look/secret; do sleep 0.1; done
        look
        kill $(cat pid)
        while grep -q /look /proc/self/mountinfo; do sleep 0.1; done
        echo ended
    "#;
    fs::write(place.path("script"), script).expect("a script");
    let output = place.run("timeout", &["60", "unshare", "--mount", "sh", "script"]);
    let text = String::from_utf8_lossy(&output.stdout);
    let expected = "of root\nroot may not\nlost+found\nsecret\nended\n";
    assert!(
        text.ends_with(expected),
        "needs root, to become another user in a mount namespace of its own: {output:?}"
    );
}

/// What a killed server has left is replaced; files that are open keep nothing from ending.
#[test]
fn dead_mounts_are_replaced_and_open_files_do_no_harm() {
    let place = Place::new("8M");
    let tree = place.path("tree");
    fs::create_dir(&tree).expect("a directory");
    fs::write(tree.join("file"), vec![7; 3 << 20]).expect("a file");
    let tree = tree.display().to_string();
    place.must(
        "mke2fs",
        &["-q", "-F", "-t", "ext4", "-d", &tree, "raw", "32M"],
    );
    let mut server = place.mount_files(&["-f", "raw"], "raw");
    let path = place.path(FOLDER).join("file");
    let file = File::open(&path).expect("a file");
    server.signal("-KILL");
    assert_eq!(server.wait(), None);
    fs::read_dir(place.path(FOLDER)).expect_err("nobody answers");

    let server = place.mount_files(&["-f", "raw"], "raw");
    let open = File::open(&path).expect("a file");
    let error = File::create(place.path(FOLDER).join("new")).expect_err("only to be read");
    assert_eq!(error.raw_os_error(), Some(libc::EROFS));
    let mut bytes = [0; 10];
    open.read_exact_at(&mut bytes, 1 << 20).expect("a read");
    assert_eq!(bytes, [7; 10]);
    server.end();
    open.read_exact_at(&mut bytes, (3 << 20) - 10)
        .expect_err("nobody serves");
    drop(file);

    // Somebody else may unmount it, and the program ends.
    let mut server = place.mount_files(&["-f", "raw"], "raw");
    place.must("umount", &[FOLDER]);
    assert_eq!(server.wait(), Some(0));
    assert!(!is_mounted(&place.path(FOLDER)));
    place.touch("plain");
    let output = place.run(
        env!("CARGO_BIN_EXE_vellum"),
        &["mount", "--files", "-f", "raw", "raw", "plain"],
    );
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("is not a directory"), "{text}");
}

/// Any image ends in files, or in an error with exit code 1.
#[test]
fn damaged_images_end_in_files_or_errors() {
    let place = Place::new("8M");
    let tree = place.path("tree");
    fs::create_dir_all(tree.join("a/b")).expect("directories");
    for number in 0..20 {
        fs::write(tree.join(format!("a/{number}")), [number; 99]).expect("a file");
    }
    let tree = tree.display().to_string();
    let options = ["-q", "-F", "-t", "ext4", "-O", "^metadata_csum", "-N", "64"];
    place.must(
        "mke2fs",
        &[&options[..], &["-d", &tree, "sound", "4M"]].concat(),
    );
    let sound = fs::read(place.path("sound")).expect("an image");
    let used: Vec<usize> = (0..sound.len()).filter(|at| sound[*at] != 0).collect();
    for seed in 0..25 {
        let mut random = fastrand::Rng::with_seed(seed);
        let mut damaged = sound.clone();
        for _ in 0..20 {
            damaged[used[random.usize(..used.len())]] = random.u8(..);
        }
        fs::write(place.path("raw"), damaged).expect("an image");
        let words = [
            "mount",
            "--files",
            "--fork",
            "--pid-file=pid",
            "-f",
            "raw",
            "raw",
            FOLDER,
        ];
        let _ = fs::create_dir(place.path(FOLDER));
        let output = place.run(env!("CARGO_BIN_EXE_vellum"), &words);
        match output.status.code() {
            Some(0) => {
                place.run("ls", &["-lR", FOLDER]);
                place.run("sh", &["-c", "cat look/*/* > all"]);
                place.must("umount", &[FOLDER]);
            }
            Some(1) => assert!(!output.stderr.is_empty()),
            other => panic!("seed {seed}: {other:?}"),
        }
        assert!(!is_mounted(&place.path(FOLDER)));
    }
}
