//! Snapshots of disks in use: an overlay over a node, or one inside its image.

use std::rc::Rc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};
use vellum::ErrorKind;
use vellum::qcow2::info::SnapshotInfo;
use vellum::qcow2::{AsQcow2, BackingName, NewSnapshot, SnapshotSelector};
use vellum_graph::change::Snapshot;
use vellum_graph::live::{NewNode, Turns, User, unknown, unknown_node};
use vellum_graph::{Nodes, foreign};
use vellum_images::create;
use vellum_options::create_options::CreateSettings;
use vellum_options::{Options, Scalar, error_text, filename};

use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure, Outcome};

use super::request::request;
use super::targets::changed_meanwhile;

/// The image that is put over a node.
#[derive(Debug)]
enum Overlay {
    /// The node of this name.
    Node(String),
    /// One that is opened for it.
    File {
        device: Option<String>,
        name: Option<String>,
        filename: String,
        format: String,
        exists: bool,
    },
    /// That one, open.
    Opened {
        new: NewNode,
        /// What its header names and how large that was, where it was made.
        below: Option<Below>,
    },
}

/// An overlay that is asked for: `blockdev-snapshot`, `blockdev-snapshot-sync`.
#[derive(Debug)]
pub(super) struct OverlayRequest {
    node: String,
    overlay: Overlay,
}

/// An overlay that users were led to.
#[derive(Debug)]
pub(super) struct MadeOverlay {
    snapshot: Snapshot,
    is_new: bool,
}

impl OverlayRequest {
    /// That of `blockdev-snapshot`.
    pub(super) fn take(mut arguments: Arguments) -> Result<OverlayRequest, Failure> {
        let node = arguments.need_text("node")?;
        let overlay = Overlay::Node(arguments.need_text("overlay")?);
        arguments.finish()?;
        Ok(OverlayRequest { node, overlay })
    }

    /// That of `blockdev-snapshot-sync`.
    pub(super) fn take_new(mut arguments: Arguments) -> Result<OverlayRequest, Failure> {
        let device = arguments.text("device")?;
        let node = arguments.text("node-name")?;
        let filename = arguments.need_text("snapshot-file")?;
        let name = arguments.text("snapshot-node-name")?;
        let format = arguments.text("format")?;
        let modes = [("existing", true), ("absolute-paths", false)];
        let exists = arguments.choice("mode", &modes)?.unwrap_or(false);
        arguments.finish()?;
        Ok(OverlayRequest {
            node: node.unwrap_or_default(),
            overlay: Overlay::File {
                device,
                name,
                filename,
                format: format.unwrap_or_else(|| "qcow2".to_owned()),
                exists,
            },
        })
    }

    /// Whether it is opened for this.
    pub(super) fn is_new(&self) -> bool {
        matches!(self.overlay, Overlay::File { .. } | Overlay::Opened { .. })
    }

    /// The node that it is put over.
    pub(super) fn node(&self) -> &str {
        &self.node
    }

    /// The nodes that have to answer meanwhile.
    pub(super) fn nodes(&self) -> Vec<String> {
        let overlay = match &self.overlay {
            Overlay::Node(overlay) => Some(overlay.clone()),
            Overlay::File { .. } | Overlay::Opened { .. } => None,
        };
        [self.node.clone()].into_iter().chain(overlay).collect()
    }

    /// Opens an overlay of its own, before what there is is held. With turns of its own, the node may not
    /// be there yet: another action of the same transaction may put it over one.
    pub(super) async fn open(&mut self, nodes: &Nodes, turns: Turns) -> Result<(), Failure> {
        let Overlay::File {
            device,
            name,
            filename,
            format,
            exists,
        } = &self.overlay
        else {
            return Ok(());
        };
        if turns == Turns::Own && !nodes.contains(&self.node) {
            return Ok(());
        }
        check_node(nodes, device.as_deref(), &self.node)?;
        let Some(name) = name else {
            return Err(Failure::new("New overlay node-name missing"));
        };
        if nodes.contains(name) {
            return Err(Failure::new("New overlay node-name already in use"));
        }
        let mut below = None;
        if !exists {
            let found = {
                let _turn = nodes.take_turn_as(turns).await;
                Below::of(nodes, &self.node)?
            };
            let settings = settings_over(&found, filename, format)?;
            create::make(filename, format, &settings).await?;
            below = Some(found);
        }
        let new = nodes.open_new(describe(name, filename, format)?, turns);
        let new = new.await?;
        self.overlay = Overlay::Opened { new, below };
        Ok(())
    }

    /// Has the users of the node use the overlay. Whoever calls it holds the parts of the daemon.
    pub(super) async fn make(mut self, daemon: &Daemon) -> Result<MadeOverlay, Failure> {
        let nodes = &daemon.nodes;
        self.open(nodes, Turns::Held).await?;
        let OverlayRequest { node, overlay } = self;
        let (overlay, is_new) = match overlay {
            Overlay::Node(overlay) => (overlay, false),
            Overlay::Opened { new, below } => {
                let now = below.as_ref().map(|_| Below::of(nodes, &node));
                if now.transpose()? != below {
                    let _ = new.discard().await;
                    return Err(changed_meanwhile(&node));
                }
                let overlay = new.name().to_owned();
                daemon.show(new).await?;
                (overlay, true)
            }
            Overlay::File { .. } => return Err(unknown(&node).into()),
        };
        match nodes.snapshot(&node, &overlay).await {
            Ok(snapshot) => Ok(MadeOverlay { snapshot, is_new }),
            Err(error) => {
                if is_new {
                    // Nobody has used it.
                    let _ = nodes.remove(&overlay).await;
                }
                Err(error.into())
            }
        }
    }
}

impl MadeOverlay {
    /// The users stay with the overlay: the node is only read from now on, as in QEMU.
    pub(super) async fn settle(&self, nodes: &Nodes) {
        nodes.stop_writing(self.snapshot.node()).await;
    }

    /// Has the users use the node again, who have written nothing since.
    ///
    /// # Errors
    /// What cannot be taken back stays: the overlay shows the same, and what is written from then on. No
    /// bitmap of the node notes that: where exports show one, all is dirty.
    pub(super) async fn undo(self, nodes: &Nodes) -> Result<(), Failure> {
        let (node, overlay) = (self.snapshot.node(), self.snapshot.overlay());
        let Err(error) = self.snapshot.undo(nodes).await else {
            if self.is_new {
                let _ = nodes.remove(overlay).await;
            }
            return Ok(());
        };
        let why = error_text(&error);
        if nodes.led_to(node).as_deref() != Some(overlay) {
            return Err(Failure::new(format!(
                "the node '{overlay}' is still there, and stands on '{node}': {why}"
            )));
        }
        nodes.show_all_dirty(node);
        Err(Failure::new(format!(
            "the snapshot of '{node}' could not be taken back, its users are on '{overlay}': {why}"
        )))
    }
}

/// Refuses a node that nothing can be put over.
fn check_node(nodes: &Nodes, device: Option<&str>, node: &str) -> Result<(), Failure> {
    // There are no devices here, only nodes.
    if device.is_some() || !nodes.contains(node) {
        return Err(Failure::new(format!(
            "Cannot find device='{}' nor node-name='{node}'",
            device.unwrap_or_default()
        )));
    }
    Ok(nodes.check_free(node)?)
}

/// What an image that is made stands on.
#[derive(Debug, PartialEq, Eq)]
struct Below {
    name: BackingName,
    size_bytes: u64,
}

impl Below {
    /// That node.
    fn of(nodes: &Nodes, node: &str) -> Result<Below, Failure> {
        Ok(Below {
            name: nodes.as_backing(node)?,
            size_bytes: nodes.device(node)?.size_bytes(),
        })
    }
}

/// What an image is made with that stands on another one.
fn settings_over(below: &Below, filename: &str, format: &str) -> Result<CreateSettings, Failure> {
    let mut settings = match create::settings(filename, format) {
        Ok(settings) => settings,
        Err(error) if error.kind() == ErrorKind::InvalidArgument => {
            let known = vellum_graph::driver_names().contains(&format);
            return Err(match known {
                true => error.into(),
                false => Failure::new(format!("Unknown file format '{format}'")),
            });
        }
        Err(error) => return Err(error.into()),
    };
    let (name, kind) = (&below.name.name, below.name.format.as_deref());
    create::set_backing(&mut settings, format, Some(name), kind)?;
    settings.set("size", &below.size_bytes.to_string())?;
    Ok(settings)
}

/// The options of an overlay that stands on nothing yet.
fn describe(name: &str, filename: &str, format: &str) -> Result<Options, Failure> {
    let mut options = Options::new();
    options.set_text("driver", format);
    options.set_text("node-name", name);
    options.set_group("file", filename::node_options(filename)?);
    if format == "qcow2" || foreign::has_backing(format) {
        options.set("backing", Scalar::Null);
    }
    Ok(options)
}

pub(super) async fn overlay(
    daemon: Rc<Daemon>,
    mut request: OverlayRequest,
) -> Result<(), Failure> {
    daemon
        .open_beside(request.open(&daemon.nodes, Turns::Own))
        .await?;
    daemon.wait_for_answers(&request.nodes()).await?;
    let parts = daemon.parts.lock().await;
    let made = request.make(&daemon).await?;
    made.settle(&parts.nodes).await;
    Ok(())
}

request! {
    /// A snapshot inside an image: `blockdev-snapshot-internal-sync`.
    #[derive(Debug)]
    pub(super) InternalRequest {
        device: String = |a| a.need_text("device"),
        name: String = |a| a.need_text("name"),
    }
}

/// A snapshot that was made inside an image.
#[derive(Debug)]
pub(super) struct MadeInternal {
    device: String,
    id: String,
}

/// The node of this name, on which no other one stands.
fn check_root(nodes: &Nodes, name: &str) -> Result<(), Failure> {
    if !nodes.contains(name) {
        return Err(unknown(name).into());
    }
    match nodes.is_used_by(name, |user| matches!(user, User::Node(_))) {
        true => Err(Failure::new("Need a root block node")),
        false => Ok(()),
    }
}

impl InternalRequest {
    /// The node that it is taken of.
    pub(super) fn node(&self) -> &str {
        &self.device
    }

    /// Takes the snapshot while no request runs: all that was written is in it.
    pub(super) async fn make(self, nodes: &Nodes) -> Result<MadeInternal, Failure> {
        let InternalRequest { device: node, name } = self;
        check_root(nodes, &node)?;
        nodes.check_free(&node)?;
        let device = nodes.device(&node)?;
        let info = device.info();
        if info.read_only {
            return Err(Failure::new(format!("Device '{node}' is read only")));
        }
        let Some(image) = device.as_qcow2() else {
            return Err(Failure::new(format!(
                "Block format '{}' used by device '{node}' does not support internal snapshots",
                info.format
            )));
        };
        if name.is_empty() {
            return Err(Failure::new("Name is empty"));
        }
        if image.snapshots().iter().any(|one| one.name == name) {
            return Err(Failure::new(format!(
                "Snapshot with name '{name}' already exists on device '{node}'"
            )));
        }
        let _held = nodes.drain(&node).await?;
        nodes.flush(&node).await?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default();
        let new = NewSnapshot {
            name,
            date_seconds: now.as_secs() as u32,
            date_nanoseconds: now.subsec_micros() * 1000,
            // No guest runs here; QEMU's daemon takes the time of day as well.
            vm_clock_nanoseconds: now.as_nanos() as u64,
            ..NewSnapshot::default()
        };
        let id = image.create_snapshot(new).await?.id;
        Ok(MadeInternal { device: node, id })
    }
}

impl MadeInternal {
    /// Deletes the snapshot again.
    pub(super) async fn undo(self, nodes: &Nodes) {
        let Ok(device) = nodes.device(&self.device) else {
            return;
        };
        if let Some(image) = device.as_qcow2() {
            // What cannot be deleted stays; it is in nobody's way.
            let _ = image.delete_snapshot(SnapshotSelector::Id(self.id)).await;
        }
    }
}

pub(super) async fn internal(daemon: Rc<Daemon>, request: InternalRequest) -> Result<(), Failure> {
    daemon
        .wait_for_answers(std::slice::from_ref(&request.device))
        .await?;
    let parts = daemon.parts.lock().await;
    request.make(&parts.nodes).await?;
    Ok(())
}

fn to_json(snapshot: &SnapshotInfo) -> Value {
    let clock = snapshot.vm_clock_nanoseconds;
    let mut value = json!({
        "id": snapshot.id,
        "name": snapshot.name,
        "vm-state-size": snapshot.vm_state_size_bytes,
        "date-sec": snapshot.date_seconds,
        "date-nsec": snapshot.date_nanoseconds,
        "vm-clock-sec": clock / 1_000_000_000,
        "vm-clock-nsec": clock % 1_000_000_000,
    });
    if let Some(icount) = snapshot.icount {
        value["icount"] = json!(icount);
    }
    value
}

request! {
    /// `blockdev-snapshot-delete-internal-sync`.
    pub(super) InternalRemoval {
        device: String = |a| a.need_text("device"),
        id: Option<String> = |a| a.text("id"),
        name: Option<String> = |a| a.text("name"),
    }
}

pub(super) async fn delete_internal(daemon: Rc<Daemon>, request: InternalRemoval) -> Outcome {
    let InternalRemoval {
        device: node,
        id,
        name,
    } = request;
    daemon.wait_for_answers(std::slice::from_ref(&node)).await?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    check_root(nodes, &node)?;
    let selector = match (id.clone(), name.clone()) {
        (None, None) => return Err(Failure::new("Name or id must be provided")),
        (Some(id), None) => SnapshotSelector::Id(id),
        (None, Some(name)) => SnapshotSelector::Name(name),
        (Some(id), Some(name)) => SnapshotSelector::IdAndName { id, name },
    };
    nodes.check_free(&node)?;
    let device = nodes.device(&node)?;
    let Some(image) = device.as_qcow2() else {
        let text = "Failed to get a snapshot list: Operation not supported";
        return Err(Failure::new(text));
    };
    let is_it = |one: &SnapshotInfo| {
        id.as_ref().is_none_or(|id| one.id == *id)
            && name.as_ref().is_none_or(|name| one.name == *name)
    };
    let Some(found) = image.snapshots().into_iter().find(is_it) else {
        let null = || "null".to_owned();
        return Err(Failure::new(format!(
            "Snapshot with id '{}' and name '{}' does not exist on device '{node}'",
            id.unwrap_or_else(null),
            name.unwrap_or_else(null)
        )));
    };
    if device.info().read_only {
        return Err(Failure::new(format!("Device '{node}' is readonly")));
    }
    image.delete_snapshot(selector).await?;
    Ok(to_json(&found))
}

request! {
    /// `change-backing-file`.
    pub(super) BackingChange {
        device: String = |a| a.need_text("device"),
        image: String = |a| a.need_text("image-node-name"),
        file: String = |a| a.need_text("backing-file"),
    }
}

pub(super) async fn change_backing_file(
    daemon: Rc<Daemon>,
    request: BackingChange,
) -> Result<(), Failure> {
    let BackingChange {
        device,
        image,
        file,
    } = request;
    daemon
        .wait_for_answers(std::slice::from_ref(&image))
        .await?;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    check_root(nodes, &device)?;
    if !nodes.contains(&image) {
        return Err(unknown_node(&image).into());
    }
    if nodes.backing_of(&image).is_none() {
        return Err(Failure::new(
            "not allowing backing file change on an image without a backing file",
        ));
    }
    if !nodes.chain(&device).contains(&image) {
        return Err(Failure::new(format!(
            "'{device}' and image file are not in the same chain"
        )));
    }
    nodes.check_no_job(&image)?;
    let was_read_only = nodes.device(&image)?.info().read_only;
    nodes.set_writable(&image, true).await?;
    let changed = nodes.rename_backing(&image, &file).await;
    if was_read_only {
        let restored = nodes.set_writable(&image, false).await;
        changed?;
        restored?;
    } else {
        changed?;
    }
    Ok(())
}
