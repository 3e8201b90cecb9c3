//! Commands that make and change nodes.

use std::rc::Rc;

use vellum_graph::live::{Changes, RequiredAccess, Turns, User};
use vellum_options::Options;

use crate::daemon::Daemon;
use crate::qmp::{Arguments, Failure};
use crate::schema::check::{Notation, check_blockdev};

use super::answers::no_device;
use super::request::request;

/// Takes the options of a node.
pub(super) fn take_options(arguments: Arguments) -> Result<Options, Failure> {
    check_blockdev(&arguments.to_value(), Notation::Json).map_err(Failure::new)?;
    arguments.into_options()
}

/// `blockdev-add`: a node of a client.
pub(super) async fn add(daemon: Rc<Daemon>, options: Options) -> Result<(), Failure> {
    open(daemon, options, Origin::Client).await
}

/// Opens a disk of the configuration.
pub(crate) async fn add_disk(daemon: Rc<Daemon>, options: Options) -> Result<(), Failure> {
    open(daemon, options, Origin::Config).await
}

/// Who asks for a node.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    Client,
    Config,
}

async fn open(daemon: Rc<Daemon>, options: Options, origin: Origin) -> Result<(), Failure> {
    let name = options.get_text("node-name").map(str::to_owned);
    let opening = daemon.nodes.open_new(options, Turns::Own);
    let new = daemon.open_beside(opening).await?;
    let parts = daemon.parts.lock().await;
    daemon.show(new).await?;
    // Users of a client's older node of that name were led elsewhere, those of this one were not. A disk
    // of the configuration comes back as the one that they were led from.
    if let (Origin::Client, Some(name)) = (origin, name) {
        parts.nodes.take_step(&name);
    }
    Ok(())
}

pub(crate) async fn del(daemon: Rc<Daemon>, name: String) -> Result<(), Failure> {
    daemon.parts.lock().await.nodes.check_removal(&name)?;
    // A server may not answer for as long as it likes, and no other command waits for it.
    daemon.nodes.flush_all(std::slice::from_ref(&name)).await;
    let parts = daemon.parts.lock().await;
    parts.nodes.check_removal(&name)?;
    // The node goes whatever its end brings, as in QEMU: an error would say that it is there.
    if let Err(error) = parts.nodes.close_root(&name).await {
        parts.notices.of_loss(&name, &error);
    }
    Ok(())
}

request! {
    /// `blockdev-set-active`.
    pub(super) Activity {
        node: Option<String> = |a| a.text("node-name"),
        active: bool = |a| a.need_switch("active"),
    }
}

/// Makes a node, or every one, active or inactive.
pub(super) async fn set_active(daemon: Rc<Daemon>, request: Activity) -> Result<(), Failure> {
    let Activity { node: name, active } = request;
    // They are opened anew.
    let affected = daemon.nodes.affected_by_activity(name.as_deref(), active)?;
    daemon.wait_for_answers(&affected).await?;
    daemon.nodes.flush_all(&affected).await;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    let affected = nodes.affected_by_activity(name.as_deref(), active)?;
    if !active && parts.exports.need_active(nodes, &affected) {
        return Err(Failure::new(
            "Failed to inactivate node: Operation not permitted",
        ));
    }
    nodes.set_activity(&affected, active).await?;
    Ok(())
}

/// Makes durable what was written to a node, as its clients can ask for themselves.
pub(super) async fn flush(daemon: Rc<Daemon>, name: String) -> Result<(), Failure> {
    let device = daemon.parts.lock().await.nodes.device(&name)?;
    if !device.info().read_only {
        device.flush().await?;
    }
    Ok(())
}

request! {
    /// `block_resize`.
    pub(super) Resize {
        device: Option<String> = |a| a.text("device"),
        node: Option<String> = |a| a.text("node-name"),
        size: i64 = |a| a.need_number("size"),
    }
}

pub(super) async fn resize(daemon: Rc<Daemon>, request: Resize) -> Result<(), Failure> {
    let Resize { device, node, size } = request;
    daemon.wait_for_answers(node.as_slice()).await?;
    let parts = daemon.parts.lock().await;
    let name = match (device, node) {
        (Some(device), None) => {
            return Err(no_device(&device));
        }
        (_, node) => node.unwrap_or_default(),
    };
    let device = parts.nodes.device(&name)?;
    let Ok(size_bytes) = u64::try_from(size) else {
        return Err(Failure::new("Parameter 'size' expects a >0 size"));
    };
    parts.nodes.check_free(&name)?;
    if device.info().read_only && !parts.nodes.is_inactive(&name) {
        return Err(Failure::new("Block node is read-only"));
    }
    let resizing = RequiredAccess {
        role: "root".to_owned(),
        changes: Changes::SIZE,
        keeps: Changes::NONE,
    };
    // QEMU has a device of its own for it, which has no name.
    let joined = parts
        .nodes
        .join(User::Export(String::new()), &name, resizing)?;
    let resized = {
        let _turn = parts.exports.size_turns().take(&*device).await;
        parts.nodes.resize(&name, size_bytes).await
    };
    parts.nodes.leave(joined.id);
    parts.exports.update_sizes().await;
    resized?;
    Ok(())
}
