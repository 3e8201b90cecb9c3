//! `x-vellum-scrub`: an image in use is compared with its checksums.

use std::rc::Rc;
use std::sync::Arc;

use serde_json::{Value, json};
use vellum::qcow2::AsQcow2;
use vellum::qcow2::checksums::{DamagedRange, ScrubReport};
use vellum::{BlockDevice, Error, ErrorKind};
use vellum_graph::live::Changes;
use vellum_images::scrub::{Repairs, scrub};
use vellum_jobs::live::CopyOutcome;

use super::{Job, JobNodes, Work};

/// What it is called, as a command and as a job.
pub(crate) const NAME: &str = "x-vellum-scrub";
/// Damaged ranges that have an event of their own.
const MOST_EVENTS: usize = 100;

/// A scrub.
pub(crate) struct Scrub {
    job_nodes: JobNodes,
    node: String,
    image: Arc<dyn BlockDevice>,
    repairs: bool,
}

impl Scrub {
    /// Prepares the scrub of a node; `repairs`: damaged bytes that its backing file has too are
    /// written anew.
    pub(crate) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        node: String,
        repairs: bool,
    ) -> vellum::Result<Scrub> {
        let joined = Scrub::join(&mut job_nodes, job, &node, repairs);
        let image = job_nodes.or_leave(joined).await?;
        Ok(Scrub {
            job_nodes,
            node,
            image,
            repairs,
        })
    }

    fn join(
        job_nodes: &mut JobNodes,
        job: &Rc<Job>,
        node: &str,
        repairs: bool,
    ) -> vellum::Result<Arc<dyn BlockDevice>> {
        let refuse = |kind, message: String| Error::new(kind, "scrub", message);
        let image = job_nodes.nodes.device(node)?;
        let Some(qcow2) = image.as_qcow2() else {
            let message = format!("Node '{node}' is no qcow2 image: only these have checksums");
            return Err(refuse(ErrorKind::Unsupported, message));
        };
        // Said now, and not by a job that has begun.
        qcow2.scrub()?;
        if repairs && image.info().read_only {
            let message = format!("Node '{node}' is read-only: nothing can be repaired");
            return Err(refuse(ErrorKind::ReadOnly, message));
        }
        let none = Changes::NONE;
        job_nodes.join(&job.settings, node, "main node", none, none)?;
        job_nodes.nodes.pin(node, true)?;
        Ok(image)
    }
}

impl Work for Scrub {
    async fn run(&mut self, job: &Job) -> vellum::Result<CopyOutcome> {
        let Some(image) = self.image.as_qcow2() else {
            return Ok(CopyOutcome::All);
        };
        let repairs = match self.repairs {
            true => Repairs::Damage,
            false => Repairs::None,
        };
        let progress = |done_bytes, total_bytes| job.set_progress(done_bytes, total_bytes);
        let found = scrub(image, repairs, &job.control, progress).await?;
        let Some(found) = found else {
            return Ok(CopyOutcome::GivenUp);
        };
        for damaged in found.damaged.iter().take(MOST_EVENTS) {
            let data = describe(&job.settings.id, &self.node, damaged);
            job.events.emit("X_VELLUM_SCRUB_DAMAGE", data);
        }
        match found.left_bytes() {
            0 => Ok(CopyOutcome::All),
            left_bytes => Err(damage(&found, left_bytes)),
        }
    }

    async fn conclude(&mut self, _job: &Job) -> vellum::Result<()> {
        Ok(())
    }

    async fn leave(mut self) {
        drop(self.image);
        // It is there as long as a job uses it.
        let _ = self.job_nodes.nodes.pin(&self.node, false);
        self.job_nodes.leave().await;
    }
}

fn describe(id: &str, node: &str, damaged: &DamagedRange) -> Value {
    let range = |range: &std::ops::Range<u64>| json!({"start": range.start, "end": range.end});
    let mut data = json!({
        "device": id,
        "node-name": node,
        "file": range(&damaged.file),
        "repaired": damaged.is_repaired,
    });
    if let Some(guest) = &damaged.guest {
        data["guest"] = range(guest);
    }
    data
}

/// Says how much damage is left, and where it begins.
fn damage(found: &ScrubReport, left_bytes: u64) -> Error {
    let left = || found.damaged.iter().filter(|range| !range.is_repaired);
    let place = match left().find_map(|range| range.guest.clone()) {
        Some(guest) => format!(
            "the first that the disk shows: bytes {} to {}",
            guest.start, guest.end
        ),
        None => "the disk shows none of them: metadata, free space or snapshots".to_owned(),
    };
    let told = found.damaged.iter();
    let told_bytes: u64 = told.map(|range| range.file.end - range.file.start).sum();
    let more = match told_bytes < found.damaged_bytes {
        true => " or more",
        false => "",
    };
    let ranges = left().count();
    let mut message = format!(
        "{left_bytes} bytes of the image's file, in {ranges} ranges{more}, have changed on disk; {place}"
    );
    if found.may_be_newer {
        message += "; another program may have written them (the file was modified since it was closed, or was not \
                    closed), so none is repaired: 'vellum scrub --repair --force' does";
    }
    Error::new(ErrorKind::Io, "scrub", message)
}
