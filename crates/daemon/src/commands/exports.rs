//! Commands about exports, and the server that they are served by.

use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use futures_util::future::select;
use serde_json::{Value, json};
use vellum_graph::live::unknown;
use vellum_io::lane::sleep;
use vellum_options::{Options, Scalar};

use crate::daemon::Daemon;
use crate::export::Removal;
use crate::qmp::{Arguments, Failure, Outcome};

/// So long does the removal of an export wait for its end.
const REMOVAL_PATIENCE: Duration = Duration::from_secs(1);

pub(crate) async fn add(daemon: Rc<Daemon>, options: Options) -> Result<(), Failure> {
    if let Some(why) = options
        .get_text("node-name")
        .and_then(|name| daemon.withheld(name))
    {
        return Err(Failure::new(why));
    }
    daemon
        .wait_for_answers(&asked_for_bitmaps(&options))
        .await?;
    let mut parts = daemon.parts.lock().await;
    parts.add_export(options).await?;
    Ok(())
}

/// The nodes whose images are asked for bitmaps that an export is to show.
fn asked_for_bitmaps(options: &Options) -> Vec<String> {
    let bitmaps = || options.keys().filter(|key| key.starts_with("bitmaps."));
    let others = bitmaps().filter(|key| key.ends_with(".node"));
    let own = bitmaps().take(1).map(|_| "node-name");
    let names = own.chain(others).filter_map(|key| options.get_text(key));
    names.map(str::to_owned).collect()
}

/// `block-export-del`.
pub(crate) struct ExportRemoval {
    pub(crate) id: String,
    pub(crate) removal: Removal,
}

impl ExportRemoval {
    /// The older command says `name` for the id.
    pub(super) fn take(mut arguments: Arguments, key: &str) -> Result<ExportRemoval, Failure> {
        let id = arguments.need_text(key)?;
        let modes = [("safe", Removal::Safe), ("hard", Removal::Hard)];
        let removal = arguments.choice("mode", &modes)?.unwrap_or(Removal::Safe);
        arguments.finish().map(|()| ExportRemoval { id, removal })
    }
}

pub(crate) async fn del(daemon: Rc<Daemon>, request: ExportRemoval) -> Result<(), Failure> {
    let ExportRemoval { id, removal } = request;
    let mut parts = daemon.parts.lock().await;
    let ended = parts.begin_removal(&id, removal)?;
    drop(parts);
    // Most have ended by then, and whoever asked may go on to remove the node. A disk that does
    // not answer keeps no monitor waiting.
    select(pin!(ended), pin!(sleep(REMOVAL_PATIENCE))).await;
    Ok(())
}

pub(super) async fn query(daemon: Rc<Daemon>, (): ()) -> Outcome {
    let parts = daemon.parts.lock().await;
    let exports = parts.exports.list(&parts.nodes).into_iter();
    let exports = exports.map(|export| {
        json!({
            "id": export.id,
            "node-name": export.node,
            "type": export.kind,
            "shutting-down": export.shutting_down,
        })
    });
    Ok(exports.collect::<Vec<Value>>().into())
}

/// Takes the arguments of `nbd-server-start` as those of `--nbd-server`.
pub(crate) fn take_server(mut arguments: Arguments) -> Result<Options, Failure> {
    let address = take_address(arguments.need_object("addr")?)?;
    let mut options = arguments.into_options()?;
    options.set_group("addr", address);
    Ok(options)
}

pub(crate) async fn nbd_server_start(daemon: Rc<Daemon>, options: Options) -> Result<(), Failure> {
    let mut parts = daemon.parts.lock().await;
    parts.add_server(options)?;
    parts.start_server();
    Ok(())
}

/// An address of the old form, `{"type": T, "data": {...}}`, flat as that of `--nbd-server`.
fn take_address(mut address: Arguments) -> Result<Options, Failure> {
    let kind = address.need_text("type")?;
    let data = address.need_object("data")?;
    address.finish()?;
    let mut options = data.into_options()?;
    options.set("type", Scalar::Text(kind));
    Ok(options)
}

pub(crate) async fn nbd_server_stop(daemon: Rc<Daemon>, (): ()) -> Result<(), Failure> {
    let mut parts = daemon.parts.lock().await;
    if parts.server.is_none() {
        return Err(Failure::new("NBD server not running"));
    }
    parts.end_server().await;
    Ok(())
}

/// The older way to export: the name is the id, and the device a node.
pub(super) struct OldExport {
    device: String,
    options: Options,
}

impl OldExport {
    pub(super) fn take(mut arguments: Arguments) -> Result<OldExport, Failure> {
        let device = arguments.need_text("device")?;
        let name = arguments.text("name")?.unwrap_or_else(|| device.clone());
        let bitmap = arguments.text("bitmap")?;
        let mut options = arguments.into_options()?;
        let is_known = |key: &str| matches!(key, "description" | "writable");
        if let Some(key) = options.keys().find(|key| !is_known(key)) {
            return Err(Failure::new(format!("Parameter '{key}' is unexpected")));
        }
        options.set_text("type", "nbd");
        options.set_text("id", &*name);
        options.set_text("name", name);
        options.set_text("node-name", &*device);
        if let Some(bitmap) = bitmap {
            options.set_text("bitmaps.0", bitmap);
        }
        Ok(OldExport { device, options })
    }
}

pub(super) async fn nbd_server_add(daemon: Rc<Daemon>, request: OldExport) -> Result<(), Failure> {
    if !daemon.parts.lock().await.nodes.contains(&request.device) {
        return Err(unknown(&request.device).into());
    }
    add(daemon, request.options).await
}
