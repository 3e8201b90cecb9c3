//! The threads that speak with servers: there while somebody has a [`Runtime`].

use std::fmt;
use std::future::Future;
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

/// The threads of all storages of this crate.
pub(crate) struct Runtime(Option<tokio::runtime::Runtime>);

impl Runtime {
    /// Those that run already, or new ones.
    pub(crate) fn shared() -> Result<Arc<Runtime>> {
        let mut current = CURRENT.lock();
        if let Some(runtime) = current.upgrade() {
            return Ok(runtime);
        }
        let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get());
        let made = Builder::new_multi_thread()
            .worker_threads(threads.min(MOST_THREADS))
            .max_blocking_threads(MOST_THREADS)
            .thread_name(THREAD_NAME)
            .enable_io()
            .enable_time()
            .build();
        let made = made.map_err(|error| Error::from_io("start network threads", &error))?;
        let runtime = Arc::new(Runtime(Some(made)));
        *current = Arc::downgrade(&runtime);
        Ok(runtime)
    }

    /// Where tasks are started.
    pub(crate) fn handle(&self) -> &Handle {
        let runtime = self.0.as_ref();
        runtime.expect("only a drop takes it").handle()
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

impl Drop for Runtime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // Lanes do not block: the threads end by themselves.
            runtime.shutdown_background();
        }
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Runtime")
    }
}
