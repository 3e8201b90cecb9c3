//! Open, read everything, check: what the `image` target does with its bytes.

use std::cell::Cell;
use std::future::Future;
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::{Backing, OpenOptions, Qcow2, read_header};
use vellum::{BlockDevice, Buffer, ErrorKind, Extent, Storage};
use vellum_format::header::Header;
use vellum_io::executor::Executor;
use vellum_storage::MemStorage;

/// Sectors that a record can begin at: images have up to 8 MiB.
const SECTORS: usize = 16 << 10;
const SECTOR_BYTES: usize = 512;
/// How much of the disk's start is read, and at most how many extents of it.
const HEAD_BYTES: u64 = 4 << 20;
const MAX_EXTENTS: usize = 256;
/// How much is read at each of a few places further on.
const SAMPLE_BYTES: u64 = 64 << 10;

/// Bytes of an image, from records of a sector number (2 bytes), a length (2
/// bytes) and as many bytes. Images are mostly zeros; this keeps inputs short.
pub fn unpack(mut records: &[u8]) -> Vec<u8> {
    let mut image = Vec::new();
    while let Some(([s1, s0, l1, l0], rest)) = records.split_first_chunk() {
        let start = usize::from(u16::from_be_bytes([*s1, *s0])) % SECTORS * SECTOR_BYTES;
        let length = usize::from(u16::from_be_bytes([*l1, *l0])).min(rest.len());
        let (data, rest) = rest.split_at(length);
        let end = (start + length).next_multiple_of(SECTOR_BYTES);
        if image.len() < end {
            image.resize(end, 0);
        }
        image[start..start + length].copy_from_slice(data);
        records = rest;
    }
    image
}

/// - Neither check nor open nor reads panic, hang, or take more memory than the
///   fuzzer allows; each ends by itself.
/// - Nothing writes to the image.
/// - No other file is opened without leave.
/// - What an extent says is true: its bytes are zeros, or lie where it says.
/// - A range reads the same in one piece and in two.
pub fn check_image(records: &[u8]) {
    let image = unpack(records);
    let storage = Arc::new(MemStorage::with_bytes(image.clone()));
    run(check_all(storage.clone()));
    run(read_all(storage.clone()));
    assert!(storage.snapshot() == image, "the image was written to");
}

/// Runs one future on an executor of its own.
pub fn run(future: impl Future<Output = ()> + 'static) {
    let done = Rc::new(Cell::new(false));
    let finished = done.clone();
    let executor = Executor::new(|| {});
    let task = executor.spawn(async move {
        future.await;
        finished.set(true);
    });
    // Storage in memory completes at once: what is not ready now never will be.
    while executor.run_ready() {}
    assert!(
        done.get(),
        "a request waits for something that never happens"
    );
    drop(task);
}

async fn check_all(storage: Arc<dyn Storage>) {
    let findings = Arc::new(Mutex::new(0u64));
    let count = findings.clone();
    let options = CheckOptions::default().on_finding(Some(Arc::new(move |finding| {
        assert!(!finding.message.is_empty());
        *count.lock().expect("nobody panicked") += 1;
    })));
    if let Ok(report) = check(storage, &options).await {
        let reported = report.corruptions > 0 || report.leaks > 0 || report.check_errors > 0;
        let found = *findings.lock().expect("nobody panicked") > 0;
        assert_eq!(reported, found, "counts and findings disagree: {report:?}");
    }
}

async fn read_all(storage: Arc<dyn Storage>) {
    let Ok(header) = read_header(&storage).await else {
        return;
    };
    refuse_other_files(storage.clone(), &header).await;
    let mut options = OpenOptions::default()
        .read_only(true)
        .backing(Backing::None);
    if header.geometry().external_data {
        let bytes = (0..1 << 20).map(|at: u32| (at / 512) as u8 | 1).collect();
        options.data_file = Some(Arc::new(MemStorage::with_bytes(bytes)));
    }
    let Ok(device) = Qcow2::open(storage, Arc::new(DenyAll), options).await else {
        return;
    };
    let size = device.size_bytes();
    read_range(&*device, 0, size.min(HEAD_BYTES)).await;
    for start in [size / 3, size / 2, size.saturating_sub(SAMPLE_BYTES)] {
        read_range(&*device, start, (size - start).min(SAMPLE_BYTES)).await;
    }
    let beyond = device.read(size, Buffer::for_read(1)).await;
    assert_eq!(
        beyond.expect_err("beyond the end").kind(),
        ErrorKind::OutOfRange
    );
}

/// An image that names other files does not open while the gate is shut.
async fn refuse_other_files(storage: Arc<dyn Storage>, header: &Header) {
    if header.backing_file.is_none() && !header.geometry().external_data {
        return;
    }
    let options = OpenOptions::default().read_only(true);
    let opened = Qcow2::open(storage, Arc::new(DenyAll), options).await;
    assert!(opened.is_err(), "another file was opened");
}

/// Reads a range extent by extent.
async fn read_range(device: &dyn BlockDevice, start: u64, length: u64) {
    let (mut at, end) = (start, start + length);
    for _ in 0..MAX_EXTENTS {
        if at >= end {
            return;
        }
        match device.block_status(at, end - at, u32::MAX).await {
            Ok(extent) => {
                assert!(extent.len_bytes > 0 && extent.len_bytes <= end - at);
                read_extent(device, at, &extent).await;
                at += extent.len_bytes;
            }
            Err(_) => {
                // What cannot be mapped cannot be read, but need not stop us.
                let _ = device.read(at, Buffer::for_read(1)).await;
                at += SAMPLE_BYTES;
            }
        }
    }
}

async fn read_extent(device: &dyn BlockDevice, at: u64, extent: &Extent) {
    let length = extent.len_bytes.min(HEAD_BYTES) as usize;
    let Ok(whole) = device.read(at, Buffer::for_read(length)).await else {
        return;
    };
    assert_eq!(whole.len(), length);
    if extent.kind.is_zero() {
        assert!(whole.is_zero(), "zeros at {at} are none");
    }
    let half = length / 2;
    let first = device
        .read(at, Buffer::for_read(half))
        .await
        .expect("read before");
    let second = device
        .read(at + half as u64, Buffer::for_read(length - half))
        .await;
    let second = second.expect("read before");
    assert!(
        whole[..half] == first[..] && whole[half..] == second[..],
        "reads at {at} differ"
    );
    if let (true, Some(host)) = (extent.kind.needs_reading(), &extent.host) {
        assert!(!extent.kind.is_compressed() && host.storage.starts_with("memory-"));
    }
}
