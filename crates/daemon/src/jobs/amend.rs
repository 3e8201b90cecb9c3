//! `x-blockdev-amend`: key slots of an encrypted image in use are changed.

use std::rc::Rc;
use std::sync::Arc;

use vellum::luks::AsLuks;
use vellum::qcow2::AsQcow2;
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_format::crypto::CryptMethod;
use vellum_graph::live::Changes;
use vellum_images::amend_keys::key_change_by;
use vellum_jobs::live::CopyOutcome;
use vellum_options::create_options::CreateSettings;

use super::{Job, JobNodes, Work};

/// A change of key slots: settings, by whichever names the format has for them.
pub(crate) struct SlotChange {
    pub(crate) settings: CreateSettings,
    /// What stands before their names.
    pub(crate) prefix: &'static str,
    /// The secret that unlocks the image, if it is not the one that it was opened with.
    pub(crate) unlocked_by: Option<String>,
    /// The image keeps the kind of its encryption.
    pub(crate) is_luks: bool,
    pub(crate) force: bool,
}

/// An amendment.
pub(crate) struct Amend {
    job_nodes: JobNodes,
    node: String,
    image: Arc<dyn BlockDevice>,
    /// What is to change, if anything.
    change: Option<SlotChange>,
}

impl Amend {
    /// Prepares the amendment of a node.
    pub(crate) async fn prepare(
        mut job_nodes: JobNodes,
        job: &Rc<Job>,
        node: String,
        change: Option<SlotChange>,
    ) -> Result<Amend> {
        let joined = Amend::join(&mut job_nodes, job, &node);
        let image = job_nodes.or_leave(joined).await?;
        Ok(Amend {
            job_nodes,
            node,
            image,
            change,
        })
    }

    fn join(job_nodes: &mut JobNodes, job: &Job, node: &str) -> Result<Arc<dyn BlockDevice>> {
        let image = job_nodes.nodes.device(node)?;
        let none = Changes::NONE;
        job_nodes.join(&job.settings, node, "main node", none, none)?;
        // It works with the image as it is open now.
        job_nodes.nodes.pin(node, true)?;
        Ok(image)
    }

    async fn amend(&mut self) -> Result<()> {
        let Some(change) = self.change.take() else {
            return Ok(());
        };
        let keys = || {
            let unlocked_by = change.unlocked_by.as_deref();
            key_change_by(&change.settings, change.prefix, change.force, unlocked_by)
        };
        if let Some(volume) = self.image.as_luks() {
            return volume.change_keys(keys()?).await.map(drop);
        }
        let Some(image) = self.image.as_qcow2() else {
            return Err(refuse("Driver does not support x-blockdev-amend"));
        };
        match image.header().crypt_method {
            CryptMethod::None => Err(refuse("image is not encrypted, can't amend")),
            _ if !change.is_luks => Err(refuse(
                "Amend can't be used to change the qcow2 encryption format",
            )),
            CryptMethod::Luks => image.change_keys(keys()?).await.map(drop),
            _ => Err(refuse(
                "Only LUKS encryption options can be amended for qcow2 with blockdev-amend",
            )),
        }
    }
}

fn refuse(message: &str) -> Error {
    Error::new(ErrorKind::Unsupported, "amend", message)
}

impl Work for Amend {
    async fn run(&mut self, job: &Job) -> Result<CopyOutcome> {
        job.set_progress(0, 1);
        let amended = self.amend().await;
        job.set_progress(1, 1);
        amended.map(|()| CopyOutcome::All)
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
