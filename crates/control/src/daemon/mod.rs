//! The daemon without the program around it: nodes, exports, jobs, and the commands that
//! change them while they are used.
//!
//! The program adds the command line, the monitors, signals and sockets ([`ServerEnvironment`]); a
//! simulation drives the same commands on files of its own.
//!
//! Invariants:
//! - Commands run one at a time, and jobs change the graph only in their turn: whoever
//!   changes it holds [`Daemon::parts`]. Nodes are opened beside that (`parts.rs`).
//! - The end comes in one order: exports, the server, jobs, nodes.

mod askers;
mod chains;
mod chardev;
mod commands;
pub mod config;
mod event_limits;
mod events;
mod export;
pub mod http;
mod inet;
mod inherited;
mod jobs;
mod monitor;
mod notices;
mod objects;
mod parts;
mod schema;
mod server;
mod space;
mod state;

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, join, select};
use serde_json::json;
use tracing::trace;
use vellum_export::nbd::{Exports, Stop};
use vellum_io::{JoinHandle, spawn};

use crate::nodes::Nodes;
use crate::options::Options;
use crate::{error_text, qmp, secret, throttle_groups, tls};
use askers::Askers;
use chardev::{Chardev, Chardevs};
pub use chardev::{Port, backend_names};
pub use commands::{carry_out, enabled_oob, package};
pub use events::{Events, Listener};
use export::ExportPlace;
pub use export::Removal;
pub use inet::{InetAddress, bind_failure};
use jobs::Jobs;
use notices::Notices;
use objects::Objects;
pub use objects::object_help;
pub use parts::{HeldParts, Parts};
use schema::check::{Notation, check_blockdev};
pub use server::{Notice, Server, ServerEnvironment};
pub use state::SavedState;

/// Why something cannot be: what the user should read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failure(pub String);

fn message(text: impl Into<String>) -> Failure {
    Failure(text.into())
}

fn failure(error: vellum::Error) -> Failure {
    message(error_text(&error))
}

impl From<vellum::Error> for Failure {
    fn from(error: vellum::Error) -> Self {
        failure(error)
    }
}

/// Takes an option that must be there.
///
/// # Errors
/// If it is not, or is no text.
pub fn need(options: &mut Options, key: &str) -> Result<String, Failure> {
    let value = options.take_text(key).map_err(failure)?;
    value.ok_or_else(|| message(format!("Parameter '{key}' is missing")))
}

/// Refuses what nobody has taken.
///
/// # Errors
/// If there is such an option.
pub fn refuse_rest(options: &Options) -> Result<(), Failure> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => {
            let key = key.split('.').next().unwrap_or(key);
            Err(message(format!("Parameter '{key}' is unexpected")))
        }
    }
}

/// The running daemon.
#[derive(Debug)]
pub struct Daemon {
    /// What there is. Whoever changes it holds it.
    pub parts: Parts,
    jobs: Jobs,
    chardevs: Chardevs,
    /// Those that have not begun yet, and whether their answers take several lines.
    monitors: RefCell<Vec<(Rc<Chardev>, bool)>>,
    /// Tells of what happens.
    pub events: Events,
    /// Somebody wants the program to end.
    pub stop: Stop,
    /// Everything but the monitors has ended.
    pub ended: Stop,
    /// Who waits for what commands do.
    askers: Askers,
    /// Those of `parts`, for whoever cannot wait for these.
    nodes: Nodes,
    /// What a state file is written from.
    state: state::Recorder,
    /// What is counted of its exports, for the same.
    counted: export::CountedExports,
    #[cfg_attr(
        not(feature = "http"),
        allow(dead_code, reason = "only HTTP looks at it")
    )]
    begun: Instant,
    /// What chains may be.
    chains: chains::ChainPolicies,
    /// How long jobs will take is told: they are looked at again and again.
    estimates: Cell<bool>,
    /// Warns of file systems that fill.
    space: space::SpaceWatch,
    /// Where the space of disks was found to go.
    surveys: space::LastSurveys,
    /// Where HTTP is to be served, once that begins.
    doors: RefCell<Vec<http::Bound>>,
}

/// So long is a server waited for that does not answer while the daemon ends: less than what
/// ends daemons by force waits for them.
const SERVER_PATIENCE: Duration = Duration::from_secs(60);

impl Daemon {
    /// A daemon with these nodes. They can be changed later if they are live.
    pub fn new(nodes: Nodes, environment: ServerEnvironment) -> Rc<Daemon> {
        let events = Events::default();
        let notices = Notices::default();
        let of_node = notices.clone();
        nodes.on_notice(move |notice| of_node.of_node(notice));
        let exports = export::ServerExports::default();
        Rc::new(Daemon {
            counted: exports.counted(),
            begun: Instant::now(),
            chains: chains::ChainPolicies::default(),
            estimates: Cell::new(false),
            space: space::SpaceWatch::default(),
            surveys: space::LastSurveys::default(),
            doors: RefCell::default(),
            nodes: nodes.clone(),
            parts: Parts::new(DaemonState {
                nodes,
                objects: Objects::default(),
                server: None,
                server_options: None,
                exports,
                events: events.clone(),
                notices,
                environment,
            }),
            jobs: Jobs::default(),
            chardevs: Chardevs::default(),
            monitors: RefCell::default(),
            events,
            stop: Stop::new(),
            ended: Stop::new(),
            askers: Askers::default(),
            state: state::Recorder::default(),
        })
    }

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
    /// What QEMU says of options that no node has, and as [`Nodes::add`].
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

    /// Waits until what some nodes stand on answers, before the parts are held: a server may be silent for as
    /// long as it likes, and whoever asks for something of its disk waits for that; other commands do not.
    async fn wait_for_answers(&self, names: &[String]) -> Result<(), qmp::Failure> {
        let answered = self.stop.or_give_up(self.nodes.wait_for_answers(names));
        let Some(answered) = self.askers.or_give_up(answered).await else {
            return Err(qmp::Failure::new(
                "Nobody waits for the disk to answer any more",
            ));
        };
        answered.ok_or_else(|| qmp::Failure::new("The program ends before the disk has answered"))
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

/// What there is.
#[derive(Debug)]
pub struct DaemonState {
    /// The nodes.
    pub nodes: Nodes,
    objects: Objects,
    server: Option<Server>,
    /// The options that the server was started with.
    server_options: Option<serde_json::Value>,
    exports: export::ServerExports,
    events: Events,
    notices: Notices,
    environment: ServerEnvironment,
}

impl DaemonState {
    /// Listens for clients; they are served once it has started.
    ///
    /// # Errors
    /// If a server is there already, or cannot listen.
    pub fn add_server(&mut self, options: Options) -> Result<(), Failure> {
        if self.server.is_some() {
            return Err(message("NBD server already running"));
        }
        let told = options.to_json();
        self.server = Some(server::listen(options, &self.environment)?);
        self.server_options = Some(told);
        Ok(())
    }

    /// The options of the server, unless it is on a socket that somebody else has made.
    fn server_options(&self) -> Option<&serde_json::Value> {
        let options = self
            .server_options
            .as_ref()
            .filter(|_| self.server.is_some())?;
        (options["addr"]["type"] != "fd").then_some(options)
    }

    /// Serves the clients that have come, and those that will.
    pub fn start_server(&mut self) {
        if let Some(server) = &mut self.server {
            server.start();
        }
    }

    /// What the server offers, if there is one.
    pub fn exports(&self) -> Option<Exports> {
        self.server.as_ref().map(|server| server.exports.clone())
    }

    /// A server that nobody can connect to: what is exported is found in what this returns.
    pub fn serve_within(&mut self) -> Exports {
        let server = self.server.get_or_insert_with(Server::within);
        server.exports.clone()
    }

    /// Adds an export, as `block-export-add` does.
    ///
    /// # Errors
    /// In QEMU's words.
    pub async fn add_export(&mut self, options: Options) -> Result<(), Failure> {
        self.add_export_of(export::Origin::Asked, options).await
    }

    /// Adds an export that a state file has.
    async fn add_saved_export(&mut self, options: Options) -> Result<(), Failure> {
        self.add_export_of(export::Origin::Saved, options).await
    }

    async fn add_export_of(
        &mut self,
        origin: export::Origin,
        options: Options,
    ) -> Result<(), Failure> {
        let told = options.to_json();
        let wanted = export::Description::take(options, origin, &self.objects.iothreads())?;
        let server = self.server.as_ref();
        let environment = &self.environment;
        let exports = &mut self.exports;
        let (id, node) = (wanted.id().to_owned(), wanted.node().to_owned());
        exports
            .add(wanted, &told, &self.nodes, server, environment)
            .await?;
        if let Some(accounting) = exports.accounting(&id) {
            accounting.on_failure(self.notices.of_export(&id, &node));
            accounting.on_room(self.notices.of_room(&id, &node));
        }
        Ok(())
    }

    /// Has nobody use an export any more; the future waits until it has ended.
    fn begin_removal(
        &mut self,
        id: &str,
        removal: Removal,
    ) -> Result<impl Future<Output = ()> + 'static, Failure> {
        let (events, named) = (self.events.clone(), id.to_owned());
        let tell = move || events.emit("BLOCK_EXPORT_DELETED", json!({"id": named}));
        let (exports, server) = (&mut self.exports, self.server.as_ref());
        exports.begin_removal(id, removal, &self.nodes, server, tell)?;
        Ok(exports.ended(id))
    }

    /// The nodes that were asked for and that stand on an export of this daemon.
    fn nodes_over(&self, export: &str) -> Vec<String> {
        match self.exports.place(export) {
            Some(ExportPlace::File(mountpoint)) => {
                let is_mounted = |name: &str| export::is_same_place(Path::new(name), &mountpoint);
                self.nodes.roots_over("file", is_mounted)
            }
            Some(ExportPlace::Server) => {
                let server = self.server.as_ref();
                let is_own = |name: &str| server.is_some_and(|server| server.may_be(name));
                self.nodes.roots_over("nbd", is_own)
            }
            Some(ExportPlace::Guest) | None => Vec::new(),
        }
    }

    /// Ends the exports that no node of this daemon stands on, the last one first.
    async fn end_uppermost_exports(&mut self) {
        let (mut exports, ending) = self.exports.ids(false);
        exports.retain(|id| self.nodes_over(id).is_empty());
        exports.reverse();
        self.end_some((exports, ending)).await;
    }

    /// Ends all exports in reverse order of their creation, and the server. Nodes that stand on an
    /// export are closed before it ends: what they have not written yet goes there.
    ///
    /// # Errors
    /// The first failure of a node that is closed; all exports end.
    async fn end_exports(&mut self) -> vellum::Result<()> {
        let mut closed = Ok(());
        while let Some(export) = self.exports.ids(false).0.pop() {
            let over = self.nodes_over(&export);
            let theirs = self.nodes.exports_of(&over);
            self.end_some((theirs, Vec::new())).await;
            closed = closed.and(self.nodes.close_some(&over).await);
            self.end_some((vec![export], Vec::new())).await;
        }
        self.end_server().await;
        closed
    }

    /// Ends some exports, and waits for others that end already.
    async fn end_some(&mut self, (exports, mut ending): (Vec<String>, Vec<String>)) {
        for id in exports {
            // Each is there, as long as nobody else changes anything.
            if self.begin_removal(&id, Removal::Hard).is_ok() {
                ending.push(id);
            }
        }
        for id in ending {
            self.exports.ended(&id).await;
        }
    }

    /// Ends the server and its exports.
    async fn end_server(&mut self) {
        self.end_some(self.exports.ids(true)).await;
        if let Some(server) = self.server.take() {
            server.end().await;
        }
    }

    /// Adds an object, as `object-add` does.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn add_object(&mut self, mut options: Options) -> Result<(), Failure> {
        let kind = need(&mut options, "qom-type")?;
        if let Some(id) = options.get_text("id")
            && commands::object_type(self, id).is_some()
        {
            return Err(failure(secret::duplicate(id)));
        }
        match kind.as_str() {
            "secret" => secret::add(options).map_err(failure),
            secret::KEYRING => secret::add_keyring(options).map_err(failure),
            throttle_groups::TYPE => throttle_groups::add(options).map_err(failure),
            kind if tls::is_type(kind) => tls::add(kind, options).map_err(failure),
            kind if Objects::keeps(kind) => {
                let id = secret::take_id(&mut options).map_err(failure)?;
                self.objects.add(kind, id, options)
            }
            kind => Err(message(match is_object_of_qemu(kind) {
                true => format!("Objects of type '{kind}' are not part of this version"),
                false => format!("Parameter 'qom-type' does not accept value '{kind}'"),
            })),
        }
    }
}

#[cfg(test)]
mod tests;

fn is_object_of_qemu(kind: &str) -> bool {
    kind == "pr-manager-helper" || kind.starts_with("tls-") || kind.starts_with("authz-")
}
