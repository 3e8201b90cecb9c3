use std::sync::atomic::{AtomicBool, Ordering};

use event_listener::Event;
use futures_util::FutureExt;
use vellum::gate::DenyAll;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{Extent, Raw, RawOptions};
use vellum_io::lane::{block_on, yield_now};
use vellum_storage::{MemStorage, Storage};

use super::*;
use crate::live::blocked_device::BlockedDevice;

const SIZE_BYTES: u64 = 256 << 10;

/// A device that tells what lies where, and what, only once it is told to answer.
#[derive(Debug)]
struct Asked {
    device: Arc<dyn BlockDevice>,
    answers: AtomicBool,
    told: Event,
}

impl Asked {
    fn new(device: Arc<dyn BlockDevice>) -> Arc<Asked> {
        Arc::new(Asked {
            device,
            answers: AtomicBool::new(false),
            told: Event::new(),
        })
    }

    fn answer(&self) {
        self.answers.store(true, Ordering::SeqCst);
        self.told.notify(usize::MAX);
    }
}

impl BlockDevice for Asked {
    delegate!(
        device: info, size_bytes, write, write_zeroes, discard, flush, truncate, close,
    );
    fn read(&self, at: u64, buffer: Buffer) -> Io<Buffer> {
        if self.answers.load(Ordering::SeqCst) {
            return self.device.read(at, buffer);
        }
        let (device, told) = (self.device.clone(), self.told.listen());
        Io::task(spawn(async move {
            told.await;
            device.read(at, buffer).await
        }))
    }
    fn block_status(&self, at: u64, len_bytes: u64, max_depth: u32) -> Io<Extent> {
        if self.answers.load(Ordering::SeqCst) {
            return self.device.block_status(at, len_bytes, max_depth);
        }
        let (device, told) = (self.device.clone(), self.told.listen());
        Io::task(spawn(async move {
            told.await;
            device.block_status(at, len_bytes, max_depth).await
        }))
    }
}

async fn some_turns() {
    for _ in 0..200 {
        yield_now().await;
    }
}

async fn image(backing: Backing) -> Arc<dyn BlockDevice> {
    let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    let options = CreateOptions::default().size_bytes(SIZE_BYTES);
    create(file.clone(), None, &options).await.expect("a file");
    let options = OpenOptions::default().backing(backing);
    let image = Qcow2::open(file, Arc::new(DenyAll), options).await;
    image.expect("an image")
}

#[test]
fn what_is_zeroed_while_a_reader_asks_for_it_is_data_to_him() {
    block_on(async {
        let source = image(Backing::None).await;
        let ones = Buffer::copy_of(&[1; 65536]);
        let write = source.write(0, ones, RequestFlags::default());
        write.await.expect("a write");
        let below = Asked::new(source.clone());
        let target = image(Backing::Given(below.clone())).await;
        let keeping = CopyBeforeWriteOptions::new(65536, DirtyMap::new(SIZE_BYTES));
        let filter = CopyBeforeWrite::new(source, target, keeping);
        let seen = filter.snapshot_view();
        let asked = seen.block_status(0, SIZE_BYTES, u32::MAX);
        // The target holds nothing there by now, and the source is about to be asked.
        some_turns().await;
        let zeroes = filter.write_zeroes(0, 65536, ZeroRequest::default());
        some_turns().await;
        below.answer();
        let extent = asked.await.expect("an answer");
        assert!(
            !extent.kind.is_zero(),
            "a reader would leave out what was there"
        );
        zeroes.await.expect("zeroes");
        let again = seen.block_status(0, 65536, u32::MAX).await;
        assert!(!again.expect("an answer").kind.is_zero());
    });
}

#[test]
fn a_question_about_all_of_a_disk_does_not_hold_up_writers_of_all_of_it() {
    block_on(async {
        let file = Arc::new(MemStorage::new());
        file.truncate(1 << 30).await.expect("a file");
        let source = Raw::open(file, RawOptions::default()).expect("a device");
        let below = Asked::new(source.clone());
        let target: Arc<dyn BlockDevice> = below.clone();
        let keeping = CopyBeforeWriteOptions::new(65536, DirtyMap::new(1 << 30));
        let filter = CopyBeforeWrite::new(source, target, keeping);
        let asked = filter.snapshot_view().block_status(0, 1 << 30, u32::MAX);
        some_turns().await;
        let byte = Buffer::copy_of(&[1; 512]);
        let write = filter.write(512 << 20, byte, RequestFlags::default());
        write.await.expect("a write beside the question");
        below.answer();
        assert!(asked.await.expect("an answer").len_bytes < 512 << 20);
    });
}

#[test]
fn nobody_waits_for_a_target_that_does_not_answer_once_it_is_over() {
    block_on(async {
        let (source, target) = (BlockedDevice::new(1, true), BlockedDevice::new(2, false));
        let keeping = CopyBeforeWriteOptions::new(4096, DirtyMap::new(4096));
        let filter = CopyBeforeWrite::new(source.clone(), target.clone(), keeping);
        let twos = Buffer::copy_of(&[2; 512]);
        let mut write = filter.write(0, twos, RequestFlags::default());
        for _ in 0..50 {
            yield_now().await;
            assert!(
                (&mut write).now_or_never().is_none(),
                "old bytes are safe nowhere"
            );
        }
        assert_eq!(filter.end(), [0..4096], "the target has nothing yet");
        write.await.expect("a write");
        assert!(!filter.left().await, "a write may land at any time");
        let mut left = Box::pin(filter.left_target());
        assert!(left.as_mut().now_or_never().is_none());
        target.open();
        left.await;
        assert_eq!(target.first_byte().await, 1, "what the source showed");
        assert_eq!(source.first_byte().await, 2);
    });
}

/// A filter over ones that gives old bytes up after a moment, and its source, which has not been
/// read when that has happened for a write of twos.
async fn given_up() -> (Arc<CopyBeforeWrite>, Arc<Asked>, Io<Buffer>, Io<Extent>) {
    let file = Arc::new(MemStorage::with_bytes(vec![1; 4096]));
    let source = Asked::new(Raw::open(file, RawOptions::default()).expect("a device"));
    let target = BlockedDevice::new(0, true);
    let keeping = CopyBeforeWriteOptions {
        on_error: OnCopyError::BreakSnapshot,
        timeout: Some(Duration::from_millis(1)),
        ..CopyBeforeWriteOptions::new(4096, DirtyMap::new(4096))
    };
    let filter = CopyBeforeWrite::new(source.clone(), target, keeping);
    let read = filter.snapshot().read(0, Buffer::for_read(512));
    let status = filter.snapshot().block_status(0, 512, u32::MAX);
    some_turns().await;
    let twos = Buffer::copy_of(&[2; 512]);
    let write = filter.write(0, twos, RequestFlags::default());
    write.await.expect("a write, without a copy");
    (filter, source, read, status)
}

#[test]
fn a_read_of_the_snapshot_that_was_under_way_when_it_broke_gets_nothing() {
    block_on(async {
        let (filter, source, read, status) = given_up().await;
        source.answer();
        let read = read.await.expect_err("new bytes are no old ones");
        assert_eq!(read.errno(), 13);
        status.await.expect_err("of what is there now");
        let view = filter.snapshot_view();
        let read = view.read(0, Buffer::for_read(512)).await;
        read.expect_err("nor through the target");
        view.block_status(0, 512, u32::MAX).await.expect_err("nor");
    });
}
