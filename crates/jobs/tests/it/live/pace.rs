//! A commit of an image becomes ready, and ends, however fast guests write.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::{Either, select};

use vellum::gate::DenyAll;
use vellum::nodes::Link;
use vellum::qcow2::create::{CreateOptions, create};
use vellum::qcow2::{Backing, OpenOptions, Qcow2};
use vellum::{BlockDevice, Buffer, Io, Raw, RawOptions, RequestFlags, ZeroRequest, delegate};
use vellum_io::lane::{block_on, sleep, yield_now};
use vellum_io::spawn;
use vellum_jobs::job::{JobCommand, JobControl};
use vellum_jobs::live::{
    CopyOutcome, DirtyMap, InitialSync, LiveMirror, LiveMirrorOptions, MirrorPart, Tracker,
};
use vellum_storage::{MemStorage, Storage};

const SIZE_BYTES: u64 = 32 << 20;
const GRAIN_BYTES: u64 = 64 << 10;
/// What users may be held up for.
const SHORT_BYTES: u64 = 4 << 20;
const GUESTS: u64 = 4;

/// A device that is slow to write, and counts what is written.
#[derive(Debug)]
struct Sluggish {
    device: Arc<dyn BlockDevice>,
    written_bytes: AtomicU64,
}

impl Sluggish {
    fn late<T: 'static>(
        &self,
        len_bytes: u64,
        begin: impl FnOnce(&dyn BlockDevice) -> Io<T> + 'static,
    ) -> Io<T> {
        self.written_bytes.fetch_add(len_bytes, Ordering::Relaxed);
        let device = self.device.clone();
        Io::task(spawn(async move {
            for _ in 0..100 {
                yield_now().await;
            }
            begin(&*device).await
        }))
    }
}

impl BlockDevice for Sluggish {
    delegate!(device: info, size_bytes, read, discard, flush, block_status, truncate, close);
    fn write(&self, at: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        self.late(buffer.len() as u64, move |device| {
            device.write(at, buffer, flags)
        })
    }
    fn write_zeroes(&self, at: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        self.late(len_bytes, move |device| {
            device.write_zeroes(at, len_bytes, request)
        })
    }
}

/// Writes small blocks all over the disk, for ever: now and then two to one place at once,
/// and zeroes.
async fn guest(number: u64, disk: Arc<Link>, over: Rc<Cell<bool>>) {
    let mut turn = number;
    while !over.get() {
        turn += GUESTS;
        let at = turn * 37 % (SIZE_BYTES / GRAIN_BYTES) * GRAIN_BYTES + turn % 7 * 512;
        let write = |byte: u64| {
            let bytes = Buffer::copy_of(&[byte as u8; 1024]);
            disk.write(at, bytes, RequestFlags::default())
        };
        match turn / GUESTS % 8 {
            0 => {
                let (one, two) = (write(turn), write(turn + 1));
                one.await.expect("a write");
                two.await.expect("a write");
            }
            1 => {
                let zeroes = disk.write_zeroes(at, 512, ZeroRequest::default());
                zeroes.await.expect("zeroes");
            }
            2 => {
                let grain = at - at % GRAIN_BYTES;
                disk.discard(grain, GRAIN_BYTES).await.expect("a discard");
            }
            _ => drop(write(turn).await.expect("a write")),
        }
        yield_now().await;
    }
}

async fn bytes_of(device: &Arc<dyn BlockDevice>) -> Buffer {
    let read = device.read(0, Buffer::for_read(SIZE_BYTES as usize));
    read.await.expect("the disk")
}

#[test]
fn a_commit_is_ready_in_the_end_though_guests_write_faster_than_is_copied() {
    block_on(async {
        let base = Arc::new(MemStorage::with_bytes(vec![1; SIZE_BYTES as usize]));
        let base: Arc<dyn BlockDevice> = Raw::open(base, RawOptions::default()).expect("a base");
        let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
        let options = CreateOptions::default().size_bytes(SIZE_BYTES);
        create(file.clone(), None, &options).await.expect("a file");
        let options = OpenOptions::default().backing(Backing::Given(Link::new(base.clone())));
        let top = Qcow2::open(file, Arc::new(DenyAll), options).await;
        let top: Arc<dyn BlockDevice> = top.expect("an image");
        for at in (0..SIZE_BYTES).step_by(1 << 20) {
            let twos = Buffer::copy_of(&vec![2; 1 << 20]);
            let write = top.write(at, twos, RequestFlags::default());
            write.await.expect("a write");
        }
        let disk = Link::new(top.clone());
        let over = Rc::new(Cell::new(false));
        let guests: Vec<_> = (0..GUESTS)
            .map(|number| spawn(guest(number, disk.clone(), over.clone())))
            .collect();
        let dirty = DirtyMap::new(SIZE_BYTES);
        let tracker = Tracker::new(top.clone(), dirty.clone());
        disk.drain().await.set(tracker);
        let target = Arc::new(Sluggish {
            device: base.clone(),
            written_bytes: AtomicU64::new(0),
        });
        let options = LiveMirrorOptions {
            part: MirrorPart::Layers(1),
            parallel: 4,
            unmap: true,
            write_blocking: false,
        };
        let job = LiveMirror::new(top.clone(), target.clone(), dirty.clone(), options).await;
        let job = job.expect("a job");
        let control = JobControl::new();
        let begun = job.begin(InitialSync::Layers(1), &control).await;
        assert_eq!(begun.expect("a beginning"), CopyOutcome::All);
        let copied = job.keep_up(&control).await.expect("a copy");
        assert_eq!(copied, CopyOutcome::All);
        assert!(dirty.dirty_bytes() > SHORT_BYTES, "guests are fast");
        job.catch_up(&control).await.expect("a copy");
        assert!(dirty.dirty_bytes() <= SHORT_BYTES, "users would be held up");
        let written = target.written_bytes.load(Ordering::Relaxed);
        assert!(written < 6 * SIZE_BYTES, "{written} bytes were written");
        let drained = disk.drain().await;
        job.finish().await.expect("the last round");
        assert!(bytes_of(&top).await[..] == bytes_of(&base).await[..]);
        drained.set(base.clone());
        drop(drained);
        over.set(true);
        for guest in guests {
            guest.await;
        }
    });
}

/// What a guest's write meets in a mirror whose target does not answer: whether it ends
/// within some seconds.
async fn write_beside_a_stalled_target(write_blocking: bool) -> bool {
    let memory = || Arc::new(MemStorage::with_bytes(vec![1; 8 << 20]));
    let device = || -> Arc<dyn BlockDevice> {
        Raw::open(memory(), RawOptions::default()).expect("a device")
    };
    let (source, target) = (device(), Link::new(device()));
    let stalled = target.drain().await;
    let dirty = DirtyMap::new(8 << 20);
    let tracker = Tracker::new(source.clone(), dirty.clone());
    let options = LiveMirrorOptions {
        part: MirrorPart::All,
        parallel: 4,
        unmap: true,
        write_blocking,
    };
    let job = LiveMirror::new(source, target, dirty, options).await;
    let job = Rc::new(job.expect("a job"));
    let control = Rc::new(JobControl::new());
    let begun = job.begin(InitialSync::Nothing, &control).await;
    assert_eq!(begun.expect("a beginning"), CopyOutcome::All);
    let writing = spawn(async move {
        let bytes = Buffer::copy_of(&[2; 4096]);
        let write = tracker.write(4096, bytes, RequestFlags::default());
        write.await.expect("a write");
    });
    let copying = {
        let (job, control) = (job.clone(), control.clone());
        spawn(async move { job.catch_up(&control).await })
    };
    let limit = sleep(Duration::from_secs(3));
    let (ended, writing) = match select(writing, limit).await {
        Either::Left(_) => (true, None),
        Either::Right((_, writing)) => (false, Some(writing)),
    };
    // Given up, it holds nobody up, whatever becomes of the target.
    let since = std::time::Instant::now();
    control.set(JobCommand::Cancel);
    job.handle().release();
    if let Some(writing) = writing {
        writing.await;
    }
    let copied = copying.await.expect("no error");
    assert!(!ended || copied == CopyOutcome::GivenUp || write_blocking);
    assert!(!job.end().await, "a request is on its way");
    assert!(since.elapsed() < Duration::from_secs(1));
    drop(stalled);
    job.left_target().await;
    ended
}

#[test]
fn a_target_that_does_not_answer_holds_guests_up_only_if_that_was_asked_for() {
    block_on(async {
        assert!(write_beside_a_stalled_target(false).await);
        assert!(!write_beside_a_stalled_target(true).await);
    });
}
