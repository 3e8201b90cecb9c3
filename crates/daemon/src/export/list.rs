//! [`ServerExports`]: the exports of the daemon.

use std::path::Path;
use std::sync::Arc;

use serde_json::Value;
use tracing::trace;
use vellum::BlockDevice;
use vellum_export::accounting::Accounting;
use vellum_export::fair_depth::FairDepth;
use vellum_export::nbd::Exports;
use vellum_export::size_turns::SizeTurns;
use vellum_export::unflushed_logs::UnflushedLogs;
use vellum_graph::Nodes;
use vellum_graph::live::{User, unknown_node};

use crate::failure::{Failure, failure, message};
use crate::server::{Server, ServerEnvironment};
use crate::state::ExportPiece;

use super::counted::{CountedExport, CountedExports, shown};
use super::description::{Description, Wanted};
use super::ending::{EndingExport, EndingExports};
use super::served::{Served, serve};
use super::surroundings::{ExportPlace, Surroundings};
use super::{nbd, vhost_user_blk};

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
    pub(super) id: String,
    /// The node that it was made for.
    pub(super) node: String,
    /// The number of its use of a live node.
    pub(super) joined: Option<u64>,
    /// It writes to the node, and does not put up with one that is inactive.
    pub(super) needs_active: bool,
    served: Served,
    /// The numbers of the bitmaps that it shows: as long as it does, nobody changes them.
    pub(super) bitmaps: Vec<u64>,
    /// The options that it was made with, as text.
    told: Arc<str>,
}

/// An export as `query-block-exports` tells of it.
#[derive(Debug)]
pub(crate) struct ExportInfo {
    pub(crate) id: String,
    /// The node that it shows now.
    pub(crate) node: String,
    /// QEMU's name of the type.
    pub(crate) kind: &'static str,
    /// It ends: what its clients have begun is still on its way.
    pub(crate) shutting_down: bool,
}

/// The exports of the daemon.
#[derive(Debug, Default)]
pub(crate) struct ServerExports {
    entries: Vec<ExportEntry>,
    ending: EndingExports,
    pub(super) counted: CountedExports,
    /// None keeps the others waiting with a deep queue.
    pub(super) neighbours: FairDepth,
    /// What one makes durable, the log of another does not undo.
    pub(super) logs: UnflushedLogs,
    pub(super) size_turns: SizeTurns,
}

impl ServerExports {
    /// The ids of all exports, or of those that NBD clients use, and of those that end.
    pub(crate) fn ids(&self, only_nbd: bool) -> (Vec<String>, Vec<String>) {
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
    pub(crate) fn list(&self, nodes: &Nodes) -> Vec<ExportInfo> {
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
    pub(crate) fn describe(&self, nodes: &Nodes) -> Vec<ExportPiece> {
        let described = self.entries.iter().map(|one| ExportPiece {
            options: one.told.clone(),
            node: shown(&one.node, one.joined, nodes),
        });
        described.collect()
    }

    /// All exports but those that end, with what their clients have asked for.
    pub(crate) fn accounted(&self, nodes: &Nodes) -> Vec<(ExportInfo, Arc<Accounting>)> {
        let entries = self.entries.iter();
        entries
            .map(|one| (one.info(nodes), one.served.accounting()))
            .collect()
    }

    /// What the clients of an export have asked for.
    pub(crate) fn accounting(&self, id: &str) -> Option<Arc<Accounting>> {
        let export = self.entries.iter().find(|one| one.id == id)?;
        Some(export.served.accounting())
    }

    /// Where the users of an export find it.
    pub(crate) fn place(&self, id: &str) -> Option<ExportPlace> {
        let export = self.entries.iter().find(|one| one.id == id)?;
        Some(export.served.place())
    }

    /// Adds an export of a node.
    pub(crate) async fn add(
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
    pub(crate) fn counted(&self) -> CountedExports {
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
    pub(crate) fn need_active(&self, nodes: &Nodes, names: &[String]) -> bool {
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
    pub(crate) fn size_turns(&self) -> &SizeTurns {
        &self.size_turns
    }

    /// Has guests told of disks whose size is another one.
    pub(crate) async fn update_sizes(&self) {
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
    pub(crate) fn begin_removal(
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
    pub(crate) fn ended(&self, id: &str) -> impl Future<Output = ()> + 'static {
        let (ending, id) = (self.ending.clone(), id.to_owned());
        async move { ending.ended(&id).await }
    }
}

impl ExportEntry {
    pub(super) fn info(&self, nodes: &Nodes) -> ExportInfo {
        ExportInfo {
            id: self.id.clone(),
            node: shown(&self.node, self.joined, nodes),
            kind: self.served.kind(),
            shutting_down: false,
        }
    }

    /// Ends it; what its clients have begun is complete on return.
    pub(super) async fn end(self, nodes: Nodes, offered: Option<Exports>) {
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
