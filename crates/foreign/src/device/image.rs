//! [`ForeignImage`]: what a device of this crate is beside a device, whatever its format.

use std::fmt;
use std::sync::Arc;

use vellum::{BlockDevice, ErrorKind, Io, Result, Storage};

use super::core::Core;
use crate::facts::{BackingName, Facts};
use crate::layout::Layout;

/// The [`format_device`](vellum::BlockDevice::format_device) of a device of this crate.
#[derive(Clone)]
pub struct ForeignImage(Arc<dyn Image>);

impl ForeignImage {
    pub(super) fn new<L: Layout>(core: Arc<Core<L>>) -> Self {
        ForeignImage(core)
    }

    /// The image that a device is, if it is one of this crate.
    pub fn of(device: &dyn BlockDevice) -> Option<&Self> {
        device.format_device()?.downcast_ref()
    }

    /// What the image says of itself.
    pub fn facts(&self) -> Arc<Facts> {
        self.0.facts()
    }

    /// The storages that the image consists of; the one that it is named by is the first.
    pub fn files(&self) -> Vec<Arc<dyn Storage>> {
        self.0.files()
    }

    /// Keeps the identity by which images on top know this one (`vhdx`, `vmdk`), whatever is written from now
    /// on: for a commit, which takes nothing from the one on top that it does not give back to it. So that one can
    /// be opened whatever interrupts the commit. To be called before the first write.
    pub fn keep_identity(&self) {
        self.0.keep_identity(true);
    }

    /// Ends that: everything is written, and images on top that were made before are of another content.
    /// Nothing is done if it was not kept.
    ///
    /// # Errors
    /// What the storage says.
    pub fn change_identity(&self) -> Io<()> {
        self.0.clone().change_identity()
    }

    /// Has the image name another backing file, or none, durably. What it shows is as it was: that is for
    /// whoever opens it anew.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] if the format does not do that, [`ErrorKind::NoSpace`] if the name
    /// has no room, [`ErrorKind::ReadOnly`]; the image is as it was then. Else what the storage says.
    pub fn set_backing_file(&self, backing: Option<BackingName>) -> Io<()> {
        self.0.clone().set_backing_file(backing)
    }
}

impl fmt::Debug for ForeignImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ForeignImage").field(&self.facts()).finish()
    }
}

trait Image: Send + Sync {
    fn facts(&self) -> Arc<Facts>;

    fn files(&self) -> Vec<Arc<dyn Storage>>;

    fn keep_identity(&self, keep: bool);

    fn change_identity(self: Arc<Self>) -> Io<()>;

    fn set_backing_file(self: Arc<Self>, backing: Option<BackingName>) -> Io<()>;
}

impl<L: Layout> Image for Core<L> {
    fn facts(&self) -> Arc<Facts> {
        self.facts.lock().clone()
    }

    fn files(&self) -> Vec<Arc<dyn Storage>> {
        self.layout.files().to_vec()
    }

    fn keep_identity(&self, keep: bool) {
        self.layout.keep_identity(keep);
    }

    fn change_identity(self: Arc<Self>) -> Io<()> {
        Io::start(async move { self.take_identity().await })
    }

    fn set_backing_file(self: Arc<Self>, backing: Option<BackingName>) -> Io<()> {
        if self.read_only {
            let message = "the device is read-only";
            return Io::ready(Err(self.error(ErrorKind::ReadOnly, "rebase", message)));
        }
        Io::start(async move { self.name_backing_file(backing).await })
    }
}

impl<L: Layout> Core<L> {
    async fn take_identity(&self) -> Result<()> {
        let _alone = self.changes.alone().await;
        self.check_changeable()?;
        let was_kept = self.layout.keep_identity(false);
        if !was_kept || !self.is_changing() {
            // There is a new one already, or nothing was written.
            return Ok(());
        }
        self.commit().await?;
        let changed = self.layout.change_identity().await;
        changed.inspect_err(|error| self.fail_stop(error))?;
        *self.facts.lock() = Arc::new(self.layout.facts());
        Ok(())
    }

    async fn name_backing_file(&self, backing: Option<BackingName>) -> Result<()> {
        let _alone = self.changes.alone().await;
        self.check_changeable()?;
        if self.layout.can_set_backing_file() {
            self.begin_changes().await?;
            self.commit().await?;
        }
        let changed = self.layout.set_backing_file(backing.as_ref()).await;
        changed.inspect_err(|error| match error.kind() {
            // Nothing was begun.
            ErrorKind::Unsupported | ErrorKind::NoSpace => {}
            _ => self.fail_stop(error),
        })?;
        *self.facts.lock() = Arc::new(self.layout.facts());
        Ok(())
    }
}
