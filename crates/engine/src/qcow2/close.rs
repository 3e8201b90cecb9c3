//! Closing an image: everything is written back, what was taken ahead is given back, and the
//! marks of an image in use go. In this order, so that a crash anywhere in between leaves what
//! a crash before the close would leave, or less. No change runs meanwhile
//! ([`changes`](vellum_io::changes)).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vellum_io::Result;

use crate::qcow2::image::Image;

impl Image {
    /// Writes back everything; afterwards all requests that change something fail. The caller
    /// is alone with the image.
    pub(crate) async fn close(self: &Arc<Self>) -> Result<()> {
        let closed = self.close_image().await;
        // A node below may have something left to write, however this ended.
        let file = self.file.close().await;
        let data = match self.has_external_data() {
            true => self.data.close().await,
            false => Ok(()),
        };
        closed.and(file).and(data)
    }

    /// Closes the image, but not the files that it lies in.
    pub(crate) async fn close_image(self: &Arc<Self>) -> Result<()> {
        if self.read_only || self.has_ended() {
            return Ok(());
        }
        // For the log too: its records would come back over what is written after all.
        self.allow_retry();
        let detached = self.detach_log().await;
        self.close_without_log().await.and(detached)
    }

    /// Ends the use of an image whose opening has failed: what it has changed until then is kept as by
    /// a close, and what it has marked is marked no more. Its files stay open.
    pub(crate) async fn abandon(self: &Arc<Self>) {
        if !self.read_only && self.preparation.is_over.load(Ordering::Acquire) {
            // Whoever opened it is told why it cannot be opened.
            let closed = self.start_alone(|image| async move { image.close_without_log().await });
            drop(closed.await);
        }
    }

    async fn close_without_log(self: &Arc<Self>) -> Result<()> {
        if !self.preparation.is_over.load(Ordering::Acquire) && !self.has_crash_consistent_bitmaps()
        {
            // Nothing was ever changed, so there is nothing to write or to flush.
            self.end_use();
            return Ok(());
        }
        self.allow_retry();
        self.fail_stop.check("close", &self.name)?;
        // What could not be written back is lost, and reported; all else is kept.
        let written_back = self.write_back_all().await;
        self.seal_packed().await?;
        self.commit().await?;
        self.free_before_change().await;
        // Else they stay in use, and are kept as after a crash.
        let bitmaps = self.close_bitmaps().await;
        self.resume_refcounts();
        self.release_all_dropped().await?;
        // The file cannot reach its end where that is beyond the limit of file sizes. The counts
        // that have gone down by then are written nevertheless: no other use lowers them.
        let released = self.allocator.release_reserve().await;
        // Writes the counts that have gone down, and those of clusters counted ahead.
        self.commit().await?;
        released?;
        self.end_leaks().await?;
        self.end_lazy_refcounts().await?;
        self.end_use();
        written_back.and(bitmaps)
    }
}
