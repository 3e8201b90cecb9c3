//! Other lanes that do a part of a job's work: what a cached request costs is copying,
//! and one thread copies only so much.

use std::future::Future;
use std::thread::{Builder, JoinHandle};

use vellum_storage::lane::{self, Remote};

use crate::answer::{Receiver, Sender, answer};

/// More lanes would wait for memory.
const MOST_LANES: usize = 8;

/// Threads with a lane each; [`Helpers::end`] must be called.
pub(crate) struct Helpers {
    lanes: Vec<Helper>,
    next: usize,
}

struct Helper {
    remote: Remote,
    /// Dropped, it ends the lane.
    _stop: Sender<()>,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl Helpers {
    /// One lane for each core, or fewer where there are no threads to be had.
    pub(crate) fn start() -> Self {
        let count = lane::compute_threads().min(MOST_LANES);
        Helpers {
            lanes: (0..count).filter_map(Helper::start).collect(),
            next: 0,
        }
    }

    /// How many there are.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes.len()
    }

    /// Has the next lane do some work; on this one, if there is no other.
    pub(crate) fn run<T: Send + 'static, F>(
        &mut self,
        work: impl FnOnce() -> F + Send + 'static,
    ) -> Receiver<T>
    where
        F: Future<Output = T> + 'static,
    {
        let (sender, receiver) = answer();
        let work = move || {
            let work = work();
            async move { sender.send(work.await) }
        };
        match self.lanes.get(self.next % self.lanes.len().max(1)) {
            Some(helper) => helper.remote.spawn(work),
            None => drop(vellum_storage::spawn(work())),
        }
        self.next += 1;
        receiver
    }

    /// Ends the lanes when their work is done. It may wait for tasks of the calling
    /// lane, so this goes on meanwhile.
    pub(crate) async fn end(self) {
        for helper in self.lanes {
            let Helper {
                _stop: stop,
                mut ended,
                thread,
                ..
            } = helper;
            drop(stop);
            ended.wait().await;
            // One that panicked has said so on standard error.
            let _ = thread.join();
        }
    }
}

impl Helper {
    fn start(number: usize) -> Option<Helper> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (stop, mut stopped) = answer::<()>();
        let (ending, ended) = answer::<()>();
        let thread = Builder::new()
            .name(format!("vellum-job-{number}"))
            .spawn(move || {
                let _ending = ending;
                lane::block_on(async move {
                    // Nobody listens only if the starter has gone.
                    let _ = sender.send(lane::remote());
                    stopped.wait().await;
                });
                lane::finish();
            })
            .ok()?;
        Some(Helper {
            remote: receiver.recv().ok()?,
            _stop: stop,
            ended,
            thread,
        })
    }
}
