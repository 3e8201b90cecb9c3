//! What an export has when NBD clients use it.

use std::sync::Arc;

use vellum::BlockDevice;
use vellum_export::WhenFull;
use vellum_export::accounting::Accounting;
use vellum_export::nbd::Export;
use vellum_graph::Nodes;
use vellum_graph::live::{Changes, RequiredAccess, ShownBitmap, unknown};
use vellum_nbd::proto::MAX_STRING_BYTES;
use vellum_options::{Options, error_text};

use crate::failure::{Failure, failure, message, need, refuse_rest};
use crate::server::Notice;
use crate::shown_bitmaps::with_hint;

use super::surroundings::{Origin, Surroundings};

/// The options of this type.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) name: String,
    description: Option<String>,
    allocation_depth: bool,
    bitmaps: Vec<WantedBitmap>,
}

/// A bitmap that an export is to show.
#[derive(Debug)]
struct WantedBitmap {
    /// The node that has it, if not the exported one or one below.
    node: Option<String>,
    name: String,
}

impl Wanted {
    /// Takes the options apart; without a name the export has that of its node.
    pub(super) fn take(options: &mut Options, node: &str) -> Result<Self, Failure> {
        let allocation_depth = options.take_bool("allocation-depth").map_err(failure)?;
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
        Ok(Wanted {
            name: string("name")?.unwrap_or_else(|| node.to_owned()),
            description: string("description")?,
            allocation_depth: allocation_depth.unwrap_or(false),
            bitmaps,
        })
    }

    /// What clients do to the node.
    pub(super) fn access(writable: bool) -> RequiredAccess {
        RequiredAccess {
            role: "root".to_owned(),
            changes: match writable {
                true => Changes::CONTENT,
                false => Changes::NONE,
            },
            // Clients are told the size once.
            keeps: Changes::SIZE,
        }
    }

    /// Adds the export of a device, which stands for a node, to those of the server.
    pub(super) async fn serve(
        self,
        (device, when_full): (Arc<dyn BlockDevice>, WhenFull),
        node: &str,
        (writable, nodes): (bool, &Nodes),
        origin: Origin,
        around: &Surroundings<'_>,
    ) -> Result<(Arc<Export>, Vec<ShownBitmap>), Failure> {
        let server = around.server;
        let server = server.ok_or_else(|| message("NBD server not running"))?;
        let mut export = Export::new(self.name, device);
        export.accounting = Arc::new(Accounting::among(around.neighbours));
        export.description = self.description;
        export.when_full = when_full;
        export.read_only = !writable;
        export.allocation_depth = self.allocation_depth;
        let mut shown = Vec::with_capacity(self.bitmaps.len());
        for bitmap in self.bitmaps {
            let from = bitmap.node.as_deref().unwrap_or(node);
            // What other nodes' bitmaps tell is not of the content that clients see.
            let is_own = bitmap.node.is_none();
            let found = match origin {
                Origin::Asked => find(nodes, from, &bitmap.name, is_own && !writable).await?,
                // Clients have seen it: what the node has become meanwhile is no reason to refuse it.
                Origin::Saved => {
                    let found = find(nodes, from, &bitmap.name, false).await;
                    found.unwrap_or_else(|Failure(why)| {
                        (around.environment.tell)(Notice::Error(format!(
                            "the export '{}' shows all of '{}' as dirty: {why}",
                            export.name, bitmap.name
                        )));
                        ShownBitmap::all_dirty(from, &bitmap.name)
                    })
                }
            };
            // The clone of the view that is kept with the node follows that.
            let (name, view) = (found.name.clone(), found.view.clone());
            export.bitmaps.push((name, view));
            shown.push(found);
        }
        export.multi_conn = server.several;
        Ok((server.exports.add(export), shown))
    }
}

/// Finds a bitmap by its name, in a node or in the next one below it that has one of the name.
async fn find(
    nodes: &Nodes,
    from: &str,
    name: &str,
    read_only: bool,
) -> Result<ShownBitmap, Failure> {
    if !nodes.contains(from) {
        return Err(failure(unknown(from)));
    }
    let found = nodes.find_bitmap(from, name).await.map_err(failure)?;
    let Some((node, bitmap, state)) = found else {
        return Err(message(format!("Bitmap '{name}' is not found")));
    };
    let changes = !nodes.device(&node).map_err(failure)?.info().read_only;
    if read_only && changes && state.records && state.consistent {
        return Err(message(format!(
            "Enabled bitmap '{name}' incompatible with readonly export"
        )));
    }
    let view = bitmap.view().await;
    let view = view.map_err(|error| Failure(with_hint(error_text(&error))))?;
    Ok(ShownBitmap {
        node,
        name: name.to_owned(),
        from: from.to_owned(),
        view,
    })
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
