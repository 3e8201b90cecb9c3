//! Commands about dirty bitmaps: persistent ones of an image, and those of any node that end
//! with the program.

use std::ops::Range;
use std::rc::Rc;

use serde_json::{Value, json};
use vellum::BlockDevice;
use vellum::qcow2::{AsQcow2, BitmapOptions, MemoryBitmap};
use vellum_graph::Nodes;
use vellum_graph::live::unknown;
use vellum_graph::node_bitmap::{self as bitmap, BitmapState, NodeBitmap, RemovedBitmap};

use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure, Outcome};

use super::request::{Request, request};

/// The longest name, in bytes.
const MAX_NAME_BYTES: usize = 1023;

request! {
    /// A bitmap that is named by a node and its name.
    #[derive(PartialEq, Eq)]
    pub(super) BitmapRef {
        node: String = |a| a.need_text("node"),
        name: String = |a| a.need_text("name"),
    }
}

impl BitmapRef {
    /// The named bitmap, whoever keeps it.
    async fn look_up(&self, nodes: &Nodes) -> Result<(NodeBitmap, BitmapState), Failure> {
        if !nodes.contains(&self.node) {
            return Err(Failure::new(format!("Node '{}' not found", self.node)));
        }
        let found = bitmap::find(nodes, &self.node, &self.name).await?;
        found.ok_or_else(|| Failure::new(format!("Dirty bitmap '{}' not found", self.name)))
    }

    /// The named bitmap, which nobody keeps to himself.
    async fn find(
        &self,
        daemon: &Daemon,
        nodes: &Nodes,
    ) -> Result<(NodeBitmap, BitmapState), Failure> {
        let found = self.look_up(nodes).await?;
        check_free(daemon, nodes, &self.node, &self.name)?;
        Ok(found)
    }

    /// What takes a change of it back.
    fn undo(&self, action: UndoAction) -> BitmapUndo {
        BitmapUndo {
            node: self.node.clone(),
            name: self.name.clone(),
            action,
        }
    }
}

/// The bitmaps of a node, as a description of it lists them: the newest first.
pub(super) async fn describe(
    daemon: &Daemon,
    nodes: &Nodes,
    node: &str,
) -> Result<Vec<Value>, Failure> {
    let mut described = Vec::new();
    for (bitmap, state) in bitmap::list(nodes, node).await?.into_iter().rev() {
        let granularity_bytes = state.granularity_bytes;
        let mut one = json!({
            "name": bitmap.name,
            "recording": state.records && state.consistent,
            "persistent": state.persistent,
            "busy": is_kept(daemon, nodes, node, &bitmap.name),
            "granularity": granularity_bytes,
            "count": 0,
        });
        match state.consistent {
            true => {
                // In whole bits, also where the device ends earlier.
                let bits = bitmap
                    .read()
                    .await?
                    .dirty_bytes()
                    .div_ceil(granularity_bytes);
                one["count"] = json!(bits.saturating_mul(granularity_bytes));
            }
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

/// Whether a job or an export keeps a bitmap to itself.
fn is_kept(daemon: &Daemon, nodes: &Nodes, node: &str, name: &str) -> bool {
    daemon.jobs.keep_bitmap(node, name) || nodes.shows_bitmap(node, name)
}

/// Refuses a bitmap that a job or an export keeps to itself.
pub(super) fn check_free(
    daemon: &Daemon,
    nodes: &Nodes,
    node: &str,
    name: &str,
) -> Result<(), Failure> {
    match is_kept(daemon, nodes, node, name) {
        false => Ok(()),
        true => Err(in_use(name)),
    }
}

/// The refusal of a bitmap that somebody keeps to himself.
fn in_use(name: &str) -> Failure {
    Failure::new(format!(
        "Bitmap '{name}' is currently in use by another operation and cannot be used"
    ))
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

request! {
    /// What a new bitmap is to be.
    pub(super) NewBitmap {
        granularity_bytes: Option<u64> = take_granularity,
        persistent: bool = |a| a.is_on("persistent"),
        disabled: bool = |a| a.is_on("disabled"),
    }
}

/// What takes a change back if its transaction is aborted. The bitmap is looked for once more then: what was
/// done since may have had its image opened anew.
pub(super) struct BitmapUndo {
    node: String,
    name: String,
    action: UndoAction,
}

enum UndoAction {
    Remove,
    Enable,
    Disable,
    /// What was dirty before.
    SetDirty(Vec<Range<u64>>),
    Restore(RemovedBitmap),
    Nothing,
}

fn take_granularity(arguments: &mut Arguments) -> Result<Option<u64>, Failure> {
    let bytes = arguments.number("granularity")?.map(u32::try_from);
    let bytes = bytes.transpose();
    let bytes = bytes.map_err(|_| Failure::new("Parameter 'granularity' expects uint32_t"))?;
    Ok(bytes.map(u64::from))
}

impl NewBitmap {
    /// Refuses what cannot be, before anything of it is looked at closer.
    fn check(&self, named: &BitmapRef, nodes: &Nodes) -> Result<(), Failure> {
        if named.name.is_empty() {
            return Err(Failure::new("Bitmap name cannot be empty"));
        }
        if !nodes.contains(&named.node) {
            return Err(unknown(&named.node).into());
        }
        let is_fit = |bytes: u64| bytes >= 512 && bytes.is_power_of_two();
        if !self.granularity_bytes.is_none_or(is_fit) {
            return Err(Failure::new(
                "Granularity must be power of 2 and at least 512",
            ));
        }
        Ok(())
    }

    async fn add(&self, named: &BitmapRef, nodes: &Nodes) -> Result<BitmapUndo, Failure> {
        self.check(named, nodes)?;
        let device = nodes.device(&named.node)?;
        let is_image = nodes.known(&named.node)?.driver.name == "qcow2";
        let name = &named.name;
        let is_there = bitmap::find(nodes, &named.node, name).await?.is_some();
        match (self.persistent, device.as_qcow2().filter(|_| is_image)) {
            (true, None) => {
                return Err(Failure::new(format!(
                    "Can't store persistent bitmaps to {}: Operation not supported",
                    named.node
                )));
            }
            _ if is_there => {
                return Err(Failure::new(format!("Bitmap already exists: {name}")));
            }
            (true, Some(image)) => {
                let options = BitmapOptions::default()
                    .granularity_bytes(self.granularity_bytes)
                    .disabled(self.disabled)
                    .node_name(Some(named.node.clone()));
                image.bitmaps().add(name, options).await?;
            }
            (false, _) => self.add_in_memory(named, nodes, &*device)?,
        }
        nodes.note_bitmap(&named.node, name);
        Ok(named.undo(UndoAction::Remove))
    }

    fn add_in_memory(
        &self,
        named: &BitmapRef,
        nodes: &Nodes,
        device: &dyn BlockDevice,
    ) -> Result<(), Failure> {
        let name = &named.name;
        if name.len() > MAX_NAME_BYTES {
            return Err(Failure::new(format!("Bitmap name too long: {name}")));
        }
        let recorder = nodes.recorder(&named.node);
        let recorder = recorder.ok_or_else(|| Failure::from(unknown(&named.node)))?;
        let cluster_bytes = nodes.cluster_size_bytes(&named.node);
        let default_bytes = cluster_bytes.unwrap_or(65536).clamp(4096, 65536);
        let bitmap = MemoryBitmap::new(
            name,
            device.size_bytes(),
            self.granularity_bytes.unwrap_or(default_bytes),
            !self.disabled,
        );
        recorder.add(bitmap);
        Ok(())
    }
}

/// Takes the sources of a merge: names of bitmaps of the same node, or nodes and names.
fn take_sources(arguments: &mut Arguments, node: &str) -> Result<Vec<BitmapRef>, Failure> {
    let take = |source| match source {
        Value::String(name) => Ok(BitmapRef {
            node: node.to_owned(),
            name,
        }),
        Value::Object(members) => BitmapRef::take(Arguments::new(members)),
        _ => Err(Failure::new(
            "Invalid parameter type for 'bitmaps', expected: BlockDirtyBitmapOrStr",
        )),
    };
    let sources = arguments.need_array("bitmaps")?;
    sources.into_iter().map(take).collect()
}

impl Change {
    /// Takes all arguments.
    pub(super) fn take(kind: Kind, mut arguments: Arguments) -> Result<Change, Failure> {
        let bitmap = BitmapRef::take;
        Ok(match kind {
            Kind::Add => {
                let named = BitmapRef::read(&mut arguments)?;
                Change::Add(named, NewBitmap::take(arguments)?)
            }
            Kind::Remove => Change::Remove(bitmap(arguments)?),
            Kind::Clear => Change::Clear(bitmap(arguments)?),
            Kind::Enable => Change::Enable(bitmap(arguments)?),
            Kind::Disable => Change::Disable(bitmap(arguments)?),
            Kind::Merge => {
                let node = arguments.need_text("node")?;
                let name = arguments.need_text("target")?;
                let sources = take_sources(&mut arguments, &node)?;
                arguments.finish()?;
                Change::Merge(BitmapRef { node, name }, sources)
            }
        })
    }

    /// What is done.
    pub(super) fn kind(&self) -> Kind {
        match self {
            Change::Add(..) => Kind::Add,
            Change::Remove(..) => Kind::Remove,
            Change::Clear(..) => Kind::Clear,
            Change::Enable(..) => Kind::Enable,
            Change::Disable(..) => Kind::Disable,
            Change::Merge(..) => Kind::Merge,
        }
    }

    fn named(&self) -> &BitmapRef {
        let (Change::Add(named, _)
        | Change::Remove(named)
        | Change::Clear(named)
        | Change::Enable(named)
        | Change::Disable(named)
        | Change::Merge(named, _)) = self;
        named
    }

    /// The node whose bitmap is changed.
    pub(super) fn node(&self) -> &str {
        &self.named().node
    }

    /// The nodes that have to answer while it is made.
    pub(super) fn nodes(&self) -> Vec<String> {
        self.all_named().map(|named| named.node.clone()).collect()
    }

    fn all_named(&self) -> impl Iterator<Item = &BitmapRef> {
        let sources = match self {
            Change::Merge(_, sources) => &sources[..],
            _ => &[],
        };
        sources.iter().chain([self.named()])
    }

    /// Refuses to use a bitmap that is among the `removed` ones.
    pub(super) fn check_not_among<'a>(
        &self,
        removed: impl Iterator<Item = &'a Change>,
    ) -> Result<(), Failure> {
        let mut used = self.all_named();
        let gone: Vec<&BitmapRef> = removed.map(Change::named).collect();
        match used.find(|named| gone.contains(named)) {
            Some(named) => Err(in_use(&named.name)),
            None => Ok(()),
        }
    }

    /// Refuses to remove a bitmap that is not there, or that somebody keeps to himself. Whether it can be had
    /// back.
    pub(super) async fn check_removal(
        &self,
        daemon: &Daemon,
        nodes: &Nodes,
    ) -> Result<bool, Failure> {
        let (_, state) = self.named().find(daemon, nodes).await?;
        Ok(state.consistent)
    }

    /// Makes the change; nobody may write meanwhile if it is to be taken back.
    pub(super) async fn make(&self, daemon: &Daemon, nodes: &Nodes) -> Result<BitmapUndo, Failure> {
        match self {
            Change::Add(named, new) => new.add(named, nodes).await,
            Change::Remove(named) => {
                let (bitmap, state) = named.find(daemon, nodes).await?;
                let removed = bitmap.take_out(&state, (nodes, &named.node)).await?;
                Ok(named.undo(removed.map_or(UndoAction::Nothing, UndoAction::Restore)))
            }
            Change::Clear(named) => {
                let (bitmap, _) = named.find(daemon, nodes).await?;
                let old = bitmap.read().await?;
                bitmap.set(Vec::new()).await?;
                Ok(named.undo(UndoAction::SetDirty(old.ranges().collect())))
            }
            Change::Enable(named) => named.switch(daemon, nodes, true).await,
            Change::Disable(named) => named.switch(daemon, nodes, false).await,
            Change::Merge(named, sources) => {
                let (bitmap, _) = named.find(daemon, nodes).await?;
                let mut dirty = Vec::with_capacity(sources.len());
                for source in sources {
                    let (found, _) = source.find(daemon, nodes).await?;
                    dirty.push(found.read().await?);
                }
                let old = bitmap.read().await?;
                bitmap.merge(dirty).await?;
                Ok(named.undo(UndoAction::SetDirty(old.ranges().collect())))
            }
        }
    }
}

impl BitmapRef {
    /// Has the bitmap record writes, or no more.
    async fn switch(
        &self,
        daemon: &Daemon,
        nodes: &Nodes,
        records: bool,
    ) -> Result<BitmapUndo, Failure> {
        let (bitmap, state) = self.find(daemon, nodes).await?;
        if !state.consistent {
            return Err(inconsistent(&self.name));
        }
        bitmap.set_records(records).await?;
        let action = match (state.records, records) {
            (true, false) => UndoAction::Enable,
            (false, true) => UndoAction::Disable,
            _ => UndoAction::Nothing,
        };
        Ok(self.undo(action))
    }
}

impl BitmapUndo {
    /// The change stays.
    pub(super) fn settle(self) {
        if let UndoAction::Restore(removed) = self.action {
            removed.settle();
        }
    }

    /// Takes the change back, or says which bitmap has kept it, and why.
    pub(super) async fn run(self, nodes: &Nodes) -> Result<(), Failure> {
        let (node, name) = (self.node.clone(), self.name.clone());
        self.take_back(nodes).await.map_err(|failure| {
            let text = failure.text;
            Failure::new(format!(
                "Bitmap '{name}' of node '{node}' could not be had back as it was: {text}"
            ))
        })
    }

    async fn take_back(self, nodes: &Nodes) -> Result<(), Failure> {
        let BitmapUndo { node, name, action } = self;
        let action = match action {
            UndoAction::Nothing => return Ok(()),
            UndoAction::Restore(removed) => return Ok(removed.restore(nodes, &node).await?),
            action => action,
        };
        let (bitmap, _) = BitmapRef { node, name }.look_up(nodes).await?;
        match action {
            UndoAction::Remove => bitmap.remove().await?,
            UndoAction::Enable => bitmap.set_records(true).await?,
            UndoAction::Disable => bitmap.set_records(false).await?,
            UndoAction::SetDirty(ranges) => bitmap.set(ranges).await?,
            UndoAction::Restore(_) | UndoAction::Nothing => {}
        }
        Ok(())
    }
}

/// A command that changes a bitmap.
pub(super) async fn change(daemon: Rc<Daemon>, change: Change) -> Result<(), Failure> {
    daemon.wait_for_answers(&change.nodes()).await?;
    let parts = daemon.parts.lock().await;
    match &change {
        // Nothing comes behind that for which it would have to be had back.
        Change::Remove(named) => named.find(&daemon, &parts.nodes).await?.0.remove().await?,
        change => drop(change.make(&daemon, &parts.nodes).await?),
    }
    Ok(())
}

/// `x-debug-block-dirty-bitmap-sha256`.
pub(super) async fn sha256(daemon: Rc<Daemon>, named: BitmapRef) -> Outcome {
    daemon
        .wait_for_answers(std::slice::from_ref(&named.node))
        .await?;
    let parts = daemon.parts.lock().await;
    let (bitmap, _) = named.look_up(&parts.nodes).await?;
    let digest = bitmap.read().await?.sha256();
    let text: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(json!({"sha256": text}))
}
