//! What has changed of a disk since it was pushed: by a bitmap that the push leaves in the image, and that
//! is named for what was pushed, so that it cannot be taken for another one's.

use std::ops::Range;

use vellum::qcow2::{AsQcow2, BitmapOptions, Bitmaps};
use vellum::{BlockDevice, Error, ErrorKind, Result};
use vellum_repository::{CHUNK_BYTES, PushId, TagName};

use super::Named;

/// The bitmaps of pushes of one disk to one tag of one repository.
#[derive(Debug)]
pub struct Tracking {
    bitmaps: Bitmaps,
    prefix: String,
}

impl Tracking {
    /// Those of an image; `None` if its format has no bitmaps.
    pub fn of(device: &dyn BlockDevice, repository: &Named) -> Option<Self> {
        let bitmaps = device.as_qcow2()?.bitmaps();
        let tag: &TagName = &repository.disk.tag;
        let hash = vellum_repository::name_hash(repository.objects.name());
        Some(Tracking {
            bitmaps,
            prefix: format!("push/{hash}/{tag}/"),
        })
    }

    fn name(&self, push: PushId) -> String {
        format!("{}{push}", self.prefix)
    }

    /// What has changed since a push; `None` if that is not known.
    ///
    /// # Errors
    /// If the bitmaps cannot be read.
    pub async fn since(&self, push: PushId) -> Result<Option<Vec<Range<u64>>>> {
        let name = self.name(push);
        let listed = self.bitmaps.list().await?;
        let Some(info) = listed.into_iter().find(|info| info.name == name) else {
            return Ok(None);
        };
        // One that was switched off, or was in use in a crash, does not know all changes.
        if !info.auto || !info.consistent {
            return Ok(None);
        }
        let dirty = self.bitmaps.read(&name).await?;
        Ok(Some(dirty.ranges().collect()))
    }

    /// Begins to note what changes from now on, for a push of what there is now.
    ///
    /// # Errors
    /// If the image has no room for a bitmap, or is read-only.
    pub async fn begin(&self, push: PushId) -> Result<()> {
        let options = BitmapOptions::default().granularity_bytes(Some(CHUNK_BYTES));
        self.bitmaps.add(&self.name(push), options).await
    }

    /// The push has come to nothing: its bitmap goes.
    pub async fn give_up(&self, push: PushId) {
        // One that stays goes with the next push.
        let _ = self.bitmaps.remove(&self.name(push)).await;
    }

    /// The push has succeeded: all other bitmaps of the tag go.
    ///
    /// # Errors
    /// If the image cannot be changed.
    pub async fn keep_only(&self, push: PushId) -> Result<()> {
        let kept = self.name(push);
        for info in self.bitmaps.list().await? {
            if info.name.starts_with(&self.prefix) && info.name != kept {
                self.bitmaps.remove(&info.name).await?;
            }
        }
        Ok(())
    }
}

/// What a bitmap of the user's says.
///
/// # Errors
/// If there is none of that name, or it does not know all changes.
pub async fn dirty_of(device: &dyn BlockDevice, name: &str) -> Result<Vec<Range<u64>>> {
    let Some(image) = device.as_qcow2() else {
        let message = "Images of this format have no bitmaps";
        return Err(Error::new(ErrorKind::Unsupported, "read bitmap", message));
    };
    let dirty = image.bitmaps().read(name).await?;
    Ok(dirty.ranges().collect())
}
