//! `x-blockdev-amend`: its options, checked before there is a job, as in QEMU.

use std::rc::Rc;

use vellum_graph::driver_names;
use vellum_graph::live::unknown_node;
use vellum_images::create_options::amend_options;
use vellum_options::create_options::CreateSettings;

use crate::daemon::Daemon;
use crate::jobs::amend::{Amend, SlotChange};
use crate::jobs::{JobNodes, Settings, kinds};
use crate::qmp::{Arguments, Failure};

use super::jobs;

/// `x-blockdev-amend`.
pub(super) struct AmendRequest {
    id: String,
    node: String,
    driver: String,
    change: Option<SlotChange>,
}

impl AmendRequest {
    pub(super) fn take(mut arguments: Arguments) -> Result<AmendRequest, Failure> {
        let id = arguments.need_text("job-id")?;
        let node = arguments.need_text("node-name")?;
        let mut options = arguments.need_object("options")?;
        let force = arguments.switch("force")?.unwrap_or(false);
        arguments.finish()?;
        let driver = options.need_text("driver")?;
        if !driver_names().contains(&driver.as_str()) {
            return Err(Failure::new(format!(
                "Parameter 'driver' does not accept value '{driver}'"
            )));
        }
        let change = match driver.as_str() {
            "luks" => Some(take_slots(options, "luks", "", force)?),
            "qcow2" => take_qcow2(options, force)?,
            _ => options.finish().map(|()| None)?,
        };
        Ok(AmendRequest {
            id,
            node,
            driver,
            change,
        })
    }
}

pub(super) async fn begin(daemon: Rc<Daemon>, request: AmendRequest) -> Result<(), Failure> {
    let AmendRequest {
        id,
        node,
        driver,
        change,
    } = request;
    let parts = daemon.parts.lock().await;
    let nodes = &parts.nodes;
    if !nodes.contains(&node) {
        return Err(unknown_node(&node).into());
    }
    if nodes.device(&node)?.info().format != driver {
        return Err(Failure::new(
            "x-blockdev-amend doesn't support changing the block driver",
        ));
    }
    if !matches!(driver.as_str(), "luks" | "qcow2") {
        return Err(Failure::new("Driver does not support x-blockdev-amend"));
    }
    nodes.check_no_job(&node)?;
    let settings = Settings {
        id,
        kind: kinds::AMEND,
        auto_finalize: true,
        auto_dismiss: false,
        filter: None,
    };
    let job = jobs::create(&daemon, (settings, 0))?;
    let prepared = Amend::prepare(JobNodes::new(nodes), &job, node, change).await;
    jobs::begin(&daemon, job, prepared)
}

fn take_qcow2(mut options: Arguments, force: bool) -> Result<Option<SlotChange>, Failure> {
    let encrypt = options.object("encrypt")?;
    options.finish()?;
    let Some(mut encrypt) = encrypt else {
        return Ok(None);
    };
    let formats = [("qcow", false), ("luks", true)];
    if encrypt.need_choice("format", &formats)? {
        return take_slots(encrypt, "qcow2", "encrypt.", force).map(Some);
    }
    encrypt.finish()?;
    Ok(Some(SlotChange {
        settings: settings_of("qcow2"),
        prefix: "encrypt.",
        unlocked_by: None,
        is_luks: false,
        force,
    }))
}

fn settings_of(format: &str) -> CreateSettings {
    CreateSettings::of(amend_options(format).unwrap_or_default().to_vec())
}

/// Takes what is to become of key slots.
fn take_slots(
    mut options: Arguments,
    format: &str,
    prefix: &'static str,
    force: bool,
) -> Result<SlotChange, Failure> {
    let mut settings = settings_of(format);
    let states = [("active", "active"), ("inactive", "inactive")];
    let state = options.need_choice("state", &states)?;
    settings.set(&format!("{prefix}state"), state)?;
    for key in ["new-secret", "old-secret"] {
        if let Some(value) = options.text(key)? {
            settings.set(&format!("{prefix}{key}"), &value)?;
        }
    }
    for key in ["keyslot", "iter-time"] {
        if let Some(value) = options.number(key)? {
            settings.set(&format!("{prefix}{key}"), &value.to_string())?;
        }
    }
    let unlocked_by = options.text("secret")?;
    options.finish()?;
    Ok(SlotChange {
        settings,
        prefix,
        unlocked_by,
        is_luks: true,
        force,
    })
}
