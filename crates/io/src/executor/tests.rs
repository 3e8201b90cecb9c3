//! Tasks, starts and wake-ups of one executor.

use std::sync::atomic::{AtomicBool, Ordering};

use super::*;

#[test]
fn tasks_run_join_and_wake_across_threads() {
    let executor = Executor::new(|| {});
    let (sender, receiver) = std::sync::mpsc::channel::<Waker>();
    let flag = Arc::new(AtomicBool::new(false));
    let seen = flag.clone();
    let mut first = true;
    let waits = executor.spawn(std::future::poll_fn(move |context| {
        if seen.load(Ordering::SeqCst) {
            return Poll::Ready(7);
        }
        if std::mem::take(&mut first) {
            sender.send(context.waker().clone()).unwrap();
        }
        Poll::Pending
    }));
    let total = executor.spawn(async move { waits.await + spawn(async { 1 }).await });
    let thread = std::thread::spawn(move || {
        let waker = receiver.recv().unwrap();
        flag.store(true, Ordering::SeqCst);
        waker.wake();
    });
    executor.run_ready();
    thread.join().unwrap();
    executor.run_ready();
    assert_eq!(executor.live_tasks(), 0);
    assert_eq!(total.now_or_never(), Some(8));
}

#[test]
fn results_of_calls_come_back_from_another_thread() {
    let executor = Executor::new(|| {});
    let called = executor.remote().call(|| async { Ok(7) });
    let dropped = executor.remote().call(|| async { Ok(8) });
    drop(dropped);
    executor.run_ready();
    let waiter = std::thread::spawn(move || called.now_or_never());
    assert!(matches!(waiter.join().unwrap(), Some(Ok(7))));
}

#[test]
fn calls_of_an_executor_that_ends_fail() {
    let executor = Executor::new(|| {});
    let remote = executor.remote();
    let before = remote.call(std::future::pending::<Result<()>>);
    executor.run_ready();
    let queued = remote.call(|| async { Ok(()) });
    executor.close();
    let after = remote.call(|| async { Ok(()) });
    for call in [before, queued, after] {
        let ended = call.now_or_never().expect("it has ended");
        assert_eq!(ended.unwrap_err().errno(), libc::ECANCELED);
    }
}

#[test]
fn a_panic_ends_its_task_and_no_other() {
    let executor = Executor::new(|| {});
    let remote = executor.remote();
    let bad_start = remote.call(|| -> std::future::Ready<Result<()>> { panic!("a bug") });
    let good_start = remote.call(|| async { Ok(6) });
    let bad = executor.spawn(async { panic!("a bug") });
    let good = executor.spawn(async { 7 });
    let waits = executor.spawn(bad);
    let mut panics = 0;
    while catch_unwind(AssertUnwindSafe(|| executor.run_ready())).is_err() {
        panics += 1;
    }
    assert_eq!(panics, 3, "the start, the task, and who awaits it");
    assert_eq!(executor.live_tasks(), 0);
    let refused = bad_start.now_or_never().expect("it has ended");
    assert_eq!(refused.unwrap_err().errno(), libc::ECANCELED);
    assert!(matches!(good_start.now_or_never(), Some(Ok(6))));
    assert_eq!(good.now_or_never(), Some(7));
    assert!(catch_unwind(AssertUnwindSafe(|| waits.now_or_never())).is_err());
}

#[test]
fn a_wake_before_sleep_is_not_lost() {
    let executor = Executor::new(|| {});
    assert!(executor.prepare_to_sleep());
    drop(executor.spawn(async {}));
    assert!(!executor.prepare_to_sleep());
    executor.run_ready();
    assert!(executor.prepare_to_sleep());
}
