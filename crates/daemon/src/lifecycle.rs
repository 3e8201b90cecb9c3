//! How a daemon starts, and how it ends: exports, the server, jobs, nodes, in this order.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::{Either, join, select};
use tracing::trace;
use vellum_export::nbd::Stop;
use vellum_graph::throttle_groups;
use vellum_io::{JoinHandle, spawn};
use vellum_options::Options;

use crate::chardev::Port;
use crate::daemon::Daemon;
use crate::failure::{Failure, failure};
use crate::schema::check::{Notation, check_blockdev};
use crate::{commands, monitor};

/// So long is a server waited for that does not answer while the daemon ends: less than what
/// ends daemons by force waits for them.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);

impl Daemon {
    /// Emits, from now on, the events that come from other lanes. Must run inside a lane.
    pub fn forward_notices(self: &Rc<Self>) {
        trace!(name: "daemon_started", version = commands::package());
        let (daemon, ended) = (self.clone(), self.ended.clone());
        drop(spawn(async move {
            let notices = daemon.parts.lock().await.notices.clone();
            let forward = pin!(notices.forward(daemon.events.clone()));
            select(forward, pin!(ended.wait())).await;
        }));
    }

    /// Opens a node that the command line describes.
    ///
    /// # Errors
    /// What QEMU says of options that no node has, and as [`Nodes::add`](vellum_graph::Nodes::add).
    pub async fn add_node(&self, options: Options) -> Result<(), Failure> {
        let tree = options.to_json();
        if !tree.is_null() {
            check_blockdev(&tree, Notation::KeyValue).map_err(Failure)?;
        }
        self.nodes.add(options).await.map_err(failure)
    }

    /// Adds a character device, as `--chardev` does; in the background there are no standard
    /// streams.
    ///
    /// # Errors
    /// In QEMU's words.
    pub async fn add_chardev(&self, options: Options, in_background: bool) -> Result<(), Failure> {
        let environment = self.parts.lock().await.environment.clone();
        let added = self.chardevs.add(options, &environment, in_background);
        added.await
    }

    /// Adds a monitor, as `--monitor` does; [`Daemon::start_monitors`] starts it.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn add_monitor(&self, options: Options) -> Result<(), Failure> {
        let wanted = monitor::Description::take(options)?;
        let chardev = self.chardevs.take(&wanted.chardev)?;
        self.monitors.borrow_mut().push((chardev, wanted.pretty));
        Ok(())
    }

    /// Has jobs that begin from now on tell how long they will take. A simulated clock would
    /// never stand still.
    pub fn estimate_jobs(&self) {
        self.estimates.set(true);
    }

    /// Starts the monitors that were added. They end some time after the daemon has.
    pub fn start_monitors(self: &Rc<Self>) -> Vec<JoinHandle<()>> {
        let monitors = self.monitors.take();
        let start = |(chardev, pretty)| monitor::start(self.clone(), chardev, pretty);
        monitors.into_iter().map(start).collect()
    }

    /// Serves one client of a monitor until it, or the daemon, is gone.
    pub async fn talk(self: &Rc<Self>, port: Port, pretty: bool) {
        monitor::talk(self, port, pretty, Stop::new()).await;
    }

    /// Forgets the character devices: their sockets and links are removed.
    pub fn close_chardevs(&self) {
        self.monitors.take();
        self.doors.take();
        self.chardevs.clear();
    }

    /// Ends everything in order: nobody uses what is closed. A server that does not answer for
    /// a minute is given up: other disks must not stay open for its sake.
    ///
    /// # Errors
    /// The first failure of a node that is closed; all are closed.
    pub async fn shut_down(&self) -> vellum::Result<()> {
        trace!(name: "daemon_stopping", jobs = self.jobs.list().len());
        let silent = self.nodes.give_up_silent_servers(SERVER_PATIENCE);
        let end = async {
            join(self.nodes.flush_over_servers(), self.end_all())
                .await
                .1
        };
        match select(pin!(end), pin!(silent)).await {
            Either::Left((closed, _)) => closed,
            Either::Right((_, end)) => end.await,
        }
    }

    async fn end_all(&self) -> vellum::Result<()> {
        // What waits for a limit would hold the end up.
        let _lifted = throttle_groups::lift(None);
        self.write_what_is_behind().await;
        // A node may stand on the file of an export in a way that is not seen here (a loop device).
        self.nodes.flush_local().await;
        {
            let mut parts = self.parts.lock().await;
            self.state.end();
            parts.end_uppermost_exports().await;
        }
        // They hold the parts when they end.
        self.jobs.cancel_all().await;
        let mut parts = self.parts.lock().await;
        let closed = parts.end_exports().await;
        let closed = closed.and(parts.nodes.clone().close().await);
        drop(parts);
        self.ended.request();
        closed
    }
}
