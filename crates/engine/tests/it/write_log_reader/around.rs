//! Flushes that go around the log.

use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::{BlockDevice, Buffer, RequestFlags};
use vellum_io::lane::{block_on, sleep};
use vellum_io::spawn;
use vellum_storage::wrap::{DelayStorage, Matching, Operation};

use crate::write_log_reader::{memory, open, open_with_log};

const CLUSTER: u64 = 64 << 10;

/// A write that is still running has mapped a cluster in memory; another one to that cluster is
/// flushed, and the program is killed.
#[test]
fn what_lies_where_only_memory_leads_to_is_appended() {
    for fua in [false, true] {
        let flushed = async { block_while_mapped(fua).await };
        let late = async { sleep(Duration::from_secs(60)).await };
        block_on(async {
            match select(Box::pin(flushed), Box::pin(late)).await {
                Either::Left(_) => {}
                Either::Right(_) => panic!("the second write waits for the first"),
            }
        });
    }
}

async fn block_while_mapped(fua: bool) {
    let bytes = memory(&[]);
    let options = CreateOptions::default().size_bytes(256 * CLUSTER);
    create(bytes.clone(), None, &options).await.expect("made");
    let (file, log) = (DelayStorage::new(bytes.clone()), memory(&[]));
    let opened = open_with_log(file.clone(), log.clone()).await;
    let image = opened.expect("opened");
    let plain = RequestFlags::default();
    // After so many the file is made longer than what is in it, so that the mapping of the next may
    // come before its data.
    for cluster in 0..100 {
        let buffer = Buffer::copy_of(&[3; CLUSTER as usize]);
        let written = image.write((100 + cluster) * CLUSTER, buffer, plain);
        written.await.expect("written");
    }
    image.flush().await.expect("flushed");
    let tail = bytes
        .snapshot()
        .iter()
        .rposition(|byte| *byte == 3)
        .expect("written") as u64
        + 1;
    // The last cluster of the running write.
    let data = Matching::operation(Operation::Write).touching(tail + 2 * CLUSTER..u64::MAX);
    let held = file.hold(data);
    let running = spawn({
        let image = image.clone();
        async move {
            let buffer = Buffer::copy_of(&[1; 5 * CLUSTER as usize / 2]);
            image.write(8192, buffer, plain).await
        }
    });
    held.arrived().await;
    let written = image.write(0, Buffer::copy_of(&[2; 4096]), plain.fua(fua));
    written.await.expect("written");
    if !fua {
        image.flush().await.expect("flushed");
    }
    let killed = memory(&bytes.snapshot());
    let shown = open(killed, memory(&log.snapshot()), true)
        .await
        .expect("opened");
    let found = shown.read(0, Buffer::for_read(4096)).await.expect("read");
    assert!(found[..] == [2; 4096], "fua {fua}");
    shown.close().await.expect("closed");
    held.release();
    running.await.expect("written");
    image.close().await.expect("closed");
}
