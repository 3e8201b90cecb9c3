//! Closing an image that is in use: what was acknowledged is kept, and what comes later is
//! refused.

use std::sync::Arc;

use crate::common::run_on_memory;
use vellum::gate::DenyAll;
use vellum::qcow2::check::{CheckOptions, check};
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, ErrorKind, Io, RequestFlags, Result, Storage, ZeroRequest};
use vellum_io::{lane, spawn};
use vellum_storage::MemStorage;
use vellum_storage::wrap::{Call, FaultStorage, Matching, Operation, Policy, Times, Wrapped};

const LEN_BYTES: usize = 3000;
const ENOSPC: i32 = 28;

/// Lets others have turns before each request.
#[derive(Debug, Default)]
struct Slow;

impl Policy for Slow {
    fn handle<T: 'static>(&self, _: Call, start: impl FnOnce() -> Io<T> + 'static) -> Io<T> {
        Io::task(spawn(async move {
            for _ in 0..3 {
                lane::yield_now().await;
            }
            start().await
        }))
    }
}

async fn new_file() -> Arc<dyn Storage> {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(64 << 20);
    create(file.clone(), None, &options).await.unwrap();
    file
}

async fn open(file: Arc<dyn Storage>) -> Arc<Qcow2> {
    let options = OpenOptions::default();
    Qcow2::open(file, Arc::new(DenyAll), options).await.unwrap()
}

fn write(image: &Qcow2, offset_bytes: u64, byte: u8) -> Io<Buffer> {
    let bytes = Buffer::copy_of(&[byte; LEN_BYTES]);
    image.write(offset_bytes, bytes, RequestFlags::default())
}

async fn holds(image: &Qcow2, offset_bytes: u64, byte: u8) -> bool {
    let read = image.read(offset_bytes, Buffer::for_read(LEN_BYTES)).await;
    read.unwrap().iter().all(|&found| found == byte)
}

async fn leaks(file: Arc<dyn Storage>) -> u64 {
    let report = check(file, &CheckOptions::default()).await.unwrap();
    assert_eq!((report.corruptions, report.check_errors), (0, 0));
    report.leaks
}

fn assert_closed<T: std::fmt::Debug>(result: Result<T>, operation: &str) {
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert_eq!(error.message(), "the image is closed");
    assert_eq!(error.operation(), operation);
}

#[test]
fn a_write_beside_a_close_is_kept_or_refused() {
    let outcomes = (0..60).map(|turns| {
        run_on_memory(async move {
            let file = new_file().await;
            let image = open(Wrapped::<Slow>::new(file.clone())).await;
            write(&image, 1 << 20, 1).await.unwrap();
            let closing = image.clone();
            let closing = spawn(async move { closing.close().await });
            for _ in 0..turns {
                lane::yield_now().await;
            }
            let written = write(&image, 8 << 20, 7).await;
            closing.await.unwrap();
            let kept = written.is_ok();
            if !kept {
                assert_closed(written, "write");
            }
            assert_eq!(leaks(file.clone()).await, 0, "after {turns} turns");
            let again = open(file).await;
            assert!(holds(&again, 1 << 20, 1).await);
            assert_eq!(holds(&again, 8 << 20, 7).await, kept, "after {turns} turns");
            kept
        })
    });
    let kept = outcomes.filter(|&kept| kept).count();
    assert!((1..60).contains(&kept), "{kept} of 60 were kept");
}

#[test]
fn a_closed_image_says_so_and_can_be_read() {
    run_on_memory(async {
        let image = open(new_file().await).await;
        write(&image, 0, 1).await.unwrap();
        image.close().await.unwrap();
        assert_closed(write(&image, 0, 2).await, "write");
        assert_closed(image.flush().await, "flush");
        assert_closed(image.discard(0, 65536).await, "discard");
        let zeroed = image.write_zeroes(0, 65536, ZeroRequest::default());
        assert_closed(zeroed.await, "write zeroes");
        assert_closed(image.truncate(1 << 20).await, "resize");
        assert!(holds(&image, 0, 1).await);
        image.close().await.unwrap();
    });
}

#[test]
fn a_close_that_fails_keeps_what_waited_for_it() {
    run_on_memory(async {
        let file = new_file().await;
        let faults = FaultStorage::new(Wrapped::<Slow>::new(file.clone()));
        let image = open(faults.clone()).await;
        write(&image, 1 << 20, 1).await.unwrap();
        // The first write has the header tell of leaks, without which the image does.
        faults.fail(
            Matching::operation(Operation::Write),
            1,
            Times::Once,
            ENOSPC,
        );
        let closing = image.close();
        lane::yield_now().await;
        let written = write(&image, 8 << 20, 7);
        let refused = closing.await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        written.await.unwrap();
        image.close().await.unwrap();
        assert_eq!(leaks(file.clone()).await, 0);
        let again = open(file).await;
        assert!(holds(&again, 1 << 20, 1).await && holds(&again, 8 << 20, 7).await);
    });
}
