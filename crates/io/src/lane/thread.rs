//! A thread with a lane, for callers that block or that have no lane of their own.

use std::future::Future;
use std::sync::mpsc;
use std::thread::{self, JoinHandle, ThreadId};

use futures_channel::oneshot;

use super::{LaneOptions, Remote, block_on, finish, install, remote};
use crate::executor::lane_ended;
use crate::{Error, ErrorKind, Result};

/// A thread that drives a lane until this handle is dropped. Any thread may hand it work and
/// wait for the result.
///
/// Dropping it waits until the tasks of the lane are done, those that were handed over before
/// as well. A panic in a call or task ends the whole thread: what runs beside it and all later
/// calls fail as calls of a lane that has ended.
///
/// ```
/// use vellum_io::lane::{LaneOptions, LaneThread};
///
/// let lane = LaneThread::start("disk", LaneOptions::default())?;
/// let sum = lane.call(|| async { Ok(1 + 1) })?;
/// assert_eq!(sum, 2);
/// # Ok::<(), vellum_io::Error>(())
/// ```
#[derive(Debug)]
pub struct LaneThread {
    remote: Remote,
    id: ThreadId,
    /// Dropped to end the thread.
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl LaneThread {
    /// Starts a thread of the given name with a lane as `options` say.
    ///
    /// # Errors
    /// If the thread cannot be started, or the lane cannot be had (see [`install`]);
    /// [`ErrorKind::InvalidArgument`] for a name with a NUL.
    pub fn start(name: &str, options: LaneOptions) -> Result<Self> {
        if name.contains('\0') {
            let message = "the name of a thread holds no NUL";
            let error = Error::new(ErrorKind::InvalidArgument, "start a lane's thread", message);
            return Err(error);
        }
        let (end, ended) = oneshot::channel::<()>();
        let (ready, installed) = mpsc::channel();
        let work = move || {
            let started = install(&options).map(|()| remote());
            let works = started.is_ok();
            let _ = ready.send(started);
            if works {
                // Nothing is ever sent; it ends when the handle is dropped.
                let _ = block_on(ended);
                finish();
            }
        };
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(work)
            .map_err(|error| Error::no_thread(&error))?;
        let remote = installed.recv().unwrap_or_else(|_| Err(lane_ended()))?;
        Ok(LaneThread {
            remote,
            id: thread.thread().id(),
            end: Some(end),
            thread: Some(thread),
        })
    }

    /// Starts tasks on the lane without waiting for them, from any thread or executor.
    pub fn remote(&self) -> &Remote {
        &self.remote
    }

    /// Runs the future that `make` returns on the lane and blocks until it is done. Calls of
    /// several threads run side by side.
    ///
    /// # Errors
    /// Those of the future; [`ErrorKind::InvalidArgument`] on the lane's own thread, which
    /// would wait for itself; [`ErrorKind::Io`] with `ECANCELED` if the lane ends first.
    pub fn call<T, F>(&self, make: impl FnOnce() -> F + Send + 'static) -> Result<T>
    where
        T: Send + 'static,
        F: Future<Output = Result<T>> + 'static,
    {
        if self.is_own_thread() {
            let message = "a blocking call on the lane's own thread: await instead";
            return Err(Error::new(ErrorKind::InvalidArgument, "call", message));
        }
        let (sender, receiver) = mpsc::sync_channel(1);
        self.remote.spawn(move || {
            let work = make();
            async move {
                // The caller waits.
                let _ = sender.send(work.await);
            }
        });
        receiver.recv().unwrap_or_else(|_| Err(lane_ended()))
    }

    fn is_own_thread(&self) -> bool {
        thread::current().id() == self.id
    }
}

impl Drop for LaneThread {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take().filter(|_| !self.is_own_thread()) {
            // A panic of a task was reported where it happened.
            let _ = thread.join();
        }
    }
}
