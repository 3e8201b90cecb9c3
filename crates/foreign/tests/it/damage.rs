//! Damaged images: whatever is in their tables, opening, reading, writing, checks and repairs end, and end
//! with a result or an error.

use std::sync::Arc;

use crate::common::run;
use vellum::storage::{MemStorage, WriteFlags, ZeroFlags};
use vellum::{
    BlockDevice, Buffer, Buffers, Error, ErrorKind, Io, RequestFlags, Result, Storage, ZeroRequest,
};
use vellum_foreign::{Fix, parallels, qcow, qed};

const SIZE_BYTES: u64 = 1 << 20;
const ALL: Fix = Fix {
    leaks: true,
    corruptions: true,
};

async fn open(format: &str, file: Arc<dyn Storage>, is_read: bool) -> Result<Arc<dyn BlockDevice>> {
    Ok(match format {
        "qcow" => {
            let options = qcow::OpenOptions::default().read_only(is_read);
            qcow::open(file, None, options).await?
        }
        "qed" => qed::open(file, None, is_read).await?,
        _ => parallels::open(file, is_read).await?,
    })
}

/// A small image with a little in each of its parts, and how much of its beginning is tables.
async fn image(format: &str) -> (Vec<u8>, usize) {
    let memory = Arc::new(MemStorage::new());
    let file: Arc<dyn Storage> = memory.clone();
    match format {
        "qcow" => {
            let options = qcow::CreateOptions::default().size_bytes(SIZE_BYTES);
            qcow::create(&file, &options).await.unwrap();
        }
        "qed" => {
            let options = qed::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .cluster_size_bytes(4096)
                .table_size_clusters(2);
            qed::create(&file, &options).await.unwrap();
        }
        _ => {
            let options = parallels::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .cluster_size_bytes(4096);
            parallels::create(&file, &options).await.unwrap();
        }
    }
    let device = open(format, file, false).await.unwrap();
    for at in (0..SIZE_BYTES).step_by(100 << 10) {
        let bytes = Buffer::copy_of(&[7; 5000]);
        let written = device.write(at, bytes, RequestFlags::default());
        written.await.unwrap();
    }
    if format == "qcow" {
        let bytes = Buffer::copy_of(&[3; 8192]);
        let written = device.write_compressed(65536, bytes, RequestFlags::default());
        written.await.unwrap();
    }
    device.close().await.unwrap();
    (memory.snapshot(), 24 << 10)
}

/// Values that are at the edges of something.
fn value(random: &mut fastrand::Rng) -> u64 {
    match random.u8(..8) {
        0 => u64::MAX,
        1 => 1 << random.u8(..64),
        2 => (1 << random.u8(..64)) - 1,
        3 => u64::from(random.u8(..)),
        4 => random.u64(..64) << 12,
        5 => i64::MAX as u64 - random.u64(..10_000),
        6 => 0,
        _ => random.u64(..),
    }
}

fn damage(bytes: &mut Vec<u8>, tables: usize, random: &mut fastrand::Rng) {
    for _ in 0..random.usize(1..6) {
        let (value, width) = (value(random), [1, 2, 4, 8][random.usize(..4)]);
        let value = match random.bool() {
            true => value.to_le_bytes()[..width].to_vec(),
            false => value.to_be_bytes()[8 - width..].to_vec(),
        };
        let end = match random.u8(..3) {
            0 => 128,
            1 => 4096,
            _ => tables,
        };
        let at = random.usize(..end.min(bytes.len()) / width) * width;
        bytes[at..at + width].copy_from_slice(&value);
    }
    if random.u8(..8) == 0 {
        bytes.truncate(random.usize(..bytes.len()));
    }
}

/// Does to a device whatever can be done to it; what comes out does not matter.
async fn use_up(device: &dyn BlockDevice, random: &mut fastrand::Rng) {
    // A damaged header may say that the disk is large.
    let size = device.size_bytes();
    for at in [
        0,
        65536,
        300 << 10,
        size.saturating_sub(70_000),
        random.u64(..size.max(1)),
    ] {
        let len = size.saturating_sub(at).min(70_000) as usize;
        let _ = device.read(at, Buffer::for_read(len)).await;
        let _ = device.block_status(at, len as u64, u32::MAX).await;
        let bytes = Buffer::copy_of(&vec![1; len.min(9000)]);
        let _ = device.write(at, bytes, RequestFlags::default()).await;
        let request = ZeroRequest::default().may_unmap(random.bool());
        let _ = device.write_zeroes(at, len as u64, request).await;
        let _ = device.discard(at, len as u64).await;
    }
    let _ = device.flush().await;
    let _ = device.truncate(size.saturating_add(1 << 20) & !511).await;
    let _ = device.close().await;
}

/// A file that is full at some MiB, wherever damage leads writes.
#[derive(Debug)]
struct Small(MemStorage);

impl Small {
    fn change<T>(&self, end_bytes: Option<u64>, start: impl FnOnce(&MemStorage) -> Io<T>) -> Io<T> {
        match end_bytes.is_some_and(|end_bytes| end_bytes < 16 << 20) {
            true => start(&self.0),
            false => Io::ready(Err(Error::new(ErrorKind::NoSpace, "write", "it is full"))),
        }
    }
}

impl Storage for Small {
    vellum_storage::delegate!(0: capabilities, name, len_bytes, flush);

    fn read(&self, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
        let len_bytes: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        assert!(
            offset_bytes
                .checked_add(len_bytes)
                .is_some_and(|end| end <= i64::MAX as u64)
        );
        self.0.read(offset_bytes, buffers)
    }

    fn write(&self, offset_bytes: u64, buffers: Buffers, flags: WriteFlags) -> Io<Buffers> {
        let len_bytes: u64 = buffers.iter().map(|buffer| buffer.len() as u64).sum();
        let end = offset_bytes.checked_add(len_bytes);
        self.change(end, |inner| inner.write(offset_bytes, buffers, flags))
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, flags: ZeroFlags) -> Io<()> {
        let end = offset_bytes.checked_add(len_bytes);
        self.change(end, |inner| {
            inner.write_zeroes(offset_bytes, len_bytes, flags)
        })
    }

    fn truncate(&self, len_bytes: u64) -> Io<()> {
        self.change(Some(len_bytes), |inner| inner.truncate(len_bytes))
    }
}

fn try_many(format: &'static str, seed: u64) {
    run(async {
        let (good, tables) = image(format).await;
        let random = &mut fastrand::Rng::with_seed(seed);
        for _ in 0..300 {
            let mut bytes = good.clone();
            damage(&mut bytes, tables, random);
            for is_read in [true, false] {
                let file = Arc::new(Small(MemStorage::with_bytes(bytes.clone())));
                if let Ok(device) = open(format, file, is_read).await {
                    use_up(&*device, random).await;
                }
            }
            let memory = Arc::new(Small(MemStorage::with_bytes(bytes)));
            let file: Arc<dyn Storage> = memory.clone();
            match format {
                "qed" => {
                    let _ = qed::check(&file).await;
                    if let Ok(report) = qed::repair(&file, ALL).await {
                        let again = qed::check(&file).await.unwrap();
                        assert!(again.corruptions <= report.corruptions, "seed {seed}");
                    }
                }
                "parallels" => {
                    let _ = parallels::check(&file).await;
                    if parallels::repair(&file, ALL).await.is_ok() {
                        let again = parallels::check(&file).await.unwrap();
                        assert_eq!(again.messages, Vec::<String>::new(), "seed {seed}");
                    }
                }
                _ => {}
            }
        }
    });
}

#[test]
fn damaged_qcow_images_end_in_errors() {
    try_many("qcow", 1);
}

#[test]
fn damaged_qed_images_end_in_errors() {
    try_many("qed", 2);
}

#[test]
fn damaged_parallels_images_end_in_errors() {
    try_many("parallels", 3);
}
