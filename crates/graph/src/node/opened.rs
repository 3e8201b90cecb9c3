//! An open node: a storage (protocols, and filters over them) or a device (formats); each can be used as the other.
//!
//! Invariant: a file is locked once it is known what it is used for: by the format that stands on it, with as many
//! filters in between as there may be, or by whoever uses the node itself.

use std::sync::Arc;

use vellum::nodes::{DeviceStorage, Filter, RecordedDevice, RecordedStorage, Recorder};
use vellum::{BlockDevice, Raw, RawOptions, Result, Storage};
use vellum_options::OpenFlags;

use crate::node::backing_name;
use crate::node::driver::DriverFacts;
use crate::node::errors::invalid;
use crate::node::file_node::{FileUse, UnlockedFile};

/// What a driver opens a node as.
#[derive(Debug, Clone)]
pub(crate) enum NodeKind {
    Storage(Arc<dyn Storage>),
    Device(Arc<dyn BlockDevice>),
}

/// An open node.
#[derive(Debug, Clone)]
pub struct OpenedNode {
    /// What there is to know of its driver.
    pub driver: DriverFacts,
    pub(crate) kind: NodeKind,
    /// The device that a filter stands on, which knows where bytes lie.
    pub(crate) filtered: Option<Filtered>,
    /// Files below it that nothing protects from others yet.
    pub(crate) files: Vec<UnlockedFile>,
    pub(crate) writable: bool,
}

/// What a filter stands on.
#[derive(Debug, Clone)]
pub(crate) struct Filtered {
    pub(crate) device: Arc<dyn BlockDevice>,
    /// A filter in between may fail requests for the block status.
    may_refuse_status: bool,
}

impl OpenedNode {
    /// A file on another machine, to be read: nothing here protects it.
    pub(crate) fn remote(driver: DriverFacts, storage: Arc<dyn Storage>) -> OpenedNode {
        OpenedNode {
            driver,
            kind: NodeKind::Storage(storage),
            filtered: None,
            files: Vec::new(),
            writable: false,
        }
    }

    /// A format, whose files are locked.
    pub(crate) fn device(driver: DriverFacts, device: Arc<dyn BlockDevice>) -> OpenedNode {
        OpenedNode {
            driver,
            writable: !device.info().read_only,
            kind: NodeKind::Device(device),
            filtered: None,
            files: Vec::new(),
        }
    }

    /// A filter over this node.
    pub(crate) fn filter(self, driver: DriverFacts, storage: Arc<dyn Storage>) -> OpenedNode {
        let is_debugger = driver.name == "blkdebug";
        let filtered = match &self.kind {
            NodeKind::Device(device) => Some(Filtered {
                device: device.clone(),
                may_refuse_status: is_debugger,
            }),
            NodeKind::Storage(_) => self.filtered.clone().map(|below| Filtered {
                may_refuse_status: below.may_refuse_status || is_debugger,
                ..below
            }),
        };
        OpenedNode {
            driver,
            kind: NodeKind::Storage(storage),
            filtered,
            ..self
        }
    }

    /// The node as it is for one who writes to it or does not.
    ///
    /// # Errors
    /// If the node is read-only and `writable` is asked for.
    pub fn for_user(&self, writable: bool) -> Result<OpenedNode> {
        if writable && !self.writable {
            return Err(invalid("Block node is read-only"));
        }
        let files = self.files.iter().map(|file| file.for_user(writable));
        Ok(OpenedNode {
            files: files.collect::<Result<_>>()?,
            writable,
            ..self.clone()
        })
    }

    /// Protects the files below from others as `user` needs it.
    pub(crate) async fn lock(&mut self, flags: &OpenFlags, user: FileUse) -> Result<()> {
        for file in self.files.drain(..) {
            file.lock(flags, user).await?;
        }
        Ok(())
    }

    /// The node as a storage. Nothing is locked.
    pub fn storage(&self) -> Arc<dyn Storage> {
        match &self.kind {
            NodeKind::Storage(storage) => storage.clone(),
            NodeKind::Device(device) => DeviceStorage::new(device.clone()),
        }
    }

    /// The node as a storage under a format.
    ///
    /// # Errors
    /// If another process holds locks that forbid the use.
    pub async fn into_storage(
        mut self,
        flags: &OpenFlags,
        user: FileUse,
    ) -> Result<Arc<dyn Storage>> {
        self.lock(flags, user).await?;
        Ok(self.storage())
    }

    /// The node as a device.
    pub(crate) async fn into_device(mut self, flags: &OpenFlags) -> Result<Arc<dyn BlockDevice>> {
        self.lock(flags, FileUse::Raw).await?;
        self.locked_device()
    }

    /// As [`OpenedNode::into_device`], without waiting for locks of a process that was killed.
    pub(crate) fn into_device_at_once(mut self, flags: &OpenFlags) -> Result<Arc<dyn BlockDevice>> {
        for file in self.files.drain(..) {
            file.lock_at_once(flags, FileUse::Raw)?;
        }
        self.locked_device()
    }

    fn locked_device(self) -> Result<Arc<dyn BlockDevice>> {
        match self.kind {
            NodeKind::Device(device) => Ok(device),
            NodeKind::Storage(storage) => {
                let options = RawOptions::default().read_only(!self.writable);
                let raw = Raw::open_as(self.driver.name, storage, options)?;
                Ok(match self.filtered {
                    Some(below) if below.may_refuse_status => Filter::new(raw, below.device),
                    Some(below) => Filter::passing_status(raw, below.device),
                    None => raw,
                })
            }
        }
    }
}

impl NodeKind {
    /// Closes what a node is.
    pub(crate) async fn close(self) -> Result<()> {
        match self {
            NodeKind::Device(device) => device.close().await,
            NodeKind::Storage(storage) => storage.close().await,
        }
    }

    /// The name of its file, or of what else it shows.
    pub(crate) fn shown_name(&self) -> String {
        match self {
            NodeKind::Device(device) => device.info().name,
            NodeKind::Storage(storage) => storage.name().to_owned(),
        }
    }
}

impl OpenedNode {
    /// The node, changes of which are told to a recorder.
    pub(crate) fn recorded(self, recorder: &Arc<Recorder>) -> OpenedNode {
        let recorder = recorder.clone();
        let kind = match self.kind {
            NodeKind::Device(device) => NodeKind::Device(RecordedDevice::new(device, recorder)),
            NodeKind::Storage(storage) => {
                NodeKind::Storage(RecordedStorage::new(storage, recorder))
            }
        };
        OpenedNode { kind, ..self }
    }

    /// What an image says that it stands on.
    pub(crate) fn backing_text(&self) -> Option<String> {
        match &self.kind {
            NodeKind::Device(device) => backing_name::named(&**device).name,
            NodeKind::Storage(_) => None,
        }
    }

    /// Whether [`OpenedNode::backing_text`] is this.
    pub(crate) fn has_backing_text(&self, text: Option<&str>) -> bool {
        match &self.kind {
            NodeKind::Device(device) => backing_name::is_named(&**device, text),
            NodeKind::Storage(_) => text.is_none(),
        }
    }
}
