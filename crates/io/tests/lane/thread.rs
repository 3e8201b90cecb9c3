//! Threads with a lane, for callers that block.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use vellum_io::lane::{self, Backend, LaneOptions, LaneThread};
use vellum_io::{Error, ErrorKind, spawn};

#[test]
fn calls_of_many_threads_run_side_by_side() {
    let lane = LaneThread::start("side", LaneOptions::default()).unwrap();
    let inside = AtomicU32::new(0);
    let most = AtomicU32::new(0);
    let (inside, most) = (Arc::new(inside), Arc::new(most));
    std::thread::scope(|scope| {
        for n in 0..8 {
            let (inside, most, lane) = (inside.clone(), most.clone(), &lane);
            scope.spawn(move || {
                let result = lane.call(move || async move {
                    let now = inside.fetch_add(1, Ordering::Relaxed) + 1;
                    most.fetch_max(now, Ordering::Relaxed);
                    lane::sleep(Duration::from_millis(100)).await;
                    inside.fetch_sub(1, Ordering::Relaxed);
                    Ok(n)
                });
                assert_eq!(result.unwrap(), n);
            });
        }
    });
    assert!(most.load(Ordering::Relaxed) > 1);
}

#[test]
fn the_thread_has_its_name_and_options() {
    let options = LaneOptions {
        backend: Backend::Threads,
        ..LaneOptions::default()
    };
    let lane = LaneThread::start("queue-0", options).unwrap();
    let (name, backend) = lane
        .call(|| async {
            let name = std::thread::current().name().map(str::to_owned);
            Ok((name, lane::backend()))
        })
        .unwrap();
    assert_eq!(name.as_deref(), Some("queue-0"));
    assert_eq!(backend, Backend::Threads);
}

#[test]
fn a_name_that_no_thread_can_have_is_refused() {
    let refused = LaneThread::start("a\0b", LaneOptions::default());
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::InvalidArgument);
}

#[test]
fn dropping_it_waits_for_its_tasks() {
    let done = Arc::new(AtomicU32::new(0));
    let lane = LaneThread::start("drop", LaneOptions::default()).unwrap();
    let counted = done.clone();
    lane.call(move || async move {
        drop(spawn(async move {
            lane::sleep(Duration::from_millis(50)).await;
            counted.fetch_add(1, Ordering::Relaxed);
        }));
        Ok(())
    })
    .unwrap();
    drop(lane);
    assert_eq!(done.load(Ordering::Relaxed), 1);
}

#[test]
fn dropping_it_runs_what_was_handed_over_before() {
    for _ in 0..200 {
        let ran = Arc::new(AtomicU32::new(0));
        let lane = LaneThread::start("drop", LaneOptions::default()).unwrap();
        let counted = ran.clone();
        lane.remote().spawn(move || async move {
            counted.fetch_add(1, Ordering::Relaxed);
        });
        drop(lane);
        assert_eq!(ran.load(Ordering::Relaxed), 1);
    }
}

#[test]
fn it_does_not_wait_for_itself() {
    let lane = Arc::new(LaneThread::start("self", LaneOptions::default()).unwrap());
    let inner = lane.clone();
    let error = lane
        .call(move || async move {
            let nested = inner.call(|| async { Ok(()) });
            Ok(nested.unwrap_err().kind())
        })
        .unwrap();
    assert_eq!(error, ErrorKind::InvalidArgument);
}

#[test]
fn a_handle_dropped_by_its_own_task_ends_the_lane() {
    let lane = LaneThread::start("own", LaneOptions::default()).unwrap();
    let remote = lane.remote().clone();
    let (sender, receiver) = std::sync::mpsc::channel();
    remote.spawn(move || async move {
        drop(lane);
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(Duration::from_secs(20)).unwrap();
}

#[test]
fn a_panic_ends_the_calls_with_an_error() {
    let lane = LaneThread::start("panics", LaneOptions::default()).unwrap();
    let result = lane.call(|| async {
        assert!(std::hint::black_box(false), "as the test wants it");
        Ok(())
    });
    assert_eq!(result.unwrap_err().errno(), libc::ECANCELED);
    let later = lane.call(|| async { Ok(()) });
    assert_eq!(later.unwrap_err().errno(), libc::ECANCELED);
}

#[test]
fn errors_come_back() {
    let lane = LaneThread::start("errors", LaneOptions::default()).unwrap();
    let result: Result<(), _> =
        lane.call(|| async { Err(Error::new(ErrorKind::OutOfRange, "read", "too far")) });
    assert_eq!(result.unwrap_err().kind(), ErrorKind::OutOfRange);
}
