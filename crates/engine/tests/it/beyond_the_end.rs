//! Images whose entries lead beyond the end of the file, as a file has them that was cut:
//! nothing new goes where they lead, and what is written there stays.

use std::sync::Arc;

use vellum::Preallocation;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, PreallocateAhead, Qcow2};
use vellum::{BlockDevice, Buffer, RequestFlags, Storage};
use vellum_io::lane;
use vellum_storage::MemStorage;

const CLUSTER: u64 = 4096;
const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Guest clusters, of which the first is there and this one leads beyond the end.
const CLUSTERS: u64 = 400;
const BEYOND: u64 = 7;

fn be64(bytes: &[u8], at: u64) -> u64 {
    let at = at as usize;
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// An image with one cluster of data, and an entry that leads so many clusters behind the end.
async fn image(extended_l2: bool, entry: impl FnOnce(u64) -> u64) -> Vec<u8> {
    let file = Arc::new(MemStorage::new());
    let options = CreateOptions::default()
        .size_bytes(CLUSTERS * if extended_l2 { 16384 } else { CLUSTER })
        .cluster_size_bytes(if extended_l2 { 16384 } else { CLUSTER })
        .extended_l2(extended_l2);
    let created = create(file.clone(), None, &options).await;
    created.expect("created");
    let device = open(file.clone(), PreallocateAhead::NONE).await;
    write(&device, 0, 1).await;
    device.close().await.expect("closed");
    let mut bytes = file.snapshot();
    let end = bytes.len() as u64;
    let width = if extended_l2 { 16 } else { 8 };
    let at = ((be64(&bytes, be64(&bytes, 40)) & OFFSET) + BEYOND * width) as usize;
    bytes[at..at + 8].copy_from_slice(&entry(end).to_be_bytes());
    if extended_l2 {
        bytes[at + 8..at + 16].copy_from_slice(&0xffff_ffffu64.to_be_bytes());
    }
    bytes
}

async fn open(file: Arc<dyn Storage>, ahead: PreallocateAhead) -> Arc<Qcow2> {
    let options = OpenOptions::default().ahead(ahead);
    let image = Qcow2::open(file, Arc::new(DenyAll), options).await;
    image.expect("opened")
}

/// Closes the device: what was written beyond the end is in the file now, and counted.
async fn close(device: Arc<Qcow2>, file: &Arc<MemStorage>) {
    device.close().await.expect("closed");
    let report = check(file.clone(), &CheckOptions::default()).await;
    let report = report.expect("checked");
    assert_eq!(
        (report.corruptions, report.check_errors),
        (0, 0),
        "{report:?}"
    );
}

fn cluster_of(device: &Qcow2) -> u64 {
    device.header().geometry().cluster_size_bytes()
}

async fn write(device: &Qcow2, cluster: u64, fill: u8) {
    let bytes = cluster_of(device);
    let mut buffer = Buffer::zeroed(bytes as usize);
    buffer.fill(fill);
    let written = device.write(cluster * bytes, buffer, RequestFlags::default());
    drop(written.await.expect("written"));
}

async fn expect(device: &Qcow2, cluster: u64, fill: u8) {
    let bytes = cluster_of(device);
    let buffer = Buffer::zeroed(bytes as usize);
    let read = device.read(cluster * bytes, buffer).await.expect("read");
    let wrong = read.iter().position(|&byte| byte != fill);
    assert_eq!(wrong, None, "guest cluster {cluster} does not hold {fill}");
}

#[test]
fn nothing_new_goes_where_an_entry_leads() {
    for extended_l2 in [false, true] {
        for behind in [0, 1, 5, 150, 5000] {
            lane::block_on(async move {
                let cluster = if extended_l2 { 16384 } else { CLUSTER };
                let entry = |end| (end + behind * cluster) | COPIED;
                let bytes = image(extended_l2, entry).await;
                let file = Arc::new(MemStorage::with_bytes(bytes));
                let device = open(file.clone(), PreallocateAhead::default()).await;
                expect(&device, BEYOND, 0).await;
                for other in 10..CLUSTERS {
                    write(&device, other, 9).await;
                }
                expect(&device, BEYOND, 0).await;
                write(&device, BEYOND, 5).await;
                for other in 10..CLUSTERS {
                    expect(&device, other, 9).await;
                }
                close(device, &file).await;
                let device = open(file.clone(), PreallocateAhead::default()).await;
                expect(&device, BEYOND, 5).await;
                // It is nobody else's later either.
                for other in 1..BEYOND {
                    write(&device, other, 8).await;
                }
                expect(&device, BEYOND, 5).await;
                close(device, &file).await;
            });
        }
    }
}

#[test]
fn nothing_new_goes_where_compressed_data_should_be() {
    lane::block_on(async {
        // Four sectors, the last of which lie in the next cluster.
        let entry = |end: u64| COMPRESSED | 3 << 58 | (end + CLUSTER - 1024);
        let bytes = image(false, entry).await;
        let end = bytes.len();
        let file = Arc::new(MemStorage::with_bytes(bytes));
        let device = open(file.clone(), PreallocateAhead::NONE).await;
        let unread = device.read(BEYOND * CLUSTER, Buffer::zeroed(CLUSTER as usize));
        unread
            .await
            .expect_err("there is nothing to be decompressed");
        write(&device, 20, 9).await;
        device.close().await.expect("closed");
        let after = file.snapshot();
        let there = after[end..].iter().take(2 * CLUSTER as usize);
        assert!(there.into_iter().all(|&byte| byte == 0));
    });
}

/// The clusters behind the end are counted, as after a cut of the file; one is free.
#[test]
fn what_is_written_beyond_the_end_is_not_cut_off_at_the_close() {
    lane::block_on(async {
        for counted in [false, true] {
            let mut bytes = image(false, |end| (end + 300 * CLUSTER) | COPIED).await;
            if counted {
                let number = bytes.len() as u64 / CLUSTER + 300;
                let block = be64(&bytes, be64(&bytes, 48)) + 2 * number;
                bytes[block as usize + 1] = 1;
            }
            let file = Arc::new(MemStorage::with_bytes(bytes));
            let device = open(file.clone(), PreallocateAhead::default()).await;
            write(&device, BEYOND, 5).await;
            for other in 10..110 {
                write(&device, other, 9).await;
            }
            device.flush().await.expect("flushed");
            device.close().await.expect("closed");
            let device = open(file, PreallocateAhead::default()).await;
            expect(&device, BEYOND, 5).await;
            device.close().await.expect("closed");
        }
    });
}

#[test]
fn what_is_written_beyond_the_end_is_not_cut_off_as_the_device_shrinks() {
    lane::block_on(async {
        let bytes = image(false, |end| (end + 300 * CLUSTER) | COPIED).await;
        let file = Arc::new(MemStorage::with_bytes(bytes));
        let device = open(file.clone(), PreallocateAhead::default()).await;
        write(&device, CLUSTERS - 1, 9).await;
        write(&device, BEYOND, 5).await;
        let smaller = device.resize((CLUSTERS - 1) * CLUSTER, Preallocation::Off);
        smaller.await.expect("resized");
        expect(&device, BEYOND, 5).await;
        close(device, &file).await;
        let device = open(file.clone(), PreallocateAhead::default()).await;
        expect(&device, BEYOND, 5).await;
        close(device, &file).await;
    });
}
