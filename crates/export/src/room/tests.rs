use std::sync::atomic::AtomicBool;

use vellum::{Raw, RawOptions, Storage};
use vellum_io::{lane::block_on, spawn};
use vellum_storage::MemStorage;
use vellum_storage::wrap::{FaultStorage, Matching, Operation as Op, Times};

use super::*;

const LEN: u64 = 1 << 20;

/// A disk, what it fails, and how one of its clients uses it.
struct Bed {
    faults: Arc<FaultStorage>,
    room: Arc<Room>,
    gone: Arc<AtomicBool>,
    device: Arc<dyn BlockDevice>,
    told: Arc<Mutex<Vec<String>>>,
}

fn bed(when_full: WhenFull) -> Bed {
    let faults = FaultStorage::new(Arc::new(MemStorage::with_bytes(vec![0; LEN as usize])));
    let file: Arc<dyn Storage> = faults.clone();
    let raw: Arc<dyn BlockDevice> = Raw::open(file, RawOptions::default()).expect("a device");
    let (room, gone) = (Arc::<Room>::default(), Arc::<AtomicBool>::default());
    let told = Arc::new(Mutex::new(Vec::new()));
    let sink = told.clone();
    room.on_notice(move |notice| {
        sink.lock().push(match notice {
            RoomNotice::Full(request) => format!("{:?} {}", request.operation, request.errno),
            RoomNotice::Again { .. } => "again".to_owned(),
        });
    });
    let has_gone = gone.clone();
    let device = when_full.around(&raw, &room, move || !has_gone.load(Ordering::Acquire));
    Bed {
        faults,
        room,
        gone,
        device,
        told,
    }
}

fn wait() -> WhenFull {
    WhenFull::Wait {
        write_through: false,
    }
}

impl Bed {
    fn fill(&self, operation: Op) {
        let matching = Matching::operation(operation);
        self.faults.fail(matching, 0, Times::Always, libc::ENOSPC);
    }

    fn write(&self, offset_bytes: u64, value: u8) -> Io<Buffer> {
        let mut data = Buffer::zeroed(4096);
        data.fill(value);
        self.device
            .write(offset_bytes, data, RequestFlags::default())
    }

    async fn until_waiting(&self, count: u64) {
        while self.room.waiting() != count {
            lane::sleep(Duration::from_millis(1)).await;
        }
    }

    fn told(&self) -> Vec<String> {
        self.told.lock().clone()
    }
}

#[test]
fn what_waits_goes_on_when_there_is_room() {
    block_on(async {
        let bed = bed(wait());
        bed.fill(Op::Write);
        let writes: Vec<_> = (0..20).map(|n| bed.write(n * 4096, n as u8 + 1)).collect();
        bed.until_waiting(20).await;
        assert_eq!(bed.told(), ["Write 28"]);
        // Others are not held up.
        let read = bed.device.read(0, Buffer::for_read(4096)).await;
        assert!(read.expect("a disk").is_zero());
        bed.faults.heal();
        for (n, write) in writes.into_iter().enumerate() {
            write.await.expect("there is room");
            let read = bed
                .device
                .read(n as u64 * 4096, Buffer::for_read(4096))
                .await;
            assert!(
                read.expect("a disk")
                    .iter()
                    .all(|byte| *byte == n as u8 + 1)
            );
        }
        assert_eq!((bed.room.waiting(), bed.room.waits()), (0, 20));
        assert_eq!(bed.told(), ["Write 28", "again"]);
    });
}

#[test]
fn for_a_client_that_is_gone_nothing_is_tried_again() {
    block_on(async {
        let bed = bed(wait());
        bed.fill(Op::Write);
        let write = spawn(bed.write(0, 1));
        bed.until_waiting(1).await;
        bed.gone.store(true, Ordering::Release);
        // What comes later may have written it again, and something else since.
        bed.faults.heal();
        let error = write.await.expect_err("nobody waits for it");
        assert!(is_given_up(&error), "{error}");
        assert_eq!(error.errno(), libc::ENOSPC);
        let read = bed.device.read(0, Buffer::for_read(4096)).await;
        assert!(read.expect("a disk").is_zero());
    });
}

#[test]
fn a_flush_whose_sync_has_failed_is_not_tried_again() {
    block_on(async {
        let bed = bed(wait());
        let once = Matching::operation(Op::Flush);
        bed.faults.fail(once, 0, Times::Once, libc::ENOSPC);
        let error = bed.device.flush().await.expect_err("it fails");
        assert_eq!(error.errno(), libc::ENOSPC);
        assert_eq!(bed.room.waits(), 0);
    });
}

#[test]
fn without_the_option_requests_fail() {
    block_on(async {
        let bed = bed(WhenFull::Fail);
        bed.fill(Op::Write);
        let error = bed.write(0, 1).await.expect_err("it is full");
        assert_eq!(error.errno(), libc::ENOSPC);
        assert_eq!((bed.room.waits(), bed.told().len()), (0, 0));
    });
}

#[test]
fn a_durable_write_that_waits_is_flushed_apart() {
    block_on(async {
        let bed = bed(WhenFull::Wait {
            write_through: true,
        });
        bed.fill(Op::Write);
        let write = spawn(bed.write(0, 1));
        bed.until_waiting(1).await;
        bed.faults.heal();
        // Were it one request, this would be what fails.
        let once = Matching::operation(Op::Flush);
        bed.faults.fail(once, 0, Times::Once, libc::EIO);
        let error = write.await.expect_err("the flush fails");
        assert_eq!(error.errno(), libc::EIO);
    });
}
