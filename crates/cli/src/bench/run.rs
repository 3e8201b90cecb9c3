//! Carries a plan out: rounds over the rows of a table.
//!
//! Invariant: every round measures each row once, and every other round goes backwards, so that
//! what disturbs the machine falls on all rows alike.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use vellum::{BlockDevice, Buffer};

use super::arguments::Effort;
use super::failure::Failure;
use super::images::{self, FullImage, Opening};
use super::load::{Blocks, Load, OverTime};
use super::plan::{self, Row, Table, Work};
use super::progress::Progress;
use super::result::{Results, Sample};
use super::scratch::{Interrupt, Scratch};
use super::survey::Survey;

/// The share of a row's time that reads run before they are measured.
const WARM_UP: f64 = 0.3;
/// Reads that touch every slice of a cache go this far.
const MOST_TOUCHES: u64 = 1 << 16;
/// And so long, in parts of a row's time.
const MOST_TOUCHING: f64 = 2.0;

/// What requests go to.
#[derive(Debug)]
pub(super) enum Target {
    /// Images made in a folder; the full one once it is needed.
    Made {
        scratch: Scratch,
        full: Option<FullImage>,
        direct: bool,
    },
    /// An image that the user named.
    Given(Box<Survey>),
}

/// A run over tables.
#[derive(Debug)]
pub(super) struct Bench {
    pub(super) target: Target,
    pub(super) effort: Effort,
    pub(super) interrupt: Interrupt,
}

impl Bench {
    /// Measures a table.
    pub(super) async fn measure(
        &mut self,
        table: Table,
        progress: &Progress,
    ) -> Result<Results, Failure> {
        let mut results = Results::new(table);
        let rows = results.rows.len();
        for round in 0..self.effort.rounds {
            for step in 0..rows {
                let index = if round % 2 == 0 {
                    step
                } else {
                    rows - 1 - step
                };
                let row = results.rows[index].row.clone();
                progress.row(&results.table.title, &row, round, self.effort.rounds);
                let sample = self.sample(&row, round).await?;
                self.interrupt.check()?;
                if let Some(sample) = sample {
                    results.rows[index].samples.push(sample);
                }
                progress.step();
            }
        }
        Ok(results)
    }

    /// Makes the full image now, if the tables need it.
    pub(super) async fn prepare(
        &mut self,
        tables: &[Table],
        progress: &Progress,
    ) -> Result<(), Failure> {
        let needs_full = |row: &Row| match row.work {
            Work::RawRead | Work::Read { .. } => true,
            Work::RawWrite | Work::SustainedRaw => false,
            Work::Write { backed, .. } => backed,
            Work::Sustained { .. } => true,
        };
        let needed = tables.iter().flat_map(|table| &table.rows).any(needs_full);
        let Target::Made {
            scratch,
            full,
            direct,
        } = &mut self.target
        else {
            return Ok(());
        };
        if needed && full.is_none() {
            progress.fill(self.effort.size_bytes);
            let made = FullImage::make(
                scratch.path("full.qcow2"),
                self.effort.size_bytes,
                *direct,
                self.effort.seed,
                &self.interrupt,
                &|bytes| progress.filled(bytes),
            )
            .await?;
            *full = Some(made);
        }
        Ok(())
    }

    /// One row in one round; nothing where there is nothing to measure.
    async fn sample(&mut self, row: &Row, round: usize) -> Result<Option<Sample>, Failure> {
        match row.work {
            Work::RawRead => self.raw_read(round).await,
            Work::Read { .. } => self.read(row.work, round).await.map(Some),
            _ => self.write(row.work, round).await.map(Some),
        }
    }

    fn load(&self, devices: Vec<Arc<dyn BlockDevice>>, blocks: Blocks, round: usize) -> Load {
        Load {
            devices,
            blocks,
            write: false,
            depth: self.effort.depth,
            seconds: self.effort.seconds,
            most: u64::MAX,
            over_time: None,
            // Another place in each round, the same for all rows of it.
            seed: self.effort.seed.wrapping_add(round as u64),
            interrupt: self.interrupt.clone(),
        }
    }

    async fn raw_read(&self, round: usize) -> Result<Option<Sample>, Failure> {
        let (devices, blocks) = match &self.target {
            Target::Made { full, direct, .. } => {
                let path = &full.as_ref().ok_or_else(no_full_image)?.path;
                let opening = Opening {
                    direct: *direct,
                    ..Opening::default()
                };
                let device = images::open(path, "raw", opening).await?;
                let blocks = Blocks::whole(device.size_bytes());
                (vec![device], blocks)
            }
            Target::Given(survey) => (survey.raw_devices.clone(), survey.raw_blocks.clone()),
        };
        if blocks.count() == 0 {
            return Ok(None);
        }
        let sample = self.warm_and_run(self.load(devices, blocks, round)).await?;
        Ok(Some(sample))
    }

    async fn read(&mut self, work: Work, round: usize) -> Result<Sample, Failure> {
        let Work::Read {
            layout,
            cache_bytes,
            entry_bytes,
        } = work
        else {
            return Ok(Sample::default());
        };
        let mut opening = Opening {
            cache_bytes: Some(cache_bytes),
            entry_bytes: Some(entry_bytes),
            ..Opening::default()
        };
        let (device, blocks) = match &mut self.target {
            Target::Made { full, direct, .. } => {
                let full = full.as_mut().ok_or_else(no_full_image)?;
                full.set_layout(layout)?;
                opening.direct = *direct;
                let device = images::open(&full.path, "qcow2", opening).await?;
                let blocks = Blocks::whole(device.size_bytes());
                (device, blocks)
            }
            Target::Given(survey) => (survey.open(opening).await?, survey.blocks.clone()),
        };
        let load = self.load(vec![device.clone()], blocks, round);
        touch(&device, &load, cache_bytes).await?;
        let sample = self.warm_and_run(load).await;
        device.close().await?;
        sample
    }

    /// Runs a load of reads once the caches are as they will be.
    async fn warm_and_run(&self, load: Load) -> Result<Sample, Failure> {
        let warm = Load {
            seconds: self.effort.seconds * WARM_UP,
            seed: !load.seed,
            ..load.clone()
        };
        warm.run().await?;
        Ok(load.run().await?)
    }

    async fn write(&mut self, work: Work, round: usize) -> Result<Sample, Failure> {
        let Some((path, direct)) = self.make_new(work).await? else {
            return Ok(Sample::default());
        };
        let log_bytes = match work {
            Work::Sustained { log_bytes } => log_bytes,
            _ => None,
        };
        let format = match work {
            Work::RawWrite | Work::SustainedRaw => "raw",
            _ => "qcow2",
        };
        let before = images::allocated_bytes(&path)?;
        let opening = Opening {
            writable: true,
            direct,
            log_bytes,
            ..Opening::default()
        };
        let device = images::open(&path, format, opening).await?;
        let load = self.write_load(work, device.clone(), round);
        let sample = load.run().await;
        let closing = Instant::now();
        let closed = device.close().await;
        let mut sample = sample?;
        closed?;
        if let Some(timeline) = &mut sample.timeline {
            timeline.close_seconds = closing.elapsed().as_secs_f64();
        }
        sample.grown_bytes = Some(images::allocated_bytes(&path)?.saturating_sub(before));
        remove(&path)?;
        if log_bytes.is_some() {
            remove(&images::log_path(&path))?;
        }
        Ok(sample)
    }

    /// Makes the image that a row writes into; its path, and whether it is used around the page
    /// cache.
    async fn make_new(&mut self, work: Work) -> Result<Option<(PathBuf, bool)>, Failure> {
        let Target::Made {
            scratch,
            full,
            direct,
        } = &mut self.target
        else {
            return Ok(None);
        };
        let path = scratch.path("new");
        let size_bytes = self.effort.size_bytes;
        let (cluster_bytes, subclusters, backed) = match work {
            Work::Write {
                cluster_bytes,
                subclusters,
                backed,
            } => (cluster_bytes, subclusters, backed),
            Work::Sustained { .. } => (plan::READ_CLUSTER_BYTES, false, true),
            _ => {
                images::make(&path, "raw", size_bytes, "").await?;
                return Ok(Some((path, *direct)));
            }
        };
        let mut options = format!("cluster_size={cluster_bytes}");
        if subclusters {
            options.push_str(",extended_l2=on");
        }
        if backed {
            full.as_mut()
                .ok_or_else(no_full_image)?
                .set_layout(plan::Layout::InOrder)?;
            options.push_str(",backing_file=full.qcow2,backing_fmt=qcow2");
        }
        images::make(&path, "qcow2", size_bytes, &options).await?;
        Ok(Some((path, *direct)))
    }

    fn write_load(&self, work: Work, device: Arc<dyn BlockDevice>, round: usize) -> Load {
        let blocks = Blocks::whole(self.effort.size_bytes);
        let load = Load {
            write: true,
            most: plan::write_count(self.effort.size_bytes),
            ..self.load(vec![device], blocks, round)
        };
        let sustained = self.effort.sustained;
        match work {
            Work::SustainedRaw | Work::Sustained { .. } => Load {
                most: sustained.writes(),
                seconds: sustained.seconds,
                over_time: Some(OverTime {
                    requests_per_flush: plan::WRITES_PER_FLUSH,
                    interval: sustained.interval(),
                }),
                ..load
            },
            _ => load,
        }
    }
}

fn remove(path: &Path) -> Result<(), Failure> {
    match std::fs::remove_file(path) {
        Ok(()) => Ok(()),
        Err(error) => Failure::io("remove", path, &error),
    }
}

fn no_full_image() -> Failure {
    Failure::Message("the full image was not prepared".into())
}

/// Reads a block of every slice once, so that a cache that can hold them all does.
async fn touch(
    device: &Arc<dyn BlockDevice>,
    load: &Load,
    cache_bytes: u64,
) -> Result<(), Failure> {
    let count = (cache_bytes / 2048)
        .clamp(1, MOST_TOUCHES)
        .min(load.blocks.count());
    let start = Instant::now();
    for index in 0..count {
        load.interrupt.check()?;
        if start.elapsed().as_secs_f64() > MOST_TOUCHING * load.seconds {
            break;
        }
        let block =
            (u128::from(index) * u128::from(load.blocks.count()) / u128::from(count)) as u64;
        let (_, offset_bytes) = load.blocks.at(block);
        let buffer = Buffer::for_read(plan::BLOCK_BYTES as usize);
        device.read(offset_bytes, buffer).await?;
    }
    Ok(())
}
