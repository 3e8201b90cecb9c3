//! Images of other programs: what the targets named for their formats do with their bytes.
//!
//! Of a format that is written, the bytes are changes of an image that was just made: a byte that says
//! which, then records of an offset (3 bytes), a length (1 byte) and as many bytes. If the first byte is
//! 0xff, and of formats that are only read, they are the image.

use std::sync::Arc;

use vellum::io::lane;
use vellum::luks::Unlocking;
use vellum::storage::MemStorage;
use vellum::{BlockDevice, Buffer, Buffers, Error, Io, RequestFlags, Result, Storage, ZeroRequest};
use vellum_foreign::ova::Package;
use vellum_foreign::{Fix, bochs, cloop, dmg, parallels, qcow, qed, vdi, vhdx, vmdk, vpc};
use vellum_storage::wrap::{Call, Operation, Policy, Wrapped};

/// The size of disks that are changed.
const SIZE_BYTES: u64 = 3 << 20 | 0x600;
/// How much of a disk is read at a few places, and at most how many extents of it.
const SAMPLE_BYTES: u64 = 256 << 10;
const MAX_EXTENTS: usize = 64;
/// The length that a file may get, in bytes: an image says where its next block lies, and all of the file is
/// in memory.
const MAX_FILE_BYTES: u64 = 32 << 20;
const ENOSPC: i32 = 28;
const MEND: Fix = Fix {
    leaks: true,
    corruptions: true,
};

/// The formats, by the names of their targets.
pub const FORMATS: [&str; 10] = [
    "bochs",
    "cloop",
    "dmg",
    "parallels",
    "qcow",
    "qed",
    "vdi",
    "vhdx",
    "vmdk",
    "vpc",
];

/// A full file system behind [`MAX_FILE_BYTES`].
#[derive(Debug, Default)]
struct Full;

impl Policy for Full {
    fn handle<T: 'static>(&self, call: Call, start: impl FnOnce() -> Io<T> + 'static) -> Io<T> {
        let end = match call.operation {
            Operation::Write | Operation::WriteZeroes | Operation::Allocate => {
                call.offset_bytes.saturating_add(call.len_bytes)
            }
            Operation::Truncate => call.offset_bytes,
            _ => 0,
        };
        match end > MAX_FILE_BYTES {
            true => Io::ready(Err(Error::from_errno("write", ENOSPC))),
            false => start(),
        }
    }
}

/// A file that holds an image.
fn file_of(image: &[u8]) -> Arc<dyn Storage> {
    Wrapped::<Full>::new(Arc::new(MemStorage::with_bytes(image.to_vec())))
}

/// - Neither opening nor reading, writing, checking or mending panics, hangs, or takes more memory
///   than the fuzzer allows.
/// - What only reads changes nothing.
/// - What an extent calls zeroes reads as zeroes; a range reads the same in one piece and in two.
/// - What was written and flushed reads so.
pub fn check_image(format: &str, data: &[u8]) {
    lane::block_on(async {
        let image = match data.split_first() {
            Some((0xff, image)) => image.to_vec(),
            Some((kind, changes)) if is_written(format) => {
                let mut image = new_image(format, *kind).await;
                change(&mut image, changes);
                image
            }
            _ => data.to_vec(),
        };
        let file = Arc::new(MemStorage::with_bytes(image.clone()));
        if let Ok(device) = open(format, file.clone(), true).await {
            read_all(&*device).await;
            let _ = device.close().await;
        }
        assert!(file.snapshot() == image, "the image was written to");
        check(format, file, Fix::default()).await;
        if is_written(format) {
            write_some(format, file_of(&image)).await;
            check(format, file_of(&image), MEND).await;
        }
    });
}

/// - Neither looking at a package nor reading and comparing its members panics, hangs, or takes more
///   memory than the fuzzer allows; the file is not written to.
/// - A disk reads as the bytes of the file that its member is.
pub fn check_package(data: &[u8]) {
    lane::block_on(async {
        let file = Arc::new(MemStorage::with_bytes(data.to_vec()));
        let Ok(package) = Package::open(file.clone()).await else {
            return;
        };
        let _ = package.check().await;
        for name in package.disks().into_iter().map(|disk| disk.name.clone()) {
            let Ok(disk) = package.storage(Some(&name)) else {
                continue;
            };
            let member = disk.member();
            let len = member.size_bytes.min(SAMPLE_BYTES) as usize;
            let start = member.offset_bytes as usize;
            let read = disk.read(0, Buffers::from_buf([Buffer::for_read(len)]));
            if let Ok(read) = read.into_single().await {
                assert!(data.get(start..start + len) == Some(&read[..]), "{name}");
            }
        }
        assert!(file.snapshot() == data, "the file was written to");
    });
}

fn is_written(format: &str) -> bool {
    !matches!(format, "bochs" | "cloop" | "dmg")
}

fn change(image: &mut Vec<u8>, mut records: &[u8]) {
    while let Some(([o2, o1, o0, len], rest)) = records.split_first_chunk() {
        let start = u32::from_be_bytes([0, *o2, *o1, *o0]) as usize;
        let (bytes, rest) = rest.split_at(usize::from(*len).min(rest.len()));
        if image.len() < start + bytes.len() {
            image.resize(start + bytes.len(), 0);
        }
        image[start..start + bytes.len()].copy_from_slice(bytes);
        records = rest;
    }
}

/// A small image in which something is written.
async fn new_image(format: &str, kind: u8) -> Vec<u8> {
    let memory = Arc::new(MemStorage::new());
    let file: Arc<dyn Storage> = memory.clone();
    let made = match format {
        "parallels" => {
            let options = parallels::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .cluster_size_bytes(if kind & 1 == 0 { 4096 } else { 65536 });
            parallels::create(&file, &options).await
        }
        "qcow" => {
            let options = qcow::CreateOptions::default().size_bytes(SIZE_BYTES);
            qcow::create(&file, &options).await
        }
        "qed" => {
            let options = qed::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .cluster_size_bytes(4096);
            qed::create(&file, &options).await
        }
        "vdi" => {
            let options = vdi::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .is_static(kind & 1 != 0);
            vdi::create(&file, &options).await
        }
        "vhdx" => {
            let options = vhdx::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .block_size_bytes(1 << 20)
                .block_state_zero(kind & 1 != 0);
            vhdx::create(&file, &options).await
        }
        "vmdk" => {
            let options = vmdk::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .zeroed_grain(kind & 1 != 0)
                .subformat(match kind & 2 {
                    0 => vmdk::Subformat::MonolithicSparse,
                    _ => vmdk::Subformat::StreamOptimized,
                });
            vmdk::create(&file, &[], &options).await
        }
        _ => {
            let options = vpc::CreateOptions::default()
                .size_bytes(SIZE_BYTES)
                .force_size(true)
                .subformat(match kind & 1 {
                    0 => vpc::Subformat::Dynamic,
                    _ => vpc::Subformat::Fixed,
                });
            vpc::create(&file, &options).await
        }
    };
    made.expect("an image can be made");
    let device = open(format, file, false).await.expect("a new image opens");
    let text = Buffer::copy_of(&[0x5a; 65536]);
    // A stream takes whole grains only.
    let _ = device
        .write_compressed(0, text, RequestFlags::default())
        .await;
    let text = Buffer::copy_of(&[0xa5; 5000]);
    let _ = device.write(1 << 20, text, RequestFlags::default()).await;
    device.close().await.expect("a new image closes");
    memory.snapshot()
}

async fn open(
    format: &str,
    file: Arc<dyn Storage>,
    read_only: bool,
) -> Result<Arc<dyn BlockDevice>> {
    Ok(match format {
        "bochs" => bochs::open(file).await?,
        "cloop" => cloop::open(file).await?,
        "dmg" => dmg::open(file).await?,
        "parallels" => parallels::open(file, read_only).await?,
        "qcow" => {
            let unlocking = Unlocking::default().passphrase(Some("fuzz".into()));
            let options = qcow::OpenOptions::default().read_only(read_only);
            qcow::open(file, None, options.unlocking(unlocking)).await?
        }
        "qed" => qed::open(file, None, read_only).await?,
        "vdi" => vdi::open(file, read_only).await?,
        "vhdx" => {
            let options = vhdx::OpenOptions::default().read_only(read_only);
            vhdx::open(file, None, options).await?
        }
        "vmdk" => {
            let descriptor = vmdk::read_descriptor(&*file).await?;
            let options = vmdk::OpenOptions::default().read_only(read_only);
            // Whoever opens an image hands over what it names; here there is nothing.
            let extents = descriptor.extents().iter().take(16);
            let extents = extents.map(|_| Arc::new(MemStorage::new()) as Arc<dyn Storage>);
            let extents = extents.collect();
            vmdk::open(file, descriptor, extents, None, &options).await?
        }
        _ => {
            let options = vpc::OpenOptions::default().read_only(read_only);
            vpc::open(file, None, options).await?
        }
    })
}

async fn check(format: &str, file: Arc<dyn Storage>, fix: Fix) {
    let checked = match format {
        "parallels" => parallels::repair(&file, fix).await,
        "qed" => qed::repair(&file, fix).await,
        "vdi" => vdi::check(&*file).await,
        "vhdx" => vhdx::check(&file, fix).await,
        "vmdk" => match vmdk::read_descriptor(&*file).await {
            Ok(descriptor) => vmdk::check(file, descriptor, Vec::new()).await,
            Err(_) => return,
        },
        _ => return,
    };
    if let Ok(report) = checked {
        assert!(report.messages.len() <= 10_000);
    }
}

async fn read_all(device: &dyn BlockDevice) {
    let size = device.size_bytes();
    for start in [0, size / 3, size / 2, size.saturating_sub(SAMPLE_BYTES)] {
        read_range(device, start, (size - start).min(SAMPLE_BYTES)).await;
    }
    assert!(device.read(size, Buffer::for_read(1)).await.is_err());
}

async fn read_range(device: &dyn BlockDevice, start: u64, len_bytes: u64) {
    let (mut at, end) = (start, start + len_bytes);
    for _ in 0..MAX_EXTENTS {
        if at >= end {
            return;
        }
        let Ok(extent) = device.block_status(at, end - at, u32::MAX).await else {
            at = end.min(at + 4096);
            continue;
        };
        assert!(extent.len_bytes > 0 && extent.len_bytes <= end - at);
        let len = extent.len_bytes as usize;
        if let Ok(whole) = device.read(at, Buffer::for_read(len)).await {
            assert!(!extent.kind.is_zero() || whole.is_zero(), "no zeroes");
            let half = len / 2;
            let second = device
                .read(at + half as u64, Buffer::for_read(len - half))
                .await;
            let second = second.expect("what was read once is read again");
            assert!(whole[half..] == second[..], "two reads differ");
        }
        at += extent.len_bytes;
    }
}

async fn write_some(format: &str, file: Arc<dyn Storage>) {
    let Ok(device) = open(format, file, false).await else {
        return;
    };
    let size = device.size_bytes();
    for (number, at) in [0, 70_000, size / 2, size.saturating_sub(1)]
        .into_iter()
        .enumerate()
    {
        let len = (size - at.min(size)).min(3000) as usize;
        let bytes = vec![number as u8 + 1; len];
        let flags = RequestFlags::default();
        let written = device.write(at, Buffer::copy_of(&bytes), flags).await;
        if written.is_err() || device.flush().await.is_err() {
            continue;
        }
        let read = device.read(at, Buffer::for_read(len)).await;
        let read = read.expect("what was written is read");
        assert!(read[..] == bytes[..], "what was written is not there");
    }
    let len_bytes = size.min(200_000);
    let zeroed = device
        .write_zeroes(0, len_bytes, ZeroRequest::default())
        .await;
    if zeroed.is_ok() {
        let read = device.read(0, Buffer::for_read(len_bytes as usize)).await;
        assert!(read.expect("zeroes are read").is_zero());
    }
    let _ = device.close().await;
}
