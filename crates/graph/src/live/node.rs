//! [`Node`]: one of the graph's, with what is noted of it.

use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Result};
use vellum_jobs::live::Moment;
use vellum_options::OpenFlags;

use crate::live::node_bitmaps::NodeBitmaps;
use crate::live::uses::{RequiredAccess, User};
use crate::node::errors::{MADE_UP, unavailable};
use crate::node::file_node::CommonOptions;
use crate::node::opened::{NodeKind, OpenedNode};
use crate::node::origin::Origin;

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) opened: OpenedNode,
    /// The node that it was made with, which owns it: itself, if it was asked for.
    pub(crate) owner: String,
    /// The one device that all its users share.
    pub(crate) device: Option<Arc<dyn BlockDevice>>,
    /// What users see in its place while a job watches it.
    pub(crate) front: Option<Arc<dyn BlockDevice>>,
    pub(crate) origin: Option<Arc<Origin>>,
    pub(crate) bitmaps: NodeBitmaps,
    /// While it is opened anew: what it keeps of the moment at which it was made.
    pub(crate) moment: Option<Arc<Moment>>,
    /// What it said that it stands on when it was opened.
    pub(crate) backing_text: Option<String>,
    /// A job has put it in front of another one.
    pub(crate) is_filter: bool,
    /// It was opened by a job, which opens it again where that is begun anew.
    pub(crate) is_of_job: bool,
    /// It is not open: it could neither be opened anew nor as it was.
    pub(crate) is_lost: bool,
    /// The number that its next child gets, where children come and go and one has.
    pub(crate) next_child: Option<u64>,
}

impl Node {
    /// The device that all users share; the file below is locked with the first.
    pub(crate) fn device(&mut self) -> Result<Arc<dyn BlockDevice>> {
        if let Some(device) = &self.device {
            return Ok(device.clone());
        }
        let device = self.opened.clone();
        let device = device.into_device_at_once(&OpenFlags::default())?;
        self.device = Some(device.clone());
        Ok(device)
    }

    pub(crate) fn is_inactive(&self) -> bool {
        let origin = self.origin.as_ref();
        origin.is_some_and(|origin| origin.flags.inactive)
    }

    /// Whether it is writable, or would be if it were active.
    pub(crate) fn is_writable_when_active(&self) -> bool {
        if !self.is_inactive() {
            return self.opened.writable;
        }
        let common = self.origin.as_ref().map(|origin| {
            let mut flags = origin.flags.clone();
            flags.inactive = false;
            CommonOptions::of(&origin.options, &flags)
        });
        matches!(common, Some(Ok(common)) if common.writable)
    }

    /// Refuses a use that changes an inactive node. An export that may have such a node has it
    /// read-only.
    pub(crate) fn check_access(&self, user: &User, wanted: &RequiredAccess) -> Result<()> {
        let changes = wanted.changes;
        match self.is_inactive() {
            true if changes.size => Err(unavailable("resize")),
            true if changes.content && user.is_job() => Err(unavailable("write")),
            _ => Ok(()),
        }
    }
}

impl Node {
    /// Whether it may have bitmaps, of its image's or its own; no file is asked.
    pub(crate) fn may_have_bitmaps(&self) -> bool {
        self.stores_bitmaps() || !self.is_filter && !self.bitmaps.recorder.is_empty()
    }

    /// Whether it is an image that holds bitmaps; no file is asked.
    pub(crate) fn stores_bitmaps(&self) -> bool {
        match &self.opened.kind {
            NodeKind::Device(device) if self.opened.driver.name == "qcow2" => {
                let image = device.as_qcow2();
                image.is_some_and(|image| !image.bitmaps().are_none())
            }
            _ => false,
        }
    }

    /// Whether it shows another node, with something done on the way.
    pub(crate) fn is_filter_driver(&self) -> bool {
        self.opened.driver.is_filter
    }

    /// Whether it is its header, which says `text`, that names the node which it stands on.
    pub(crate) fn stands_by_header(&self, text: Option<&str>, backing: &str) -> bool {
        let options = self.origin.as_ref().map(|origin| &origin.options);
        backing.starts_with(MADE_UP)
            && text.is_some()
            && text == self.backing_text.as_deref()
            && options.is_some_and(|options| !options.keys().any(names_backing))
    }
}

fn names_backing(key: &str) -> bool {
    key == "backing" || key.starts_with("backing.")
}
