//! Tasks on the calling thread's lane: how they start, wait and are driven.

use std::future::Future;
use std::task::Poll;
use std::time::{Duration, Instant};

use super::backend::Wait;
use super::current::{current_or_panic, with_executor};
use super::timer::{self, Sleep};
use crate::executor::{JoinHandle, Remote};

/// Drives the calling thread's lane until `future` is done, and what was started with
/// [`crate::spawn_to_completion`]. [`crate::spawn`] works inside; other tasks that are not
/// done then go on with the next call.
///
/// # Panics
/// Inside itself (await instead), and if a lane cannot be set up at all. If a task panics, not
/// only `future`: its panic comes out of here, and `future` is dropped. The other tasks go on
/// with the next call.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    current_or_panic().block_on(future)
}

/// Drives the calling thread's lane until no task is left, such as work that a
/// device does in the background, and none that was handed over with [`Remote::spawn`]. A
/// thread whose lane was used for devices that others go on using should end with it: tasks
/// of a lane that ends are dropped.
///
/// # Panics
/// As [`block_on`].
pub fn finish() {
    current_or_panic().finish();
}

/// Starts a task on the calling thread's lane, from inside it or not. The task runs while
/// the lane does: in [`block_on`], [`super::turn`] or [`finish`]; its handle may be awaited by
/// another executor of the same thread. Once the thread's lane has ended (what drops with the
/// thread's locals may come so late), the task is dropped.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    with_executor(|executor| executor.spawn(future), JoinHandle::of_none)
}

/// As [`spawn`], for work that others may have to wait for, on other threads too: a lane does
/// not leave [`block_on`] before it is done.
///
/// # Panics
/// As [`spawn`].
pub fn spawn_to_completion<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    with_executor(
        |executor| executor.spawn_to_completion(future),
        JoinHandle::of_none,
    )
}

/// A handle that starts tasks on the calling thread's lane from other threads.
/// They run while that lane is inside [`block_on`], [`super::turn`] or [`finish`].
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn remote() -> Remote {
    current_or_panic().executor().remote()
}

/// Waits for `time` on the calling thread's lane.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn sleep(time: Duration) -> Sleep {
    let now = timer::now();
    // A sleep beyond what the clock can tell is as good as a century.
    let century = Duration::from_secs(100 * 365 * 86_400);
    sleep_until(now.checked_add(time).unwrap_or(now + century))
}

/// Waits until `deadline` on the calling thread's lane.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn sleep_until(deadline: Instant) -> Sleep {
    let timers = timer::simulated().unwrap_or_else(|| current_or_panic().timers().clone());
    Sleep::new(timers, deadline)
}

/// Hands over at once what the tasks of the calling thread's lane have started, and takes in what is
/// complete, without waiting; a lane does both by itself when its tasks have nothing to do, or
/// after some rounds of them. For tasks that look for something again and again.
///
/// # Panics
/// If a lane cannot be set up at all.
pub fn hand_over() {
    current_or_panic().reactor().turn(Wait::No, || {});
}

/// Lets other tasks and completions have a turn.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}
