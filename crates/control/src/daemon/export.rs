//! `--export`, `block-export-add`.

use std::sync::Arc;

use crate::nodes::{Changes, RequiredAccess, User};
use crate::wrap::WriteThrough;
use crate::{Nodes, Options, shown_bitmaps};
use vellum::BlockDevice;
use vellum_export::nbd::Export;
use vellum_nbd::proto::MAX_STRING_BYTES;

use super::server::Server;
use super::{Failure, failure, message, need, refuse_rest};

/// An export as the options describe it.
#[derive(Debug)]
pub(super) struct Description {
    id: String,
    node: String,
    name: String,
    description: Option<String>,
    writable: bool,
    writethrough: bool,
    allocation_depth: bool,
    bitmaps: Vec<WantedBitmap>,
}

impl Description {
    /// Takes the options apart; `iothreads` are those that exist.
    pub(super) fn take(mut options: Options, iothreads: &[String]) -> Result<Self, Failure> {
        let kind = need(&mut options, "type")?;
        match kind.as_str() {
            "nbd" => {}
            "vhost-user-blk" | "fuse" | "vduse-blk" => {
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
        let allocation_depth = switch("allocation-depth")?;
        switch("fixed-iothread")?;
        let bitmaps = take_bitmaps(options.take_group("bitmaps"))?;
        let mut string = |key: &str| {
            let value = options.take_text(key).map_err(failure)?;
            match &value {
                Some(text) if text.len() > MAX_STRING_BYTES => {
                    Err(message(format!("export {key} '{text}' too long")))
                }
                _ => Ok(value),
            }
        };
        let name = string("name")?.unwrap_or_else(|| node.clone());
        let description = string("description")?;
        if let Some(iothread) = string("iothread")?
            && !iothreads.contains(&iothread)
        {
            return Err(message(format!("iothread \"{iothread}\" not found")));
        }
        refuse_rest(&options)?;
        Ok(Description {
            id,
            node,
            name,
            description,
            writable,
            writethrough,
            allocation_depth,
            bitmaps,
        })
    }
}

/// A bitmap that an export shows.
#[derive(Debug)]
struct WantedBitmap {
    /// The node that has it, if not the exported one or one below.
    node: Option<String>,
    name: String,
}

/// Takes `bitmaps.N=NAME` and `bitmaps.N.node=NODE,bitmaps.N.name=NAME`.
fn take_bitmaps(mut options: Options) -> Result<Vec<WantedBitmap>, Failure> {
    let mut bitmaps = Vec::new();
    while !options.is_empty() {
        let index = bitmaps.len().to_string();
        let bitmap = match options.take_text(&index).map_err(failure)? {
            Some(name) => WantedBitmap { node: None, name },
            None => {
                let mut parts = options.take_group(&index);
                if parts.is_empty() {
                    return Err(message(format!("Parameter 'bitmaps.{index}' is missing")));
                }
                let node = Some(need(&mut parts, "node")?);
                let name = need(&mut parts, "name")?;
                refuse_rest(&parts)?;
                WantedBitmap { node, name }
            }
        };
        bitmaps.push(bitmap);
    }
    Ok(bitmaps)
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
    export: Arc<Export>,
}

/// The exports of the server.
#[derive(Debug, Default)]
pub(super) struct ServerExports(Vec<ExportEntry>);

impl ServerExports {
    /// The ids of all exports.
    pub(super) fn ids(&self) -> Vec<String> {
        self.0.iter().map(|one| one.id.clone()).collect()
    }

    /// Ids of all exports, and the nodes that they show now.
    pub(super) fn list(&self, nodes: &Nodes) -> Vec<(String, String)> {
        let node = |one: &ExportEntry| one.joined.and_then(|joined| nodes.used_by(joined));
        let entries = self.0.iter();
        entries
            .map(|one| {
                (
                    one.id.clone(),
                    node(one).unwrap_or_else(|| one.node.clone()),
                )
            })
            .collect()
    }

    /// Adds an export of a node to those of a server.
    pub(super) async fn add(
        &mut self,
        wanted: Description,
        nodes: &Nodes,
        server: &Server,
    ) -> Result<(), Failure> {
        if self.0.iter().any(|other| other.id == wanted.id) {
            let id = wanted.id;
            return Err(message(format!("Block export id '{id}' is already in use")));
        }
        let node = nodes.device(&wanted.node).map_err(failure)?;
        if server.exports.find(&wanted.name).is_some() {
            let name = wanted.name;
            return Err(message(format!(
                "NBD server already has export named '{name}'"
            )));
        }
        if wanted.writable && node.info().read_only {
            return Err(message("Cannot export read-only node as writable"));
        }
        let (device, joined) = match nodes.are_live() {
            false => (node.clone(), None),
            true => {
                let user = User::Export(wanted.id.clone());
                let use_as = RequiredAccess {
                    role: "root".to_owned(),
                    changes: match wanted.writable {
                        true => Changes::CONTENT,
                        false => Changes::NONE,
                    },
                    // Clients are told the size once.
                    keeps: Changes::SIZE,
                };
                let joined = nodes.join(user, &wanted.node, use_as).map_err(failure)?;
                (joined.link as Arc<dyn BlockDevice>, Some(joined.id))
            }
        };
        let (id, name) = (wanted.id.clone(), wanted.node.clone());
        match make(wanted, device, node, nodes).await {
            Ok(mut export) => {
                export.multi_conn = server.several;
                self.0.push(ExportEntry {
                    id,
                    node: name,
                    joined,
                    export: server.exports.add(export),
                });
                Ok(())
            }
            Err(failure) => {
                joined.into_iter().for_each(|joined| nodes.leave(joined));
                Err(failure)
            }
        }
    }

    /// Takes an export out.
    fn take(&mut self, id: &str, removal: Removal) -> Result<ExportEntry, Failure> {
        let Some(at) = self.0.iter().position(|one| one.id == id) else {
            return Err(message(format!("Export '{id}' is not found")));
        };
        if removal == Removal::Safe && self.0[at].export.connections() > 0 {
            return Err(message(format!("export '{id}' still in use")));
        }
        Ok(self.0.remove(at))
    }

    /// Ends an export; what its clients have begun is complete on return.
    pub(super) async fn remove(
        &mut self,
        id: &str,
        removal: Removal,
        nodes: &Nodes,
        server: &Server,
    ) -> Result<(), Failure> {
        let ExportEntry { joined, export, .. } = self.take(id, removal)?;
        server.exports.remove(&export).await;
        joined.into_iter().for_each(|joined| nodes.leave(joined));
        Ok(())
    }
}

/// The export of a device, which stands for a node.
async fn make(
    wanted: Description,
    device: Arc<dyn BlockDevice>,
    node: Arc<dyn BlockDevice>,
    nodes: &Nodes,
) -> Result<Export, Failure> {
    let device = match wanted.writethrough {
        true => WriteThrough::new(device),
        false => device,
    };
    let mut export = Export::new(wanted.name, device);
    export.description = wanted.description;
    export.read_only = !wanted.writable;
    export.allocation_depth = wanted.allocation_depth;
    for bitmap in wanted.bitmaps {
        let holder = match &bitmap.node {
            Some(node) => nodes.device(node).map_err(failure)?,
            None => node.clone(),
        };
        let found = shown_bitmaps::find(&holder, &[bitmap.name], export.read_only).await?;
        export.bitmaps.extend(found);
    }
    Ok(export)
}
