//! `blockdev-backup` and `drive-backup`.

use std::rc::Rc;

use vellum::qcow2::AsQcow2;
use vellum_graph::drivers::copy_before_write::{MIN_GRAIN_BYTES, check_min_cluster};
use vellum_graph::live::{NewNode, Turns, unknown};
use vellum_graph::{Nodes, node_bitmap as bitmap};
use vellum_jobs::live::WhenFull;

use crate::daemon::Daemon;
use crate::jobs::backup::{BackedUp, Backup, Bitmap, BitmapMode, Sync};
use crate::jobs::failures::ErrorPolicies;
use crate::jobs::fleece::Fleecing;
use crate::jobs::{Job, JobNodes, Settings};
use crate::qmp::{Arguments, Failure};

use super::request::{Request, request};
use super::targets::{Backing, NewTarget, TargetPlan, changed_meanwhile};
use super::{bitmaps, jobs};

request! {
    /// How a backup is asked for. The words are those of the command.
    BackupArguments {
        source: String = |a| a.need_text("device"),
        target: String = |a| a.need_text("target"),
        sync: (&'static str, Sync) = |a| a.need_choice("sync", &SYNC_WORDS),
        mode: Option<(&'static str, BitmapMode)> = |a| a.choice("bitmap-mode", &MODE_WORDS),
        policies: ErrorPolicies = jobs::take_policies,
        tuning: Tuning = |a| a.object("x-perf")?.map_or(Ok(Tuning::default()), take_tuning),
        fleecing: Option<Fleecing> = take_fleecing,
        bitmap: Option<String> = |a| a.text("bitmap"),
        compress: bool = |a| a.is_on("compress"),
        discard_source: bool = |a| a.is_on("discard-source"),
    }
}

/// What of `x-perf` has a meaning.
#[derive(Default)]
struct Tuning {
    parallel: Option<usize>,
    /// 0 is no limit.
    max_chunk_bytes: u64,
    min_cluster_bytes: u64,
}

const FULL: (&str, Sync) = ("full", Sync::Full);
const TOP: (&str, Sync) = ("top", Sync::Top);
const NONE: (&str, Sync) = ("none", Sync::None);
const INCREMENTAL: (&str, Sync) = ("incremental", Sync::Bitmap);
const BITMAP: (&str, Sync) = ("bitmap", Sync::Bitmap);

const SYNC_WORDS: [(&str, (&str, Sync)); 5] = [
    (FULL.0, FULL),
    (TOP.0, TOP),
    (NONE.0, NONE),
    (INCREMENTAL.0, INCREMENTAL),
    (BITMAP.0, BITMAP),
];

const ON_SUCCESS: (&str, BitmapMode) = ("on-success", BitmapMode::OnSuccess);
const ALWAYS: (&str, BitmapMode) = ("always", BitmapMode::Always);
const NEVER: (&str, BitmapMode) = ("never", BitmapMode::Never);

const MODE_WORDS: [(&str, (&str, BitmapMode)); 3] = [
    (ON_SUCCESS.0, ON_SUCCESS),
    (ALWAYS.0, ALWAYS),
    (NEVER.0, NEVER),
];

/// Takes apart how old bytes wait for the target, which is ours.
fn take_fleecing(arguments: &mut Arguments) -> Result<Option<Fleecing>, Failure> {
    let Some(mut fleecing) = arguments.object("x-vellum-fleecing")? else {
        return Ok(Some(Fleecing::default()));
    };
    let is_wanted = fleecing.switch("enabled")?.unwrap_or(true);
    let default = Fleecing::default();
    let max_bytes = match fleecing.number("max-size")? {
        None => default.max_bytes,
        Some(bytes) => u64::try_from(bytes)
            .map_err(|_| Failure::new("Parameter 'max-size' expects a non-negative value"))?,
    };
    let choices = [("wait", WhenFull::Wait), ("fail", WhenFull::Fail)];
    let when_full = fleecing.choice("when-full", &choices)?;
    let directory = fleecing.text("directory")?;
    fleecing.finish()?;
    Ok(is_wanted.then_some(Fleecing {
        directory,
        max_bytes,
        when_full: when_full.unwrap_or(default.when_full),
    }))
}

/// Takes `x-perf` apart. Copying is never left to the kernel, and pieces have one size.
fn take_tuning(mut tuning: Arguments) -> Result<Tuning, Failure> {
    tuning.switch("use-copy-range")?;
    let max_chunk = tuning.number("max-chunk")?.unwrap_or(0);
    let min_cluster = tuning.number("min-cluster-size")?.unwrap_or(0);
    let workers = tuning.number("max-workers")?;
    tuning.finish()?;
    let parallel = match workers.map(i32::try_from) {
        None => None,
        Some(Ok(workers)) if workers > 0 => usize::try_from(workers).ok(),
        Some(_) => {
            return Err(Failure::new(format!(
                "max-workers must be between 1 and {}",
                i32::MAX
            )));
        }
    };
    let Ok(max_chunk_bytes) = u64::try_from(max_chunk) else {
        return Err(Failure::new(
            "max-chunk must be zero (which means no limit) or positive",
        ));
    };
    let Ok(min_cluster_bytes) = u64::try_from(min_cluster) else {
        return Err(Failure::new(format!(
            "min-cluster-size too large: {} > {}",
            min_cluster as u64,
            i64::MAX
        )));
    };
    Ok(Tuning {
        parallel,
        max_chunk_bytes,
        min_cluster_bytes,
    })
}

impl BackupArguments {
    /// What a new target stands on, as the graph is.
    fn plan(&self, nodes: &Nodes, target: &NewTarget) -> Result<TargetPlan, Failure> {
        if !nodes.contains(&self.source) {
            return Err(unknown(&self.source).into());
        }
        nodes.check_no_job(&self.source)?;
        let backing = match (self.sync.1, nodes.below_filters(&self.source)) {
            // It is to show what the source showed.
            (Sync::None, _) => Backing::Needed(self.source.clone()),
            (Sync::Top, Some(below)) if !target.is_there => Backing::Needed(below),
            _ => Backing::Own,
        };
        target.plan(nodes, &self.source, backing)
    }

    /// How its words go together: what becomes of the bitmap.
    async fn check_bitmap(
        &self,
        daemon: &Daemon,
        nodes: &Nodes,
    ) -> Result<Option<Bitmap>, Failure> {
        let (sync, mut mode) = (self.sync, self.mode);
        if sync.1 == Sync::Bitmap && self.bitmap.is_none() {
            return Err(Failure::new(format!(
                "must provide a valid bitmap name for '{}' sync mode",
                sync.0
            )));
        }
        if sync == INCREMENTAL {
            if mode.is_some_and(|mode| mode != ON_SUCCESS) {
                return Err(Failure::new(format!(
                    "Bitmap sync mode must be '{}' when using sync mode '{}'",
                    ON_SUCCESS.0, sync.0
                )));
            }
            mode = Some(ON_SUCCESS);
        }
        let Some(name) = &self.bitmap else {
            return match mode {
                None => Ok(None),
                Some(_) => Err(Failure::new(
                    "Cannot specify bitmap sync mode without a bitmap",
                )),
            };
        };
        let found = bitmap::find(nodes, &self.source, name).await?;
        let (bitmap, state) =
            found.ok_or_else(|| Failure::new(format!("Bitmap '{name}' could not be found")))?;
        let mode = mode.ok_or_else(|| {
            Failure::new("Bitmap sync mode must be given when providing a bitmap")
        })?;
        bitmaps::check_free(daemon, nodes, &self.source, name)?;
        if !state.consistent {
            return Err(bitmaps::inconsistent(name));
        }
        if sync == NONE {
            return Err(Failure::new(format!(
                "sync mode '{}' does not produce meaningful bitmap outputs",
                sync.0
            )));
        }
        if mode == NEVER && sync.1 != Sync::Bitmap {
            return Err(Failure::new(format!(
                "Bitmap sync mode '{}' has no meaningful effect when combined with sync mode '{}'",
                mode.0, sync.0
            )));
        }
        Ok(Some(Bitmap {
            bitmap,
            mode: mode.1,
            enabled: state.records,
            granularity_bytes: state.granularity_bytes,
        }))
    }

    /// Whether its filter can stand where it is to.
    fn check_filter(&self, nodes: &Nodes, settings: &Settings) -> Result<(), Failure> {
        let active = |name, role| jobs::check_active(nodes, settings, (name, role));
        let checked = jobs::check_filter(nodes, settings)
            .and_then(|()| active(&self.source, "file"))
            .and_then(|()| active(&self.target, "target"));
        checked.map_err(|failure| Failure::new(format!("{}: {}", jobs::NO_FILTER, failure.text)))
    }

    /// Whether its nodes are fit for it.
    fn check_nodes(&self, nodes: &Nodes) -> Result<(), Failure> {
        if self.source == self.target {
            return Err(Failure::new("Source and target cannot be the same"));
        }
        let (source, target) = (nodes.device(&self.source)?, nodes.device(&self.target)?);
        if self.compress && target.as_qcow2().is_none() {
            return Err(Failure::new("Compression is not supported for this drive "));
        }
        nodes.check_free(&self.target)?;
        nodes.check_backup_target(&self.target, &self.source)?;
        nodes.check_no_job(&self.source)?;
        let max_chunk_bytes = self.tuning.max_chunk_bytes;
        let cluster_bytes = target.info().cluster_size_bytes.unwrap_or_default();
        let cluster_bytes = cluster_bytes.max(MIN_GRAIN_BYTES);
        if max_chunk_bytes != 0 && max_chunk_bytes < cluster_bytes {
            return Err(Failure::new(format!(
                "Required max-chunk ({max_chunk_bytes}) is less than backup cluster size \
                 ({cluster_bytes})"
            )));
        }
        if source.size_bytes() != target.size_bytes() {
            return Err(Failure::new("Source and target image have different sizes"));
        }
        match target.info().read_only && !nodes.is_inactive(&self.target) {
            true => Err(Failure::new(
                "Could not create node: Block node is read-only",
            )),
            false => Ok(()),
        }
    }
}

/// A backup that is asked for.
pub(super) struct BackupRequest {
    wanted: BackupArguments,
    settings: (Settings, i64),
    target: Target,
}

/// Where the target comes from.
enum Target {
    /// It is a node that is there.
    Named,
    /// It is opened for the backup alone.
    File(NewTarget),
    /// That is open.
    Opened(Box<OpenedTarget>),
}

/// A target that is open, as the graph was then.
struct OpenedTarget {
    new: NewNode,
    plan: TargetPlan,
    file: NewTarget,
}

impl BackupRequest {
    /// Takes all arguments of `blockdev-backup`.
    pub(super) fn take(mut arguments: Arguments) -> Result<BackupRequest, Failure> {
        let wanted = BackupArguments::read(&mut arguments)?;
        let settings = jobs::take_settings(&mut arguments, "backup")?;
        arguments.finish()?;
        Ok(BackupRequest {
            wanted,
            settings,
            target: Target::Named,
        })
    }

    /// Takes all arguments of `drive-backup`.
    pub(super) fn take_drive(mut arguments: Arguments) -> Result<BackupRequest, Failure> {
        let wanted = BackupArguments::read(&mut arguments)?;
        let target = NewTarget::take(&mut arguments, &wanted.target)?;
        let settings = jobs::take_settings(&mut arguments, "backup")?;
        arguments.finish()?;
        Ok(BackupRequest {
            wanted,
            settings,
            target: Target::File(target),
        })
    }

    /// The node that is backed up.
    pub(super) fn source(&self) -> &str {
        &self.wanted.source
    }

    /// The node that it is backed up to, where there is one already.
    pub(super) fn target(&self) -> Option<&str> {
        match &self.target {
            Target::Named => Some(&self.wanted.target),
            Target::File(_) | Target::Opened(_) => None,
        }
    }

    /// Opens a target that is new, before what there is is held. With turns of its own, the source may
    /// not be there yet: another action of the same transaction may make it.
    pub(super) async fn open(&mut self, nodes: &Nodes, turns: Turns) -> Result<(), Failure> {
        let Target::File(target) = &self.target else {
            return Ok(());
        };
        if turns == Turns::Own && !nodes.contains(&self.wanted.source) {
            return Ok(());
        }
        let plan = {
            let _turn = nodes.take_turn_as(turns).await;
            self.wanted.plan(nodes, target)?
        };
        let rest = [("discard", "unmap"), ("detect-zeroes", "unmap")];
        let new = target.open((nodes, turns), &plan, &rest).await?;
        let file = target.clone();
        self.target = Target::Opened(Box::new(OpenedTarget { new, plan, file }));
        Ok(())
    }

    /// Prepares the job.
    pub(super) async fn prepare(
        mut self,
        daemon: &Daemon,
        nodes: &Nodes,
    ) -> Result<(Rc<Job>, Backup), Failure> {
        self.open(nodes, Turns::Held).await?;
        let OpenedTarget { new, plan, file } =
            match std::mem::replace(&mut self.target, Target::Named) {
                Target::Opened(opened) => *opened,
                Target::File(_) | Target::Named if nodes.contains(&self.wanted.source) => {
                    return self.prepare_on(daemon, nodes, false).await;
                }
                Target::File(_) | Target::Named => return Err(unknown(&self.wanted.source).into()),
            };
        let is_still = match self.wanted.plan(nodes, &file) {
            Ok(now) if now != plan => Err(changed_meanwhile(&self.wanted.source)),
            now => now.map(drop),
        };
        if let Err(failure) = is_still {
            let _ = new.discard().await;
            return Err(failure);
        }
        if self.wanted.sync == TOP && nodes.below_filters(&self.wanted.source).is_none() {
            self.wanted.sync = FULL;
        }
        let target = new.name().to_owned();
        daemon.show(new).await?;
        self.wanted.target.clone_from(&target);
        let prepared = self.prepare_on(daemon, nodes, true).await;
        if prepared.is_err() {
            // Nobody has used it.
            let _ = nodes.remove(&target).await;
        }
        prepared
    }

    /// Prepares the job whose target is a node.
    async fn prepare_on(
        self,
        daemon: &Daemon,
        nodes: &Nodes,
        owns_target: bool,
    ) -> Result<(Rc<Job>, Backup), Failure> {
        let BackupRequest {
            wanted, settings, ..
        } = self;
        if !nodes.contains(&wanted.target) {
            return Err(unknown(&wanted.target).into());
        }
        let bitmap = wanted.check_bitmap(daemon, nodes).await?;
        wanted.check_nodes(nodes)?;
        let min_grain_bytes = check_min_cluster(wanted.tuning.min_cluster_bytes)
            .map_err(|error| error.context("backup", jobs::NO_FILTER))?;
        wanted.check_filter(nodes, &settings.0)?;
        let job = jobs::create(daemon, settings)?;
        if let Some(bitmap) = &bitmap {
            job.keep_bitmap(&wanted.source, &bitmap.bitmap.name);
        }
        let what = BackedUp {
            source: wanted.source,
            target: wanted.target,
            sync: wanted.sync.1,
            bitmap,
            compress: wanted.compress,
            parallel: wanted.tuning.parallel,
            min_grain_bytes,
            discard_source: wanted.discard_source,
            fleecing: wanted.fleecing,
            policies: wanted.policies,
            owns_target,
        };
        match Backup::prepare(JobNodes::new(nodes), &job, what).await {
            Ok(backup) => Ok((job, backup)),
            Err(error) => {
                daemon.jobs.dismiss(&job);
                Err(error.into())
            }
        }
    }
}

pub(super) async fn begin(daemon: Rc<Daemon>, mut asked: BackupRequest) -> Result<(), Failure> {
    let opening = asked.open(&daemon.nodes, Turns::Own);
    daemon.open_beside(opening).await?;
    if asked.wanted.bitmap.is_some() {
        let source = std::slice::from_ref(&asked.wanted.source);
        daemon.wait_for_answers(source).await?;
    }
    let parts = daemon.parts.lock().await;
    let (job, backup) = asked.prepare(&daemon, &parts.nodes).await?;
    jobs::begin(&daemon, job, Ok(backup))
}
