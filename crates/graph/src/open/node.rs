//! Opens a node of any driver, and the children that a node's options describe or name.

use tracing::trace;
use vellum::Result;
use vellum::detect_zeroes::ZeroDetector;
use vellum_options::{DetectZeroes, Options, Scalar};

use crate::live::child_access::ChildAccess;
use crate::live::uses::Changes;
use crate::node::errors::{inactive_child, invalid, missing};
use crate::node::file_node::{CommonOptions, FileUse};
use crate::node::opened::OpenedNode;
use crate::node::origin::{Origin, Role};
use crate::open::context::{Driver, FormatOpening, NamedFormat, Open, OpenContext};
use crate::open::probe_file::probe_file;

/// Opens a node with everything below it.
///
/// # Errors
/// If an option is wrong or unknown, or something below cannot be opened.
pub async fn open_node(
    mut options: Options,
    role: Role,
    around: &OpenContext,
) -> Result<OpenedNode> {
    let around = &with_activity(&mut options, around)?;
    let place = &around.place;
    let node_name = match options.get_text("node-name") {
        None if around.names_all() => Some(around.nodes.make_up_name()),
        given => given.map(str::to_owned),
    };
    let origin = around.names_all().then(|| Origin {
        options: options.clone(),
        role,
        flags: around.flags.clone(),
        policy: around.policy.clone(),
        place: place.for_later(),
    });
    let driver = match (options.take_text("driver")?, role) {
        (Some(name), _) => Some(around.drivers.find(&name)?),
        (None, Role::Protocol) => Some(around.drivers.of_file(options.get_text("filename"))?),
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
    let claimed = node_name.as_deref().map(|name| around.claim_name(name));
    let _claimed = claimed.transpose()?;
    let below = OpenContext {
        flags: common.child_flags(&around.flags),
        place: place.inside(node_name.as_deref()),
        ..around.clone()
    };
    let filename = options.get_text("filename").map(str::to_owned);
    let opened = match driver {
        Some(Driver {
            open: Open::Node(open),
            ..
        }) => open(options, common, below).await?,
        Some(Driver {
            facts,
            open: Open::Format(format),
        }) => {
            let format = Some((*facts, *format));
            Box::pin(open_format(format, options, common, below)).await?
        }
        None => Box::pin(open_format(None, options, common, below)).await?,
    };
    trace!(
        name: "bdrv_open_common",
        node = node_name,
        filename,
        format_name = opened.driver.name,
        writable = opened.writable
    );
    let opened = detecting(opened, detect_zeroes, around).await?;
    let opened = match around.own_name(node_name.as_deref()) {
        Some(name) => around.nodes.watched(name, place.reopens, opened),
        None => opened,
    };
    if let Some(name) = node_name {
        let opened = around.name(&name, opened, origin)?;
        return Ok(match around.nodes.is_kept(&name) {
            true => opened.borrowed(),
            false => opened,
        });
    }
    Ok(opened)
}

/// How a node is opened that may be inactive. One that is opened anew stays what it is.
fn with_activity(options: &mut Options, around: &OpenContext) -> Result<OpenContext> {
    let mut around = around.clone();
    if around.nodes.are_live() {
        let active = options.take_bool("active")?;
        match (active, &around.place.parent) {
            _ if around.place.reopens => {}
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
            let _turn = around.take_turn().await;
            let node = around.nodes.referred(&around.place, &name)?;
            around.check_activity(&name, key)?;
            let linked = exchangeable && around.nodes.is_linkable(&name, &node);
            let node = node.for_user(around.flags.writable)?;
            around.note_use(&name, key, linked)?;
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
    Box::pin(open_node(group, role, &around)).await.map(Some)
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
    around.nodes.linked(&around.place, key, found)
}

/// Opens a format, found out from the content if none is given, with the file under it.
async fn open_format(
    format: Option<NamedFormat>,
    mut options: Options,
    mut common: CommonOptions,
    mut around: OpenContext,
) -> Result<OpenedNode> {
    let is_probed = format.is_none();
    let (mut file, (facts, format)) = open_format_file(&mut options, format, &around).await?;
    if common.auto_read_only && !file.writable {
        common.writable = false;
        around.flags.writable = false;
    }
    for file in &file.files {
        around.place.enter(&file.file)?;
    }
    if format.file_use == FileUse::Format {
        let nodes = &around.nodes;
        nodes.keep_file(&around.place, common.writable).await?;
    } else if options.contains("offset") || options.contains("size") {
        // A part of a file has to lie inside it.
        let kept = ChildAccess::keeping(Changes::SIZE);
        let nodes = &around.nodes;
        nodes.require(&around.place, "file", kept).await?;
    }
    file.lock(&around.flags, format.file_use).await?;
    let opening = FormatOpening {
        format: facts.name,
        is_probed,
        file: file.storage(),
        options,
        common,
        around,
    };
    Ok(OpenedNode::device(facts, (format.open)(opening).await?))
}

/// Opens the node under a format, and finds out the format if none is given. The
/// format decides about the locks, so none are taken yet.
pub(crate) async fn open_format_file(
    options: &mut Options,
    format: Option<NamedFormat>,
    around: &OpenContext,
) -> Result<(OpenedNode, NamedFormat)> {
    let file = match format {
        // It holds no state of an image below it, so that image can be exchanged.
        Some((_, format)) if format.file_use == FileUse::Raw => {
            Some(exchangeable_child(options, "file", Role::Protocol, around).await?)
        }
        _ => optional_child(options, "file", Role::Protocol, around).await?,
    };
    let Some(file) = file else {
        return Err(match format {
            None => invalid("Must specify either driver or file"),
            Some(_) => missing("file"),
        });
    };
    let format = match format {
        Some(format) => format,
        None => probe_file(&*file.storage(), around.drivers).await?,
    };
    Ok((file, format))
}
