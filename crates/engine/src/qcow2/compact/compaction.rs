//! A compaction from its begin to its end, pass by pass.

use std::sync::Arc;

use vellum_format::types::HostCluster;
use vellum_io::{Error, ErrorKind, Io, Result};

use super::pass::{Moved, Next, Pass};
use crate::qcow2::alloc::below::LowestFirst;
use crate::qcow2::device::Qcow2;
use crate::qcow2::image::Image;
use crate::qcow2::survey::{HostCell, SurveyOptions, survey};

/// A file that is longer than what is used of it by no more than one part in so many is short enough.
const GOOD_ENOUGH: u64 = 50;
/// Passes at most: guests may allocate as fast as clusters are moved.
const MOST_PASSES: u32 = 8;

/// What a compaction has done so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CompactionProgress {
    /// Length of the file when it began.
    pub old_file_bytes: u64,
    /// Length of the file when it was cut last.
    pub file_bytes: u64,
    /// What was moved.
    pub moved_bytes: u64,
    /// Bytes of the disk that have to be looked at, in all passes that were begun.
    pub total_bytes: u64,
    /// How many of these were looked at.
    pub done_bytes: u64,
}

/// A compaction of an image in use; see [`Qcow2::compact`].
#[derive(Debug)]
pub struct Compaction {
    image: Arc<Image>,
    _lowest_first: LowestFirst,
    pass: Option<Pass>,
    passes: u32,
    /// Length of the file before the last pass.
    before_pass_bytes: Option<u64>,
    /// It had room for all that it had to move.
    had_room: bool,
    /// Bytes of the disk that the passes before this one looked at.
    passed_bytes: u64,
    progress: CompactionProgress,
}

impl Qcow2 {
    /// Begins to make the file as short as what is allocated in it, while the image is used:
    /// [`Compaction::step`] does a part of the work. Dropped before it is done, it leaves a whole
    /// image, whose file may be as long as before.
    ///
    /// What stays where it is: compressed clusters of an image with internal snapshots, and all that
    /// these use while one of them is open ([`Qcow2::open_snapshot`]); the header of the encryption; a write log in
    /// the image.
    ///
    /// # Errors
    /// [`ErrorKind::ReadOnly`] where the image may not be changed, [`ErrorKind::Unsupported`] where
    /// the length of its file cannot change or it lies in another file (`data-file`).
    ///
    /// # Examples
    /// ```
    /// # use std::sync::Arc;
    /// # use vellum::{gate::DenyAll, storage::MemStorage, BlockDevice, Buffer, RequestFlags};
    /// # use vellum::qcow2::{OpenOptions, Qcow2};
    /// # use vellum::qcow2::create::{CreateOptions, create};
    /// # vellum_io::lane::block_on(async {
    /// # let file: Arc<dyn vellum::Storage> = Arc::new(MemStorage::new());
    /// # let options = CreateOptions::default().size_bytes(8 << 20);
    /// # create(file.clone(), None, &options).await?;
    /// # let options = OpenOptions::default().discard(true);
    /// let image = Qcow2::open(file.clone(), Arc::new(DenyAll), options).await?;
    /// image.write(0, Buffer::zeroed(8 << 20), RequestFlags::default()).await?;
    /// image.discard(0, 7 << 20).await?;
    /// let mut compaction = image.compact().await?;
    /// while let Some(_moved_bytes) = compaction.step().await? {}
    /// assert!(file.len_bytes()? < 2 << 20);
    /// image.close().await?;
    /// # Ok::<(), vellum::Error>(())
    /// # }).unwrap();
    /// ```
    pub async fn compact(&self) -> Result<Compaction> {
        let image = self.image.clone();
        image.check_changeable("compact")?;
        let refuse = |message: &str| {
            let error = Error::new(ErrorKind::Unsupported, "compact", message);
            Err(image.name_error(error))
        };
        if image.has_external_data() {
            return refuse("the disk's bytes lie in a data file, each at its own offset");
        }
        if !image.file.capabilities().growable {
            return refuse("the length of what the image lies on cannot change");
        }
        let old_file_bytes = image.file.len_bytes()?;
        Ok(Compaction {
            _lowest_first: {
                let allocator = image.allocator.clone();
                Io::start(async move { allocator.begin_lowest_first().await }).await?
            },
            pass: None,
            passes: 0,
            before_pass_bytes: None,
            had_room: true,
            passed_bytes: 0,
            progress: CompactionProgress {
                old_file_bytes,
                file_bytes: old_file_bytes,
                ..CompactionProgress::default()
            },
            image,
        })
    }
}

impl Compaction {
    /// Does a part of the work, which is done to its end even if this is dropped: some 1 MiB is moved, or
    /// a table is looked at. Tells how many bytes were moved; `None`: there is
    /// nothing left to do.
    ///
    /// # Errors
    /// What reading and writing report. What was moved before stays moved.
    pub async fn step(&mut self) -> Result<Option<u64>> {
        let pass = match self.pass {
            Some(pass) => pass,
            None => match self.begin_pass().await? {
                Some(pass) => pass,
                None => return Ok(None),
            },
        };
        let change = self.image.start_change(move |image| async move {
            image.begin_change("compact").await?;
            image.compact_step(pass).await
        });
        let Moved { bytes, next } = change.await?;
        let progress = &mut self.progress;
        progress.moved_bytes += bytes;
        self.pass = match next {
            Next::Step(next) => {
                let looked_at = self.passed_bytes + next.looked_at_bytes();
                progress.done_bytes = looked_at.min(progress.total_bytes);
                Some(next)
            }
            Next::Over { had_room } => {
                progress.done_bytes = progress.total_bytes;
                progress.file_bytes = self.image.file.len_bytes()?;
                self.passed_bytes = progress.total_bytes;
                self.had_room = had_room;
                None
            }
        };
        Ok(Some(bytes))
    }

    /// Ends it before everything is done: what is free at the end of the file by now is cut off.
    ///
    /// # Errors
    /// What reading and writing report.
    pub async fn end(mut self) -> Result<CompactionProgress> {
        if let Some(pass) = self.pass.take() {
            self.pass = Some(pass.cut_now());
            self.step().await?;
        }
        Ok(self.progress)
    }

    /// What was done so far.
    pub fn progress(&self) -> CompactionProgress {
        self.progress
    }

    /// How many bytes are counted as used although nothing leads to them. A crash has left them, and
    /// they keep the file long: only a check of an image that is not in use gives them back. What
    /// guests allocate or give up meanwhile is not counted, so it may be less for a busy disk.
    ///
    /// It waits for requests that have begun, and others wait for it a moment: a cluster that one of them
    /// has allocated, and not mapped yet, looks as if it had leaked.
    ///
    /// # Errors
    /// What reading and writing report, and what [`survey`] refuses.
    pub async fn leaked_bytes(&self) -> Result<u64> {
        let counted = self.image.start_change(|image| async move {
            // Most of it before others are held up: it takes as long as the image is large.
            let count = image.allocator.count_used().await?;
            let counting = async {
                let used = image.allocator.settled_used_clusters(count).await?;
                Ok((used, image.commits.ever_dropped_clusters()))
            };
            let counted = image.exclusively("compact", counting).await?;
            // New refcount blocks are led to on disk as well.
            image.settle().await?;
            Ok(counted)
        });
        let image = &self.image;
        let (used, ever_dropped) = counted.await?;
        let found = survey(image.file.clone(), &SurveyOptions::default().cells(1)).await?;
        let led_to: u64 = found.host.iter().map(HostCell::used_bytes).sum();
        let dropped_since = image.commits.ever_dropped_clusters() - ever_dropped;
        let stayed = used.saturating_sub(dropped_since);
        Ok((stayed * image.geometry.cluster_size_bytes()).saturating_sub(led_to))
    }

    /// Begins the next pass, if there is one to be made.
    async fn begin_pass(&mut self) -> Result<Option<Pass>> {
        let image = &self.image;
        if self.passes == 0 {
            // What guests have given up and not flushed counts as used until then.
            let settled = image.start_change(|image| async move {
                image.begin_change("compact").await?;
                image.settle().await
            });
            settled.await?;
        }
        let file_bytes = image.file.len_bytes()?;
        let allocator = image.allocator.clone();
        // Others may wait for the counts that it loads.
        let used = Io::start(async move { allocator.used_clusters().await }).await?;
        // Compressed data takes a little more where it is moved to.
        let slack = used / GOOD_ENOUGH + 1;
        let is_short = file_bytes <= (used + slack) * image.geometry.cluster_size_bytes();
        let got_shorter = |before: u64| file_bytes + before / GOOD_ENOUGH < before;
        let is_stuck = self.had_room && self.before_pass_bytes.is_some_and(|b| !got_shorter(b));
        if is_short || is_stuck || self.passes == MOST_PASSES {
            return Ok(None);
        }
        self.passes += 1;
        self.before_pass_bytes = Some(file_bytes);
        self.progress.file_bytes = file_bytes;
        self.progress.total_bytes = self.passed_bytes + image.size_bytes();
        let limit = used + slack * u64::from(self.passes) - 1;
        Ok(Some(match self.passes {
            1 => Pass::first(HostCluster(limit)),
            _ => Pass::new(HostCluster(limit)),
        }))
    }
}
