//! Tasks, timers and wake-ups.

use std::cell::Cell;
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::{Either, join, join_all, select};
use vellum_io::lane::{
    self, Backend, Descriptor, LaneOptions, Op, Request, block_on, finish_buffers,
};
use vellum_io::{Buffer, Buffers, ErrorKind, Io, spawn};

use crate::on_both;

#[test]
fn tasks_run_beside_the_root() {
    on_both(|| {
        let sum = block_on(async {
            let tasks = (0..100).map(|n| {
                spawn(async move {
                    lane::yield_now().await;
                    n
                })
            });
            join_all(tasks).await.into_iter().sum::<i32>()
        });
        assert_eq!(sum, 4950);
    });
}

#[test]
fn tasks_go_on_in_the_next_block_on() {
    on_both(|| {
        let done = Rc::new(Cell::new(false));
        let flag = done.clone();
        let work = async move {
            lane::sleep(Duration::from_millis(5)).await;
            flag.set(true);
        };
        let mut task = None;
        block_on(async { task = Some(spawn(work)) });
        assert!(!done.get());
        block_on(task.unwrap());
        assert!(done.get());
    });
}

#[test]
fn sleeps_end_in_order_and_on_time() {
    on_both(|| {
        let start = Instant::now();
        let order = block_on(async {
            let order = Rc::new(std::cell::RefCell::new(Vec::new()));
            let tasks = [30_u64, 10, 20].map(|time| {
                let order = order.clone();
                spawn(async move {
                    lane::sleep(Duration::from_millis(time)).await;
                    order.borrow_mut().push(time);
                })
            });
            join_all(tasks).await;
            order.take()
        });
        assert_eq!(order, [10, 20, 30]);
        assert!(start.elapsed() >= Duration::from_millis(30));
    });
}

#[test]
fn remotes_start_tasks_and_wakers_cross_threads() {
    on_both(|| {
        let remote = lane::remote();
        let total = block_on(async move {
            let (sender, receiver) = futures_channel();
            let thread = std::thread::spawn(move || {
                for n in 0..1000_u64 {
                    let sender = sender.clone();
                    remote.spawn(move || async move { sender.add(n) });
                }
            });
            let total = receiver.wait_for(1000).await;
            thread.join().unwrap();
            total
        });
        assert_eq!(total, 499_500);
    });
}

/// A counter that can be awaited: how many numbers came, and their sum.
#[derive(Clone)]
struct Counter(std::sync::Arc<(parking_lot::Mutex<(u64, u64)>, event_listener::Event)>);

fn futures_channel() -> (Counter, Counter) {
    let counter = Counter(Default::default());
    (counter.clone(), counter)
}

impl Counter {
    fn add(&self, n: u64) {
        let mut state = self.0.0.lock();
        state.0 += 1;
        state.1 += n;
        drop(state);
        self.0.1.notify(usize::MAX);
    }

    async fn wait_for(&self, count: u64) -> u64 {
        loop {
            let changed = self.0.1.listen();
            let state = *self.0.0.lock();
            if state.0 == count {
                return state.1;
            }
            changed.await;
        }
    }
}

#[test]
fn readiness_is_seen_and_a_dropped_wait_is_gone() {
    on_both(|| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        block_on(async {
            lane::poll_writable(ours.as_fd()).await.unwrap();
            let readable = lane::poll_readable(ours.as_fd());
            let sleep = lane::sleep(Duration::from_millis(5));
            assert!(matches!(select(readable, sleep).await, Either::Right(_)));
            theirs.write_all(b"x").unwrap();
            lane::poll_readable(ours.as_fd()).await.unwrap();
        });
    });
}

/// A new file for requests, opened with `flags` besides.
pub(crate) fn create(path: &Path, flags: i32) -> Arc<Descriptor> {
    let mut options = std::fs::File::options();
    options.write(true).create_new(true).custom_flags(flags);
    let file = options.open(path).unwrap();
    Arc::new(Descriptor::direct(file.into(), "file", 512))
}

pub(crate) fn write(file: &Arc<Descriptor>, offset_bytes: u64, buffers: Buffers) -> Io<Buffers> {
    let op = Op::Write {
        offset_bytes,
        durable: false,
    };
    lane::submit(Request::new(file.clone(), op, buffers), finish_buffers)
}

#[test]
fn a_thread_may_end_with_requests_in_flight() {
    on_both(|| {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("file");
        let backend = lane::backend();
        let inner = path.clone();
        std::thread::spawn(move || {
            lane::install(&LaneOptions {
                backend,
                ..LaneOptions::default()
            })
            .unwrap();
            let file = create(&inner, libc::O_DIRECT);
            let (ours, _theirs) = UnixStream::pair().unwrap();
            block_on(async {
                drop(spawn(
                    async move { lane::poll_readable(ours.as_fd()).await },
                ));
            });
            for n in 0..64 {
                let buffers = Buffers::from_buf([Buffer::copy_of(&[7; 65_536])]);
                drop(write(&file, n * 65_536, buffers));
            }
        })
        .join()
        .unwrap();
        assert!(std::fs::read(&path).unwrap() == vec![7; 64 * 65_536]);
    });
}

/// Runs a test in a thread whose ring takes two requests at a time, with the path of a new file and that file.
fn on_a_small_ring(test: fn(&Path, Arc<Descriptor>)) {
    let options = LaneOptions {
        backend: Backend::IoUring,
        ring_entries: 2,
        ..LaneOptions::default()
    };
    let thread = std::thread::spawn(move || {
        lane::install(&options).unwrap();
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = folder.path().join("file");
        test(&path, create(&path, 0));
    });
    thread.join().unwrap();
}

#[test]
fn more_requests_than_the_ring_holds() {
    on_a_small_ring(|path, file| {
        block_on(async {
            let writes = (0..500).map(|n| {
                let buffers = Buffers::from_buf([Buffer::copy_of(&[n as u8; 512])]);
                write(&file, n * 512, buffers)
            });
            for write in join_all(writes).await {
                write.unwrap();
            }
        });
        assert_eq!(std::fs::metadata(path).unwrap().len(), 500 * 512);
    });
}

/// Idle clients may be many more than requests on a disk that the kernel is given at a time.
#[test]
fn any_number_of_waits_leave_room_for_requests() {
    on_a_small_ring(|_, file| {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        block_on(async {
            let waits: Vec<_> = (0..3000)
                .map(|_| lane::poll_readable(ours.as_fd()))
                .collect();
            let buffers = Buffers::from_buf([Buffer::copy_of(&[1; 512])]);
            let written = write(&file, 0, buffers);
            let late = lane::sleep(Duration::from_secs(20));
            assert!(matches!(select(written, late).await, Either::Left(_)));
            // All end at once: many more completions than the kernel has room for.
            theirs.write_all(b"x").unwrap();
            for wait in waits {
                wait.await.unwrap();
            }
        });
    });
}

/// Has the kernel refuse io_uring to the calling thread, as containers do.
fn refuse_io_uring() {
    let statement = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let mut filter = [
        // The number of the call; if it is not io_uring_setup, skip the refusal.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        statement(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            libc::SYS_io_uring_setup as u32,
        ),
        statement(
            libc::BPF_RET,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        statement(libc::BPF_RET, 0, 0, libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog {
        len: filter.len() as u16,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: plain flags, and a live program whose filter lives as long.
    let result = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::prctl(
            libc::PR_SET_SECCOMP,
            libc::SECCOMP_MODE_FILTER,
            &raw const program,
        )
    };
    assert_eq!(result, 0);
}

#[test]
fn where_io_uring_is_refused_threads_take_over() {
    let thread = std::thread::spawn(|| {
        refuse_io_uring();
        let insisting = LaneOptions {
            backend: Backend::IoUring,
            ..LaneOptions::default()
        };
        let error = lane::install(&insisting).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied);
        assert_eq!(lane::backend(), Backend::Threads);
        assert_eq!(block_on(async { spawn(async { 5 }).await }), 5);
    });
    thread.join().unwrap();
}

#[test]
fn a_second_lane_and_a_nested_block_on_are_refused() {
    on_both(|| {
        let error = lane::install(&LaneOptions::default()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    });
    let nested = std::thread::spawn(|| block_on(async { block_on(async {}) })).join();
    let message = *nested.unwrap_err().downcast::<&str>().unwrap();
    assert!(message.contains("inside a lane"), "{message}");
}

#[test]
fn a_panicking_future_leaves_the_lane_usable() {
    on_both(|| {
        let panic = std::panic::catch_unwind(|| block_on(async { panic!("on purpose") }));
        assert!(panic.is_err());
        assert_eq!(block_on(async { spawn(async { 5 }).await }), 5);
    });
}

#[test]
fn a_panicking_task_leaves_the_lane_usable() {
    on_both(|| {
        let drives: &[fn()] = &[
            || block_on(async {}),
            lane::finish,
            #[cfg(not(shuttle))]
            lane::turn,
        ];
        for drive in drives {
            let bad = lane::spawn(async { panic!("on purpose") });
            let good = lane::spawn(async { 5 });
            let called = lane::remote().call(|| async { Ok(6) });
            assert!(std::panic::catch_unwind(drive).is_err());
            drive();
            assert_eq!(good.now_or_never(), Some(5));
            assert!(matches!(called.now_or_never(), Some(Ok(6))));
            let awaited = std::panic::AssertUnwindSafe(|| block_on(bad));
            assert!(std::panic::catch_unwind(awaited).is_err());
        }
    });
}

#[test]
fn finish_runs_what_was_handed_over() {
    on_both(|| {
        let ran = Arc::new(AtomicU32::new(0));
        let count = |ran: &Arc<AtomicU32>| {
            let ran = ran.clone();
            lane::remote().spawn(move || async move {
                ran.fetch_add(1, Ordering::Relaxed);
            });
        };
        count(&ran);
        lane::finish();
        assert_eq!(ran.load(Ordering::Relaxed), 1);
        let by_task = ran.clone();
        drop(lane::spawn(async move { count(&by_task) }));
        lane::finish();
        assert_eq!(ran.load(Ordering::Relaxed), 2);
    });
}

#[test]
fn a_task_that_comes_after_the_lane_is_dropped() {
    struct SpawnsLate(Arc<AtomicU32>);
    impl Drop for SpawnsLate {
        fn drop(&mut self) {
            let alive = self.0.clone();
            alive.fetch_add(1, Ordering::Relaxed);
            drop(lane::spawn(async move { drop(alive) }));
        }
    }
    thread_local! {
        static LATE: Cell<Option<SpawnsLate>> = const { Cell::new(None) };
    }
    let dropped = Arc::new(AtomicU32::new(0));
    let inside = dropped.clone();
    let thread = std::thread::spawn(move || {
        // Set before the lane is made: it goes after it.
        LATE.set(Some(SpawnsLate(inside)));
        block_on(async {});
    });
    thread.join().unwrap();
    assert_eq!(dropped.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&dropped), 1);
}

#[test]
fn computations_run_beside_the_lane_and_come_back() {
    on_both(|| {
        let own = std::thread::current().id();
        block_on(async {
            let all =
                (0..200_u64).map(|n| lane::compute(move || (n * n, std::thread::current().id())));
            // A timer that must not wait for them.
            let (results, ()) = join(join_all(all), lane::sleep(Duration::from_millis(1))).await;
            for (n, (square, thread)) in results.into_iter().enumerate() {
                assert_eq!(square, (n * n) as u64);
                assert_ne!(thread, own);
            }
        });
    });
}

#[test]
fn outside_a_lane_computations_are_done_at_once() {
    let own = std::thread::current().id();
    let done = lane::compute(|| std::thread::current().id()).now_or_never();
    assert_eq!(done, Some(own));
}

#[test]
fn a_panic_of_a_computation_goes_on_where_it_is_awaited() {
    let result = std::panic::catch_unwind(|| {
        block_on(async {
            lane::compute(|| panic!("as the test wants it")).await;
        });
    });
    assert!(result.is_err());
    // The thread that panicked, or another one, still works.
    std::thread::spawn(|| assert_eq!(block_on(lane::compute(|| 7)), 7))
        .join()
        .expect("computes");
}

#[test]
fn a_task_that_never_waits_hands_over_what_it_has_started() {
    on_both(|| {
        block_on(async {
            let (ours, mut theirs) = UnixStream::pair().unwrap();
            theirs.write_all(b"x").unwrap();
            let mut readable = lane::poll_readable(ours.as_fd());
            let begin = Instant::now();
            while (&mut readable).now_or_never().is_none() {
                assert!(
                    begin.elapsed() < Duration::from_secs(30),
                    "nothing was handed over"
                );
                lane::hand_over();
            }
        });
    });
}
