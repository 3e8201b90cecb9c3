//! [`DaemonState`]: the nodes, objects, exports and server that there are. Whoever changes them holds the daemon's parts
//! (`parts.rs`).

use std::path::Path;

use serde_json::json;
use vellum_export::nbd::Exports;
use vellum_graph::live::Nodes;
use vellum_graph::{secret, throttle_groups, tls};
use vellum_options::Options;

use crate::events::Events;
use crate::export::{self, ExportPlace, Removal};
use crate::failure::{Failure, failure, message, need};
use crate::notices::Notices;
use crate::objects::Objects;
use crate::server::{self, Server, ServerEnvironment};

/// What there is.
#[derive(Debug)]
pub struct DaemonState {
    /// The nodes.
    pub nodes: Nodes,
    pub(crate) objects: Objects,
    pub(crate) server: Option<Server>,
    /// The options that the server was started with.
    pub(crate) server_options: Option<serde_json::Value>,
    pub(crate) exports: export::ServerExports,
    pub(crate) events: Events,
    pub(crate) notices: Notices,
    pub(crate) environment: ServerEnvironment,
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
    pub(crate) fn server_options(&self) -> Option<&serde_json::Value> {
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
    pub(crate) async fn add_saved_export(&mut self, options: Options) -> Result<(), Failure> {
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
    pub(crate) fn begin_removal(
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
    pub(crate) fn nodes_over(&self, export: &str) -> Vec<String> {
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
    pub(crate) async fn end_uppermost_exports(&mut self) {
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
    pub(crate) async fn end_exports(&mut self) -> vellum::Result<()> {
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
    pub(crate) async fn end_some(&mut self, (exports, mut ending): (Vec<String>, Vec<String>)) {
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
    pub(crate) async fn end_server(&mut self) {
        self.end_some(self.exports.ids(true)).await;
        if let Some(server) = self.server.take() {
            server.end().await;
        }
    }

    /// The type of an object, wherever it is kept.
    pub(crate) fn object_type(&self, id: &str) -> Option<&'static str> {
        let kept = self.objects.kind(id).or_else(|| tls::kind(id));
        kept.or_else(|| secret::kind(id))
            .or_else(|| throttle_groups::contains(id).then_some(throttle_groups::TYPE))
    }

    /// Adds an object, as `object-add` does.
    ///
    /// # Errors
    /// In QEMU's words.
    pub fn add_object(&mut self, mut options: Options) -> Result<(), Failure> {
        let kind = need(&mut options, "qom-type")?;
        if let Some(id) = options.get_text("id")
            && self.object_type(id).is_some()
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

fn is_object_of_qemu(kind: &str) -> bool {
    kind == "pr-manager-helper" || kind.starts_with("tls-") || kind.starts_with("authz-")
}
