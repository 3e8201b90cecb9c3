//! An export: a device behind a socket, for one client after the other.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::os::fd::OwnedFd;
use std::pin::pin;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tracing::trace;
use vellum::BlockDevice;
use vellum_io::lane::{self, Descriptor};
use vellum_io::{JoinHandle, Result, spawn};

use super::channel::Channel;
use super::disk::{Disk, Log};
use super::options::Options;
use super::session::{Shared, serve};
use crate::accounting::Accounting;
use crate::nbd::{Listener, Stop};

/// Pause after a failed accept: the cause (no file descriptors) will not go at once.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A device that is exported. It goes on until [`Export::end`].
pub struct Export {
    shared: Rc<Shared>,
    clients: Rc<Cell<usize>>,
    acceptor: Cell<Option<JoinHandle<()>>>,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Export")
            .field("disk", &self.shared.disk)
            .field("clients", &self.clients.get())
            .finish_non_exhaustive()
    }
}

impl Export {
    /// Serves `device` to the clients that come to `listener`, one after the other; others wait.
    /// `log` receives a line for each that breaks the protocol. Must run inside a lane, which
    /// talks to the clients; requests run on lanes of their own, one for each queue.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`](vellum_io::ErrorKind::InvalidArgument) for options out of range.
    pub fn start(
        device: Arc<dyn BlockDevice>,
        options: &Options,
        listener: Listener,
        log: Option<Log>,
    ) -> Result<Export> {
        options.check()?;
        let shared = Rc::new(Shared {
            disk: Arc::new(Disk::new(device, options, log)),
            queues: options.queues,
            lanes: RefCell::new((0..options.queues).map(|_| None).collect()),
            backend: RefCell::default(),
            stop: Stop::new(),
        });
        let clients = Rc::new(Cell::new(0));
        let accepting = accept_clients(listener, shared.clone(), clients.clone());
        Ok(Export {
            shared,
            clients,
            acceptor: Cell::new(Some(spawn(accepting))),
        })
    }

    /// How many clients use it now.
    pub fn connections(&self) -> usize {
        self.clients.get()
    }

    /// Counts what guests ask for.
    pub fn accounting(&self) -> &Arc<Accounting> {
        &self.shared.disk.accounting
    }

    /// Takes the size of the device in, and tells the client if it is another one.
    pub async fn update_size(&self) {
        if self.shared.update_size().await {
            self.shared.tell_of_config();
        }
    }

    /// Ends it: the client is hung up on, and everything that was begun on the device is
    /// complete on return. Must run inside a lane.
    pub async fn end(&self) {
        self.shared.stop.request();
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.await;
        }
        let lanes = self.shared.lanes.take();
        // They may wait for tasks of the calling lane, so it goes on meanwhile.
        let none = Arc::new(Descriptor::none("lanes".to_owned()));
        let ending = move || {
            drop(lanes);
            Ok(0)
        };
        // A lane that panicked has said so on standard error.
        let _ = lane::call(&none, "end lanes", ending, lane::finish_unit).await;
    }
}

async fn accept_clients(listener: Listener, shared: Rc<Shared>, clients: Rc<Cell<usize>>) {
    loop {
        let next = pin!(next_client(&listener));
        let Either::Left((socket, _)) = select(next, pin!(shared.stop.wait())).await else {
            return;
        };
        clients.set(1);
        trace!(name: "vhost_user_client_connected", export = ?Arc::as_ptr(&shared.disk));
        serve(shared.clone(), Channel::new(socket)).await;
        trace!(name: "vhost_user_client_disconnected", export = ?Arc::as_ptr(&shared.disk));
        clients.set(0);
    }
}

async fn next_client(listener: &Listener) -> OwnedFd {
    loop {
        match listener.accept().await.and_then(|client| client.to_fd()) {
            Ok(socket) => return socket,
            Err(_) => lane::sleep(ACCEPT_PAUSE).await,
        }
    }
}
