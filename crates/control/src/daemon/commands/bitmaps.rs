//! Commands about the dirty bitmaps of an image. They are persistent, all of them: there
//! are none that end with the program.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;
use vellum::qcow2::AsQcow2;

use crate::Nodes;
use crate::nodes::{NodeInfo, unknown};
use crate::qmp::{Arguments, Failure, Outcome};
use serde_json::{Value, json};
use vellum::BlockDevice;
use vellum::qcow2::info::BitmapInfo;
use vellum::qcow2::{BitmapOptions, Bitmaps};

use super::{Daemon, done};

/// A bitmap that is named by a node and its name.
pub(super) struct BitmapRef {
    node: String,
    name: String,
}

impl BitmapRef {
    fn take(arguments: &mut Arguments) -> Result<BitmapRef, Failure> {
        Ok(BitmapRef {
            node: arguments.need_text("node")?,
            name: arguments.need_text("name")?,
        })
    }

    /// The bitmaps of the node, among which the named one is, that no job keeps to itself.
    async fn find(&self, daemon: &Daemon, nodes: &Nodes) -> Result<Bitmaps, Failure> {
        if !nodes.contains(&self.node) {
            return Err(Failure::new(format!("Node '{}' not found", self.node)));
        }
        bitmaps(&image(nodes, &self.node)?)?;
        let Some((bitmaps, _)) = look_up(nodes, &self.node, &self.name).await? else {
            return Err(Failure::new(format!(
                "Dirty bitmap '{}' not found",
                self.name
            )));
        };
        check_free(daemon, &self.node, &self.name)?;
        Ok(bitmaps)
    }

    /// As [`Named::find`], and whether the named one records writes.
    async fn find_switch(
        &self,
        daemon: &Daemon,
        nodes: &Nodes,
    ) -> Result<(Bitmaps, bool), Failure> {
        let bitmaps = self.find(daemon, nodes).await?;
        let info = bitmaps.find(&self.name).await?;
        Ok((bitmaps, info.auto))
    }
}

/// The bitmaps of a node, and what there is to say of the named one, if there is one.
pub(super) async fn look_up(
    nodes: &Nodes,
    node: &str,
    name: &str,
) -> Result<Option<(Bitmaps, BitmapInfo)>, Failure> {
    let Ok(bitmaps) = bitmaps(&image(nodes, node)?) else {
        return Ok(None);
    };
    let list = bitmaps.list().await?;
    let found = list.into_iter().find(|one| one.name == name);
    Ok(found.map(|info| (bitmaps, info)))
}

/// The bitmaps of a node, as a description of it lists them.
pub(super) async fn describe(daemon: &Daemon, node: &NodeInfo) -> Result<Vec<Value>, Failure> {
    let image = node.device.as_ref().and_then(|device| device.as_qcow2());
    let Some(image) = image else {
        return Ok(Vec::new());
    };
    let bitmaps = image.bitmaps();
    let mut described = Vec::new();
    for info in bitmaps.list().await? {
        let mut one = json!({
            "name": info.name,
            "recording": info.auto && info.consistent,
            "persistent": true,
            "busy": daemon.jobs.keep_bitmap(&node.name, &info.name),
            "granularity": info.granularity_bytes,
            "count": 0,
        });
        match info.consistent {
            true => one["count"] = json!(bitmaps.read(&info.name).await?.dirty_bytes()),
            false => one["inconsistent"] = json!(true),
        }
        described.push(one);
    }
    Ok(described)
}

/// The refusal of a bitmap whose content is lost.
pub(super) fn inconsistent(name: &str) -> Failure {
    Failure::new(format!(
        "Bitmap '{name}' is inconsistent and cannot be used"
    ))
}

/// Refuses a bitmap that a job keeps to itself.
pub(super) fn check_free(daemon: &Daemon, node: &str, name: &str) -> Result<(), Failure> {
    match daemon.jobs.keep_bitmap(node, name) {
        false => Ok(()),
        true => Err(Failure::new(format!(
            "Bitmap '{name}' is currently in use by another operation and cannot be used"
        ))),
    }
}

fn image(nodes: &Nodes, node: &str) -> Result<Arc<dyn BlockDevice>, Failure> {
    match nodes.contains(node) {
        true => Ok(nodes.device(node)?),
        false => Err(unknown(node).into()),
    }
}

fn bitmaps(image: &Arc<dyn BlockDevice>) -> Result<Bitmaps, Failure> {
    let qcow2 = image.as_qcow2();
    let qcow2 = qcow2.ok_or_else(|| Failure::new("the node's format has no bitmaps"))?;
    Ok(qcow2.bitmaps())
}

/// What is done to a bitmap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge,
}

/// A change of a bitmap, as a command asks for it.
pub(super) enum Change {
    Add(BitmapRef, NewBitmap),
    Remove(BitmapRef),
    Clear(BitmapRef),
    Enable(BitmapRef),
    Disable(BitmapRef),
    /// The sources.
    Merge(BitmapRef, Vec<BitmapRef>),
}

/// What a new bitmap is to be.
pub(super) struct NewBitmap {
    granularity_bytes: Option<u64>,
    persistent: bool,
    disabled: bool,
}

/// What takes a change back if its transaction is aborted.
pub(super) struct BitmapUndo {
    bitmaps: Bitmaps,
    name: String,
    action: UndoAction,
}

enum UndoAction {
    Remove,
    Enable,
    Disable,
    /// What was dirty before.
    SetDirty(Vec<Range<u64>>),
    Nothing,
}

impl NewBitmap {
    fn take(arguments: &mut Arguments) -> Result<NewBitmap, Failure> {
        let granularity_bytes = match arguments.number("granularity")? {
            None => None,
            Some(bytes) => match u64::try_from(bytes) {
                Ok(bytes) if bytes >= 512 && bytes.is_power_of_two() => Some(bytes),
                Ok(bytes) if bytes >= 512 => {
                    return Err(Failure::new("Granularity must be power of 2"));
                }
                _ => return Err(Failure::new("Granularity must be at least 512")),
            },
        };
        Ok(NewBitmap {
            granularity_bytes,
            persistent: arguments.switch("persistent")?.unwrap_or(false),
            disabled: arguments.switch("disabled")?.unwrap_or(false),
        })
    }

    async fn add(&self, named: &BitmapRef, nodes: &Nodes) -> Result<BitmapUndo, Failure> {
        let image = image(nodes, &named.node)?;
        if named.name.is_empty() {
            return Err(Failure::new("Bitmap name cannot be empty"));
        }
        if !self.persistent {
            return Err(Failure::new(
                "Bitmaps that are not persistent are not part of this version",
            ));
        }
        let bitmaps = bitmaps(&image)?;
        let list = bitmaps.list().await?;
        if list.iter().any(|one| one.name == named.name) {
            return Err(Failure::new(format!(
                "Bitmap already exists: {}",
                named.name
            )));
        }
        let options = BitmapOptions::default()
            .granularity_bytes(self.granularity_bytes)
            .disabled(self.disabled)
            .node_name(Some(named.node.clone()));
        bitmaps.add(&named.name, options).await?;
        Ok(named.undo(bitmaps, UndoAction::Remove))
    }
}

/// Takes the sources of a merge: names of bitmaps of the same node, or nodes and names.
fn take_sources(arguments: &mut Arguments, node: &str) -> Result<Vec<BitmapRef>, Failure> {
    let take = |source| match source {
        Value::String(name) => Ok(BitmapRef {
            node: node.to_owned(),
            name,
        }),
        Value::Object(members) => {
            let mut external = Arguments::new(members);
            let source = BitmapRef::take(&mut external)?;
            external.finish()?;
            Ok(source)
        }
        _ => Err(Failure::new(
            "Invalid parameter type for 'bitmaps', expected: BlockDirtyBitmapOrStr",
        )),
    };
    let sources = arguments.need_array("bitmaps")?;
    sources.into_iter().map(take).collect()
}

impl BitmapRef {
    fn undo(&self, bitmaps: Bitmaps, action: UndoAction) -> BitmapUndo {
        BitmapUndo {
            bitmaps,
            name: self.name.clone(),
            action,
        }
    }
}

impl Change {
    /// Takes all arguments.
    pub(super) fn take(kind: Kind, mut arguments: Arguments) -> Result<Change, Failure> {
        let from = &mut arguments;
        let change = match kind {
            Kind::Add => Change::Add(BitmapRef::take(from)?, NewBitmap::take(from)?),
            Kind::Remove => Change::Remove(BitmapRef::take(from)?),
            Kind::Clear => Change::Clear(BitmapRef::take(from)?),
            Kind::Enable => Change::Enable(BitmapRef::take(from)?),
            Kind::Disable => Change::Disable(BitmapRef::take(from)?),
            Kind::Merge => {
                let node = from.need_text("node")?;
                let name = from.need_text("target")?;
                let sources = take_sources(from, &node)?;
                Change::Merge(BitmapRef { node, name }, sources)
            }
        };
        arguments.finish()?;
        Ok(change)
    }

    /// The node whose bitmap is changed.
    pub(super) fn node(&self) -> &str {
        let (Change::Add(named, _)
        | Change::Remove(named)
        | Change::Clear(named)
        | Change::Enable(named)
        | Change::Disable(named)
        | Change::Merge(named, _)) = self;
        &named.node
    }

    /// Whether it can not be taken back.
    pub(super) fn is_final(&self) -> bool {
        matches!(self, Change::Remove(_))
    }

    /// Refuses a bitmap that is not there, or that a job keeps to itself.
    pub(super) async fn check(&self, daemon: &Daemon, nodes: &Nodes) -> Result<(), Failure> {
        match self {
            Change::Add(..) => Ok(()),
            Change::Remove(named)
            | Change::Clear(named)
            | Change::Enable(named)
            | Change::Disable(named)
            | Change::Merge(named, _) => named.find(daemon, nodes).await.map(drop),
        }
    }

    /// Makes the change; nobody may write meanwhile if it is to be taken back.
    pub(super) async fn make(&self, daemon: &Daemon, nodes: &Nodes) -> Result<BitmapUndo, Failure> {
        match self {
            Change::Add(named, new) => new.add(named, nodes).await,
            Change::Remove(named) => {
                let bitmaps = named.find(daemon, nodes).await?;
                bitmaps.remove(&named.name).await?;
                Ok(named.undo(bitmaps, UndoAction::Nothing))
            }
            Change::Clear(named) => {
                let bitmaps = named.find(daemon, nodes).await?;
                let old = bitmaps.read(&named.name).await?;
                bitmaps.clear(&named.name).await?;
                Ok(named.undo(bitmaps, UndoAction::SetDirty(old.ranges().collect())))
            }
            Change::Enable(named) => {
                let (bitmaps, was_enabled) = named.find_switch(daemon, nodes).await?;
                bitmaps.enable(&named.name).await?;
                let action = if was_enabled {
                    UndoAction::Nothing
                } else {
                    UndoAction::Disable
                };
                Ok(named.undo(bitmaps, action))
            }
            Change::Disable(named) => {
                let (bitmaps, was_enabled) = named.find_switch(daemon, nodes).await?;
                bitmaps.disable(&named.name).await?;
                let action = if was_enabled {
                    UndoAction::Enable
                } else {
                    UndoAction::Nothing
                };
                Ok(named.undo(bitmaps, action))
            }
            Change::Merge(named, sources) => {
                let bitmaps = named.find(daemon, nodes).await?;
                let mut dirty = Vec::with_capacity(sources.len());
                for source in sources {
                    let found = source.find(daemon, nodes).await?;
                    dirty.push(found.read(&source.name).await?);
                }
                let old = bitmaps.read(&named.name).await?;
                bitmaps.merge(&named.name, dirty).await?;
                Ok(named.undo(bitmaps, UndoAction::SetDirty(old.ranges().collect())))
            }
        }
    }
}

impl BitmapUndo {
    /// Takes the change back. What fails of it leaves the bitmap as it was changed.
    pub(super) async fn run(self) -> vellum::Result<()> {
        let BitmapUndo {
            bitmaps,
            name,
            action,
        } = self;
        match action {
            UndoAction::Remove => bitmaps.remove(&name).await,
            UndoAction::Enable => bitmaps.enable(&name).await,
            UndoAction::Disable => bitmaps.disable(&name).await,
            UndoAction::SetDirty(ranges) => bitmaps.set(&name, ranges).await,
            UndoAction::Nothing => Ok(()),
        }
    }
}

/// A command that changes a bitmap.
pub(super) async fn change(daemon: Rc<Daemon>, arguments: Arguments, kind: Kind) -> Outcome {
    let change = Change::take(kind, arguments)?;
    let parts = daemon.parts.lock().await;
    change.make(&daemon, &parts.nodes).await?;
    done()
}
