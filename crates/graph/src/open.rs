//! Opening: an [`ImageSpec`] and [`OpenFlags`] in, a [`BlockDevice`] out.

use std::os::unix::fs::MetadataExt;
use std::sync::Arc;

use vellum::detect_zeroes::ZeroDetector;
use vellum::nodes::CopyOnRead;
use vellum::raw::RawOptions;
use vellum::{BlockDevice, Buffer, Buffers, Error, ErrorKind, Raw, Result, Storage};
use vellum_options::spec::is_protocol;
use vellum_options::{DetectZeroes, ImageSpec, OpenFlags, Options, Source};
use vellum_storage::file::FileStorage;

use crate::drivers::luks;
use crate::file_node::{self, CommonOptions, FileUse};
use crate::foreign::{self, ForeignFormat};
use crate::gate::FilePolicy;
use crate::graph::{self, OpenContext, OpenedNode, Role};
use crate::nodes::{Changes, ChildAccess, NameClaim, Nodes, Origin, Turn, Turns, inactive_child};
use crate::probe::{PROBE_BYTES, Probed, probe};
use crate::probed_raw::ProbedRaw;
use crate::qcow2_node;
use crate::wrap::WriteThrough;

/// What is around the node being opened: the files above it, so that no chain
/// bites its tail, and the nodes beside it.
#[derive(Debug, Clone, Default)]
pub struct Ancestry {
    above: Vec<(u64, u64)>,
    /// The nodes that options may refer to.
    pub(crate) nodes: Nodes,
    /// The nearest node above that has a name.
    pub(crate) parent: Option<String>,
    /// The node to which all belong that are made here.
    owner: Option<String>,
    /// What the node is to the one above it, where that one notes it.
    role: Option<String>,
    /// The node has its name, and is opened anew under it.
    pub(crate) renewal: bool,
    /// It is opened as it was before a change that failed: nobody has come in its way since.
    pub(crate) reverts: bool,
    /// It is as a state file says that it was when another process ended.
    pub(crate) restored: bool,
    /// Files that are open already, for whoever opens them anew: their locks pass on.
    pub(crate) kept: Vec<Arc<FileStorage>>,
    /// The node that owns what is made here is being opened, and not shown yet.
    opening: Option<Turns>,
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidArgument, "open", message)
}

/// Opens an image with everything it stands on, as QEMU's tools would.
///
/// # Errors
/// [`ErrorKind::InvalidArgument`] for options that are unknown, wrong or contradict each other;
/// what opening its files and reading its metadata report. The text is what QEMU prints after
/// `Could not open 'name': `; see [`vellum_options::error_text`].
pub async fn open_device(spec: &ImageSpec, flags: &OpenFlags) -> Result<Arc<dyn BlockDevice>> {
    open_device_with(spec, flags, &FilePolicy::Any).await
}

/// Like [`open_device`], with a say in which files the image may name.
///
/// # Errors
/// As [`open_device`], and [`ErrorKind::Denied`] for a file that `policy` does not allow.
pub async fn open_device_with(
    spec: &ImageSpec,
    flags: &OpenFlags,
    policy: &FilePolicy,
) -> Result<Arc<dyn BlockDevice>> {
    if flags.copy_on_read && !flags.writable {
        return Err(invalid("Can't use copy-on-read on read-only device"));
    }
    let device = open_spec(spec, flags, policy, Ancestry::default()).await?;
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
    let around = OpenContext {
        flags: flags.clone(),
        policy: FilePolicy::Any,
        place: Ancestry::default(),
    };
    if driver.as_deref().is_some_and(is_protocol) {
        let node = graph::open(options, Role::Protocol, &around).await?;
        let (format, protocol) = (node.driver, node.driver);
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
    let format = driver.as_deref().map(Format::named).transpose()?;
    let (mut node, format) = open_format_file(&mut options, format, &around).await?;
    node.lock(&around.flags, format.user()).await?;
    Ok(ImageFile {
        storage: node.storage(),
        format: format.name(),
        protocol: node.driver,
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

/// The flags for a backing file of an image opened with `flags`.
pub(crate) fn backing_flags(flags: &OpenFlags) -> OpenFlags {
    let unlocked_from = flags.unlocked_from.map(|depth| depth.saturating_sub(1));
    OpenFlags {
        force_share: flags.force_share || unlocked_from == Some(0),
        unlocked_from,
        writable: false,
        detect_zeroes: DetectZeroes::Off,
        no_share: false,
        resize: false,
        no_backing: false,
        for_check: false,
        copy_on_read: false,
        ..flags.clone()
    }
}

/// The formats that can be opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    Raw { probed: bool },
    Qcow2,
    Luks,
    Foreign(&'static ForeignFormat),
}

impl Format {
    pub(crate) fn named(name: &str) -> Result<Format> {
        match name {
            "raw" => Ok(Format::Raw { probed: false }),
            "qcow2" => Ok(Format::Qcow2),
            "luks" => Ok(Format::Luks),
            other => match foreign::find(other) {
                Some(format) => Ok(Format::Foreign(format)),
                None => Err(file_node::unknown_driver(other)),
            },
        }
    }

    fn name(self) -> &'static str {
        match self {
            Format::Raw { .. } => "raw",
            Format::Qcow2 => "qcow2",
            Format::Luks => "luks",
            Format::Foreign(format) => format.name,
        }
    }

    /// How the format uses its file.
    fn user(self) -> FileUse {
        match self {
            Format::Raw { .. } => FileUse::Raw,
            Format::Qcow2 | Format::Luks | Format::Foreign(_) => FileUse::Format,
        }
    }
}

/// Opens a node by its specification; `place` knows what led here.
pub(crate) async fn open_spec(
    spec: &ImageSpec,
    flags: &OpenFlags,
    policy: &FilePolicy,
    place: Ancestry,
) -> Result<Arc<dyn BlockDevice>> {
    let around = OpenContext {
        flags: flags.clone(),
        policy: policy.clone(),
        place,
    };
    let node = graph::open(spec.options()?, Role::Image, &around).await?;
    node.into_device(flags).await
}

/// Opens what the image at a place stands on.
pub(crate) async fn open_below(
    options: Options,
    around: &OpenContext,
) -> Result<Arc<dyn BlockDevice>> {
    let place = &around.place;
    let nodes = &place.nodes;
    if place.names_all()
        && let Some(name) = options.get_text("node-name").map(str::to_owned)
    {
        Box::pin(graph::open(options, Role::Image, around)).await?;
        return nodes.stand_on(place, &name, &around.flags);
    }
    let key = nodes.base_key(&options, around);
    if let Some(key) = &key {
        let _turn = place.take_turn().await;
        if let Some(shared) = nodes.shared(key, around) {
            return Ok(shared);
        }
    }
    let mut own = options.clone();
    let name = place.names_all().then(|| nodes.make_up_name());
    if let Some(name) = &name {
        own.set_text("node-name", &**name);
    }
    let node = Box::pin(graph::open(own, Role::Image, around)).await?;
    let device = match &name {
        Some(name) => nodes.stand_on(place, name, &around.flags)?,
        None => node.into_device(&around.flags).await?,
    };
    // Unless another file has got the name meanwhile.
    if let Some(key) = key
        && nodes.base_key(&options, around).as_ref() == Some(&key)
    {
        nodes.share(place, key, (name, &device));
    }
    Ok(device)
}

/// Opens a format, found out from the content if none is given, with the file under it.
pub(crate) async fn open_format(
    format: Option<Format>,
    mut options: Options,
    mut common: CommonOptions,
    mut around: OpenContext,
) -> Result<OpenedNode> {
    let (mut file, format) = open_format_file(&mut options, format, &around).await?;
    if common.auto_read_only && !file.writable {
        common.writable = false;
        around.flags.writable = false;
    }
    for file in &file.files {
        around.place.enter(&file.file)?;
    }
    if format.user() == FileUse::Format {
        let nodes = &around.place.nodes;
        nodes.keep_file(&around.place, common.writable).await?;
    } else if options.contains("offset") || options.contains("size") {
        // A part of a file has to lie inside it.
        let kept = ChildAccess::keeping(Changes::SIZE);
        let nodes = &around.place.nodes;
        nodes.require(&around.place, "file", kept).await?;
    }
    file.lock(&around.flags, format.user()).await?;
    let storage = file.storage();
    let device = match format {
        Format::Raw { probed } => open_raw(storage, options, &around.flags, probed)?,
        Format::Luks => luks::open(storage, options, &around).await?,
        Format::Qcow2 => qcow2_node::open(storage, options, &common, around).await?,
        Format::Foreign(format) => {
            let opening = foreign::Opening {
                format,
                file: storage,
                options,
                writable: common.writable,
                around,
            };
            (format.open)(opening).await?
        }
    };
    Ok(OpenedNode::device(format.name(), device))
}

impl Ancestry {
    /// A place that nothing leads to, beside other nodes, for the node `owner`, which is not shown before
    /// all is open.
    pub(crate) fn opening(nodes: Nodes, owner: &str, turns: Turns) -> Ancestry {
        Ancestry {
            nodes,
            owner: Some(owner.to_owned()),
            opening: Some(turns),
            ..Ancestry::default()
        }
    }

    /// The node with which what is opened here is shown, later.
    pub(crate) fn opening_root(&self) -> Option<&str> {
        self.owner().filter(|_| self.opening.is_some())
    }

    /// Waits for a turn, where what is opened here takes turns of its own. To be held for moments.
    pub(crate) async fn take_turn(&self) -> Option<Turn> {
        self.opening?.take(&self.nodes).await
    }

    /// The same for whoever opens it later, when it is shown.
    pub(crate) fn shown(&mut self) {
        self.opening = None;
    }

    /// Whether every node has a name here, if need be one that is made up.
    pub(crate) fn names_all(&self) -> bool {
        self.nodes.are_live() && self.owner.is_some() && !self.renewal
    }

    /// The name of the live node that is opened here, `given` or as it was before it was opened
    /// anew.
    pub(crate) fn own_name<'a>(&'a self, given: Option<&'a str>) -> Option<&'a str> {
        let kept = self.parent.as_deref().filter(|_| self.renewal);
        given.or(kept).filter(|_| self.nodes.are_live())
    }

    /// Whether the node whose parts are opened here is there already, and is opened anew.
    pub(crate) fn is_renewed(&self) -> bool {
        let parent = self.parent.as_deref();
        parent.is_some_and(|parent| self.nodes.contains(parent))
    }

    /// The place of what stands below a node.
    pub(crate) fn inside(&self, name: Option<&str>) -> Ancestry {
        Ancestry {
            parent: name.map(str::to_owned).or(self.parent.clone()),
            role: None,
            renewal: false,
            ..self.clone()
        }
    }

    /// The place of a child, which the node above knows by `role`.
    pub(crate) fn child(&self, role: &str) -> Ancestry {
        Ancestry {
            role: Some(role.to_owned()),
            ..self.clone()
        }
    }

    /// Refuses a node as `role` of an active one, if it is inactive.
    pub(crate) fn check_activity(&self, name: &str, role: &str, flags: &OpenFlags) -> Result<()> {
        let above = self.parent.as_deref().unwrap_or_default();
        match !flags.inactive && self.nodes.is_inactive(name) {
            true => Err(inactive_child(name, role, above)),
            false => Ok(()),
        }
    }

    /// Notes that the node above uses another one, be it behind a link.
    pub(crate) fn note_use(&self, name: &str, role: &str, linked: bool) -> Result<()> {
        match self.parent {
            Some(_) => self.nodes.note(self, name, role, linked),
            None => Ok(()),
        }
    }

    /// The node to which all belong that are made here.
    pub(crate) fn owner(&self) -> Option<&str> {
        self.owner.as_deref()
    }

    /// Reserves the name of the node that is opened here, before anything below it is opened: uses are
    /// recorded under that name from then on.
    ///
    /// # Errors
    /// If the name is malformed, or another node has it.
    pub(crate) fn claim_name(&self, name: &str) -> Result<NameClaim> {
        self.nodes.claim_name(self, name)
    }

    /// Gives the node that was opened here a name.
    pub(crate) fn name(
        &self,
        name: &str,
        node: OpenedNode,
        origin: Option<Origin>,
    ) -> Result<OpenedNode> {
        let named = self.nodes.name(self, name, node, origin)?;
        if let Some(role) = &self.role {
            self.note_use(name, role, false)?;
        }
        Ok(named)
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

/// Opens the node under a format, and finds out the format if none is given. The
/// format decides about the locks, so none are taken yet.
async fn open_format_file(
    options: &mut Options,
    format: Option<Format>,
    around: &OpenContext,
) -> Result<(OpenedNode, Format)> {
    let file = match format {
        // It holds no state of an image below it, so that image can be exchanged.
        Some(Format::Raw { .. }) => {
            Some(graph::exchangeable_child(options, "file", Role::Protocol, around).await?)
        }
        _ => graph::optional_child(options, "file", Role::Protocol, around).await?,
    };
    let Some(file) = file else {
        return Err(match format {
            None => invalid("Must specify either driver or file"),
            Some(_) => graph::missing("file"),
        });
    };
    let format = match format {
        Some(format) => format,
        None => probe_file(&*file.storage()).await?,
    };
    Ok((file, format))
}

async fn probe_file(file: &dyn Storage) -> Result<Format> {
    let len_bytes = file.len_bytes()?.min(PROBE_BYTES as u64) as usize;
    let start = file
        .read(0, Buffers::from_iter([Buffer::zeroed(len_bytes)]))
        .await
        .map_err(|error| {
            error.context("open", "Could not read image for determining its format")
        })?;
    match probe(&Buffer::join_all(start)) {
        Probed::Qcow2 => Ok(Format::Qcow2),
        Probed::Luks => Ok(Format::Luks),
        // Nothing at its beginning tells such an image.
        Probed::Raw if file.name().ends_with(".dmg") => Format::named("dmg"),
        Probed::Raw => Ok(Format::Raw { probed: true }),
        Probed::Foreign(name) => Format::named(name).map_err(|_| {
            Error::new(
                ErrorKind::Unsupported,
                "open",
                format!("The image looks like {name}, a format that this version does not have"),
            )
            .target(file.name())
        }),
    }
}

/// Refuses options that a format has left.
pub(crate) fn refuse_unknown(options: &Options, format: &str) -> Result<()> {
    match options.keys().next() {
        None => Ok(()),
        Some(key) => Err(invalid(format!(
            "Block format '{format}' does not support the option '{key}'"
        ))),
    }
}

fn open_raw(
    file: Arc<dyn Storage>,
    mut options: Options,
    flags: &OpenFlags,
    probed: bool,
) -> Result<Arc<dyn BlockDevice>> {
    let raw = RawOptions::default()
        .offset_bytes(options.take_size("offset")?.unwrap_or(0))
        .size_bytes(options.take_size("size")?)
        .read_only(!flags.writable);
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
         restrictions.\n"
    ));
    Ok(ProbedRaw::new(device))
}
