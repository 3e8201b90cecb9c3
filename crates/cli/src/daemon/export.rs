//! `--export`.

use vellum_control::wrap::WriteThrough;
use vellum_control::{Nodes, Options};
use vellum_export::nbd::Export;
use vellum_storage::nbd::proto::MAX_STRING_BYTES;

use super::{failure, message, need, refuse_rest};
use crate::nbd::{Failure, bitmaps};

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

/// The exports of the server.
#[derive(Debug, Default)]
pub(super) struct Set {
    ids: Vec<String>,
    exports: Vec<Export>,
}

impl Set {
    /// Adds an export of a node; `several` connections may use it at once.
    pub(super) async fn add(
        &mut self,
        wanted: Description,
        nodes: &Nodes,
        several: bool,
    ) -> Result<(), Failure> {
        if self.ids.contains(&wanted.id) {
            let id = wanted.id;
            return Err(message(format!("Block export id '{id}' is already in use")));
        }
        let mut device = nodes.device(&wanted.node).map_err(failure)?;
        if self.exports.iter().any(|other| other.name == wanted.name) {
            let name = wanted.name;
            return Err(message(format!(
                "NBD server already has export named '{name}'"
            )));
        }
        if wanted.writable && device.info().read_only {
            return Err(message("Cannot export read-only node as writable"));
        }
        if wanted.writethrough {
            device = WriteThrough::new(device);
        }
        let mut export = Export::new(wanted.name, device);
        export.description = wanted.description;
        export.read_only = !wanted.writable;
        export.multi_conn = several;
        export.allocation_depth = wanted.allocation_depth;
        for bitmap in wanted.bitmaps {
            let holder = match &bitmap.node {
                Some(node) => nodes.device(node).map_err(failure)?,
                None => export.device.clone(),
            };
            let found = bitmaps::find(&holder, &[bitmap.name], export.read_only).await?;
            export.bitmaps.extend(found);
        }
        self.ids.push(wanted.id);
        self.exports.push(export);
        Ok(())
    }

    /// Hands the exports over.
    pub(super) fn take(&mut self) -> Vec<Export> {
        std::mem::take(&mut self.exports)
    }
}
