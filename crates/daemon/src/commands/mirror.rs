//! `blockdev-mirror` and `drive-mirror`.

use std::rc::Rc;

use vellum_graph::Nodes;
use vellum_graph::live::{NewNode, Turns, unknown};

use crate::daemon::Daemon;
use crate::jobs::failures::ErrorPolicies;
use crate::jobs::mirror::{self, Mirrored, Sync};
use crate::jobs::{JobNodes, Settings, kinds};
use crate::qmp::{Arguments, Failure};

use super::job_verbs::{COPY_MODES, CopyMode};
use super::request::Request;
use super::targets::{Backing, NewTarget, TargetPlan, changed_meanwhile};
use super::{jobs, layers};

/// QEMU's pieces are of this size at most, and so are ours.
const PIECE_BYTES: u64 = 1 << 20;
/// And so many are in flight.
const MAX_IN_FLIGHT: u64 = 16;
const DEFAULT_BUFFER_BYTES: u64 = 10 << 20;

/// What the word of `sync` means, if that is supported.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SyncWord {
    Known(Sync),
    Unsupported(&'static str),
}

const SYNC_WORDS: [(&str, SyncWord); 5] = [
    ("top", SyncWord::Known(Sync::Top)),
    ("full", SyncWord::Known(Sync::Full)),
    ("none", SyncWord::Known(Sync::None)),
    ("incremental", SyncWord::Unsupported("incremental")),
    ("bitmap", SyncWord::Unsupported("bitmap")),
];

/// Where a target comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TargetKind {
    /// It is a node.
    Named,
    /// A file that was there.
    Existing,
    /// A file that was made for it, and reads as zeroes.
    New,
    /// A file that was made for it, and that stands on the source once users go on with it.
    Overlay,
}

/// What mirrors of all kinds are asked for with, and how it is meant.
pub(super) struct MirrorRequest {
    source: String,
    target: String,
    sync: SyncWord,
    replaces: Option<String>,
    granularity_bytes: u64,
    buffer_bytes: i64,
    unmap: bool,
    write_blocking: bool,
    policies: ErrorPolicies,
    settings: (Settings, i64),
}

/// `blockdev-mirror`.
impl Request for MirrorRequest {
    fn read(arguments: &mut Arguments) -> Result<MirrorRequest, Failure> {
        MirrorRequest::of(arguments, false)
    }
}

impl MirrorRequest {
    fn of(arguments: &mut Arguments, takes_unmap: bool) -> Result<MirrorRequest, Failure> {
        let source = arguments.need_text("device")?;
        let target = arguments.need_text("target")?;
        let sync = arguments.need_choice("sync", &SYNC_WORDS)?;
        let replaces = arguments.text("replaces")?;
        let granularity = arguments.number("granularity")?.unwrap_or(0);
        let buffer_bytes = arguments.number("buf-size")?.unwrap_or(0);
        let unmap = match takes_unmap {
            true => arguments.switch("unmap")?.unwrap_or(true),
            false => true,
        };
        let policies = jobs::take_policies(arguments)?;
        let mode = arguments.choice("copy-mode", &COPY_MODES)?;
        let granularity_bytes = u32::try_from(granularity)
            .map_err(|_| Failure::new("Parameter 'granularity' expects uint32_t"))?;
        Ok(MirrorRequest {
            source,
            target,
            sync,
            replaces,
            granularity_bytes: u64::from(granularity_bytes),
            buffer_bytes,
            unmap,
            write_blocking: mode == Some(CopyMode::WriteBlocking),
            policies,
            settings: jobs::take_settings(arguments, kinds::MIRROR)?,
        })
    }

    /// The grain in which is noted what has to be copied, if it is given.
    fn check_granularity(&self) -> Result<Option<u64>, Failure> {
        let bytes = self.granularity_bytes;
        if bytes == 0 {
            return Ok(None);
        }
        if !(512..=64 << 20).contains(&bytes) {
            return Err(Failure::new(
                "Parameter 'granularity' expects a value in range [512B, 64MB]",
            ));
        }
        match bytes.is_power_of_two() {
            true => Ok(Some(bytes)),
            false => Err(Failure::new("Parameter 'granularity' expects a power of 2")),
        }
    }

    /// How many pieces may be in flight in the memory that is given for that.
    fn parallel(&self) -> Result<usize, Failure> {
        let bytes = u64::try_from(self.buffer_bytes)
            .map_err(|_| Failure::new("Invalid parameter 'buf-size'"))?;
        let bytes = if bytes == 0 {
            DEFAULT_BUFFER_BYTES
        } else {
            bytes
        };
        Ok((bytes / PIECE_BYTES).clamp(1, MAX_IN_FLIGHT) as usize)
    }

    /// Whether the node can be replaced that is to be.
    fn check_replaced(&self, nodes: &Nodes) -> Result<(), Failure> {
        let Some(replaced) = &self.replaces else {
            return Ok(());
        };
        if !nodes.contains(replaced) {
            return Err(Failure::new(format!(
                "Failed to find node with node-name='{replaced}'"
            )));
        }
        nodes.check_free(replaced)?;
        // The source itself has the size of the source.
        match *replaced == self.source {
            true => Ok(()),
            false => Err(Failure::new(format!(
                "Cannot replace '{replaced}' by a node mirrored from '{}', because it cannot be \
                 guaranteed that doing so would not lead to an abrupt change of visible data",
                self.source
            ))),
        }
    }

    /// Has the job begin whose nodes are there.
    async fn begin(
        self,
        daemon: &Rc<Daemon>,
        nodes: &Nodes,
        of: TargetKind,
    ) -> Result<(), Failure> {
        let granularity_bytes = self.check_granularity()?;
        nodes.check_no_job(&self.source)?;
        nodes.check_free(&self.target)?;
        self.check_replaced(nodes)?;
        let sync = match self.sync {
            SyncWord::Known(Sync::Top) if nodes.below_filters(&self.source).is_none() => Sync::Full,
            SyncWord::Known(sync) => sync,
            SyncWord::Unsupported(word) => {
                return Err(Failure::new(format!("Sync mode '{word}' not supported")));
            }
        };
        let parallel = self.parallel()?;
        if self.source == self.target {
            return Err(Failure::new("Can't mirror node into itself"));
        }
        nodes.check_mirror_target(&self.target, &self.source)?;
        jobs::check_filter(nodes, &self.settings.0)?;
        jobs::check_active(nodes, &self.settings.0, (&self.source, "backing"))?;
        let job = jobs::create(daemon, self.settings)?;
        let what = Mirrored {
            source: self.source,
            target: self.target,
            sync,
            zero: !matches!(of, TargetKind::New | TargetKind::Overlay),
            owns_target: of != TargetKind::Named,
            stands_on_source: of == TargetKind::Overlay,
            granularity_bytes,
            parallel,
            unmap: self.unmap,
            write_blocking: self.write_blocking,
            policies: self.policies,
        };
        let prepared = mirror::prepare(JobNodes::new(nodes), &job, what).await;
        jobs::begin(daemon, job, prepared)
    }
}

pub(super) async fn blockdev_mirror(
    daemon: Rc<Daemon>,
    asked: MirrorRequest,
) -> Result<(), Failure> {
    let parts = daemon.parts.lock().await;
    let nodes = parts.nodes.clone();
    if !nodes.contains(&asked.source) {
        return Err(unknown(&asked.source).into());
    }
    jobs::check_root(&nodes, &asked.source)?;
    if !nodes.contains(&asked.target) {
        return Err(unknown(&asked.target).into());
    }
    asked.begin(&daemon, &nodes, TargetKind::Named).await
}

/// Opens a target that is there and says that it stands on the source: it does so once users go on
/// with it.
async fn open_overlay(
    nodes: &Nodes,
    target: &NewTarget,
    source: &str,
) -> Result<Option<NewNode>, Failure> {
    if target.format.as_deref() != Some("qcow2") {
        return Ok(None);
    }
    let later = target.plan(nodes, source, Backing::Later(source.to_owned()))?;
    let new = target.open((nodes, Turns::Own), &later, &[]).await?;
    let stands = {
        let _turn = nodes.take_turn().await;
        let image = new.device()?;
        layers::stands_by_header_on(nodes, &*image, &nodes.skip_filters(source))
    };
    match stands {
        Ok(true) => Ok(Some(new)),
        other => {
            new.discard().await?;
            other.map(|_| None)
        }
    }
}

impl MirrorRequest {
    /// What the target stands on, if this can be mirrored.
    fn plan(&self, nodes: &Nodes, target: &NewTarget) -> Result<TargetPlan, Failure> {
        if !nodes.contains(&self.source) {
            return Err(unknown(&self.source).into());
        }
        jobs::check_root(nodes, &self.source)?;
        if self.replaces.is_some() && target.node_name.is_none() {
            return Err(Failure::new(
                "a node-name must be provided when replacing a named node of the graph",
            ));
        }
        let backing = match self.sync {
            SyncWord::Known(Sync::Top) => nodes
                .below_filters(&self.source)
                .map_or(Backing::Own, Backing::Usual),
            SyncWord::Known(Sync::None) if !target.is_there => Backing::Later(self.source.clone()),
            SyncWord::Known(Sync::Full | Sync::None) | SyncWord::Unsupported(_) => Backing::Own,
        };
        target.plan(nodes, &self.source, backing)
    }

    /// Opens the target.
    async fn open(
        &self,
        nodes: &Nodes,
        target: &NewTarget,
        plan: &TargetPlan,
    ) -> Result<(NewNode, TargetKind), Failure> {
        let kind = match (target.is_there, &plan.backing) {
            (true, _) => TargetKind::Existing,
            (false, Backing::Later(_)) => TargetKind::Overlay,
            (false, _) => TargetKind::New,
        };
        if let (TargetKind::Existing, SyncWord::Known(Sync::None)) = (kind, self.sync)
            && let Some(new) = open_overlay(nodes, target, &self.source).await?
        {
            return Ok((new, TargetKind::Overlay));
        }
        let new = target.open((nodes, Turns::Own), plan, &[]).await?;
        Ok((new, kind))
    }
}

/// `drive-mirror`.
pub(super) struct DriveMirror(MirrorRequest, NewTarget);

impl Request for DriveMirror {
    fn read(arguments: &mut Arguments) -> Result<DriveMirror, Failure> {
        let asked = MirrorRequest::of(arguments, true)?;
        let mut target = NewTarget::take(arguments, &asked.target)?;
        target.node_name = arguments.text("node-name")?;
        Ok(DriveMirror(asked, target))
    }
}

pub(super) async fn drive_mirror(daemon: Rc<Daemon>, request: DriveMirror) -> Result<(), Failure> {
    let DriveMirror(mut asked, target) = request;
    let plan = asked.plan(&daemon.parts.lock().await.nodes, &target)?;
    let opening = asked.open(&daemon.nodes, &target, &plan);
    let (new, kind) = daemon.open_beside(opening).await?;
    let parts = daemon.parts.lock().await;
    let nodes = parts.nodes.clone();
    let is_still = match asked.plan(&nodes, &target) {
        Ok(now) if now != plan => Err(changed_meanwhile(&asked.source)),
        now => now.map(drop),
    };
    if let Err(failure) = is_still {
        let _ = new.discard().await;
        return Err(failure);
    }
    let name = new.name().to_owned();
    daemon.show(new).await?;
    asked.target.clone_from(&name);
    let begun = asked.begin(&daemon, &nodes, kind).await;
    if begun.is_err() {
        // Nobody has used it.
        let _ = nodes.remove(&name).await;
    }
    begun
}
