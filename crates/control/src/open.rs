//! Opening: an [`ImageSpec`] and [`OpenFlags`] in, a [`BlockDevice`] out.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use serde_json::{Map, Value, json};
use vellum::detect_zeroes::ZeroDetector;
use vellum::qcow2::{Backing, CompressionOptions, Qcow2};
use vellum::raw::RawOptions;
use vellum::{BlockDevice, Buffer, Buffers, Error, ErrorKind, Raw, Result, Storage};
use vellum_storage::file::FileStorage;

use crate::cache_cleaner;
use crate::file_node::{self, Common, Use};
use crate::filename;
use crate::flags::{DetectZeroes, OpenFlags};
use crate::gate::{FileGate, FilePolicy};
use crate::json;
use crate::nodes::{Node, Nodes};
use crate::options::{Options, Scalar};
use crate::probe::{PROBE_BYTES, Probed, probe};
use crate::qcow2_node;
use crate::spec::{ImageSpec, Source};
use crate::wrap::{ProbedRaw, WriteThrough};

/// What is around the node being opened: the files above it, so that no chain
/// bites its tail, and the nodes beside it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Place {
    above: Vec<(u64, u64)>,
    /// The nodes that options may refer to.
    nodes: Nodes,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// Opens an image with everything it stands on, as QEMU's tools would.
///
/// Errors carry the text that QEMU prints after `Could not open 'name': `; see
/// [`crate::error_text`].
pub async fn open_device(spec: &ImageSpec, flags: &OpenFlags) -> Result<Arc<dyn BlockDevice>> {
    open_device_with(spec, flags, &FilePolicy::Any).await
}

/// Like [`open_device`], with a say in which files the image may name.
pub async fn open_device_with(
    spec: &ImageSpec,
    flags: &OpenFlags,
    policy: &FilePolicy,
) -> Result<Arc<dyn BlockDevice>> {
    let device = open_spec(spec, flags, policy, Place::default()).await?;
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

/// Opens only the file of an image, and says which format it has (`"file"` if
/// the file itself is meant).
pub async fn open_file(
    spec: &ImageSpec,
    flags: &OpenFlags,
) -> Result<(Arc<FileStorage>, &'static str)> {
    let mut options = node_options(spec)?;
    let driver = options.take_text("driver")?;
    let common = Common::take(&mut options, flags)?;
    let flags = common.pass_on(flags);
    let (file, format) = match driver.as_deref() {
        Some(name) if file_node::is_file_driver(name) => {
            options.set_text("driver", name);
            return Ok((file_node::open(options, &flags, Use::Raw)?, "file"));
        }
        driver => open_format_file(&mut options, driver, &flags, &Nodes::new()).await?,
    };
    Ok((file, format.name()))
}

/// Checks the options that a user gave beyond the names of file and format.
pub async fn check_options(spec: &ImageSpec, flags: &OpenFlags) -> Result<()> {
    match &spec.source {
        Source::Filename(name) if !name.starts_with("json:") => Ok(()),
        _ => open_device(spec, flags).await.map(drop),
    }
}

/// Options that change what is seen through a node: a file name alone does not
/// say it all any more.
const TELLING_OPTIONS: [&str; 2] = ["offset", "size"];

/// The name of an image for people: its file name, or `json:{...}` where that
/// would not be enough to open the same again.
pub fn display_name(spec: &ImageSpec, format: &str) -> String {
    let Ok(mut options) = node_options(spec) else {
        return spec.name.clone();
    };
    let mut file = options.take_group("file");
    let filename = match (file.take_text("filename"), options.take_text("filename")) {
        (Ok(Some(name)), _) | (_, Ok(Some(name))) => name,
        _ => return spec.name.clone(),
    };
    let mut members = Map::new();
    for key in TELLING_OPTIONS {
        if let Some(value) = options.take(key) {
            members.insert(key.to_owned(), value.into());
        }
    }
    let backing = options.take_group("backing");
    if !backing.is_empty() {
        members.insert("backing".to_owned(), backing.to_json());
    }
    if members.is_empty() {
        return filename;
    }
    members.insert("driver".to_owned(), format.into());
    members.insert(
        "file".to_owned(),
        json!({ "driver": "file", "filename": filename }),
    );
    format!("json:{}", json::compact(&Value::Object(members)))
}

/// The flags for a backing file of an image opened with `flags`.
pub(crate) fn backing_flags(flags: &OpenFlags) -> OpenFlags {
    let unlocked_from = flags.unlocked_from.map(|depth| depth.saturating_sub(1));
    OpenFlags {
        force_share: flags.force_share || unlocked_from == Some(0),
        unlocked_from,
        writable: false,
        detect_zeroes: DetectZeroes::Off,
        no_share: false,
        no_backing: false,
        for_check: false,
        ..flags.clone()
    }
}

/// The formats that can be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Raw { probed: bool },
    Qcow2,
}

impl Format {
    fn named(name: &str) -> Result<Format> {
        match name {
            "raw" => Ok(Format::Raw { probed: false }),
            "qcow2" => Ok(Format::Qcow2),
            other => Err(file_node::unknown_driver(other)),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Format::Raw { .. } => "raw",
            Format::Qcow2 => "qcow2",
        }
    }
}

/// The options of the node that a user's words mean.
fn node_options(spec: &ImageSpec) -> Result<Options> {
    let mut options = match &spec.source {
        Source::Options(options) => options.clone(),
        Source::Filename(name) => match name.strip_prefix("json:") {
            Some(json) => Options::from_json(json)?,
            None => {
                let mut options = Options::new();
                options.set_text("file.filename", filename::local_path(name)?);
                options
            }
        },
    };
    if let Some(format) = &spec.format {
        options.set_text("driver", format.as_str());
    }
    Ok(options)
}

/// Opens a node by its specification; `place` knows what led here.
pub(crate) async fn open_spec(
    spec: &ImageSpec,
    flags: &OpenFlags,
    policy: &FilePolicy,
    place: Place,
) -> Result<Arc<dyn BlockDevice>> {
    open_node(node_options(spec)?, flags, policy, place).await
}

pub(crate) async fn open_node(
    mut options: Options,
    flags: &OpenFlags,
    policy: &FilePolicy,
    mut place: Place,
) -> Result<Arc<dyn BlockDevice>> {
    let driver = options.take_text("driver")?;
    if let Some(name) = driver
        .as_deref()
        .filter(|name| file_node::is_file_driver(name))
    {
        options.set_text("driver", name);
        let file = file_node::open(options, flags, Use::Raw)?;
        return Ok(Raw::open(file, RawOptions::default())?);
    }
    let detect_zeroes = take_detect_zeroes(&mut options)?;
    let common = Common::take(&mut options, flags)?;
    if detect_zeroes == DetectZeroes::Unmap && !common.discard {
        return Err(invalid(
            "setting detect-zeroes to unmap is not allowed without setting discard operation to \
             unmap",
        ));
    }
    let flags = common.pass_on(flags);
    let nodes = &place.nodes;
    let (file, format) = open_format_file(&mut options, driver.as_deref(), &flags, nodes).await?;
    place.enter(&file)?;
    let device: Arc<dyn BlockDevice> = match format {
        Format::Raw { probed } => open_raw(file, options, &flags, probed)?,
        Format::Qcow2 => {
            open_qcow2(
                file,
                options,
                &common,
                FileGate {
                    flags,
                    policy: policy.clone(),
                    place,
                },
            )
            .await?
        }
    };
    Ok(match detect_zeroes {
        DetectZeroes::Off => device,
        DetectZeroes::On => ZeroDetector::new(device, false),
        DetectZeroes::Unmap => ZeroDetector::new(device, true),
    })
}

impl Place {
    /// A place that nothing leads to, beside other nodes.
    pub(crate) fn among(nodes: Nodes) -> Place {
        Place {
            above: Vec::new(),
            nodes,
        }
    }

    /// Notes a file, unless it is one of those above.
    fn enter(&mut self, file: &FileStorage) -> Result<()> {
        let name = file.name();
        let Ok(metadata) = std::fs::metadata(name) else {
            return Ok(());
        };
        let id = (metadata.dev(), metadata.ino());
        if self.above.contains(&id) {
            let message = format!("Backing file '{name}' creates an infinite loop.");
            return Err(Error::new(ErrorKind::InvalidImage, "open", message).target(name));
        }
        self.above.push(id);
        Ok(())
    }
}

fn take_detect_zeroes(options: &mut Options) -> Result<DetectZeroes> {
    match options.take_text("detect-zeroes")? {
        None => Ok(DetectZeroes::Off),
        Some(name) => DetectZeroes::parse(&name)
            .ok_or_else(|| invalid(format!("invalid parameter value: {name}"))),
    }
}

/// Opens the file under a format node, and finds out the format if no driver
/// says it.
async fn open_format_file(
    options: &mut Options,
    driver: Option<&str>,
    flags: &OpenFlags,
    nodes: &Nodes,
) -> Result<(Arc<FileStorage>, Format)> {
    let format = driver.map(Format::named).transpose()?;
    let reference = options.take_text("file")?;
    let file_options = options.take_group("file");
    // The format decides about the locks, so look before taking them.
    let unlocked = match reference {
        Some(name) => match nodes.referred(&name)? {
            Node::File(file) => file.for_user(flags.writable)?,
            Node::Device(_) => {
                return Err(invalid(format!(
                    "Node '{name}' is no file; a format over a format is not part of this version"
                )));
            }
        },
        None if file_options.is_empty() => {
            return Err(invalid(match format {
                None => "Must specify either driver or file",
                Some(_) => "A block device must be specified for \"file\"",
            }));
        }
        None => file_node::open_unlocked(file_options, flags)?,
    };
    let format = match format {
        Some(format) => format,
        None => probe_file(&unlocked.file).await?,
    };
    let user = if format == Format::Qcow2 {
        Use::Format
    } else {
        Use::Raw
    };
    Ok((unlocked.lock(flags, user)?, format))
}

async fn probe_file(file: &Arc<FileStorage>) -> Result<Format> {
    let len_bytes = file.len_bytes()?.min(PROBE_BYTES as u64) as usize;
    let start = file
        .read(0, Buffers::from_iter([Buffer::for_read(len_bytes)]))
        .await?;
    match probe(&Buffer::join_all(start)) {
        Probed::Qcow2 => Ok(Format::Qcow2),
        Probed::Raw => Ok(Format::Raw { probed: true }),
        Probed::Foreign(name) => Err(Error::new(
            ErrorKind::Unsupported,
            "open",
            format!("The image looks like {name}, a format that this version does not have"),
        )
        .target(file.name())),
    }
}

fn refuse_unknown(options: &Options, format: &str) -> Result<()> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => Err(invalid(format!(
            "Block format '{format}' does not support the option '{key}'"
        ))),
    }
}

fn open_raw(
    file: Arc<FileStorage>,
    mut options: Options,
    flags: &OpenFlags,
    probed: bool,
) -> Result<Arc<dyn BlockDevice>> {
    let raw = RawOptions {
        offset_bytes: options.take_size("offset")?.unwrap_or(0),
        size_bytes: options.take_size("size")?,
        read_only: !flags.writable,
    };
    refuse_unknown(&options, "raw")?;
    let name = file.name().to_owned();
    let file_bytes = file.len_bytes()?.next_multiple_of(512);
    if raw.offset_bytes > file_bytes {
        return Err(invalid(format!(
            "Offset ({}) cannot be greater than size of the containing file ({file_bytes})",
            raw.offset_bytes
        )));
    }
    let device = Raw::open(file, raw)?;
    if !(probed && flags.writable) {
        return Ok(device);
    }
    (flags.warn)(&format!(
        "WARNING: Image format was not specified for '{name}' and probing guessed raw.\n         \
         Automatically detecting the format is dangerous for raw images, write operations on \
         block 0 will be restricted.\n         Specify the 'raw' format explicitly to remove the \
         restrictions."
    ));
    Ok(ProbedRaw::new(device))
}

async fn open_qcow2(
    file: Arc<FileStorage>,
    mut options: Options,
    common: &Common,
    gate: FileGate,
) -> Result<Arc<dyn BlockDevice>> {
    let mut open = qcow2_node::take(&mut options, common)?;
    let flags = &gate.flags;
    open.metadata_only = flags.metadata_only;
    if open.compression == CompressionOptions::default() {
        open.compression = flags.compression;
    }
    open.for_check = flags.for_check;
    let backing = take_backing(&mut options, flags, &gate.place.nodes)?;
    let data_file = options.take_group("data-file");
    refuse_unknown(&options, "qcow2")?;
    if !data_file.is_empty() {
        open.data_file = Some(file_node::open(data_file, flags, Use::Format)?);
    }
    let mut given = None;
    match backing {
        Override::None => open.backing = Backing::None,
        _ if flags.no_backing => open.backing = Backing::None,
        Override::Options(options) => {
            given = options.keys().next().map(str::to_owned);
            let below = backing_flags(flags);
            let opened = open_node(options, &below, &gate.policy, gate.place.clone());
            open.backing = Backing::Given(Box::pin(opened).await?);
        }
        Override::Node(device) => open.backing = Backing::Given(device),
        Override::FromImage => {}
    }
    let clean_interval_s = open.cache.cache_clean_interval_s;
    let device = Qcow2::open(file, Arc::new(gate), open).await?;
    cache_cleaner::start(&device, clean_interval_s);
    if let (Some(key), None) = (given, &device.header().backing_file) {
        return Err(invalid(format!(
            "Block format 'qcow2' does not support the option 'backing.{key}'"
        )));
    }
    Ok(device)
}

/// What the user says of the backing file.
enum Override {
    FromImage,
    None,
    Node(Arc<dyn BlockDevice>),
    Options(Options),
}

fn take_backing(options: &mut Options, flags: &OpenFlags, nodes: &Nodes) -> Result<Override> {
    // Where only metadata is wanted no backing file can be given.
    let group = match flags.metadata_only {
        true => Options::new(),
        false => options.take_group("backing"),
    };
    match options.take("backing") {
        Some(Scalar::Null) => return Ok(Override::None),
        Some(Scalar::Text(text)) if text.is_empty() => return Ok(Override::None),
        Some(Scalar::Text(text)) => {
            return match nodes.referred(&text) {
                Ok(node) => node.as_backing().map(Override::Node),
                Err(error) if nodes.is_empty() => Err(error),
                Err(error) => Err(error.context("open", "Could not open backing file")),
            };
        }
        Some(_) => {
            return Err(invalid(
                "Invalid parameter type for 'backing', expected: string",
            ));
        }
        None => {}
    }
    Ok(if group.is_empty() {
        Override::FromImage
    } else {
        Override::Options(group)
    })
}
