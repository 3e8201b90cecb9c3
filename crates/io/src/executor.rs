//! A single-threaded executor: the slow path of a lane, and the whole world of a
//! simulation.
//!
//! Tasks never leave their thread; wakers may be used from any thread. What
//! waits for I/O is not this module's business: its owner calls
//! [`Executor::run_ready`], and when that returns with nothing left to do, blocks
//! as it likes until its `notify` callback is called.
//!
//! Invariants:
//! - A wake-up between the last [`Executor::run_ready`] and [`Executor::prepare_to_sleep`]
//!   makes the latter return `false`, so no wake-up is lost.
//! - A task that panics is over, and the panic comes out of the call that ran it. What was
//!   ready beside it stays ready.

mod join;
mod queue;
mod queued;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use futures_channel::oneshot;
use futures_util::FutureExt;

use crate::sync::thread_local;
use crate::{Error, ErrorKind, Result};
use join::Join;
pub use join::JoinHandle;
use queue::{RemoteStart, SharedQueue, TaskWaker};

type LocalTask = Pin<Box<dyn Future<Output = ()>>>;
/// The task number of the owner's root future; see [`Executor::root_waker`].
const ROOT: usize = usize::MAX;

struct Slot {
    /// `None` while the task is being polled, and after its end.
    future: Option<LocalTask>,
    waker: Arc<TaskWaker>,
}

#[derive(Default)]
struct Tasks {
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    live: usize,
}

/// What is ready now. A panic amid it puts the rest back.
struct Batch<'a> {
    core: &'a Core,
    starts: std::vec::IntoIter<RemoteStart>,
    ready: VecDeque<usize>,
}

impl<'a> Batch<'a> {
    fn take(core: &'a Core) -> Self {
        let mut ready = core.batch.take();
        let mut queue = core.shared.lock();
        queue.sleeping = false;
        std::mem::swap(&mut queue.ready, &mut ready);
        let starts = std::mem::take(&mut queue.starts).into_iter();
        drop(queue);
        Batch {
            core,
            starts,
            ready,
        }
    }
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        if !self.starts.as_slice().is_empty() || !self.ready.is_empty() {
            let mut queue = self.core.shared.lock();
            queue.starts.splice(0..0, self.starts.by_ref());
            self.ready.append(&mut queue.ready);
            std::mem::swap(&mut queue.ready, &mut self.ready);
        }
        *self.core.batch.borrow_mut() = std::mem::take(&mut self.ready);
    }
}

struct Core {
    tasks: RefCell<Tasks>,
    shared: Arc<SharedQueue>,
    root: Arc<TaskWaker>,
    root_woken: Cell<bool>,
    /// Tasks that were started with [`Executor::spawn_to_completion`].
    lingering: Rc<Cell<usize>>,
    /// The queue's other half: swapped with it, so that neither is reallocated.
    batch: RefCell<VecDeque<usize>>,
}

thread_local! {
    static CURRENT: RefCell<Option<Rc<Core>>> = const { RefCell::new(None) };
}

/// A single-threaded executor; see the module's head.
pub struct Executor {
    core: Rc<Core>,
}

/// Starts tasks on an executor of another thread.
#[derive(Clone)]
pub struct Remote {
    shared: Arc<SharedQueue>,
}

impl Executor {
    /// A new executor; `notify` is called, from any thread, when a task becomes
    /// ready after [`Executor::prepare_to_sleep`] returned `true`.
    pub fn new(notify: impl Fn() + Send + Sync + 'static) -> Self {
        let shared = SharedQueue::new(notify);
        Executor {
            core: Rc::new(Core {
                tasks: RefCell::default(),
                root: Arc::new(TaskWaker::new(&shared, ROOT)),
                shared,
                root_woken: Cell::new(false),
                lingering: Rc::default(),
                batch: RefCell::default(),
            }),
        }
    }

    /// The thread's current executor: that of the innermost [`Executor::enter`] that the caller is
    /// inside. A thread that ends has none: destructors of its locals may ask.
    pub(crate) fn current() -> Option<Executor> {
        let core = CURRENT.try_with(|current| current.borrow().clone());
        core.ok().flatten().map(|core| Executor { core })
    }

    /// Runs `work` with this executor as the thread's current one, so that
    /// [`spawn`] inside finds it.
    pub fn enter<R>(&self, work: impl FnOnce() -> R) -> R {
        struct Restore(Option<Rc<Core>>);
        impl Drop for Restore {
            fn drop(&mut self) {
                let before = self.0.take();
                let _ = CURRENT.try_with(|current| current.replace(before));
            }
        }
        let before = CURRENT.with(|current| current.replace(Some(self.core.clone())));
        let _restore = Restore(before);
        work()
    }

    /// Starts a task.
    pub fn spawn<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let (result, handle) = join::ends();
        // An async block around it would have room for the future twice: where it is kept
        // before the first poll, and where it is awaited.
        let whole = future.map(move |value| result.set(Join::Done(value)));
        let mut tasks = self.core.tasks.borrow_mut();
        let task = tasks.free.pop().unwrap_or_else(|| {
            tasks.slots.push(None);
            tasks.slots.len() - 1
        });
        let slot = &mut tasks.slots[task];
        let waker = reusable_waker(slot)
            .unwrap_or_else(|| Arc::new(TaskWaker::new(&self.core.shared, task)));
        *slot = Some(Slot {
            future: Some(Box::pin(whole)),
            waker: waker.clone(),
        });
        tasks.live += 1;
        drop(tasks);
        waker.wake();
        handle
    }

    /// Starts a task that counts in [`Executor::tasks_to_complete`] until it is finished.
    pub(crate) fn spawn_to_completion<T: 'static>(
        &self,
        future: impl Future<Output = T> + 'static,
    ) -> JoinHandle<T> {
        let lingering = CompletionCounter::new(self.core.lingering.clone());
        let whole = future.map(move |value| {
            drop(lingering);
            value
        });
        self.spawn(whole)
    }

    /// A handle that starts tasks from other threads.
    pub fn remote(&self) -> Remote {
        Remote {
            shared: self.core.shared.clone(),
        }
    }

    /// Polls ready tasks until none is ready; returns whether any was.
    ///
    /// # Panics
    /// As [`Executor::run_batch`].
    pub fn run_ready(&self) -> bool {
        self.enter(|| {
            let mut any = false;
            while self.run_batch() {
                any = true;
            }
            any
        })
    }

    /// Polls the tasks that are ready now, once each; returns whether any was.
    /// Must be called inside [`Executor::enter`] to allow tasks to spawn.
    ///
    /// # Panics
    /// If a task does. That task is over; the others go on with the next call.
    pub fn run_batch(&self) -> bool {
        let mut batch = Batch::take(&self.core);
        let any = !batch.ready.is_empty() || !batch.starts.as_slice().is_empty();
        for start in batch.starts.by_ref() {
            start();
        }
        while let Some(task) = batch.ready.pop_front() {
            self.poll_task(task);
        }
        any
    }

    /// A waker for a future that the owner polls itself, beside the tasks. A
    /// wake-up shows in [`Executor::take_root_wake`] after the next batch.
    pub fn root_waker(&self) -> Waker {
        Waker::from(self.core.root.clone())
    }

    /// Whether the root waker was used since the last call.
    pub fn take_root_wake(&self) -> bool {
        self.core.root_woken.take()
    }

    /// Whether the root waker was used, without taking that in.
    pub fn root_is_woken(&self) -> bool {
        self.core.root_woken.get()
    }

    fn poll_task(&self, task: usize) {
        if task == ROOT {
            self.core.root.leave_queue();
            self.core.root_woken.set(true);
            return;
        }
        let (mut future, waker) = {
            let mut tasks = self.core.tasks.borrow_mut();
            let Some(Some(slot)) = tasks.slots.get_mut(task) else {
                return;
            };
            let Some(future) = slot.future.take() else {
                return;
            };
            (future, slot.waker.clone())
        };
        waker.leave_queue();
        let std_waker = Waker::from(waker);
        let mut context = Context::from_waker(&std_waker);
        // Whatever a panic has left half done is seen by nobody but the future's drop.
        let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut context)));
        let mut tasks = self.core.tasks.borrow_mut();
        if let Ok(Poll::Pending) = polled {
            if let Some(slot) = &mut tasks.slots[task] {
                slot.future = Some(future);
            }
            return;
        }
        // The slot keeps its waker for the next task.
        tasks.free.push(task);
        tasks.live -= 1;
        drop(tasks);
        drop(future);
        if let Err(panic) = polled {
            resume_unwind(panic);
        }
    }

    /// Declares that the owner is about to block. `false`: something is ready,
    /// do not block. After `true`, the next wake-up calls `notify` once.
    pub fn prepare_to_sleep(&self) -> bool {
        let mut queue = self.core.shared.lock();
        queue.sleeping = queue.ready.is_empty() && queue.starts.is_empty();
        queue.sleeping
    }

    /// Declares that the owner is awake again, so that wake-ups need no `notify`.
    pub fn end_sleep(&self) {
        self.core.shared.lock().sleeping = false;
    }

    /// Drops all tasks as they are.
    pub fn drop_tasks(&self) {
        // A task's drop may start or wake others: take them out first.
        let slots = std::mem::take(&mut *self.core.tasks.borrow_mut());
        drop(slots);
    }

    /// As [`Executor::drop_tasks`], and starts no task of a [`Remote`] from now on: what is
    /// asked for is dropped.
    pub fn close(&self) {
        let starts = {
            let mut queue = self.core.shared.lock();
            queue.closed = true;
            std::mem::take(&mut queue.starts)
        };
        drop(starts);
        self.drop_tasks();
    }

    /// Tasks started with [`crate::spawn_to_completion`] and not finished.
    pub fn tasks_to_complete(&self) -> usize {
        self.core.lingering.get()
    }

    /// Tasks started and not finished.
    pub fn live_tasks(&self) -> usize {
        self.core.tasks.borrow().live
    }

    /// Whether a task is not finished, or was handed over by a [`Remote`] and not started.
    pub(crate) fn has_tasks(&self) -> bool {
        self.live_tasks() > 0 || !self.core.shared.lock().starts.is_empty()
    }
}

impl Remote {
    /// Runs `make` on the executor's thread and spawns the future that it returns. Both are
    /// dropped if the executor is gone, or ends first.
    pub fn spawn<F>(&self, make: impl FnOnce() -> F + Send + 'static)
    where
        F: Future<Output = ()> + 'static,
    {
        let mut start: Option<RemoteStart> = Some(Box::new(move || {
            drop(spawn(make()));
        }));
        self.shared.push(|queue| {
            if !queue.closed {
                queue.starts.extend(start.take());
            }
        });
        // Outside the lock: its drop may run anybody's code.
        drop(start);
    }

    /// As [`Remote::spawn`], for a future whose result the caller wants: what comes back may
    /// be awaited on any thread and by any executor. Dropping it abandons the result, never
    /// the work.
    ///
    /// # Errors
    /// Those of the future, and [`ErrorKind::Io`] with `ECANCELED` if the executor ends first;
    /// whether the work was done is not known then.
    pub fn call<T, F>(&self, make: impl FnOnce() -> F + Send + 'static) -> RemoteCall<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        self.spawn(move || {
            let work = make();
            async move {
                // Nobody listens if the caller has dropped the future.
                let _ = sender.send(work.await);
            }
        });
        RemoteCall(receiver)
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Remote")
    }
}

/// The result of [`Remote::call`], to be awaited anywhere.
#[derive(Debug)]
#[must_use = "dropping it abandons the result"]
pub struct RemoteCall<T>(oneshot::Receiver<Result<T>>);

impl<T> Future for RemoteCall<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        Pin::new(&mut self.0)
            .poll(context)
            .map(|ended| ended.unwrap_or_else(|_| Err(lane_ended())))
    }
}

/// Why a call has no result.
pub(crate) fn lane_ended() -> Error {
    let message = "the lane ended before the request did";
    Error::new(ErrorKind::Io, "call", message).with_errno(libc::ECANCELED)
}

/// Whether the calling thread is inside an executor, so that [`spawn`] works.
pub fn is_entered() -> bool {
    CURRENT
        .try_with(|current| current.borrow().is_some())
        .unwrap_or(false)
}

/// A handle that starts tasks on the thread's current executor from other threads.
///
/// # Panics
/// As [`spawn`].
pub fn remote() -> Remote {
    let executor = Executor::current().expect("outside an executor: call it inside a lane");
    executor.remote()
}

/// Starts a task on the thread's current executor. It runs to its end even if
/// the handle is dropped.
///
/// # Panics
/// Outside an executor: run inside a lane, or [`Executor::enter`].
pub fn spawn<T: 'static>(future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
    let executor = Executor::current().expect("spawn outside an executor: call it inside a lane");
    executor.spawn(future)
}

/// Counts a lingering task until it is gone.
struct CompletionCounter(Rc<Cell<usize>>);

impl CompletionCounter {
    fn new(count: Rc<Cell<usize>>) -> Self {
        count.set(count.get() + 1);
        CompletionCounter(count)
    }
}

impl Drop for CompletionCounter {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// The waker of a slot's last task, if nobody else can use it any more.
fn reusable_waker(slot: &mut Option<Slot>) -> Option<Arc<TaskWaker>> {
    let mut waker = slot.take()?.waker;
    Arc::get_mut(&mut waker)?.renew();
    Some(waker)
}

#[cfg(all(test, shuttle))]
mod interleavings;

#[cfg(all(test, not(shuttle)))]
mod tests;
