//! Embeds the engine: makes a qcow2 image, writes, reads back and checks it.
//!
//! ```sh
//! cargo run --example embed -- disk.qcow2
//! ```

use std::path::Path;
use std::sync::Arc;

use vellum::gate::DenyAll;
use vellum::io::lane;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::storage::file::{Create, FileOptions, FileStorage};
use vellum::{BlockDevice, Buffer, RequestFlags, Result, ZeroRequest};

const MIB: u64 = 1 << 20;

fn main() -> Result<()> {
    let path = std::env::args_os().nth(1).unwrap_or("disk.qcow2".into());
    run(Path::new(&path))
}

/// Embeds the engine for as long as one image is open.
pub fn run(path: &Path) -> Result<()> {
    // A lane is this thread's io_uring (or its worker threads) and executor.
    lane::block_on(embed(path))
}

async fn embed(path: &Path) -> Result<()> {
    let file = FileOptions::default().create(Create::Truncate);
    let storage = FileStorage::open(path, &file)?;
    let options = CreateOptions::default()
        .size_bytes(64 * MIB)
        .cluster_size_bytes(128 * 1024)
        .extended_l2(true);
    create(storage.clone(), None, &options).await?;

    // The gate decides about the files that an image names; this one allows none.
    let gate = Arc::new(DenyAll);
    let image = Qcow2::open(storage.clone(), gate, OpenOptions::default()).await?;

    // Requests own their buffers and give them back. These three run side by side.
    let first = image.write(0, Buffer::copy_of(&[1; 4096]), RequestFlags::default());
    let second = image.write(MIB, Buffer::copy_of(&[2; 4096]), RequestFlags::default());
    let zeroes = image.write_zeroes(2 * MIB, MIB, ZeroRequest::default());
    first.await?;
    second.await?;
    zeroes.await?;
    image.flush().await?; // Now, and only now, a power cut loses none of it.

    let read = image.read(MIB, Buffer::for_read(4096)).await?;
    assert!(read.iter().all(|&byte| byte == 2));

    let extent = image.block_status(0, 64 * MIB, u32::MAX).await?;
    println!(
        "the first {} bytes hold data: {}",
        extent.len_bytes,
        extent.kind.is_data()
    );

    image.close().await?;
    let report = check(storage, &CheckOptions::default()).await?;
    println!(
        "{} of {} clusters allocated, {} corruptions, {} leaks",
        report.allocated_clusters, report.total_clusters, report.corruptions, report.leaks
    );
    Ok(())
}
