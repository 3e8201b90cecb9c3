//! The threads that speak with servers: there while somebody has a [`Runtime`].
//!
//! Invariants:
//! - Each thread has a runtime of its own. One with several threads panics while it is made if the system has no room
//!   for all of them.
//! - Nothing here uses the runtimes' pools for work that blocks, see [`crate::blocking`].

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use futures_channel::oneshot;
use parking_lot::Mutex;
use tokio::runtime::{Builder, Handle};
use vellum_io::{Error, ErrorKind, Result};

/// The name of its threads.
const THREAD_NAME: &str = "vellum-remote";
/// One thread decrypts faster than most links bring something; more are for several disks.
const MOST_THREADS: usize = 4;

static CURRENT: Mutex<Weak<Runtime>> = Mutex::new(Weak::new());

/// The threads of all storages of this crate; never none.
pub(crate) struct Runtime {
    threads: Vec<NetworkThread>,
    /// Deals tasks out.
    next: AtomicUsize,
}

/// A thread, which ends with this.
struct NetworkThread {
    handle: Handle,
    _end: oneshot::Sender<()>,
}

impl NetworkThread {
    fn start() -> Result<NetworkThread> {
        let made = Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build();
        let runtime = made.map_err(|error| Error::from_io("start network threads", &error))?;
        let handle = runtime.handle().clone();
        let (end, ended) = oneshot::channel::<()>();
        let work = move || {
            // Nothing is ever sent.
            let _ = runtime.block_on(ended);
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name(THREAD_NAME.to_owned());
        let started = thread.spawn(work);
        started.map_err(|error| Error::no_thread(&error))?;
        Ok(NetworkThread { handle, _end: end })
    }
}

impl Runtime {
    /// Those that run already, or new ones.
    pub(crate) fn shared() -> Result<Arc<Runtime>> {
        let mut current = CURRENT.lock();
        if let Some(runtime) = current.upgrade() {
            return Ok(runtime);
        }
        let wanted = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let mut threads = vec![NetworkThread::start()?];
        while threads.len() < wanted.min(MOST_THREADS) {
            match NetworkThread::start() {
                Ok(thread) => threads.push(thread),
                // Fewer do as well.
                Err(_) => break,
            }
        }
        let runtime = Arc::new(Runtime {
            threads,
            next: AtomicUsize::new(0),
        });
        *current = Arc::downgrade(&runtime);
        Ok(runtime)
    }

    /// Where tasks are started. Those of one handle share a thread.
    pub(crate) fn handle(&self) -> &Handle {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        &self.threads[next % self.threads.len()].handle
    }

    /// Runs a future there, and waits for it here, on a lane.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        let (send, receive) = oneshot::channel();
        self.handle().spawn(async move {
            // Nobody waits any more: the result goes.
            let _ = send.send(work.await);
        });
        receive.await.unwrap_or_else(|_| {
            let message = "the network threads have ended";
            Err(Error::new(ErrorKind::Io, "wait for a server", message))
        })
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Runtime")
    }
}
