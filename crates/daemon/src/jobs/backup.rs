//! `blockdev-backup`: what a node shows now, in another one, while users go on writing.

use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use vellum::BlockDevice;
use vellum_graph::change::DrainedUsers;
use vellum_graph::live::{Changes, Keeps};
use vellum_graph::node_bitmap::NodeBitmap;
use vellum_jobs::copy::CopyError;
use vellum_jobs::live::{
    CopyBeforeWrite, CopyBeforeWriteOptions, CopyOutcome, DirtyMap, LiveBackup,
};

use super::failures::ErrorPolicies;
use super::fleece::Fleecing;
use super::job::PARALLEL;
use super::progress::ProgressReporter;
use super::{Job, JobNodes, Work};

/// What of a node is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sync {
    /// All that it shows.
    Full,
    /// What it holds itself.
    Top,
    /// What is overwritten from now on.
    None,
    /// What a bitmap calls dirty.
    Bitmap,
}

/// What becomes of a bitmap in the end: it is to tell what the next backup has to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BitmapMode {
    /// If the backup is complete: what was written since it began.
    OnSuccess,
    /// That, or what else is not in the backup.
    Always,
    /// It stays as it is.
    Never,
}

/// A bitmap of the source.
pub(crate) struct Bitmap {
    pub(crate) bitmap: NodeBitmap,
    pub(crate) mode: BitmapMode,
    /// It records writes.
    pub(crate) enabled: bool,
    pub(crate) granularity_bytes: u64,
}

/// What a backup is about.
pub(crate) struct BackedUp {
    pub(crate) source: String,
    pub(crate) target: String,
    pub(crate) sync: Sync,
    pub(crate) bitmap: Option<Bitmap>,
    pub(crate) compress: bool,
    pub(crate) parallel: Option<usize>,
    /// The least grain that somebody wants, in bytes.
    pub(crate) min_grain_bytes: u64,
    /// What has been copied is discarded in the source, which nobody else changes then.
    pub(crate) discard_source: bool,
    /// Where old bytes wait for the target; otherwise those who overwrite them do.
    pub(crate) fleecing: Option<Fleecing>,
    pub(crate) policies: ErrorPolicies,
    /// The target was opened for the job, and goes with it.
    pub(crate) owns_target: bool,
}

/// A backup.
pub(crate) struct Backup {
    job_nodes: JobNodes,
    what: BackedUp,
    /// The target shows the source through, and may have users who see it so.
    shows_source: bool,
    backup: LiveBackup,
    written: Arc<DirtyMap>,
    /// The bitmap tells what it is to tell in the end.
    is_settled: bool,
}

impl Backup {
    /// Prepares a backup. What the source shows on return is what the target will.
    pub(crate) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        what: BackedUp,
    ) -> vellum::Result<Backup> {
        let joined = Backup::join(&mut job_nodes, job, &what);
        let (source, target) = job_nodes.or_leave(joined).await?;
        let shows_source = job_nodes.nodes.chain(&what.target).contains(&what.source);
        let fleece = match &what.fleecing {
            // Users of such a target see what it has.
            Some(fleecing) if !shows_source => {
                let made = fleecing.make(&job_nodes.nodes, source.size_bytes()).await;
                job_nodes.or_leave(made).await?
            }
            _ => None,
        };
        let granularity = what.bitmap.as_ref().map(|bitmap| bitmap.granularity_bytes);
        let grain_bytes = granularity.unwrap_or(what.min_grain_bytes);
        let written = DirtyMap::in_grains_of(grain_bytes, source.size_bytes());
        let cluster_size = target.info().cluster_size_bytes;
        let grain = cluster_size.unwrap_or_default().max(what.min_grain_bytes);
        let keeping = CopyBeforeWriteOptions {
            compress: what.compress,
            fleece,
            ..CopyBeforeWriteOptions::new(grain, written.clone())
        };
        let filter = CopyBeforeWrite::new(source.clone(), target.clone(), keeping);
        if what.discard_source {
            filter.discard_source();
        }
        let mut backup = Backup {
            shows_source,
            job_nodes,
            backup: LiveBackup {
                source,
                filter,
                parallel: what.parallel.unwrap_or(PARALLEL),
            },
            what,
            written,
            is_settled: false,
        };
        let mut taken_up = backup.take_up().await;
        if taken_up.is_ok() {
            let (source, front) = (&backup.what.source, backup.backup.filter.clone());
            let nodes = &mut backup.job_nodes;
            taken_up = nodes.show_filter(&job.settings, "copy-before-write", source, front);
        }
        if let Err(error) = taken_up {
            backup.is_settled = true;
            backup.leave().await;
            return Err(error);
        }
        // Until here whoever has opened the target does not know yet that there is a job.
        if backup.what.owns_target {
            backup.job_nodes.own(&backup.what.target);
        }
        Ok(backup)
    }

    fn join(
        job_nodes: &mut JobNodes,
        job: &Job,
        what: &BackedUp,
    ) -> vellum::Result<(Arc<dyn BlockDevice>, Arc<dyn BlockDevice>)> {
        let (none, size) = (Changes::NONE, Changes::SIZE);
        let (changes, keeps) = match what.discard_source {
            true => (Changes::CONTENT, Changes::ALL),
            false => (none, size),
        };
        let has_users = job_nodes.nodes.is_used_by(&what.source, |_| true);
        job_nodes.join(&job.settings, &what.source, "main node", changes, keeps)?;
        // What is written below by others comes past no filter.
        let kept = job_nodes.keep_below(&what.source, Keeps::All);
        kept.map_err(|error| match has_users {
            true => error.context("backup", "Could not replace node"),
            false => error,
        })?;
        let (content, all) = (Changes::CONTENT, Changes::ALL);
        job_nodes.join(&job.settings, &what.target, "target", content, all)?;
        let nodes = &job_nodes.nodes;
        let target = job_nodes.way_to(&what.target)?;
        Ok((nodes.device(&what.source)?, target))
    }

    /// Has users go through the filter.
    async fn take_up(&self) -> vellum::Result<()> {
        let (nodes, filter) = (&self.job_nodes.nodes, &self.backup.filter);
        if self.shows_source {
            let seen = filter.snapshot_view();
            nodes.insert_filter(&self.what.target, Some(seen)).await?;
        }
        let front = filter.clone();
        nodes.insert_filter(&self.what.source, Some(front)).await?;
        if let (Sync::Bitmap, Some(bitmap)) = (self.what.sync, &self.what.bitmap) {
            // What was written since is in it too, and is copied as it was before.
            let dirty = bitmap.bitmap.read().await?;
            self.backup.keep_only(dirty.ranges());
        }
        Ok(())
    }

    /// Holds the users of the source up. Those of the target go first: a write to the
    /// source may wait for their reads, and these for what is held up.
    async fn hold(&self) -> vellum::Result<Vec<DrainedUsers>> {
        let nodes = &self.job_nodes.nodes;
        let mut held = Vec::new();
        if self.shows_source {
            held.push(nodes.drain(&self.what.target).await?);
        }
        held.push(nodes.drain(&self.what.source).await?);
        Ok(held)
    }

    /// Has the bitmap tell what was written since the backup began, and `also`.
    async fn update_bitmap(&mut self, also: Vec<Range<u64>>) -> vellum::Result<()> {
        let Some(bitmap) = &self.what.bitmap else {
            return Ok(());
        };
        let mut ranges = also;
        let written = match bitmap.enabled {
            true => self.written.take().ranges(),
            false => Vec::new(),
        };
        ranges.extend(written.iter().cloned());
        let set = bitmap.bitmap.set_after_backup(ranges).await;
        if set.is_err() {
            // Whoever tries again has to know it.
            for range in written {
                self.written.mark(range.start, range.end - range.start);
            }
        }
        set
    }

    /// Copies what there is to copy. It may be tried again.
    async fn copy(&self, job: &Job, begun: &mut Option<u64>) -> Result<CopyOutcome, CopyError> {
        let mut reporter = ProgressReporter { job, exact: true };
        let backup = &self.backup;
        if self.what.sync == Sync::None {
            backup.wait(&job.control, &mut reporter).await?;
            return Ok(CopyOutcome::GivenUp);
        }
        let total_bytes = match *begun {
            Some(total_bytes) => total_bytes,
            None => {
                if self.what.sync == Sync::Top
                    && backup.keep_only_top(&job.control).await? == CopyOutcome::GivenUp
                {
                    return Ok(CopyOutcome::GivenUp);
                }
                *begun.insert(backup.todo_bytes())
            }
        };
        backup.run(&job.control, &mut reporter, total_bytes).await
    }

    fn mode(&self) -> BitmapMode {
        let bitmap = self.what.bitmap.as_ref();
        bitmap.map_or(BitmapMode::Never, |bitmap| bitmap.mode)
    }

    /// As [`Backup::conclude`], for a backup that has ended and is not complete: the target lacks
    /// `left`.
    async fn update_bitmap_of_incomplete(&mut self, left: Vec<Range<u64>>) -> vellum::Result<()> {
        let _held = self.hold().await?;
        self.update_bitmap(left).await
    }

    /// Has users go to the nodes again.
    async fn let_go(&self) -> vellum::Result<()> {
        let nodes = &self.job_nodes.nodes;
        let _held = self.hold().await?;
        nodes.insert_filter(&self.what.source, None).await?;
        match self.shows_source {
            true => nodes.insert_filter(&self.what.target, None).await,
            false => Ok(()),
        }
    }
}

impl Work for Backup {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        let mut begun = None;
        loop {
            match self.copy(job, &mut begun).await {
                Ok(outcome) => return Ok(outcome),
                // Old bytes that are lost do not come back.
                Err(error) if self.backup.is_broken() => return Err(job.report_failure(error)),
                Err(error) => job.survive(error, self.what.policies).await?,
            }
        }
    }

    async fn draw_near(&mut self) -> vellum::Result<()> {
        if self.mode() != BitmapMode::Never {
            let source = std::slice::from_ref(&self.what.source);
            self.job_nodes.nodes.wait_for_answers(source).await;
        }
        Ok(())
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        if self.mode() != BitmapMode::Never {
            let _held = self.hold().await?;
            self.update_bitmap(Vec::new()).await?;
        }
        self.is_settled = true;
        Ok(())
    }

    async fn leave(mut self) {
        // From here on no user waits for a copy, so holding them up ends.
        let left = self.backup.filter.end();
        let filter = &self.backup.filter;
        // Otherwise it goes on calling dirty what it did, which is more.
        let forgets = !self.is_settled && self.mode() == BitmapMode::Always;
        if forgets && filter.has_durable_target().await {
            let _ = self.update_bitmap_of_incomplete(left).await;
        }
        // There is nothing to do about it: the filter lets everything pass.
        let _ = self.let_go().await;
        let filter = self.backup.filter;
        if self.what.discard_source {
            // What is discarded must not meet what the next user writes.
            filter.left_target().await;
        }
        if !filter.left().await {
            let left = async move { filter.left_target().await };
            return self.job_nodes.leave_before(&self.what.target, left);
        }
        drop(filter);
        self.job_nodes.leave().await;
    }
}
