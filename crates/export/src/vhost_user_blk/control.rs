//! What a client's session has of a queue that runs on its lane: what it wants of it, and the look
//! after its signals.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::task::AtomicWaker;
use parking_lot::Mutex;
use vellum_io::executor::RemoteCall;
use vellum_io::lane::Remote;
use vellum_io::{Result, spawn};

use super::disk::Disk;
use super::queue::{QueueSetup, run};
use super::signals::{Signals, Watched};

/// What a session wants of a queue that runs.
#[derive(Debug, Default)]
pub(super) struct QueueControl {
    /// There is something below.
    pub(super) has_news: AtomicBool,
    pub(super) stop: AtomicBool,
    /// Nobody waits for what is in flight: work in pieces ends unfinished.
    pub(super) abandon: AtomicBool,
    pub(super) call: Mutex<Option<Option<OwnedFd>>>,
    pub(super) error: Mutex<Option<Option<OwnedFd>>>,
    pub(super) waker: AtomicWaker,
    pub(super) signals: Arc<Signals>,
}

/// A queue that runs on its lane.
#[derive(Debug)]
pub(super) struct RunningQueue {
    control: Arc<QueueControl>,
    life: RemoteCall<u16>,
    _watched: Watched,
}

impl QueueControl {
    fn tell(&self) {
        self.has_news.store(true, Ordering::Release);
        self.waker.wake();
    }

    fn ask_to_stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.tell();
    }

    /// Whether there is something below, which is looked at from now on.
    pub(super) fn take_news(&self) -> bool {
        self.has_news.load(Ordering::Relaxed) && self.has_news.swap(false, Ordering::AcqRel)
    }

    /// Whether the queue must not sleep. A stop stays one, whoever has taken the news that told of it: the queue
    /// may have looked for a stop just before.
    pub(super) fn has_something(&self) -> bool {
        self.has_news.load(Ordering::Acquire) || self.stop.load(Ordering::Acquire)
    }
}

impl RunningQueue {
    /// Starts a queue on a lane. The calling one, which must be another, looks after it.
    pub(super) fn start(lane: &Remote, setup: QueueSetup) -> RunningQueue {
        let control = Arc::<QueueControl>::default();
        drop(spawn(look_after(
            control.clone(),
            setup.disk.clone(),
            setup.number,
        )));
        let told = control.clone();
        let life = lane.call(move || async move { run(setup, told).await });
        RunningQueue {
            _watched: Watched(control.signals.clone()),
            control,
            life,
        }
    }

    /// Has another descriptor tell the guest.
    pub(super) fn set_call(&self, call: Option<OwnedFd>) {
        *self.control.call.lock() = Some(call);
        self.control.tell();
    }

    /// Has another descriptor tell the client.
    pub(super) fn set_error(&self, error: Option<OwnedFd>) {
        *self.control.error.lock() = Some(error);
        self.control.tell();
    }

    /// Lets work that comes in pieces end unfinished, and unanswered.
    pub(super) fn abandon(&self) {
        self.control.abandon.store(true, Ordering::Release);
    }

    /// Ends it when its requests are done; what of the available ring comes next.
    ///
    /// # Errors
    /// If its lane has ended.
    pub(super) async fn stop(self) -> Result<u16> {
        self.control.ask_to_stop();
        self.life.await
    }
}

/// Frees a queue whose signals wait for its client.
async fn look_after(control: Arc<QueueControl>, disk: Arc<Disk>, number: u16) {
    while let Some(stuck) = control.signals.stuck().await {
        if !control.signals.is_any_full() {
            // It only had no processor.
            continue;
        }
        disk.log(&format!(
            "queue {number}: an event counter is full, and its client has writes wait for room: \
             it is not told any more"
        ));
        // Unless the client has said of others meanwhile.
        control.call.lock().get_or_insert(None);
        control.error.lock().get_or_insert(None);
        control.tell();
        control.signals.make_room(stuck);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_took_the_news_of_its_stop_does_not_sleep() {
        let control = QueueControl::default();
        assert!(!control.has_something());
        control.ask_to_stop();
        assert!(control.take_news());
        assert!(!control.take_news());
        assert!(control.has_something());
    }
}
