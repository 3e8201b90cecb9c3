//! Nodes of a graph: each is a driver with options, and stands on other nodes.
//!
//! A node is a storage (protocols, and filters over them) or a device (formats); each
//! can be used as the other. Which drivers there are says [`crate::drivers`].
//!
//! Invariant: a file is locked once it is known what it is used for: by the format
//! that stands on it, with as many filters in between as there may be, or by whoever
//! uses the node itself.

use std::sync::Arc;

use tracing::trace;
use vellum::detect_zeroes::ZeroDetector;
use vellum::nodes::{DeviceStorage, Filter};
use vellum::{BlockDevice, Error, ErrorKind, Raw, RawOptions, Result, Storage};
use vellum_options::{DetectZeroes, OpenFlags, Options, Scalar};

use crate::drivers::{self, Driver};
use crate::file_node::{CommonOptions, FileUse, UnlockedFile};
use crate::gate::FilePolicy;
use crate::nodes::{Origin, inactive_child};
use crate::open::{self, Ancestry};

/// What a missing driver means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The format is found out from the content.
    Image,
    /// It is a file.
    Protocol,
}

/// What is around a node that is being opened.
#[derive(Debug, Clone)]
pub struct OpenContext {
    /// How images are opened.
    pub flags: OpenFlags,
    /// How files are opened.
    pub policy: FilePolicy,
    /// What it stands below, and the nodes that it may name.
    pub place: Ancestry,
}

impl OpenContext {
    /// The same for whoever opens the node later.
    fn for_later(&self) -> OpenContext {
        let mut around = self.clone();
        around.place.kept.clear();
        around.place.restored = false;
        around.place.shown();
        around
    }
}

/// What a driver opens a node as.
#[derive(Debug, Clone)]
pub(crate) enum NodeKind {
    Storage(Arc<dyn Storage>),
    Device(Arc<dyn BlockDevice>),
}

/// An open node.
#[derive(Debug, Clone)]
pub struct OpenedNode {
    /// The name of its driver.
    pub driver: &'static str,
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

pub(crate) fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

impl OpenedNode {
    /// A file on another machine, to be read: nothing here protects it.
    pub(crate) fn remote(driver: &'static str, storage: Arc<dyn Storage>) -> OpenedNode {
        OpenedNode {
            driver,
            kind: NodeKind::Storage(storage),
            filtered: None,
            files: Vec::new(),
            writable: false,
        }
    }

    /// A format, whose files are locked.
    pub(crate) fn device(driver: &'static str, device: Arc<dyn BlockDevice>) -> OpenedNode {
        OpenedNode {
            driver,
            writable: !device.info().read_only,
            kind: NodeKind::Device(device),
            filtered: None,
            files: Vec::new(),
        }
    }

    /// A filter over this node.
    pub(crate) fn filter(self, driver: &'static str, storage: Arc<dyn Storage>) -> OpenedNode {
        let is_debugger = driver == "blkdebug";
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
                let raw = Raw::open_as(self.driver, storage, options)?;
                Ok(match self.filtered {
                    Some(below) if below.may_refuse_status => Filter::new(raw, below.device),
                    Some(below) => Filter::passing_status(raw, below.device),
                    None => raw,
                })
            }
        }
    }
}

/// Opens a node with everything below it.
///
/// # Errors
/// If an option is wrong or unknown, or something below cannot be opened.
pub async fn open(mut options: Options, role: Role, around: &OpenContext) -> Result<OpenedNode> {
    let around = &with_activity(&mut options, around)?;
    let place = &around.place;
    let node_name = match options.get_text("node-name") {
        None if place.names_all() => Some(place.nodes.make_up_name()),
        given => given.map(str::to_owned),
    };
    let origin = place.names_all().then(|| Origin {
        options: options.clone(),
        role,
        around: around.for_later(),
    });
    let driver = match (options.take_text("driver")?, role) {
        (Some(name), _) => Some(drivers::find(&name)?),
        (None, Role::Protocol) => Some(drivers::of_file(options.get_text("filename"))?),
        (None, Role::Image) => None,
    };
    let detect_zeroes = take_detect_zeroes(&mut options)?;
    let common = CommonOptions::take(&mut options, &around.flags)?;
    if detect_zeroes == DetectZeroes::Unmap && !common.discard {
        return Err(invalid(
            "setting detect-zeroes to unmap is not allowed without setting discard operation to \
             unmap",
        ));
    }
    let claimed = node_name.as_deref().map(|name| place.claim_name(name));
    let _claimed = claimed.transpose()?;
    let below = OpenContext {
        flags: common.child_flags(&around.flags),
        policy: around.policy.clone(),
        place: place.inside(node_name.as_deref()),
    };
    let filename = options.get_text("filename").map(str::to_owned);
    let opened = match driver {
        Some(Driver { open, .. }) => open(options, common, below).await?,
        None => Box::pin(open::open_format(None, options, common, below)).await?,
    };
    trace!(
        name: "bdrv_open_common",
        node = node_name,
        filename,
        format_name = opened.driver,
        writable = opened.writable
    );
    let opened = detecting(opened, detect_zeroes, around).await?;
    let opened = match place.own_name(node_name.as_deref()) {
        Some(name) => place.nodes.watched(name, place.renewal, opened),
        None => opened,
    };
    if let Some(name) = node_name {
        let opened = place.name(&name, opened, origin)?;
        return Ok(match place.nodes.is_kept(&name) {
            true => opened.borrowed(),
            false => opened,
        });
    }
    Ok(opened)
}

/// How a node is opened that may be inactive. One that is opened anew stays what it is.
fn with_activity(options: &mut Options, around: &OpenContext) -> Result<OpenContext> {
    let mut around = around.clone();
    if around.place.nodes.are_live() {
        let active = options.take_bool("active")?;
        match (active, &around.place.parent) {
            _ if around.place.renewal => {}
            (Some(false), Some(above)) if !around.flags.inactive => {
                let name = options.get_text("node-name").unwrap_or_default();
                return Err(inactive_child(name, "file", above));
            }
            // What its options describe below a node is as active as that is.
            (None, _) | (_, Some(_)) => {}
            (Some(active), None) => around.flags.inactive = !active,
        }
    }
    Ok(around)
}

fn take_detect_zeroes(options: &mut Options) -> Result<DetectZeroes> {
    match options.take_text("detect-zeroes")? {
        None => Ok(DetectZeroes::Off),
        Some(name) => DetectZeroes::parse(&name)
            .ok_or_else(|| invalid(format!("invalid parameter value: {name}"))),
    }
}

async fn detecting(
    opened: OpenedNode,
    detect_zeroes: DetectZeroes,
    around: &OpenContext,
) -> Result<OpenedNode> {
    let unmap = match detect_zeroes {
        DetectZeroes::Off => return Ok(opened),
        DetectZeroes::On => false,
        DetectZeroes::Unmap => true,
    };
    let driver = opened.driver;
    let device = ZeroDetector::new(opened.into_device(&around.flags).await?, unmap);
    Ok(OpenedNode::device(driver, device))
}

/// The child of a node that its options describe under `key`, or name there.
/// `None` if they do neither.
pub(crate) async fn optional_child(
    options: &mut Options,
    key: &str,
    role: Role,
    around: &OpenContext,
) -> Result<Option<OpenedNode>> {
    child_at(options, (key, false), role, around).await
}

/// As [`optional_child`], for one who may stand on it behind a link.
async fn child_at(
    options: &mut Options,
    (key, exchangeable): (&str, bool),
    role: Role,
    around: &OpenContext,
) -> Result<Option<OpenedNode>> {
    let group = options.take_group(key);
    match options.take(key) {
        Some(Scalar::Text(name)) => {
            let _turn = around.place.take_turn().await;
            let node = around.place.nodes.referred(&around.place, &name)?;
            around.place.check_activity(&name, key, &around.flags)?;
            let linked = exchangeable && around.place.nodes.is_linkable(&name, &node);
            let node = node.for_user(around.flags.writable)?;
            around.place.note_use(&name, key, linked)?;
            return Ok(Some(node));
        }
        Some(_) => {
            return Err(invalid(format!(
                "Invalid parameter type for '{key}', expected: string"
            )));
        }
        None => {}
    }
    if group.is_empty() {
        return Ok(None);
    }
    let around = OpenContext {
        place: around.place.child(key),
        ..around.clone()
    };
    Box::pin(open(group, role, &around)).await.map(Some)
}

/// As [`optional_child`]; there must be one.
pub(crate) async fn child(
    options: &mut Options,
    key: &str,
    role: Role,
    around: &OpenContext,
) -> Result<OpenedNode> {
    let found = optional_child(options, key, role, around).await?;
    found.ok_or_else(|| missing(key))
}

/// As [`child`], for a filter under which a node of a format that others know too can be exchanged.
pub(crate) async fn exchangeable_child(
    options: &mut Options,
    key: &str,
    role: Role,
    around: &OpenContext,
) -> Result<OpenedNode> {
    let found = child_at(options, (key, true), role, around).await?;
    let found = found.ok_or_else(|| missing(key))?;
    around.place.nodes.linked(&around.place, key, found)
}

/// The refusal of a node without a child that it needs.
pub(crate) fn missing(key: &str) -> Error {
    invalid(format!("A block device must be specified for \"{key}\""))
}

/// Refuses options that a protocol or filter has not taken.
///
/// # Errors
/// If there is one.
pub fn refuse_unknown(options: &Options, driver: &str) -> Result<()> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => Err(invalid(format!(
            "Block protocol '{driver}' doesn't support the option '{key}'"
        ))),
    }
}
