//! What only files and devices do: opening, kinds, holes on disk, read-only,
//! lengths that direct I/O does not like, devices.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use tempfile::TempDir;
use vellum_io::lane::{block_on, yield_now};
use vellum_io::{Buffer, Buffers, ErrorKind};
use vellum_storage::file::{Create, FileKind};
use vellum_storage::{
    BlockStatus, FileOptions, FileStorage, Storage, StorageIdentity, WriteFlags, ZeroFlags,
};

fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

fn options() -> FileOptions {
    FileOptions::default()
}

fn create(folder: &TempDir, direct: bool) -> Arc<FileStorage> {
    let options = options().create(Create::Truncate).direct(direct);
    FileStorage::open(folder.path().join("file"), &options).unwrap()
}

async fn write(storage: &dyn Storage, offset_bytes: u64, bytes: &[u8]) {
    let buffers = Buffers::from_buf([Buffer::copy_of(bytes)]);
    storage
        .write(offset_bytes, buffers, WriteFlags::default())
        .await
        .unwrap();
}

async fn read(storage: &dyn Storage, offset_bytes: u64, len_bytes: usize) -> Buffer {
    let buffers = Buffers::from_buf([Buffer::for_read(len_bytes)]);
    storage
        .read(offset_bytes, buffers)
        .into_single()
        .await
        .unwrap()
}

#[test]
fn what_cannot_be_opened_says_why() {
    let folder = folder();
    let missing = folder.path().join("missing");
    let error = FileStorage::open(&missing, &options()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    let expected = format!(
        "Could not open '{}': No such file or directory",
        missing.display()
    );
    assert_eq!(error.message(), expected);

    let read_only = options().read_only(true);
    let error = FileStorage::open(folder.path(), &read_only).unwrap_err();
    assert!(error.message().contains("to be a regular file"), "{error}");

    std::fs::write(folder.path().join("file"), b"x").unwrap();
    let device = options().kind(FileKind::Device);
    let error = FileStorage::open(folder.path().join("file"), &device).unwrap_err();
    assert!(
        error
            .message()
            .contains("either a character or block device"),
        "{error}"
    );

    let nul = Path::new("a\0b");
    assert_eq!(
        FileStorage::open(nul, &options()).unwrap_err().errno(),
        libc::EINVAL
    );
}

#[test]
fn a_file_is_made_emptied_or_kept_as_told() {
    let folder = folder();
    let path = folder.path().join("file");
    let make = |create| FileStorage::open(&path, &options().create(create)).unwrap();
    make(Create::IfMissing);
    std::fs::write(&path, b"content").unwrap();
    assert_eq!(make(Create::IfMissing).len_bytes().unwrap(), 7);
    assert_eq!(make(Create::Truncate).len_bytes().unwrap(), 0);
}

#[test]
fn read_only_files_refuse_changes() {
    let folder = folder();
    std::fs::write(folder.path().join("file"), [1; 512]).unwrap();
    let options = options().read_only(true);
    let file = FileStorage::open(folder.path().join("file"), &options).unwrap();
    assert!(file.capabilities().read_only);
    block_on(async {
        let buffers = Buffers::from_buf([Buffer::zeroed(512)]);
        let errors = [
            file.write(0, buffers, WriteFlags::default())
                .await
                .map(drop),
            file.write_zeroes(0, 512, ZeroFlags::default()).await,
            file.discard(0, 512).await,
            file.allocate(0, 512).await,
            file.truncate(0).await,
        ];
        for error in errors {
            assert_eq!(error.unwrap_err().kind(), ErrorKind::ReadOnly);
        }
        file.flush().await.unwrap();
        assert_eq!(read(&*file, 0, 512).await[..], [1; 512]);
    });
}

#[test]
fn direct_reads_reach_an_end_that_is_not_aligned() {
    let folder = folder();
    for len in [1, 511, 513, 4095, 5000, 70_001] {
        let bytes: Vec<u8> = (0..len).map(|at| at as u8 | 1).collect();
        std::fs::write(folder.path().join("file"), &bytes).unwrap();
        let options = options().direct(true).read_only(true);
        let file = FileStorage::open(folder.path().join("file"), &options).unwrap();
        block_on(async {
            let mut expected = bytes.clone();
            expected.resize(80_000, 0);
            assert!(read(&*file, 0, 80_000).await[..] == expected, "{len}");
            assert!(read(&*file, 0, len).await[..] == bytes, "{len}");
            let sector = len as u64 & !511;
            assert!(read(&*file, sector, 512).await[..] == expected[sector as usize..][..512]);
        });
    }
}

#[test]
fn zeroes_and_discards_are_holes_on_disk() {
    for direct in [false, true] {
        let folder = folder();
        let file = create(&folder, direct);
        block_on(async {
            write(&*file, 0, &vec![1; 1 << 20]).await;
            file.flush().await.unwrap();
            let full = file.allocated_bytes().unwrap().unwrap();
            assert!(full >= 1 << 20);
            file.discard(0, 512 << 10).await.unwrap();
            let flags = ZeroFlags {
                may_unmap: true,
                no_fallback: true,
                fua: false,
            };
            file.write_zeroes(512 << 10, 256 << 10, flags)
                .await
                .unwrap();
            let left = file.allocated_bytes().unwrap().unwrap();
            assert!(left <= full - (768 << 10), "{left} of {full}");
            let hole = file.block_status(0, 1 << 20).await.unwrap();
            assert_eq!(
                (hole.status, hole.len_bytes),
                (BlockStatus::Hole, 768 << 10)
            );
            let data = file.block_status(768 << 10, 1 << 20).await.unwrap();
            assert_eq!(
                (data.status, data.len_bytes),
                (BlockStatus::Data, 256 << 10)
            );
            // The extent just learned must not hide a hole made since.
            file.discard(768 << 10, 256 << 10).await.unwrap();
            let hole = file.block_status(768 << 10, 256 << 10).await.unwrap();
            assert_eq!(hole.status, BlockStatus::Hole);
            file.allocate(0, 256 << 10).await.unwrap();
            assert!(file.allocated_bytes().unwrap().unwrap() >= 256 << 10);
        });
    }
}

#[test]
fn discards_can_be_ignored() {
    let folder = folder();
    std::fs::write(folder.path().join("file"), [1; 8192]).unwrap();
    let options = options().discard(false);
    let file = FileStorage::open(folder.path().join("file"), &options).unwrap();
    assert!(!file.capabilities().can_punch);
    block_on(async {
        file.discard(0, 8192).await.unwrap();
        assert_eq!(read(&*file, 0, 8192).await[..], [1; 8192]);
    });
}

/// A loop device over a file, where this process may have one.
struct LoopDevice(String);

impl LoopDevice {
    fn attach(path: &Path) -> Option<Self> {
        Self::attach_with(path, &[])
    }

    fn attach_with(path: &Path, options: &[&str]) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["--show", "-f"])
            .args(options)
            .arg(path)
            .output()
            .ok()?;
        let name = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        if output.status.success() && !name.is_empty() {
            return Some(LoopDevice(name));
        }
        eprintln!("no loop device to be had: devices are not tested");
        None
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}

/// The kernel opens such a device for writing, and fails the writes.
#[test]
fn a_read_only_block_device_is_not_opened_for_writing() {
    let folder = folder();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let Some(device) = LoopDevice::attach_with(&path, &["-r"]) else {
        return;
    };
    for create in [Create::No, Create::Truncate] {
        let error = FileStorage::open(&device.0, &options().create(create)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert_eq!(error.errno(), libc::EACCES);
        assert!(
            error.message().contains("The device is not writable"),
            "{error}"
        );
    }
    let file = FileStorage::open(&device.0, &options().read_only(true)).unwrap();
    assert!(file.capabilities().read_only);
}

/// Several nodes in the file system may name one device.
#[test]
fn a_block_device_is_itself_by_any_node() {
    let folder = folder();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let Some(device) = LoopDevice::attach(&path) else {
        return;
    };
    let node = folder.path().join("node");
    let number = std::fs::metadata(&device.0).unwrap().rdev();
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let kind = rustix::fs::FileType::BlockDevice;
    rustix::fs::mknodat(rustix::fs::CWD, &node, kind, mode, number).unwrap();
    let open = |path: &Path| FileStorage::open(path, &options().read_only(true)).unwrap();
    let (one, two) = (open(Path::new(&device.0)), open(&node));
    assert_eq!(StorageIdentity::of(&*one), StorageIdentity::of(&*two));
    assert_ne!(
        StorageIdentity::of(&*one),
        StorageIdentity::of(&*open(&path))
    );
}

#[test]
fn block_devices() {
    let folder = folder();
    let path = folder.path().join("disk");
    std::fs::write(&path, vec![1; 1 << 20]).unwrap();
    let Some(device) = LoopDevice::attach(&path) else {
        return;
    };
    for direct in [true, false] {
        let options = options().direct(direct).kind(FileKind::Device);
        let file = FileStorage::open(&device.0, &options).unwrap();
        let capabilities = file.capabilities();
        assert!(file.is_device() && !capabilities.growable && !capabilities.has_zero_init);
        assert_eq!(file.len_bytes().unwrap(), 1 << 20);
        block_on(async {
            write(&*file, 0, &[1; 4096]).await;
            write(&*file, 100, &[2; 1000]).await;
            assert_eq!(read(&*file, 99, 1002).await[..3], [1, 2, 2]);
            for may_unmap in [false, true] {
                write(&*file, 0, &[3; 65_536]).await;
                let flags = ZeroFlags {
                    may_unmap,
                    ..ZeroFlags::default()
                };
                file.write_zeroes(4096, 8192, flags).await.unwrap();
                file.write_zeroes(20_001, 777, flags).await.unwrap();
                let bytes = read(&*file, 0, 65_536).await;
                let zeroes = |at| (4096..12_288).contains(&at) || (20_001..20_778).contains(&at);
                for (at, &byte) in bytes.iter().enumerate() {
                    assert_eq!(byte, if zeroes(at) { 0 } else { 3 }, "{at}");
                }
            }
            file.discard(0, 65_536).await.unwrap();
            file.discard(100, 200).await.unwrap();
            file.allocate(0, 1 << 20).await.unwrap();
            file.truncate(4096).await.unwrap();
            assert_eq!(
                file.truncate(2 << 20).await.unwrap_err().message(),
                "Cannot grow device files"
            );
            assert_eq!(
                file.allocate(0, 2 << 20).await.unwrap_err().kind(),
                ErrorKind::NoSpace
            );
            let buffers = Buffers::from_buf([Buffer::zeroed(4096)]);
            let error = file
                .write(1 << 20, buffers, WriteFlags::default())
                .await
                .unwrap_err();
            assert_eq!(error.kind(), ErrorKind::NoSpace);
            assert_eq!(read(&*file, 1 << 20, 4096).await[..], [0; 4096]);
            file.flush().await.unwrap();
        });
    }
}

/// Two writes that meet in a block, of which one fills blocks and the other reads what stands
/// around it: whichever comes last, each has written all that the other one does not.
#[test]
fn direct_writes_that_overlap_bring_nothing_old_back() {
    let folder = folder();
    let file = create(&folder, true);
    block_on(async {
        write(&*file, 0, &[0; 8192]).await;
        for round in 1..=100_u8 {
            let whole = Buffers::from_buf([Buffer::copy_of(&[round; 8192])]);
            let part = Buffers::from_buf([Buffer::copy_of(&[0xff; 100])]);
            let at = u64::from(round) * 80 + 1;
            let part = file.write(at, part, WriteFlags::default());
            // So that it has begun to read in some rounds, and to write in others.
            for _ in 0..round % 4 {
                yield_now().await;
            }
            let whole = file.write(0, whole, WriteFlags::default());
            whole.await.unwrap();
            part.await.unwrap();
            let bytes = read(&*file, 0, 8192).await;
            let old = (0..8192).find(|&place| {
                let inside = (at as usize..at as usize + 100).contains(&place);
                bytes[place] != round && !(inside && bytes[place] == 0xff)
            });
            assert_eq!(old, None, "round {round}: {}", bytes[old.unwrap_or(0)]);
        }
    });
}
