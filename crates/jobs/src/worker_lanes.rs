//! Other lanes that do a part of a job's work: what a cached request costs is copying,
//! and one thread copies only so much.

use std::future::Future;
use std::thread::{Builder, JoinHandle};

use futures_channel::oneshot::{self, Receiver, Sender};
use vellum_io::lane::{self, Remote};

/// More lanes would wait for memory.
const MOST_LANES: usize = 8;

/// The pieces of work that the calling lane does itself before others are started: they
/// are not worth it for fewer.
const WORK_BEFORE_WORKERS: usize = 32;

/// Threads with a lane each, started once there is enough to do; [`WorkerLanes::end`] must be
/// called.
#[derive(Default)]
pub(crate) struct WorkerLanes {
    /// `None`: not started yet.
    lanes: Option<Vec<WorkerLane>>,
    given: usize,
}

struct WorkerLane {
    remote: Remote,
    /// Dropped, it ends the lane.
    _stop: Sender<()>,
    ended: Receiver<()>,
    thread: JoinHandle<()>,
}

impl WorkerLanes {
    /// How many lanes work, the calling one if there is no other.
    pub(crate) fn lanes(&self) -> usize {
        self.lanes.as_ref().map_or(0, Vec::len).max(1)
    }

    /// Has the next lane do some work; this one, if there is no other.
    pub(crate) fn run<T: Send + 'static, F>(
        &mut self,
        work: impl FnOnce() -> F + Send + 'static,
    ) -> Receiver<T>
    where
        F: Future<Output = T> + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let work = move || {
            let work = work();
            async move { drop(sender.send(work.await)) }
        };
        match self.next() {
            Some(worker) => worker.remote.spawn(work),
            None => drop(vellum_io::spawn(work())),
        }
        receiver
    }

    fn next(&mut self) -> Option<&WorkerLane> {
        self.given += 1;
        // An executor without a lane, a simulation's, has no other thread beside it.
        if self.given < WORK_BEFORE_WORKERS || !lane::is_running() {
            return None;
        }
        let lanes = self.lanes.get_or_insert_with(start);
        lanes.get(self.given % lanes.len().max(1))
    }

    /// Ends the lanes when their work is done. It may wait for tasks of the calling
    /// lane, so this goes on meanwhile.
    pub(crate) async fn end(self) {
        for worker in self.lanes.into_iter().flatten() {
            let WorkerLane {
                _stop: stop,
                ended,
                thread,
                ..
            } = worker;
            drop(stop);
            let _ = ended.await;
            // One that panicked has said so on standard error.
            let _ = thread.join();
        }
    }
}

/// One lane for each core, or fewer where there are no threads to be had.
fn start() -> Vec<WorkerLane> {
    let count = lane::compute_threads().min(MOST_LANES);
    (0..count).filter_map(WorkerLane::start).collect()
}

impl WorkerLane {
    fn start(number: usize) -> Option<WorkerLane> {
        let (sender, receiver) = std::sync::mpsc::channel();
        let (stop, stopped) = oneshot::channel::<()>();
        let (ending, ended) = oneshot::channel::<()>();
        let thread = Builder::new()
            .name(format!("vellum-job-{number}"))
            .spawn(move || {
                let _ending = ending;
                lane::block_on(async move {
                    // Nobody listens only if the starter has gone.
                    let _ = sender.send(lane::remote());
                    let _ = stopped.await;
                });
                lane::finish();
            })
            .ok()?;
        Some(WorkerLane {
            remote: receiver.recv().ok()?,
            _stop: stop,
            ended,
            thread,
        })
    }
}
