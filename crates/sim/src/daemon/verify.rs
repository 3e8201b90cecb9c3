//! What must hold after the end of a daemon: the next one opens what clients used last, by
//! the names in the images, and finds everything that was flushed.

use std::rc::Rc;
use std::sync::Arc;

use serde_json::json;
use vellum::BlockDevice;
use vellum::qcow2::check::{CheckOptions, check};
use vellum_control::{Nodes, Options};
use vellum_storage::Buffer;

use super::files::SimFiles;
use super::lanes::Lanes;
use super::scene::{Kept, Scene};
use crate::audit::{Frozen, audit};
use crate::disk::{Disk, Mode};
use crate::failure::{Failure, FailureKind, guarded};
use crate::model::{Model, Tick};
use crate::pages::Pages;
use crate::schedule::Scheduler;

const READ_BYTES: u64 = 64 << 10;

/// A file of which it is known what it must show.
#[derive(Debug, Clone)]
struct Expected {
    file: String,
    model: Rc<Model>,
    begun: Tick,
    what: String,
}

/// What is known at the moment of the end.
#[derive(Debug, Clone)]
pub(super) struct Expectations {
    shown: Vec<Expected>,
    /// All images, with their numbers on the disk.
    images: Vec<(String, usize)>,
}

impl Expectations {
    /// What must hold if the daemon ends now.
    pub(super) fn of(scene: &Scene) -> Expectations {
        let mut shown = Vec::new();
        for disk in &scene.disks {
            if let Some(top) = scene.top(disk) {
                shown.push(Expected {
                    file: top,
                    model: Rc::new(disk.model.borrow().after_cut()),
                    begun: 0,
                    what: format!("disk {}", disk.name),
                });
            }
            let kept = disk.kept.borrow();
            shown.extend(kept.iter().map(|kept: &Kept| Expected {
                file: kept.file.clone(),
                model: kept.model.clone(),
                begun: kept.begun,
                what: format!("{} of disk {}", kept.what, disk.name),
            }));
        }
        Expectations {
            shown,
            images: scene.files.names().into_iter().collect(),
        }
    }

    /// The images must be sound, whatever they hold.
    pub(super) fn of_images(scene: &Scene) -> Expectations {
        Expectations {
            shown: Vec::new(),
            images: scene.files.names().into_iter().collect(),
        }
    }

    /// Starts again with these contents of the files, and looks at everything.
    pub(super) fn verify(&self, contents: &[Pages]) -> Result<(), Failure> {
        guarded(|| {
            for (name, number) in &self.images {
                let problems = audit(&contents[*number], &Frozen::default());
                if !problems.is_empty() {
                    let message = format!("{name}: {}", problems.join("; "));
                    return Err(Failure::new(FailureKind::Audit, message));
                }
            }
            let disk = Disk::new(Mode::Instant);
            let files = SimFiles::new(disk.clone());
            let mut images = self.images.clone();
            images.sort_by_key(|(_, number)| *number);
            for (name, number) in &images {
                files.add(name, contents[*number].clone());
            }
            let shown = self.shown.clone();
            let lanes = Lanes::new(1, 0);
            let looked = lanes.run(
                &disk,
                &mut Scheduler::new(0),
                look(files, shown, images),
                &mut |_| true,
            );
            lanes.kill();
            looked?.unwrap_or(Ok(()))
        })
    }
}

async fn look(
    files: Arc<SimFiles>,
    shown: Vec<Expected>,
    images: Vec<(String, usize)>,
) -> Result<(), Failure> {
    for expected in shown {
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
    for (name, _) in images {
        let failed = |error| Failure::error(FailureKind::Check, &name, &error);
        let file = vellum_control::files::Files::open(&*files, &name, false).map_err(failed)?;
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
        "driver": "qcow2",
        "node-name": "top",
        "file": {"driver": "file", "filename": file},
    });
    nodes.add(Options::from_json(&options.to_string())?).await?;
    nodes.device("top")
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
    Ok(())
}
