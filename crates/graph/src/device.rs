//! Opens images as QEMU's tools name them: an [`ImageSpec`] and [`OpenFlags`] in, a [`BlockDevice`] out.

use std::sync::Arc;

use vellum::detect_zeroes::ZeroDetector;
use vellum::nodes::CopyOnRead;
use vellum::{BlockDevice, Result, Storage};
use vellum_options::spec::is_protocol;
use vellum_options::{DetectZeroes, ImageSpec, OpenFlags, Source};

use crate::drivers;
use crate::live::nodes::Nodes;
use crate::node::errors::invalid;
use crate::node::file_node::{CommonOptions, FileUse};
use crate::node::file_policy::FilePolicy;
use crate::node::origin::Role;
use crate::node::place::NodePlace;
use crate::open::context::OpenContext;
use crate::open::node::{open_format_file, open_node};
use crate::wrap::WriteThrough;

impl OpenContext {
    /// For a node that nothing leads to, with no nodes beside it, and all drivers.
    pub fn alone(flags: OpenFlags, policy: FilePolicy) -> OpenContext {
        OpenContext::among(&Nodes::new(), NodePlace::default(), flags, policy)
    }

    /// For a node at a place in a graph.
    pub(crate) fn among(
        nodes: &Nodes,
        place: NodePlace,
        flags: OpenFlags,
        policy: FilePolicy,
    ) -> OpenContext {
        OpenContext {
            flags,
            policy,
            place,
            nodes: nodes.clone(),
            drivers: drivers::all(),
        }
    }
}

/// Opens an image with everything it stands on, as QEMU's tools would.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`](vellum::ErrorKind::InvalidArgument) for options that are unknown, wrong or contradict each other;
/// what opening its files and reading its metadata report. The text is what QEMU prints after
/// `Could not open 'name': `; see [`vellum_options::error_text`].
pub async fn open_device(spec: &ImageSpec, flags: &OpenFlags) -> Result<Arc<dyn BlockDevice>> {
    open_device_with(spec, flags, &FilePolicy::Any).await
}

/// Like [`open_device`], with a say in which files the image may name.
///
/// # Errors
/// As [`open_device`], and [`ErrorKind::Denied`](vellum::ErrorKind::Denied) for a file that `policy` does not allow.
pub async fn open_device_with(
    spec: &ImageSpec,
    flags: &OpenFlags,
    policy: &FilePolicy,
) -> Result<Arc<dyn BlockDevice>> {
    if flags.copy_on_read && !flags.writable {
        return Err(invalid("Can't use copy-on-read on read-only device"));
    }
    let device = open_spec(spec, flags, policy).await?;
    let device = match flags.copy_on_read {
        true => CopyOnRead::new(device, None),
        false => device,
    };
    let device: Arc<dyn BlockDevice> = match flags.detect_zeroes {
        DetectZeroes::Off => device,
        DetectZeroes::On => ZeroDetector::new(device, false),
        DetectZeroes::Unmap => ZeroDetector::new(device, true),
    };
    if flags.cache.writethrough && flags.writable {
        return Ok(WriteThrough::new(device));
    }
    Ok(device)
}

/// The node under a format, or the node itself where that is no format.
#[derive(Debug, Clone)]
pub struct ImageFile {
    /// Its bytes.
    pub storage: Arc<dyn Storage>,
    /// The driver of the node that was named: the format's, or [`ImageFile::protocol`].
    pub format: &'static str,
    /// The driver of the bytes' node: `"file"`, `"host_device"`, `"blkdebug"`, ...
    pub protocol: &'static str,
}

/// Opens only the file of an image, and says which format it has.
///
/// # Errors
/// As [`open_device`].
pub async fn open_file(spec: &ImageSpec, flags: &OpenFlags) -> Result<ImageFile> {
    let mut options = spec.options()?;
    let driver = options.get_text("driver").map(str::to_owned);
    let around = OpenContext::alone(flags.clone(), FilePolicy::Any);
    if driver.as_deref().is_some_and(is_protocol) {
        let node = open_node(options, Role::Protocol, &around).await?;
        let (format, protocol) = (node.driver.name, node.driver.name);
        let storage = node.into_storage(flags, FileUse::Raw).await?;
        return Ok(ImageFile {
            storage,
            format,
            protocol,
        });
    }
    options.take("driver");
    let common = CommonOptions::take(&mut options, flags)?;
    let around = OpenContext {
        flags: common.child_flags(flags),
        ..around
    };
    let format = driver
        .as_deref()
        .map(|name| around.drivers.find_format(name))
        .transpose()?;
    let (mut node, (driver, format)) = open_format_file(&mut options, format, &around).await?;
    node.lock(&around.flags, format.file_use).await?;
    Ok(ImageFile {
        storage: node.storage(),
        format: driver.name,
        protocol: node.driver.name,
    })
}

/// Checks the options that a user gave beyond the names of file and format.
///
/// # Errors
/// As [`open_device`].
pub async fn check_options(spec: &ImageSpec, flags: &OpenFlags) -> Result<()> {
    match &spec.source {
        Source::Filename(name) if !name.starts_with("json:") => Ok(()),
        _ => open_device(spec, flags).await.map(drop),
    }
}

async fn open_spec(
    spec: &ImageSpec,
    flags: &OpenFlags,
    policy: &FilePolicy,
) -> Result<Arc<dyn BlockDevice>> {
    let around = OpenContext::alone(flags.clone(), policy.clone());
    let node = open_node(spec.options()?, Role::Image, &around).await?;
    node.into_device(flags).await
}
