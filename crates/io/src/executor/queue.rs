//! What is ready on an executor: the part of it that other threads reach.

use std::collections::VecDeque;
use std::sync::Arc;
use std::task::Wake;

use super::queued::Queued;
use crate::sync::{Mutex, MutexGuard};

/// Starts a task; called on the executor's thread, inside it.
pub(super) type RemoteStart = Box<dyn FnOnce() + Send>;

/// What is ready on one executor.
#[derive(Default)]
pub(super) struct Queue {
    pub(super) ready: VecDeque<usize>,
    pub(super) starts: Vec<RemoteStart>,
    pub(super) sleeping: bool,
    /// No task is started any more.
    pub(super) closed: bool,
}

/// The queue of one executor. Wakers and [`super::Remote`]s of any thread have it.
pub(super) struct SharedQueue {
    queue: Mutex<Queue>,
    /// Called when something is queued while the owner sleeps.
    notify: Box<dyn Fn() + Send + Sync>,
}

impl SharedQueue {
    /// An empty queue.
    pub(super) fn new(notify: impl Fn() + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(SharedQueue {
            queue: Mutex::new(Queue::default()),
            notify: Box::new(notify),
        })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock()
    }

    /// Changes the queue, and wakes the owner if it sleeps.
    pub(super) fn push(&self, change: impl FnOnce(&mut Queue)) {
        let mut queue = self.lock();
        change(&mut queue);
        let wake = std::mem::take(&mut queue.sleeping);
        drop(queue);
        if wake {
            (self.notify)();
        }
    }
}

/// The waker of one task.
pub(super) struct TaskWaker {
    shared: Arc<SharedQueue>,
    task: usize,
    queued: Queued,
}

impl TaskWaker {
    /// Of task number `task`, which is not queued.
    pub(super) fn new(shared: &Arc<SharedQueue>, task: usize) -> Self {
        TaskWaker {
            shared: shared.clone(),
            task,
            queued: Queued::new(),
        }
    }

    /// Notes that the task is about to be polled.
    pub(super) fn leave_queue(&self) {
        self.queued.leave();
    }

    /// Makes this the waker of the slot's next task.
    pub(super) fn renew(&mut self) {
        self.queued = Queued::new();
    }
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if self.queued.enter() {
            self.shared.push(|queue| queue.ready.push_back(self.task));
        }
    }
}
