//! What must hold after the end of a daemon: the next one opens what clients used last, by
//! the names in the images, and finds everything that was flushed.

use std::rc::Rc;
use std::sync::Arc;

use serde_json::json;
use vellum::BlockDevice;
use vellum::qcow2::AsQcow2;
use vellum::qcow2::check::{CheckOptions, check};
use vellum_graph::Nodes;
use vellum_io::Buffer;
use vellum_options::Options;

use super::files::{SimFiles, is_raw};
use super::guest_disk::{BackupSeries, BitmapPair, ExpectedFile};
use super::lanes::Lanes;
use super::setup::Setup;
use crate::audit::{Frozen, audit};
use crate::bitmap;
use crate::disk::{Disk, Mode};
use crate::failure::{Failure, FailureKind, guarded};
use crate::model::{LogicalTime, Model};
use crate::record::CutPoint;
use crate::rng::Rng;
use crate::schedule::Scheduler;
use crate::sparse_bytes::SparseBytes;

const READ_BYTES: u64 = 64 << 10;

/// A file of which it is known what it must show.
#[derive(Debug, Clone)]
struct Expected {
    file: String,
    model: Rc<Model>,
    begun: LogicalTime,
    /// What the model knows of bitmaps is about these.
    bitmaps: Option<BitmapPair>,
    what: String,
}

/// What is known at the moment of the end.
#[derive(Debug, Clone)]
pub(super) struct Expectations {
    shown: Vec<Expected>,
    /// Those whose bitmaps are in what clients use.
    series: Vec<BackupSeries>,
    /// All images, with their numbers on the disk.
    images: Vec<(String, usize)>,
}

impl Expectations {
    /// What must hold if the daemon ends now.
    pub(super) fn of(setup: &Setup) -> Expectations {
        let (mut shown, mut series) = (Vec::new(), Vec::new());
        for disk in &setup.disks {
            if let Some(top) = setup.top(disk) {
                let pair = disk.bitmaps.borrow().clone();
                let current = disk.series.borrow().clone();
                series.extend(current.filter(|series| series.node == top));
                shown.push(Expected {
                    file: top.clone(),
                    model: Rc::new(disk.model.borrow().after_cut()),
                    begun: 0,
                    bitmaps: pair.filter(|pair| pair.node == top),
                    what: format!("disk {}", disk.name),
                });
            }
            let kept = disk.kept.borrow();
            shown.extend(kept.iter().map(|kept: &ExpectedFile| Expected {
                file: kept.file.clone(),
                model: kept.model.clone(),
                begun: kept.begun,
                bitmaps: None,
                what: format!("{} of disk {}", kept.what, disk.name),
            }));
        }
        Expectations {
            shown,
            series,
            images: setup.files.names().into_iter().collect(),
        }
    }

    /// The images must be sound, whatever they hold.
    pub(super) fn of_images(setup: &Setup) -> Expectations {
        Expectations {
            shown: Vec::new(),
            series: Vec::new(),
            images: setup.files.names().into_iter().collect(),
        }
    }

    /// Starts again with these contents of the files, and looks at everything.
    pub(super) fn verify(&self, contents: &[SparseBytes]) -> Result<(), Failure> {
        guarded(|| {
            let qcow2 = |image: &&(String, usize)| !is_raw(&image.0);
            for (name, number) in self.images.iter().filter(qcow2) {
                let problems = audit(&contents[*number], &Frozen::default());
                if !problems.is_empty() {
                    let message = format!("{name}: {}", problems.join("; "));
                    return Err(Failure::new(FailureKind::Audit, message));
                }
            }
            let files = self.plug(Mode::Instant, contents);
            let lanes = Lanes::new(1, 0);
            let verified = lanes.run(
                &files.disk,
                &mut Scheduler::new(0),
                verify_all(files.clone(), self.clone()),
                &mut |_| true,
            );
            lanes.kill();
            verified?.unwrap_or(Ok(()))
        })
    }

    /// Starts again after a kill, over what has completed at `point` and what of the rest lands; gives the moment at which
    /// the power fails while everything is looked at.
    pub(super) fn outlive(&self, point: &CutPoint, rng: &mut Rng) -> Result<CutPoint, Failure> {
        guarded(|| {
            let files = self.plug(Mode::Scheduled, &point.durable);
            let (completed, in_flight) = point.records.split_at(point.completed);
            let landed = in_flight.iter().filter(|_| rng.chance(1, 2));
            files.disk.land_unsynced(completed.iter().chain(landed));
            let lanes = Lanes::new(1, rng.next_u64());
            let most = *rng.pick(&[32, 256]);
            let end = rng.below(most);
            let verified = lanes.run(
                &files.disk,
                &mut Scheduler::new(rng.next_u64()),
                verify_all(files.clone(), self.clone()),
                &mut |step| step < end,
            );
            lanes.kill();
            verified?.unwrap_or(Ok(()))?;
            Ok(files.disk.cut_point())
        })
    }

    /// The files on a disk of their own, with the numbers that they have.
    fn plug(&self, mode: Mode, contents: &[SparseBytes]) -> Arc<SimFiles> {
        let files = SimFiles::new(Disk::new(mode));
        let mut images = self.images.clone();
        images.sort_by_key(|(_, number)| *number);
        for (name, number) in &images {
            debug_assert_eq!(*number, files.disk.files(), "no file is taken away");
            files.add(name, contents[*number].clone());
        }
        files
    }
}

async fn verify_all(files: Arc<SimFiles>, all: Expectations) -> Result<(), Failure> {
    for expected in all.shown {
        let nodes = Nodes::live_on(files.clone());
        let opened = open(&nodes, &expected.file).await;
        let failed = |error: &vellum::Error| {
            let what = (&expected.what, &expected.file);
            Failure::error(FailureKind::Open, what, error)
        };
        let device = opened.map_err(|error| failed(&error))?;
        let seen = compare(&*device, &expected).await;
        drop(device);
        nodes.close().await.map_err(|error| failed(&error))?;
        seen?;
    }
    for series in all.series {
        let nodes = Nodes::live_on(files.clone());
        let checked = check_bitmap(&nodes, &series).await;
        checked.map_err(|error| Failure::error(FailureKind::Bitmap, &series, &error))??;
        let closed = nodes.close().await;
        closed.map_err(|error| Failure::error(FailureKind::Bitmap, &series, &error))?;
    }
    for (name, _) in all.images {
        if is_raw(&name) {
            continue;
        }
        let failed = |error| Failure::error(FailureKind::Check, &name, &error);
        let file = vellum_graph::files::Files::open(&*files, &name, false).map_err(failed)?;
        let report = check(file, &CheckOptions::default())
            .await
            .map_err(failed)?;
        if report.corruptions + report.check_errors > 0 {
            let message = format!("{name}: {report:?}");
            return Err(Failure::new(FailureKind::Check, message));
        }
    }
    Ok(())
}

async fn open(nodes: &Nodes, file: &str) -> vellum::Result<Arc<dyn BlockDevice>> {
    let options = json!({
        "driver": if is_raw(file) { "raw" } else { "qcow2" },
        "node-name": file,
        "file": {"driver": "file", "filename": file},
    });
    nodes.add(Options::from_json(&options.to_string())?).await?;
    nodes.device(file)
}

/// Fails unless the bitmap of a series calls all dirty that differs from the last backup.
async fn check_bitmap(nodes: &Nodes, series: &BackupSeries) -> vellum::Result<Result<(), Failure>> {
    let (disk, last) = (
        open(nodes, &series.node).await?,
        open(nodes, &series.last).await?,
    );
    let failed = |what: String| {
        let message = format!("{what}: {series:?}");
        Ok(Err(Failure::new(FailureKind::Bitmap, message)))
    };
    let Some(image) = disk.as_qcow2() else {
        return failed("a raw image".to_owned());
    };
    let list = image.bitmaps().list().await?;
    let Some(info) = list.iter().find(|info| info.name == series.bitmap) else {
        return failed(format!("no such bitmap in {list:?}"));
    };
    if !info.consistent {
        return Ok(Ok(()));
    }
    let bitmap = image.bitmaps().read(&series.bitmap).await?;
    let dirty: Vec<_> = bitmap.ranges().collect();
    let size = disk.size_bytes();
    let mut offset = 0;
    while offset < size {
        let len = READ_BYTES.min(size - offset);
        let now = disk.read(offset, Buffer::zeroed(len as usize)).await?;
        let then = last.read(offset, Buffer::zeroed(len as usize)).await?;
        let sectors = now.chunks(512).zip(then.chunks(512));
        for (at, _) in (offset..)
            .step_by(512)
            .zip(sectors)
            .filter(|(_, (now, then))| now != then)
        {
            if !dirty.iter().any(|range| range.contains(&at)) {
                return failed(format!("byte {at} has changed, and is clean: {dirty:?}"));
            }
        }
        offset += len;
    }
    Ok(Ok(()))
}

async fn compare(device: &dyn BlockDevice, expected: &Expected) -> Result<(), Failure> {
    let mut model = Model::clone(&expected.model);
    let size = device.size_bytes();
    let mut offset = 0;
    while offset < size {
        let len = READ_BYTES.min(size - offset);
        let buffer = device.read(offset, Buffer::zeroed(len as usize)).await;
        let buffer =
            buffer.map_err(|error| Failure::error(FailureKind::Request, &expected.what, &error))?;
        model
            .end_read(expected.begun, offset, &buffer)
            .map_err(|mismatch| {
                let what = format!("{} in {}", expected.what, expected.file);
                Failure::from(mismatch).when(&what)
            })?;
        offset += len;
    }
    let (Some(pair), Some(image)) = (&expected.bitmaps, device.as_qcow2()) else {
        return Ok(());
    };
    let found = bitmap::find(&image.bitmaps(), (&pair.first, &pair.second)).await?;
    found
        .check(&mut model)
        .map_err(|failure| failure.when(&format!("{pair:?}")))
}
