//! `copy-before-write`: what a node showed when this was opened is kept in another one, and
//! `snapshot-access`, which shows it.

use std::sync::Arc;
use std::time::Duration;

use vellum::qcow2::DirtyBitmap;
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_jobs::live::{CopyBeforeWrite, CopyBeforeWriteOptions, DirtyMap, Moment, OnCopyError};
use vellum_options::Options;

use crate::live::child_access::ChildAccess;
use crate::live::uses::{Changes, Passes};
use crate::node::driver::DriverFacts;
use crate::node::errors::{invalid, refuse_unknown};
use crate::node::file_node::CommonOptions;
use crate::node::opened::OpenedNode;
use crate::node::origin::Role;
use crate::node_bitmap;
use crate::open::context::OpenContext;
use crate::open::node::child;

/// `snapshot-access`.
pub(super) const SNAPSHOT_FACTS: DriverFacts = DriverFacts {
    is_reopened: false,
    ..DriverFacts::named("snapshot-access")
};

/// The driver.
pub(super) const FACTS: DriverFacts = DriverFacts {
    options: &[&[
        "target",
        "bitmap.node",
        "bitmap.name",
        "on-cbw-error",
        "cbw-timeout",
        "min-cluster-size",
    ]],
    is_reopened: false,
    has_past: true,
    ..DriverFacts::filter("copy-before-write")
};

const DRIVER: &str = "copy-before-write";

/// Bytes that QEMU copies at once at least.
pub const MIN_GRAIN_BYTES: u64 = 64 << 10;

/// The largest grain, in bytes: a copy fits into memory.
const MAX_GRAIN_BYTES: u64 = 1 << 30;

/// Refuses a node without what QEMU's monitor demands of it.
fn check(options: &Options, keys: &[&str]) -> Result<()> {
    for key in keys {
        let prefix = format!("{key}.");
        let is_there = options.contains(key) || options.keys().any(|it| it.starts_with(&prefix));
        if !is_there {
            return Err(invalid(format!("Parameter '{key}' is missing")));
        }
    }
    Ok(())
}

fn take_on_error(options: &mut Options) -> Result<OnCopyError> {
    match options.take_text("on-cbw-error")?.as_deref() {
        None | Some("break-guest-write") => Ok(OnCopyError::BreakWrite),
        Some("break-snapshot") => Ok(OnCopyError::BreakSnapshot),
        Some(other) => Err(invalid(format!(
            "Parameter 'on-cbw-error' does not accept value '{other}'"
        ))),
    }
}

/// 0, the default, is no limit.
fn take_timeout(options: &mut Options) -> Result<Option<Duration>> {
    let seconds = options.take_number("cbw-timeout");
    match seconds.map(|seconds| seconds.map_or(Ok(0), u32::try_from)) {
        Ok(Ok(0)) => Ok(None),
        Ok(Ok(seconds)) => Ok(Some(Duration::from_secs(seconds.into()))),
        _ => Err(invalid("Parameter 'cbw-timeout' expects uint32_t")),
    }
}

/// The smallest grain that somebody asks for, in bytes.
///
/// # Errors
/// In QEMU's words, if it is none.
pub fn check_min_cluster(bytes: u64) -> Result<u64> {
    if bytes != 0 && !bytes.is_power_of_two() {
        return Err(invalid(
            "Cannot create block-copy-state: min-cluster-size needs to be a power of 2",
        ));
    }
    if bytes > MAX_GRAIN_BYTES {
        return Err(invalid(format!(
            "min-cluster-size too large: {bytes} > {MAX_GRAIN_BYTES}"
        )));
    }
    Ok(bytes.max(MIN_GRAIN_BYTES))
}

/// A bitmap of a node, by both their names.
struct BitmapName {
    node: String,
    name: String,
}

fn take_bitmap(options: &mut Options) -> Result<Option<BitmapName>> {
    let mut group = options.take_group("bitmap");
    if group.is_empty() {
        return Ok(None);
    }
    let mut need = |key: &str| {
        let value = group.take_text(key)?;
        value.ok_or_else(|| invalid(format!("Parameter 'bitmap.{key}' is missing")))
    };
    let (node, name) = (need("node")?, need("name")?);
    match group.keys().next() {
        Some(key) => Err(invalid(format!("Parameter 'bitmap.{key}' is unexpected"))),
        None => Ok(Some(BitmapName { node, name })),
    }
}

/// Of which moment a filter keeps what was there.
enum Begin {
    /// Of now, or what a bitmap tells of that.
    Now(Option<DirtyBitmap>),
    /// Of the one that it kept before it was opened anew.
    Resumed(Arc<Moment>),
    /// Of one that ended with the process before: nobody knows what has changed since.
    GivenUp,
}

async fn begin(around: &OpenContext, bitmap: Option<BitmapName>) -> Result<Begin> {
    let (nodes, place) = (&around.nodes, &around.place);
    if let Some(moment) = nodes.moment(place) {
        return Ok(Begin::Resumed(moment));
    }
    if place.restored {
        return Ok(Begin::GivenUp);
    }
    let Some(BitmapName { node, name }) = bitmap else {
        return Ok(Begin::Now(None));
    };
    if !nodes.contains(&node) {
        return Err(invalid(format!("Node '{node}' not found")));
    }
    let found = node_bitmap::find(nodes, &node, &name).await?;
    let Some((bitmap, _)) = found else {
        return Err(invalid(format!("Dirty bitmap '{name}' not found")));
    };
    Ok(Begin::Now(Some(bitmap.read().await?)))
}

impl Begin {
    fn filter(
        self,
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        keeping: CopyBeforeWriteOptions,
    ) -> Arc<CopyBeforeWrite> {
        match self {
            Begin::Resumed(moment) => CopyBeforeWrite::resumed(source, target, keeping, &moment),
            Begin::GivenUp => {
                let filter = CopyBeforeWrite::new(source, target, keeping);
                filter.give_up();
                filter
            }
            Begin::Now(shown) => {
                let filter = CopyBeforeWrite::new(source, target, keeping);
                if let Some(shown) = shown {
                    filter.show_only(shown.ranges());
                }
                filter
            }
        }
    }
}

pub(super) async fn open(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    check(&options, &["file", "target"])?;
    let on_error = take_on_error(&mut options)?;
    let timeout = take_timeout(&mut options)?;
    let bitmap = take_bitmap(&mut options)?;
    let min_cluster_bytes = options.take_number("min-cluster-size")?.unwrap_or(0);
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    let target = child(&mut options, "target", Role::Image, &around).await?;
    refuse_unknown(&options, DRIVER)?;
    let nodes = &around.nodes;
    let begins = begin(&around, bitmap).await?;
    let min_cluster_bytes = check_min_cluster(min_cluster_bytes)?;
    let source = file.into_device(&around.flags).await?;
    let target = target.into_device(&around.flags).await?;
    let kept_bytes = match &begins {
        Begin::Resumed(moment) => moment.size_bytes(),
        Begin::Now(_) | Begin::GivenUp => source.size_bytes(),
    };
    if kept_bytes != target.size_bytes() {
        return Err(invalid("Source and target image have different sizes"));
    }
    let cluster_bytes = target.info().cluster_size_bytes.unwrap_or_default();
    // Nobody asks for what was written since.
    let written = DirtyMap::in_grains_of(1 << 30, source.size_bytes());
    let keeping = CopyBeforeWriteOptions {
        on_error,
        timeout,
        ..CopyBeforeWriteOptions::new(min_cluster_bytes.max(cluster_bytes), written)
    };
    let filter = begins.filter(source, target, keeping);
    let through_filter = ChildAccess {
        passes: Passes::AllAndKeeps,
        ..ChildAccess::keeping(Changes::NONE)
    };
    nodes.require(&around.place, "file", through_filter).await?;
    // Others may write there too: what the guest has changed, say, below an image that shows
    // what it was.
    let kept = ChildAccess {
        changes: Changes::CONTENT,
        keeps: Changes::SIZE,
        passes: Passes::Nothing,
        rewrites: false,
    };
    nodes.require(&around.place, "target", kept).await?;
    let device: Arc<dyn BlockDevice> = filter;
    Ok(OpenedNode::device(FACTS, device))
}

/// Opens `snapshot-access`.
pub(super) async fn open_snapshot(
    mut options: Options,
    _common: CommonOptions,
    around: OpenContext,
) -> Result<OpenedNode> {
    const NAME: &str = SNAPSHOT_FACTS.name;
    check(&options, &["file"])?;
    let file = child(&mut options, "file", Role::Protocol, &around).await?;
    let reading = ChildAccess {
        passes: Passes::Nothing,
        ..ChildAccess::keeping(Changes::NONE)
    };
    let nodes = &around.nodes;
    nodes.require(&around.place, "file", reading).await?;
    refuse_unknown(&options, NAME)?;
    let device = file.into_device(&around.flags).await?;
    let filter = device.format_device().and_then(|it| it.downcast_ref());
    let Some(filter): Option<&CopyBeforeWrite> = filter else {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "open",
            format!(
                "'{}' keeps no snapshot that could be accessed",
                device.info().name
            ),
        ));
    };
    Ok(OpenedNode::device(SNAPSHOT_FACTS, filter.snapshot()))
}
