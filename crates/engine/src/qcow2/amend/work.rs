//! An image while it is amended: closed, and opened for each step that needs it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_format::Header;
use vellum_io::{Error, ErrorKind, Result};

use super::progress::Progress;
use crate::qcow2::header::rewrite::rewrite_header;
use crate::qcow2::image::Image;
use crate::qcow2::open;

pub(super) fn refuse(kind: ErrorKind, message: impl Into<String>) -> Error {
    Error::new(kind, "amend", message)
}

/// An image that is being amended: closed, with its parts still at hand.
pub(super) struct Work {
    pub(super) closed: Arc<Image>,
    pub(super) progress: Progress,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Work({})", self.closed.name)
    }
}

impl Work {
    /// The image as it is now, open for one step, which ends with
    /// [`Image::close_image`]: the files are of use for longer.
    pub(super) async fn open(&self) -> Result<Arc<Image>> {
        open::reopen(&self.closed).await
    }

    /// The same for a step that changes nothing that a guest reads: bitmaps are not
    /// told.
    pub(super) async fn open_metadata(&self) -> Result<Arc<Image>> {
        let image = self.open().await?;
        image.tell_of_leaks().await;
        image.sync_what_was_read().await?;
        image.preparation.is_over.store(true, Ordering::Release);
        Ok(image)
    }

    /// Switches to another header.
    pub(super) async fn switch(&self, change: impl FnOnce(&mut Header)) -> Result<()> {
        let rewritten = rewrite_header(&self.closed.file, |header| {
            change(header);
            Ok(())
        });
        rewritten.await.map(drop)
    }

    pub(super) async fn header(&self) -> Result<Header> {
        open::read_header(&self.closed.file).await
    }
}
