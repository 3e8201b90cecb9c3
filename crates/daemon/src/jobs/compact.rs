//! `x-vellum-compact`: the file of an image in use becomes as short as what is allocated in it.

use std::rc::Rc;
use std::sync::Arc;

use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_graph::live::Changes;
use vellum_images::compact::compact;
use vellum_jobs::live::CopyOutcome;

use super::{Job, JobNodes, Work};

/// What it is called, as a command and as a job.
pub(crate) const NAME: &str = "x-vellum-compact";

/// A compaction.
pub(crate) struct Compact {
    job_nodes: JobNodes,
    node: String,
    image: Arc<dyn BlockDevice>,
}

impl Compact {
    /// Prepares the compaction of a node.
    pub(crate) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        node: String,
    ) -> Result<Compact> {
        let joined = Compact::join(&mut job_nodes, job, &node);
        let image = job_nodes.or_leave(joined).await?;
        // Said now, and not by a job that has begun.
        let refused = match image.as_qcow2() {
            Some(qcow2) => qcow2.compact().await.map(drop),
            None => Ok(()),
        };
        if refused.is_err() {
            let _ = job_nodes.nodes.pin(&node, false);
        }
        job_nodes.or_leave(refused).await?;
        Ok(Compact {
            job_nodes,
            node,
            image,
        })
    }

    fn join(job_nodes: &mut JobNodes, job: &Job, node: &str) -> Result<Arc<dyn BlockDevice>> {
        let image = job_nodes.nodes.device(node)?;
        let refuse = |kind, message: String| Err(Error::new(kind, "compact", message));
        if image.as_qcow2().is_none() {
            let message = format!("Node '{node}' is no qcow2 image: only these are compacted");
            return refuse(ErrorKind::Unsupported, message);
        }
        if image.info().read_only {
            let message = format!("Node '{node}' is read-only");
            return refuse(ErrorKind::ReadOnly, message);
        }
        let none = Changes::NONE;
        job_nodes.join(&job.settings, node, "main node", none, none)?;
        // It works with the image as it is open now.
        job_nodes.nodes.pin(node, true)?;
        Ok(image)
    }
}

impl Work for Compact {
    async fn run(&mut self, job: &Job) -> Result<CopyOutcome> {
        let Some(image) = self.image.as_qcow2() else {
            return Ok(CopyOutcome::All);
        };
        let progress = |done_bytes, total_bytes| job.set_progress(done_bytes, total_bytes);
        let done = compact(image, &job.control, progress).await?;
        match done.leaks_text(image.header().geometry().cluster_size_bytes()) {
            Some(why) => Err(Error::new(ErrorKind::InvalidImage, "compact", why)),
            None => Ok(done.outcome),
        }
    }

    async fn conclude(&mut self, _job: &Job) -> Result<()> {
        Ok(())
    }

    async fn leave(mut self) {
        drop(self.image);
        // It is there as long as a job uses it.
        let _ = self.job_nodes.nodes.pin(&self.node, false);
        self.job_nodes.leave().await;
    }
}
