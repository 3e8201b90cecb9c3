//! `--export`, `block-export-add`: what all types have in common. Each type has a file, and a
//! variant of [`Wanted`] and of `Served`.

#[cfg_attr(
    not(feature = "http"),
    allow(dead_code, reason = "only HTTP looks at it")
)]
mod counted;
mod ending;
mod fuse;
mod nbd;
mod served;
mod vhost_user_blk;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;
use tracing::trace;

use crate::nodes::{User, unknown_node};
use crate::{Nodes, Options};
use vellum::BlockDevice;
use vellum_export::WhenFull;
use vellum_export::accounting::Accounting;
use vellum_export::fair_depth::FairDepth;
use vellum_export::nbd::Exports;
use vellum_export::size_turns::SizeTurns;
use vellum_export::unflushed_logs::UnflushedLogs;

use super::server::{Server, ServerEnvironment};
use super::state::ExportPiece;
use super::{Failure, failure, message, need, refuse_rest};
pub(super) use counted::{CountedExport, CountedExports};
use ending::{EndingExport, EndingExports};
pub(super) use fuse::is_same_place;
use served::{Served, Surroundings, serve};

/// Where the options of an export are from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    /// Somebody asks for it.
    Asked,
    /// It was there before the daemon was started: a bitmap that is gone meanwhile is shown as all dirty, as
    /// where it goes while the export is there.
    Saved,
}

/// An export as the options describe it.
#[derive(Debug)]
pub(super) struct Description {
    id: String,
    node: String,
    writable: bool,
    writethrough: bool,
    /// The node may be inactive.
    allow_inactive: bool,
    when_full: WhenFull,
    origin: Origin,
    kind: Wanted,
}

/// What of the options belongs to a type.
#[derive(Debug)]
enum Wanted {
    Nbd(nbd::Wanted),
    Fuse(fuse::Wanted),
    VhostUserBlk(vhost_user_blk::Wanted),
}

impl Description {
    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// Takes the options apart; `iothreads` are those that exist.
    pub(super) fn take(
        mut options: Options,
        origin: Origin,
        iothreads: &[String],
    ) -> Result<Self, Failure> {
        let kind = need(&mut options, "type")?;
        match kind.as_str() {
            "nbd" | "fuse" | "vhost-user-blk" => {}
            "vduse-blk" => {
                return Err(message(format!(
                    "Exports of type '{kind}' are not part of this version"
                )));
            }
            _ => {
                return Err(message(format!(
                    "Parameter 'type' does not accept value '{kind}'"
                )));
            }
        }
        let id = need(&mut options, "id")?;
        let node = need(&mut options, "node-name")?;
        let mut switch = |key: &str| {
            let value = options.take_bool(key).map_err(failure)?;
            Ok::<bool, Failure>(value.unwrap_or(false))
        };
        let (writable, writethrough) = (switch("writable")?, switch("writethrough")?);
        // Lanes are the export's own, whatever becomes of the node's.
        switch("fixed-iothread")?;
        let allow_inactive = switch("allow-inactive")?;
        let when_full = take_when_full(&mut options, writethrough)?;
        let kind = match kind.as_str() {
            "fuse" => Wanted::Fuse(fuse::Wanted::take(&mut options)?),
            "vhost-user-blk" => Wanted::VhostUserBlk(vhost_user_blk::Wanted::take(&mut options)?),
            _ => Wanted::Nbd(nbd::Wanted::take(&mut options, &node)?),
        };
        let iothread = options.take_text("iothread").map_err(failure)?;
        if let Some(iothread) = iothread
            && !iothreads.contains(&iothread)
        {
            return Err(message(format!("iothread \"{iothread}\" not found")));
        }
        refuse_rest(&options)?;
        Ok(Description {
            id,
            node,
            writable,
            writethrough,
            allow_inactive,
            when_full,
            origin,
            kind,
        })
    }
}

/// Takes `on-full`.
fn take_when_full(options: &mut Options, write_through: bool) -> Result<WhenFull, Failure> {
    let text = options.take_text("on-full").map_err(failure)?;
    match text.as_deref() {
        None | Some("fail") => Ok(WhenFull::Fail),
        Some("wait") => Ok(WhenFull::Wait { write_through }),
        Some(other) => Err(message(format!(
            "Parameter 'on-full' does not accept value '{other}'"
        ))),
    }
}

/// How an export goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// Only if nobody uses it.
    Safe,
    /// Whoever uses it is hung up on.
    Hard,
}

/// An export that is there.
#[derive(Debug)]
struct ExportEntry {
    id: String,
    /// The node that it was made for.
    node: String,
    /// The number of its use of a live node.
    joined: Option<u64>,
    /// It writes to the node, and does not put up with one that is inactive.
    needs_active: bool,
    served: Served,
    /// The numbers of the bitmaps that it shows: as long as it does, nobody changes them.
    bitmaps: Vec<u64>,
    /// The options that it was made with, as text.
    told: Arc<str>,
}

/// An export as `query-block-exports` tells of it.
#[derive(Debug)]
pub(super) struct ExportInfo {
    pub(super) id: String,
    /// The node that it shows now.
    pub(super) node: String,
    /// QEMU's name of the type.
    pub(super) kind: &'static str,
    /// It ends: what its clients have begun is still on its way.
    pub(super) shutting_down: bool,
}

/// Where users find an export.
#[derive(Debug)]
pub(super) enum ExportPlace {
    /// At the server of this daemon.
    Server,
    /// In a file that is mounted over.
    File(PathBuf),
    /// In a guest.
    Guest,
}

/// The exports of the daemon.
#[derive(Debug, Default)]
pub(super) struct ServerExports {
    entries: Vec<ExportEntry>,
    ending: EndingExports,
    counted: CountedExports,
    /// None keeps the others waiting with a deep queue.
    neighbours: FairDepth,
    /// What one makes durable, the log of another does not undo.
    logs: UnflushedLogs,
    size_turns: SizeTurns,
}

impl ServerExports {
    /// The ids of all exports, or of those that NBD clients use, and of those that end.
    pub(super) fn ids(&self, only_nbd: bool) -> (Vec<String>, Vec<String>) {
        let is_wanted = |kind: &str| !only_nbd || kind == "nbd";
        let entries = self.entries.iter();
        let entries = entries.filter(|one| is_wanted(one.served.kind()));
        let ending = self.ending.list().into_iter();
        let ending = ending.filter(|one| is_wanted(one.kind));
        (
            entries.map(|one| one.id.clone()).collect(),
            ending.map(|one| one.id).collect(),
        )
    }

    /// All exports.
    pub(super) fn list(&self, nodes: &Nodes) -> Vec<ExportInfo> {
        let entries = self.entries.iter().map(|one| one.info(nodes));
        let ending = self.ending.list().into_iter().map(|one| ExportInfo {
            node: shown(&one.node, one.joined, nodes),
            id: one.id,
            kind: one.kind,
            shutting_down: true,
        });
        entries.chain(ending).collect()
    }

    /// How to make all exports but those that end, and the nodes that they show.
    pub(super) fn describe(&self, nodes: &Nodes) -> Vec<ExportPiece> {
        let described = self.entries.iter().map(|one| ExportPiece {
            options: one.told.clone(),
            node: shown(&one.node, one.joined, nodes),
        });
        described.collect()
    }

    /// All exports but those that end, with what their clients have asked for.
    pub(super) fn accounted(&self, nodes: &Nodes) -> Vec<(ExportInfo, Arc<Accounting>)> {
        let entries = self.entries.iter();
        entries
            .map(|one| (one.info(nodes), one.served.accounting()))
            .collect()
    }

    /// What the clients of an export have asked for.
    pub(super) fn accounting(&self, id: &str) -> Option<Arc<Accounting>> {
        let export = self.entries.iter().find(|one| one.id == id)?;
        Some(export.served.accounting())
    }

    /// Where the users of an export find it.
    pub(super) fn place(&self, id: &str) -> Option<ExportPlace> {
        let export = self.entries.iter().find(|one| one.id == id)?;
        Some(export.served.place())
    }

    /// Adds an export of a node.
    pub(super) async fn add(
        &mut self,
        wanted: Description,
        told: &Value,
        nodes: &Nodes,
        server: Option<&Server>,
        environment: &ServerEnvironment,
    ) -> Result<(), Failure> {
        self.check(&wanted, server)?;
        let Description { id, node: name, .. } = &wanted;
        let (id, name) = (id.clone(), name.clone());
        if !nodes.contains(&name) {
            return Err(failure(unknown_node(&name)));
        }
        if wanted.allow_inactive && !matches!(wanted.kind, Wanted::Nbd(_)) {
            return Err(message("Export type does not support inactive exports"));
        }
        if let Wanted::Nbd(nbd) = &wanted.kind {
            check_name(&nbd.name, server)?;
        }
        if nodes.is_inactive(&name) && !wanted.allow_inactive {
            let inactive = nodes.affected_by_activity(Some(&name), true);
            let inactive = inactive.map_err(failure)?;
            nodes.set_activity(&inactive, true).await.map_err(failure)?;
        }
        let node = nodes.device(&name).map_err(failure)?;
        let is_read_only = match nodes.is_inactive(&name) {
            true => !nodes.is_writable_when_active(&name),
            false => node.info().read_only,
        };
        if wanted.writable && is_read_only {
            return Err(message("Cannot export read-only node as writable"));
        }
        let (device, joined) = match nodes.are_live() {
            false => (node.clone(), None),
            true => {
                let access = match &wanted.kind {
                    Wanted::Nbd(_) => nbd::Wanted::access(wanted.writable),
                    Wanted::Fuse(fuse) => fuse.access(wanted.writable),
                    Wanted::VhostUserBlk(_) => vhost_user_blk::Wanted::access(wanted.writable),
                };
                let joined = nodes.join(User::Export(id.clone()), &name, access);
                let joined = joined.map_err(failure)?;
                (joined.link as Arc<dyn BlockDevice>, Some(joined.id))
            }
        };
        let needs_active = wanted.writable && !wanted.allow_inactive;
        let around = Surroundings {
            server,
            environment,
            neighbours: &self.neighbours,
            logs: &self.logs,
            size_turns: &self.size_turns,
        };
        match serve(wanted, device, nodes, joined, around).await {
            Ok((served, bitmaps)) => {
                let bitmaps = bitmaps.into_iter();
                let bitmaps = bitmaps.map(|shown| nodes.show_bitmap(shown)).collect();
                self.note(ExportEntry {
                    id,
                    node: name,
                    joined,
                    needs_active,
                    served,
                    bitmaps,
                    told: told.to_string().into(),
                });
                Ok(())
            }
            Err(failure) => {
                joined.into_iter().for_each(|joined| nodes.leave(joined));
                Err(failure)
            }
        }
    }

    /// What is counted of them, for those who do not hold them.
    pub(super) fn counted(&self) -> CountedExports {
        self.counted.clone()
    }

    fn note(&mut self, entry: ExportEntry) {
        self.counted.add(CountedExport {
            id: entry.id.clone(),
            node: entry.node.clone(),
            kind: entry.served.kind(),
            name: entry.served.name(),
            joined: entry.joined,
            accounting: entry.served.accounting(),
        });
        trace!(
            name: "block_export_added",
            id = entry.id,
            node = entry.node,
            kind = entry.served.kind(),
            export = ?Arc::as_ptr(&entry.served.accounting())
        );
        self.entries.push(entry);
    }

    /// Refuses what cannot be beside what there is.
    fn check(&self, wanted: &Description, server: Option<&Server>) -> Result<(), Failure> {
        if !is_well_formed(&wanted.id) {
            return Err(message("Invalid block export id"));
        }
        if matches!(wanted.kind, Wanted::Nbd(_)) && server.is_none() {
            return Err(message("NBD server not running"));
        }
        let is_used = self.entries.iter().any(|other| other.id == wanted.id);
        if is_used || self.ending.contains(&wanted.id) {
            let id = &wanted.id;
            return Err(message(format!("Block export id '{id}' is already in use")));
        }
        if let Wanted::Fuse(fuse) = &wanted.kind {
            let ending = self.ending.list();
            let ending = ending.iter().filter_map(|one| one.mountpoint.as_deref());
            let entries = self.entries.iter();
            fuse.check_free(
                entries
                    .filter_map(|other| other.served.mountpoint())
                    .chain(ending),
            )?;
        }
        Ok(())
    }

    /// Whether an export needs one of some nodes to be active.
    pub(super) fn need_active(&self, nodes: &Nodes, names: &[String]) -> bool {
        let needing = self.entries.iter().filter(|one| one.needs_active);
        let ending = self.ending.list().into_iter();
        let ending = ending.filter(|one| one.needs_active);
        let mut uses = needing
            .map(|one| one.joined)
            .chain(ending.map(|one| one.joined));
        let shown = |joined: Option<u64>| nodes.used_by(joined?);
        uses.any(|joined| shown(joined).is_some_and(|node| names.contains(&node)))
    }

    /// Who holds one changes sizes of disks.
    pub(super) fn size_turns(&self) -> &SizeTurns {
        &self.size_turns
    }

    /// Has guests told of disks whose size is another one.
    pub(super) async fn update_sizes(&self) {
        for entry in &self.entries {
            if let Served::VhostUserBlk(export) = &entry.served {
                export.update_size().await;
            }
        }
    }

    /// Takes an export out.
    fn take(&mut self, id: &str, removal: Removal) -> Result<ExportEntry, Failure> {
        let Some(at) = self.entries.iter().position(|one| one.id == id) else {
            return Err(message(match self.ending.contains(id) {
                true => format!("Export '{id}' is already shutting down"),
                false => format!("Export '{id}' is not found"),
            }));
        };
        if removal == Removal::Safe && self.entries[at].served.is_in_use() {
            return Err(message(format!("export '{id}' still in use")));
        }
        self.counted.remove(id);
        Ok(self.entries.remove(at))
    }

    /// Has nobody use an export any more, and `tell` called when what its clients have begun is
    /// complete: [`ServerExports::ended`] waits for that.
    pub(super) fn begin_removal(
        &mut self,
        id: &str,
        removal: Removal,
        nodes: &Nodes,
        server: Option<&Server>,
        tell: impl FnOnce() + 'static,
    ) -> Result<(), Failure> {
        let entry = self.take(id, removal)?;
        let ending = EndingExport {
            id: entry.id.clone(),
            node: entry.node.clone(),
            joined: entry.joined,
            kind: entry.served.kind(),
            needs_active: entry.needs_active,
            mountpoint: entry.served.mountpoint().map(Path::to_owned),
        };
        let offered = server.map(|server| server.exports.clone());
        let end = entry.end(nodes.clone(), offered);
        self.ending.begin(ending, end, tell);
        Ok(())
    }

    /// Waits for the end of an export, without a hold on the others.
    pub(super) fn ended(&self, id: &str) -> impl Future<Output = ()> + 'static {
        let (ending, id) = (self.ending.clone(), id.to_owned());
        async move { ending.ended(&id).await }
    }
}

impl ExportEntry {
    fn info(&self, nodes: &Nodes) -> ExportInfo {
        ExportInfo {
            id: self.id.clone(),
            node: shown(&self.node, self.joined, nodes),
            kind: self.served.kind(),
            shutting_down: false,
        }
    }

    /// Ends it; what its clients have begun is complete on return.
    async fn end(self, nodes: Nodes, offered: Option<Exports>) {
        let lifted = nodes.lift_limits(&shown(&self.node, self.joined, &nodes));
        self.served.end(offered).await;
        drop(lifted);
        trace!(name: "block_export_removed", id = self.id);
        self.joined
            .into_iter()
            .for_each(|joined| nodes.leave(joined));
        for number in &self.bitmaps {
            nodes.hide_bitmap(*number);
        }
    }
}

/// The node that an export shows now, which was made for `node`.
fn shown(node: &str, joined: Option<u64>, nodes: &Nodes) -> String {
    let used = joined.and_then(|joined| nodes.used_by(joined));
    used.unwrap_or_else(|| node.to_owned())
}

fn is_well_formed(id: &str) -> bool {
    id.starts_with(|c: char| c.is_ascii_alphabetic())
        && id
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "-._".contains(c))
}

/// Refuses a name that clients know already.
fn check_name(name: &str, server: Option<&Server>) -> Result<(), Failure> {
    match server.is_some_and(|server| server.exports.find(name).is_some()) {
        true => Err(message(format!(
            "NBD server already has export named '{name}'"
        ))),
        false => Ok(()),
    }
}
