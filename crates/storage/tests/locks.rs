//! Locks between us and real QEMU programs, in both directions, and between two
//! opens of one process.

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use parking_lot::{Mutex, MutexGuard};
use vellum_io::{ErrorKind, Result, lane};
use vellum_storage::lock::{PermissionSet, Permissions};
use vellum_storage::{FileOptions, FileStorage, Locks, Storage};

/// One test at a time: a program being started holds our locks until its `exec`.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock()
}

fn open(path: &Path, permissions: Permissions) -> Result<std::sync::Arc<FileStorage>> {
    let read_only = !permissions.used.contains(PermissionSet::WRITE);
    FileStorage::open(
        path,
        &FileOptions::default()
            .read_only(read_only)
            .locks(Locks::Of(permissions)),
    )
}

fn image(folder: &tempfile::TempDir) -> PathBuf {
    let path = folder.path().join("disk.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2"])
        .arg(&path)
        .arg("1M")
        .status();
    assert!(made.expect("qemu-img must be installed").success());
    path
}

fn conflict(path: &Path, permissions: Permissions, what: &str) {
    let error = open(path, permissions).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    let hint = format!(
        "{what}\nIs another process using the image [{}]?",
        path.display()
    );
    assert_eq!(error.message(), hint);
}

#[test]
fn two_opens_of_one_process_conflict_as_qemu_would() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [0; 4096]).unwrap();
    let reader = open(&path, Permissions::READER).unwrap();
    let other = open(&path, Permissions::READER).unwrap();
    conflict(&path, Permissions::WRITER, "Failed to get \"write\" lock");
    conflict(&path, Permissions::CREATOR, "Failed to get \"write\" lock");
    drop(other);
    drop(reader);
    let writer = open(&path, Permissions::WRITER).unwrap();
    conflict(
        &path,
        Permissions::READER,
        "Failed to get shared \"write\" lock",
    );
    conflict(
        &path,
        Permissions::INSPECTOR,
        "Failed to get shared \"write\" lock",
    );
    conflict(&path, Permissions::WRITER, "Failed to get \"write\" lock");
    drop(open(&path, Permissions::FORCE_SHARE).unwrap());
    writer.set_permissions(Permissions::RAW_WRITER).unwrap();
    let second = open(&path, Permissions::RAW_WRITER).unwrap();
    conflict(&path, Permissions::CREATOR, "Failed to get \"resize\" lock");
    assert_eq!(
        writer
            .set_permissions(Permissions::READER)
            .unwrap_err()
            .message()
            .lines()
            .next(),
        Some("Failed to get shared \"write\" lock")
    );
    // The failed change left the old permissions.
    conflict(
        &path,
        Permissions::READER,
        "Failed to get shared \"write\" lock",
    );
    drop(second);
    writer.set_permissions(Permissions::READER).unwrap();
    drop(open(&path, Permissions::READER).unwrap());
}

/// A change of the length takes its lock meanwhile, and gives it back.
#[test]
fn the_length_is_changed_under_its_lock() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("file");
    std::fs::write(&path, [0; 4096]).unwrap();
    let file = open(&path, Permissions::RAW_WRITER).unwrap();
    let reader = open(&path, Permissions::RAW_READER).unwrap();
    let error = lane::block_on(file.truncate(0)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Locked);
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4096);
    drop(reader);
    for len_bytes in [8192, 512] {
        lane::block_on(file.truncate(len_bytes)).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), len_bytes);
        drop(open(&path, Permissions::RAW_READER).unwrap());
    }
}

/// What a QEMU tool says on standard error; it must fail.
fn refused(command: &mut Command) -> String {
    let output = command.output().unwrap();
    assert!(!output.status.success(), "{command:?} got through");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn qemu_is_told_that_we_use_the_image() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder);
    let hint = format!("Is another process using the image [{}]?", path.display());

    let writer = open(&path, Permissions::WRITER).unwrap();
    let info = refused(Command::new("qemu-img").arg("info").arg(&path));
    assert!(
        info.contains("Failed to get shared \"write\" lock"),
        "{info}"
    );
    assert!(info.contains(&hint), "{info}");
    let io = refused(Command::new("qemu-io").args(["-c", "quit"]).arg(&path));
    assert!(io.contains("Failed to get \"write\" lock"), "{io}");
    let shared = Command::new("qemu-img")
        .args(["info", "-U"])
        .arg(&path)
        .output()
        .unwrap();
    assert!(shared.status.success());
    drop(writer);

    let _reader = open(&path, Permissions::READER).unwrap();
    let info = Command::new("qemu-img")
        .arg("info")
        .arg(&path)
        .output()
        .unwrap();
    assert!(info.status.success());
    let io = refused(
        Command::new("qemu-io")
            .args(["-c", "write 0 512"])
            .arg(&path),
    );
    assert!(io.contains("Failed to get \"write\" lock"), "{io}");
}

/// A `qemu-io` that has an image open until its standard input ends.
struct QemuIo(Child);

impl QemuIo {
    fn open(path: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new("qemu-io")
            .args(arguments)
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The prompt comes when the image is open.
        let mut prompt = [0; 8];
        child
            .stdout
            .as_mut()
            .unwrap()
            .read_exact(&mut prompt)
            .unwrap();
        assert_eq!(&prompt, b"qemu-io>");
        QemuIo(child)
    }

    fn close(mut self) {
        drop(self.0.stdin.take());
        let mut rest = String::new();
        let _ = BufReader::new(self.0.stdout.take().unwrap()).read_line(&mut rest);
        assert!(self.0.wait().unwrap().success());
    }
}

#[test]
fn we_are_told_that_qemu_uses_the_image() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let path = image(&folder);

    let qemu = QemuIo::open(&path, &[]);
    conflict(
        &path,
        Permissions::READER,
        "Failed to get shared \"write\" lock",
    );
    conflict(
        &path,
        Permissions::INSPECTOR,
        "Failed to get shared \"write\" lock",
    );
    conflict(&path, Permissions::WRITER, "Failed to get \"write\" lock");
    conflict(&path, Permissions::CREATOR, "Failed to get \"write\" lock");
    drop(open(&path, Permissions::FORCE_SHARE).unwrap());
    qemu.close();

    let qemu = QemuIo::open(&path, &["-r"]);
    drop(open(&path, Permissions::READER).unwrap());
    conflict(&path, Permissions::WRITER, "Failed to get \"write\" lock");
    conflict(
        &path,
        Permissions::RAW_WRITER,
        "Failed to get \"write\" lock",
    );
    qemu.close();
    drop(open(&path, Permissions::WRITER).unwrap());
}
