//! Devices whose requests block.

use std::path::Path;
use std::sync::Arc;

use vellum::blocking::Device;
use vellum::gate::Folder;
use vellum::io::lane::{LaneOptions, LaneThread};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{AsQcow2, NewSnapshot, OpenOptions};
use vellum::storage::{Create, FileOptions, FileStorage, MemStorage};
use vellum::{ErrorKind, Raw, RawOptions, ZeroRequest};

const MIB: u64 = 1 << 20;

fn new_image(directory: &Path, name: &str) {
    let path = directory.join(name);
    let lane = LaneThread::start("create", LaneOptions::default()).unwrap();
    lane.call(|| async move {
        let file = FileStorage::open(path, &FileOptions::default().create(Create::Truncate))?;
        create(file, None, &CreateOptions::default().size_bytes(64 * MIB)).await
    })
    .unwrap();
}

fn open(directory: &Path, name: &str) -> Device {
    let folder = Folder::new(directory).unwrap();
    Device::open(&folder, name, OpenOptions::default()).unwrap()
}

#[test]
fn slices_of_any_size_and_place() {
    let directory = tempfile::tempdir().unwrap();
    new_image(directory.path(), "disk.qcow2");
    let disk = open(directory.path(), "disk.qcow2");
    assert_eq!(disk.size_bytes(), 64 * MIB);
    let mut expected = vec![0; 20 << 20];
    let writes = [(3, 1), (4095, 9 << 20), (12_345_678, 5 << 20), (77, 0)];
    for (byte, (offset, len)) in (1..).zip(writes) {
        let bytes = vec![byte; len];
        disk.write(offset as u64, &bytes).unwrap();
        expected[offset..offset + len].copy_from_slice(&bytes);
    }
    disk.write_zeroes(MIB, MIB, ZeroRequest::default()).unwrap();
    expected[1 << 20..2 << 20].fill(0);
    let mut read = vec![7; expected.len()];
    disk.read(0, &mut read).unwrap();
    assert!(read == expected);
    disk.flush().unwrap();
    disk.close().unwrap();

    let disk = open(directory.path(), "disk.qcow2");
    disk.read(0, &mut read).unwrap();
    assert!(read == expected);
    let extent = disk.block_status(63 * MIB, MIB, u32::MAX).unwrap();
    assert_eq!(extent.len_bytes, MIB);
    disk.truncate(65 * MIB).unwrap();
    assert_eq!(disk.size_bytes(), 65 * MIB);
    disk.discard(0, 64 * MIB).unwrap();
    disk.close().unwrap();
}

#[test]
fn threads_share_a_device_and_devices_a_lane() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["one.qcow2", "two.qcow2"] {
        new_image(directory.path(), name);
    }
    let one = open(directory.path(), "one.qcow2");
    let folder = Folder::new(directory.path()).unwrap();
    let two = one
        .call(move || async move { folder.open_image("two.qcow2", OpenOptions::default()).await });
    let two = Device::new(two.unwrap(), one.lane().clone());
    std::thread::scope(|scope| {
        for thread in 0..8_u8 {
            let disk = if thread % 2 == 0 { &one } else { &two };
            scope.spawn(move || {
                for n in 0..50 {
                    let offset = u64::from(thread) * MIB + n * 8192;
                    disk.write(offset, &[thread + 1; 4096]).unwrap();
                    let mut read = [0; 4096];
                    disk.read(offset, &mut read).unwrap();
                    assert_eq!(read, [thread + 1; 4096]);
                }
                disk.flush().unwrap();
            });
        }
    });
    one.close().unwrap();
    two.close().unwrap();
}

#[test]
fn errors_say_what_went_wrong() {
    let directory = tempfile::tempdir().unwrap();
    new_image(directory.path(), "disk.qcow2");
    let folder = Folder::new(directory.path()).unwrap();
    let missing = Device::open(&folder, "missing.qcow2", OpenOptions::default());
    assert_eq!(missing.unwrap_err().errno(), 2);
    let disk = open(directory.path(), "disk.qcow2");
    let beyond = disk.write(64 * MIB - 1, &[1; 2]);
    assert_eq!(beyond.unwrap_err().kind(), ErrorKind::OutOfRange);
    // A request of the lane's own would wait for itself.
    let inner = disk.clone();
    let nested = disk.call(move || async move { Ok(inner.flush().unwrap_err().kind()) });
    assert_eq!(nested.unwrap(), ErrorKind::InvalidArgument);
    let closed = disk.clone();
    disk.close().unwrap();
    assert!(closed.write(0, &[1]).is_err());
}

#[test]
fn what_was_flushed_outlives_a_device_that_is_dropped() {
    let directory = tempfile::tempdir().unwrap();
    new_image(directory.path(), "disk.qcow2");
    let disk = open(directory.path(), "disk.qcow2");
    disk.write(5 * MIB, &[5; 70_000]).unwrap();
    disk.flush().unwrap();
    drop(disk);
    let disk = open(directory.path(), "disk.qcow2");
    let mut read = vec![0; 70_000];
    disk.read(5 * MIB, &mut read).unwrap();
    assert!(read.iter().all(|&byte| byte == 5));
    disk.close().unwrap();
}

#[test]
fn what_only_a_format_can_do_runs_by_call() {
    let directory = tempfile::tempdir().unwrap();
    new_image(directory.path(), "disk.qcow2");
    let disk = open(directory.path(), "disk.qcow2");
    let device = disk.device().clone();
    disk.call(move || async move {
        let image = device.as_qcow2().expect("it is one");
        let new = NewSnapshot {
            name: "before".into(),
            ..NewSnapshot::default()
        };
        image.create_snapshot(new).await
    })
    .unwrap();
    disk.close().unwrap();
}

#[test]
fn any_device_may_block() {
    let lane = Arc::new(LaneThread::start("raw", LaneOptions::default()).unwrap());
    let raw = lane.call(|| async {
        let file = Arc::new(MemStorage::new());
        vellum::Storage::truncate(&*file, MIB).await?;
        Raw::open(file, RawOptions::default())
    });
    let disk = Device::new(raw.unwrap(), lane);
    disk.write(1, b"raw").unwrap();
    let mut read = [0; 5];
    disk.read(0, &mut read).unwrap();
    assert_eq!(&read, b"\0raw\0");
}

#[test]
fn requests_for_nothing_are_refused_as_others_are() {
    let directory = tempfile::tempdir().unwrap();
    new_image(directory.path(), "disk.qcow2");
    let disk = open(directory.path(), "disk.qcow2");
    disk.write(64 * MIB, &[]).unwrap();
    let beyond = [
        disk.write(64 * MIB + 1, &[]),
        disk.read(64 * MIB + 1, &mut []),
    ];
    for refused in beyond {
        assert_eq!(refused.unwrap_err().kind(), ErrorKind::OutOfRange);
    }
    let other = disk.clone();
    disk.close().unwrap();
    let refused = other.write(0, &[]).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::InvalidArgument);
}
