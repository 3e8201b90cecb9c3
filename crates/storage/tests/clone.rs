//! Shared blocks, on file systems that have them and on one that does not.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use vellum_io::lane::block_on;
use vellum_io::{Buffer, Buffers, ErrorKind};
use vellum_storage::file::Create;
use vellum_storage::{FileOptions, FileStorage, MemStorage, Storage, WriteFlags};

const MIB: u64 = 1 << 20;
/// The smallest file system that `mkfs.xfs` makes.
const FILE_SYSTEM_BYTES: u64 = 320 * MIB;

/// A file system in a file, mounted until dropped.
struct Mounted {
    folder: tempfile::TempDir,
}

/// Runs a program that has to succeed.
fn done(program: &str, words: &[&Path]) {
    let output = Command::new(program)
        .args(words)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error}; run `cargo xtask setup`"));
    assert!(
        output.status.success(),
        "{program} {words:?}: {}\nThis test mounts a file system in a file: run it as root, and in \
         a container with CAP_SYS_ADMIN and the loop devices (docker run --privileged).",
        String::from_utf8_lossy(&output.stderr)
    );
}

impl Mounted {
    fn new(kind: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("image");
        let file = std::fs::File::create(&image).unwrap();
        file.set_len(FILE_SYSTEM_BYTES).unwrap();
        done(&format!("mkfs.{kind}"), &[Path::new("-q"), &image]);
        let mounted = Mounted { folder };
        std::fs::create_dir(mounted.path()).unwrap();
        let words = ["-o", "loop", "-t", kind].map(Path::new);
        done("mount", &[&words[..], &[&image, &mounted.path()]].concat());
        mounted
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("mounted")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // It may not be mounted; then the folder just goes.
        let _ = Command::new("umount").arg(self.path()).output();
    }
}

fn open(path: &Path, direct: bool) -> Arc<FileStorage> {
    let options = FileOptions::default()
        .direct(direct)
        .create(Create::IfMissing);
    FileStorage::open(path, &options).unwrap()
}

fn write(storage: &dyn Storage, offset_bytes: u64, byte: u8, len_bytes: u64) {
    let buffers = Buffers::from_buf([Buffer::copy_of(&vec![byte; len_bytes as usize])]);
    block_on(storage.write(offset_bytes, buffers, WriteFlags::default())).unwrap();
}

fn holds(storage: &dyn Storage, offset_bytes: u64, byte: u8, len_bytes: u64) -> bool {
    let buffers = Buffers::from_buf([Buffer::for_read(len_bytes as usize)]);
    let bytes = block_on(storage.read(offset_bytes, buffers).into_single()).unwrap();
    bytes.iter().all(|&found| found == byte)
}

fn refused(target: &dyn Storage, source: &dyn Storage, from: u64, to: u64, len: u64) {
    let error = block_on(target.clone_range(source, from, to, len)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
}

fn shares_blocks(folder: &Path, direct: bool) {
    let source = open(&folder.join(format!("source-{direct}")), direct);
    let target = open(&folder.join(format!("target-{direct}")), direct);
    write(&*source, 0, 1, 4 * MIB);
    write(&*target, 0, 2, MIB);
    assert!(target.may_clone_from(&*source));
    // What is no whole block is refused, and what can be had stays to be had.
    refused(&*target, &*source, 100, 0, 4096);
    refused(&*target, &*source, 0, 0, 0);
    assert!(target.may_clone_from(&*source));
    block_on(target.clone_range(&*source, MIB, 2 * MIB, 2 * MIB)).unwrap();
    assert_eq!(target.len_bytes().unwrap(), 4 * MIB);
    assert!(holds(&*target, 0, 2, MIB) && holds(&*target, MIB, 0, MIB));
    assert!(holds(&*target, 2 * MIB, 1, 2 * MIB));
    // Writing one copy leaves the other as it is.
    write(&*target, 2 * MIB, 3, 4096);
    assert!(holds(&*source, MIB, 1, MIB) && holds(&*target, 2 * MIB, 3, 4096));
    // Inside one file.
    assert!(target.may_clone_from(&*target));
    block_on(target.clone_range(&*target, 0, 4 * MIB, MIB)).unwrap();
    assert!(holds(&*target, 4 * MIB, 2, MIB));
}

#[test]
fn file_systems_with_shared_blocks_share_them() {
    for kind in ["xfs", "btrfs"] {
        let mounted = Mounted::new(kind);
        for direct in [false, true] {
            shares_blocks(&mounted.path(), direct);
        }
    }
}

#[test]
fn two_file_systems_share_nothing_and_are_not_asked_again() {
    let (one, other) = (Mounted::new("xfs"), tempfile::tempdir().unwrap());
    let target = open(&one.path().join("target"), false);
    let source = open(&other.path().join("source"), false);
    write(&*source, 0, 1, MIB);
    write(&*target, 0, 2, MIB);
    refused(&*target, &*source, 0, 0, MIB);
    assert!(!target.may_clone_from(&*source));
    // Inside itself the target can share.
    assert!(target.may_clone_from(&*target));
    block_on(target.clone_range(&*target, 0, MIB, MIB)).unwrap();
}

#[test]
fn what_is_no_file_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = open(&folder.path().join("file"), false);
    let memory = MemStorage::with_bytes(vec![1; 4096]);
    assert!(!file.may_clone_from(&memory) && !memory.may_clone_from(&*file));
    refused(&*file, &memory, 0, 0, 4096);
    refused(&memory, &*file, 0, 0, 4096);
}
