//! Resizing an open image whose latest bytes are still in memory.

use std::path::Path;
use std::sync::Arc;

use crate::common::{open, qemu_ok, qemu_verdict};
use vellum::Preallocation;
use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create_over};
use vellum::qcow2::{Backing, OpenOptions, PreallocateAhead, Qcow2};
use vellum::{BlockDevice, Buffer, Buffers, Raw, RequestFlags, Storage};
use vellum_io::lane;
use vellum_storage::file::Create;
use vellum_storage::{MemStorage, WriteFlags};

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// An image of `size` over a backing file of 3 MiB of sevens.
async fn over_sevens(path: &Path, size: &str) -> Arc<Qcow2> {
    let dir = path.parent().expect("a directory");
    qemu_ok(
        "qemu-img",
        dir,
        &["create", "-q", "-f", "qcow2", "image", size],
    );
    let base: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let mut sevens = Buffer::zeroed(3 * MIB as usize);
    sevens.fill(7);
    let base = Raw::open(base, Default::default()).expect("a raw device");
    base.truncate(3 * MIB).await.expect("longer");
    let written = base.write(0, sevens, RequestFlags::default()).await;
    drop(written.expect("written"));
    let options = OpenOptions::default()
        .backing(Backing::Given(base))
        .ahead(PreallocateAhead::default().after_clusters(0));
    let storage = open(path, Create::No);
    Qcow2::open(storage, Arc::new(DenyAll), options)
        .await
        .expect("opened")
}

async fn write(image: &Qcow2, offset_bytes: u64, len_bytes: u64, fill: u8) {
    let mut buffer = Buffer::zeroed(len_bytes as usize);
    buffer.fill(fill);
    let write = image.write(offset_bytes, buffer, RequestFlags::default());
    drop(write.await.expect("written"));
}

/// Checks what a range consists of.
async fn expect(image: &Qcow2, offset_bytes: u64, len_bytes: u64, fill: u8) {
    let buffer = Buffer::zeroed(len_bytes as usize);
    let bytes = image.read(offset_bytes, buffer).await.expect("read");
    let wrong = bytes.iter().position(|&byte| byte != fill);
    assert_eq!(wrong, None, "from {offset_bytes} on, not {fill}");
}

fn assert_sound(path: &Path) {
    let verdict = qemu_verdict(path);
    assert_eq!((verdict.exit_code, verdict.messages), (0, vec![]));
}

#[test]
fn bytes_kept_beyond_the_new_end_do_not_come_back() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let at = path.clone();
    lane::block_on(async move {
        let image = over_sevens(&at, "4M").await;
        // Sequential beginnings of clusters wait in the write buffer for more.
        for cluster in 0..60 {
            write(&image, cluster * 64 * KIB, 4 * KIB, 9).await;
        }
        let end = 2 * MIB + 2 * KIB;
        image.truncate(end).await.expect("smaller");
        expect(&image, MIB, 4 * KIB, 9).await;
        expect(&image, MIB + 4 * KIB, 60 * KIB, 7).await;
        expect(&image, 2 * MIB, 2 * KIB, 9).await;
        image.truncate(4 * MIB).await.expect("larger");
        expect(&image, 2 * MIB, 2 * KIB, 9).await;
        expect(&image, end, 4 * MIB - end, 0).await;
        image.flush().await.expect("flushed");
        expect(&image, end, 4 * MIB - end, 0).await;
        image.close().await.expect("closed");
    });
    assert_sound(&path);
}

#[test]
fn shrinking_gives_back_what_was_counted_ahead() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let at = path.clone();
    let len_bytes = lane::block_on(async move {
        let image = over_sevens(&at, "256M").await;
        for mib in 0..128 {
            write(&image, mib * MIB, MIB, 3).await;
        }
        image.truncate(MIB).await.expect("smaller");
        let cut = at.metadata().expect("the image").len();
        // What comes after the cut lies where the file ends now.
        image.truncate(256 * MIB).await.expect("larger");
        for mib in 0..64 {
            write(&image, mib * MIB, MIB, 4).await;
        }
        expect(&image, 0, 64 * MIB, 4).await;
        expect(&image, 64 * MIB, 64 * MIB, 0).await;
        image.close().await.expect("closed");
        cut
    });
    assert!(len_bytes <= 2 * MIB, "{len_bytes} bytes are left");
    let now = path.metadata().expect("the image").len();
    assert!(now <= 67 * MIB, "{now} bytes for 64 MiB of data");
    assert_sound(&path);
}

#[test]
fn growth_goes_on_beside_writes() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("image");
    let at = path.clone();
    lane::block_on(async move {
        let image = over_sevens(&at, "64M").await;
        let writer = async {
            for mib in 0..64 {
                write(&image, mib * MIB, MIB, 5).await;
            }
        };
        let grower = async {
            for (size, preallocation) in [
                (80, Preallocation::Metadata),
                (96, Preallocation::Falloc),
                (1 << 20, Preallocation::Off),
            ] {
                let resized = image.resize(size * MIB, preallocation).await;
                resized.expect("resized");
            }
        };
        futures_util::join!(writer, grower);
        expect(&image, 0, 64 * MIB, 5).await;
        expect(&image, 64 * MIB, 64 * MIB, 0).await;
        image.close().await.expect("closed");
    });
    assert_sound(&path);
}

/// The refcount blocks of what was cut off go too, but for those that count themselves or others.
#[test]
fn shrinking_leaves_no_refcount_block_that_counts_nothing() {
    use std::io::{Read, Seek, SeekFrom};
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("image");
    let create = "cluster_size=512,refcount_bits=64";
    qemu_ok(
        "qemu-img",
        dir.path(),
        &["create", "-q", "-f", "qcow2", "-o", create, "image", "1M"],
    );
    lane::block_on(async {
        for length in [MIB, 64 * KIB] {
            let storage = open(&path, Create::No);
            let image = Qcow2::open(storage, Arc::new(DenyAll), OpenOptions::default());
            let image = image.await.expect("opened");
            write(&image, 0, length, 9).await;
            let resized = image.resize(300 * KIB, Preallocation::Off).await;
            resized.expect("smaller");
            image.close().await.expect("closed");
        }
    });
    assert_sound(&path);
    let mut file = std::fs::File::open(&path).expect("the image");
    let mut read = |at: u64, bytes: &mut [u8]| {
        file.seek(SeekFrom::Start(at)).expect("inside");
        file.read_exact(bytes).expect("there");
    };
    let mut field = [0; 12];
    read(48, &mut field);
    let table = u64::from_be_bytes(field[..8].try_into().expect("8 bytes"));
    let clusters = u32::from_be_bytes(field[8..].try_into().expect("4 bytes"));
    for at in (table..table + u64::from(clusters) * 512).step_by(8) {
        let mut entry = [0; 8];
        read(at, &mut entry);
        let block = u64::from_be_bytes(entry);
        let mut counts = [0; 512];
        if block != 0 {
            read(block, &mut counts);
            assert_ne!(counts, [0; 512], "block at {block}");
        }
    }
}

/// A raw data file is the disk: what somebody has put behind its end shows as the disk grows.
#[test]
fn a_longer_raw_data_file_is_kept() {
    lane::block_on(async {
        let image: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let data: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let write = |at: u64, fill: u8| {
            let mut buffer = Buffer::zeroed(MIB as usize);
            buffer.fill(fill);
            data.write(at, Buffers::from_iter([buffer]), WriteFlags::default())
        };
        drop(write(0, 42).await.expect("written"));
        let options = CreateOptions::default()
            .size_bytes(MIB)
            .data_file(Some("data".to_owned()))
            .data_file_raw(true);
        let created = create_over(image.clone(), Some(data.clone()), &options).await;
        created.expect("an image");
        drop(write(MIB, 84).await.expect("written"));
        let options = OpenOptions::default().data_file(Some(data.clone()));
        let opened = Qcow2::open(image, Arc::new(DenyAll), options).await;
        let opened = opened.expect("opened");
        expect(&opened, 0, MIB, 42).await;
        opened.truncate(3 * MIB).await.expect("longer");
        expect(&opened, MIB, MIB, 84).await;
        expect(&opened, 2 * MIB, MIB, 0).await;
        opened.close().await.expect("closed");
    });
}
