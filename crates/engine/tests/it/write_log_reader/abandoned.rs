//! Flushes whose thread has gone on to something else, or has ended.

use std::sync::{Arc, mpsc};
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::qcow2::Qcow2;
use vellum::{BlockDevice, Buffer, RequestFlags};
use vellum_io::executor::Executor;
use vellum_io::lane::{self, block_on};
use vellum_storage::MemStorage;
use vellum_storage::wrap::{DelayStorage, Matching, Operation};

use crate::common::Random;
use crate::write_log_reader::{content_read_only, memory, open_with_log, reader, world};

struct Bed {
    memory: [Arc<MemStorage>; 2],
    file: Arc<DelayStorage>,
    log: Arc<DelayStorage>,
    image: Arc<Qcow2>,
}

fn bed() -> Bed {
    block_on(async {
        let bytes = world::image(&mut Random::new(1)).await;
        let memory = [memory(&bytes), memory(&[])];
        let [file, log] = memory.clone().map(|memory| DelayStorage::new(memory));
        let image = open_with_log(file.clone(), log.clone()).await;
        Bed {
            image: image.expect("opened"),
            memory,
            file,
            log,
        }
    })
}

async fn write(image: &Qcow2, value: u8) {
    let buffer = Buffer::copy_of(&[value; 512]);
    let flags = RequestFlags::default();
    image.write(8192, buffer, flags).await.expect("written");
}

fn assert_holds(bed: &Bed, value: u8) {
    let [file, log] = bed.memory.each_ref().map(|memory| memory.snapshot());
    let shown = block_on(content_read_only(&file, &log)).expect("opened");
    assert_eq!(shown[8192..8704], [value; 512]);
}

/// A flush is dropped in its append, with the executor that it runs on.
#[test]
fn what_an_abandoned_flush_took_is_flushed_by_the_next() {
    let bed = bed();
    let appends = Matching::operation(Operation::Write).touching(8192..u64::MAX);
    let held = bed.log.hold(appends);
    let executor = Executor::new(|| {});
    let image = bed.image.clone();
    drop(executor.spawn(async move {
        write(&image, 7).await;
        drop(image.flush().await);
    }));
    executor.run_ready();
    assert!(held.has_arrived());
    drop(executor);
    block_on(async { bed.image.flush().await }).expect("flushed");
    assert_holds(&bed, 7);
    drop(held);
    block_on(async {
        write(&bed.image, 8).await;
        bed.image.flush().await.expect("flushed");
    });
    assert_holds(&bed, 8);
}

/// The log's tail moves while batches are appended: a crash that tears that superblock is none that
/// damages the log.
#[test]
fn a_superblock_that_is_not_durable_yet_is_named_by_no_record() {
    let bed = bed();
    let [file, mut log] = block_on(async {
        write(&bed.image, 1).await;
        bed.image.flush().await.expect("flushed");
        let superblocks = Matching::operation(Operation::Write).touching(0..8192);
        let held = bed.log.hold(superblocks);
        for value in 2..8 {
            write(&bed.image, value).await;
            bed.image.flush().await.expect("flushed");
        }
        held.arrived().await;
        write(&bed.image, 8).await;
        bed.image.flush().await.expect("flushed");
        let left = bed.memory.each_ref().map(|memory| memory.snapshot());
        drop(held);
        left
    });
    let newest = reader::newest(&log).expect("one").expect("one");
    let torn_at = (newest.generation + 1) as usize % 2 * 4096;
    log[torn_at..torn_at + 512].fill(0xee);
    let shown = block_on(content_read_only(&file, &log)).expect("opened");
    assert_eq!(shown[8192..8704], [8; 512]);
    assert!(reader::replay(&file, &log).is_ok());
}

/// A log that is idle is ended by a thread that leaves its lane meanwhile.
#[test]
fn nobody_waits_for_a_thread_that_has_left_its_lane() {
    let bed = bed();
    let (image, file) = (bed.image.clone(), bed.file.clone());
    let (send_held, held) = mpsc::channel();
    let (end, ended) = mpsc::channel::<()>();
    let thread = std::thread::spawn(move || {
        block_on(async {
            write(&image, 1).await;
            image.flush().await.expect("flushed");
            let idle = file.hold(Matching::operation(Operation::Flush));
            idle.arrived().await;
            send_held.send(idle).expect("somebody waits");
        });
        // The lane is not driven any more.
        let _ = ended.recv();
    });
    let idle = held.recv().expect("the idle log is being ended");
    std::thread::sleep(Duration::from_millis(100));
    drop(idle);
    block_on(async {
        write(&bed.image, 2).await;
        let late = lane::sleep(Duration::from_secs(10));
        match select(Box::pin(bed.image.flush()), Box::pin(late)).await {
            Either::Left((flushed, _)) => flushed.expect("flushed"),
            // Leaving would wait for the flush.
            Either::Right(_) => std::process::abort(),
        }
    });
    drop(end);
    thread.join().expect("no panic");
    assert_holds(&bed, 2);
}
