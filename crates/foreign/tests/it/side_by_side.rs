//! Requests that need new blocks run side by side: none waits for what another one writes, unless it needs the same.

use std::future::poll_fn;
use std::task::Poll;

use crate::common::images::{create, open};
use crate::common::run;
use futures_util::future::join_all;
use futures_util::poll;
use vellum::{BlockDevice, Buffer, ErrorKind, RequestFlags};
use vellum_storage::wrap::{DelayStorage, FaultStorage, Matching, Operation, Times, TraceStorage};

const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 40 * MIB;
const ENOSPC: i32 = 28;
/// Of a storage in memory everything has ended after so many polls.
const MANY_POLLS: usize = 1000;

async fn write(device: &dyn BlockDevice, offset_bytes: u64, fill: u8) -> vellum::Result<Buffer> {
    let buffer = Buffer::copy_of(&[fill; 5000]);
    device
        .write(offset_bytes, buffer, RequestFlags::default())
        .await
}

async fn assert_reads(device: &dyn BlockDevice, offset_bytes: u64, fill: u8) {
    let read = device.read(offset_bytes, Buffer::for_read(5000)).await;
    assert!(read.unwrap().iter().all(|byte| *byte == fill));
}

/// What a future ends with although what is held stays held, if it does.
async fn outcome<F: Future + Unpin>(future: &mut F) -> Option<F::Output> {
    for _ in 0..MANY_POLLS {
        if let Poll::Ready(output) = poll!(&mut *future) {
            return Some(output);
        }
        let mut polled = false;
        // Others of the lane get their turn.
        poll_fn(|context| match std::mem::replace(&mut polled, true) {
            true => Poll::Ready(()),
            false => {
                context.waker().wake_by_ref();
                Poll::Pending
            }
        })
        .await;
    }
    None
}

/// Holds a write to a new block at one of two offsets in what it writes; that to the other one ends.
async fn assert_not_held_up(format: &str, held: Operation, offsets_bytes: [u64; 2]) {
    let file = DelayStorage::new(create(format, SIZE_BYTES).await);
    let device = open(format, file.clone()).await;
    // What comes before the first change of all.
    write(&*device, 0, 9).await.unwrap();
    let held = file.hold(Matching::operation(held));
    let [first, second] = offsets_bytes;
    let mut slow = Box::pin(write(&*device, first, 1));
    assert!(outcome(&mut slow).await.is_none());
    assert!(held.has_arrived());
    let written = outcome(&mut Box::pin(write(&*device, second, 2))).await;
    held.release();
    slow.await.unwrap();
    assert!(written.is_some_and(|written| written.is_ok()), "{format}");
    assert_reads(&*device, first, 1).await;
    assert_reads(&*device, second, 2).await;
    device.close().await.unwrap();
}

#[test]
fn tables_of_clusters_are_made_side_by_side() {
    for format in ["qcow", "qed"] {
        run(assert_not_held_up(
            format,
            Operation::WriteZeroes,
            [4 * MIB, 8 * MIB],
        ));
    }
}

#[test]
fn clusters_with_a_table_wait_for_none_that_is_made() {
    for format in ["qcow", "qed"] {
        run(assert_not_held_up(
            format,
            Operation::WriteZeroes,
            [4 * MIB, 65536],
        ));
    }
}

#[test]
fn a_table_that_several_need_is_made_once() {
    for format in ["qcow", "qed"] {
        run(async {
            let trace = TraceStorage::new(create(format, SIZE_BYTES).await);
            let file = DelayStorage::new(trace.clone());
            let device = open(format, file.clone()).await;
            let held = file.hold(Matching::operation(Operation::WriteZeroes));
            let writes = (0..8).map(|at| write(&*device, at * 65536, 1));
            let mut writes = Box::pin(join_all(writes));
            assert!(outcome(&mut writes).await.is_none());
            held.release();
            assert!(writes.await.iter().all(Result::is_ok));
            let made = trace.count(&Matching::operation(Operation::WriteZeroes));
            assert_eq!(made, 1, "{format}");
            device.close().await.unwrap();
        });
    }
}

#[test]
fn bitmaps_of_vpc_blocks_are_written_side_by_side() {
    run(assert_not_held_up(
        "vpc",
        Operation::Write,
        [4 * MIB, 8 * MIB],
    ));
}

#[test]
fn one_footer_is_written_for_all_vpc_blocks_that_wait_for_it() {
    run(async {
        let trace = TraceStorage::new(create("vpc", SIZE_BYTES).await);
        let file = DelayStorage::new(trace.clone());
        let device = open("vpc", file.clone()).await;
        let held = file.hold(Matching::operation(Operation::Flush));
        let writes = (0..6).map(|block| write(&*device, block * 2 * MIB, 1));
        let mut writes = Box::pin(join_all(writes));
        assert!(outcome(&mut writes).await.is_none());
        // Nothing goes over the footer before another one is durable.
        let before = trace.count(&Matching::operation(Operation::Write));
        assert_eq!(before, 1);
        held.release();
        assert!(writes.await.iter().all(Result::is_ok));
        assert_eq!(trace.count(&Matching::operation(Operation::Flush)), 1);
        device.close().await.unwrap();
    });
}

#[test]
fn a_vhdx_file_becomes_longer_once_for_all_blocks_that_wait_for_it() {
    run(async {
        let trace = TraceStorage::new(create("vhdx", SIZE_BYTES).await);
        let file = DelayStorage::new(trace.clone());
        let device = open("vhdx", file.clone()).await;
        // What comes before the first change of all.
        write(&*device, 39 * MIB, 9).await.unwrap();
        trace.take();
        let growths = Matching::operation(Operation::Truncate);
        let held = file.hold(growths.clone());
        let writes = (0..8).map(|block| write(&*device, block * MIB, block as u8));
        let mut writes = Box::pin(join_all(writes));
        assert!(outcome(&mut writes).await.is_none());
        held.release();
        assert!(writes.await.iter().all(Result::is_ok));
        let growths = trace.matching(&growths);
        // One for the first, and one for those that came while it was made.
        assert_eq!(growths.len(), 2);
        assert!(growths.is_sorted_by_key(|growth| growth.call.offset_bytes));
        for block in 0..8 {
            assert_reads(&*device, block * MIB, block as u8).await;
        }
        device.close().await.unwrap();
    });
}

/// The length of an image after a write to it, of which the first attempt fails if it is to.
async fn len_after_write(format: &str, fails: bool) -> usize {
    let memory = create(format, SIZE_BYTES).await;
    let file = FaultStorage::new(memory.clone());
    let device = open(format, file.clone()).await;
    write(&*device, 0, 9).await.unwrap();
    if fails {
        // What lies behind the bitmap of a block, if there is one.
        let data = Matching::operation(Operation::Write);
        let pass = usize::from(format == "vpc");
        file.fail(data, pass, Times::Once, ENOSPC);
        let error = write(&*device, 20 * MIB, 1).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NoSpace);
    }
    write(&*device, 20 * MIB, 1).await.unwrap();
    assert_reads(&*device, 20 * MIB, 1).await;
    device.close().await.unwrap();
    memory.snapshot().len()
}

#[test]
fn a_place_whose_block_was_not_written_is_given_out_again() {
    for format in ["parallels", "qcow", "qed", "vdi", "vhdx", "vmdk", "vpc"] {
        run(async {
            let straight = len_after_write(format, false).await;
            assert_eq!(len_after_write(format, true).await, straight, "{format}");
        });
    }
}

#[test]
fn a_growth_that_fails_is_the_failure_of_one_request() {
    const EIO: i32 = 5;
    const EFBIG: i32 = 27;
    for (format, growth) in [
        ("vhdx", Operation::Truncate),
        // The footer behind the blocks to come.
        ("vpc", Operation::Write),
    ] {
        for errno in [EIO, EFBIG] {
            run(async {
                let memory = create(format, SIZE_BYTES).await;
                let file = FaultStorage::new(memory);
                let device = open(format, file.clone()).await;
                write(&*device, 0, 9).await.unwrap();
                device.flush().await.unwrap();
                file.fail(Matching::operation(growth), 0, Times::Once, errno);
                let error = write(&*device, 20 * MIB, 1).await.unwrap_err();
                assert_eq!(error.errno(), errno, "{format}: {error}");
                write(&*device, 20 * MIB, 1).await.unwrap();
                device.flush().await.unwrap();
                assert_reads(&*device, 20 * MIB, 1).await;
                device.close().await.unwrap();
            });
        }
    }
}
