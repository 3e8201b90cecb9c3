//! Threads that serve connections: started as they are needed, each a lane.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::JoinHandle;

use vellum_io::executor;
use vellum_io::lane::{self, LaneOptions, Remote};

use super::stop::Stop;

/// The lanes of a server; the first is the caller's own.
#[derive(Debug)]
pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    most: usize,
    options: LaneOptions,
    end: Stop,
}

struct Lane {
    remote: Remote,
    connections: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
    /// The thread has done everything that was begun on it.
    ended: Stop,
}

impl std::fmt::Debug for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lane")
            .field("connections", &self.connections)
            .finish_non_exhaustive()
    }
}

/// A connection's place on a lane, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct LaneSlot(Arc<AtomicUsize>);

impl Drop for LaneSlot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Lanes {
    /// The calling thread's lane, and space for up to `most` in all.
    pub(crate) fn new(most: usize) -> Self {
        let own = Lane {
            remote: executor::remote(),
            connections: Arc::default(),
            thread: None,
            ended: Stop::new(),
        };
        Lanes {
            lanes: vec![own],
            most: most.max(1),
            options: LaneOptions::default(),
            end: Stop::new(),
        }
    }

    /// As [`Lanes::new`], with other lanes set up as `options` say.
    pub(crate) fn with_options(most: usize, options: LaneOptions) -> Self {
        Lanes {
            options,
            ..Lanes::new(most)
        }
    }

    /// The calling lane, and others that there are already.
    pub(crate) fn of(others: &[Remote]) -> Self {
        let mut lanes = Lanes::new(1);
        lanes.lanes.extend(others.iter().map(|remote| {
            // It ends when its owner likes.
            let ended = Stop::new();
            ended.request();
            Lane {
                remote: remote.clone(),
                connections: Arc::default(),
                thread: None,
                ended,
            }
        }));
        lanes
    }

    /// A place on the lane with the fewest connections; on a new lane if all
    /// are busy and another one may be started.
    pub(crate) fn take_slot(&mut self) -> (Remote, LaneSlot) {
        let load = |lane: &Lane| lane.connections.load(Ordering::Relaxed);
        let all_busy = self.lanes.iter().all(|lane| load(lane) > 0);
        if all_busy && self.lanes.len() < self.most {
            // Without another thread the ones that run must do.
            if let Ok(lane) = start_lane(self.lanes.len(), &self.options, self.end.clone()) {
                self.lanes.push(lane);
            }
        }
        let mut best = &self.lanes[0];
        for lane in &self.lanes[1..] {
            if load(lane) < load(best) {
                best = lane;
            }
        }
        best.connections.fetch_add(1, Ordering::Relaxed);
        (best.remote.clone(), LaneSlot(best.connections.clone()))
    }
}

/// Ends the other lanes when their tasks are done. These may wait for tasks of the
/// calling lane, so it goes on meanwhile.
pub(crate) async fn end(lanes: &RefCell<Lanes>) {
    let others = {
        let mut lanes = lanes.borrow_mut();
        lanes.end.request();
        lanes.lanes.split_off(1)
    };
    for lane in others {
        lane.ended.wait().await;
        if let Some(thread) = lane.thread {
            // A lane that panicked has said so on standard error.
            let _ = thread.join();
        }
    }
}

/// Tells that a lane has ended, even if by a panic.
struct EndNotifier(Stop);

impl Drop for EndNotifier {
    fn drop(&mut self) {
        self.0.request();
    }
}

fn start_lane(number: usize, options: &LaneOptions, end: Stop) -> io::Result<Lane> {
    let options = options.clone();
    let (sender, receiver) = std::sync::mpsc::channel();
    let ended = Stop::new();
    let ending = EndNotifier(ended.clone());
    let thread = std::thread::Builder::new()
        .name(format!("lane-{number}"))
        .spawn(move || {
            let _ending = ending;
            // Whoever waits for the lane is told by what does not come.
            if lane::install(&options).is_err() {
                return;
            }
            lane::block_on(async move {
                // Nobody listens only if the server has given up on this lane.
                let _ = sender.send(lane::remote());
                end.wait().await;
            });
            lane::finish();
        })?;
    let remote = receiver
        .recv()
        .map_err(|_| io::Error::other("the lane did not start"))?;
    Ok(Lane {
        remote,
        connections: Arc::default(),
        thread: Some(thread),
        ended,
    })
}
