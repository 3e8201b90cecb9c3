//! Giving up everything that an image holds itself, so that its backing file shows
//! through everywhere: the end of a commit into that file.

use std::sync::Arc;

use vellum_io::Result;
use vellum_storage::{Event, ZeroFlags};

use crate::qcow2::image::Image;
use vellum_io::range_lock::Mode;

impl Image {
    /// Unmaps every guest cluster and cuts the file where it is not used any more:
    /// from then on the image shows its backing file, or zeroes where it has none.
    /// Snapshots and bitmaps stay. A power cut leaves each cluster mapped or not.
    pub(crate) async fn clear(self: Arc<Self>) -> Result<()> {
        self.begin_change("clear").await?;
        let _one = self.resizing.lock().await;
        self.emit(Event::EmptyImagePrepare).await;
        {
            let _all = self
                .guest_ranges
                .acquire(0..u64::MAX, Mode::Exclusive)
                .await;
            if self.backing.is_none() {
                // Else the guest sees below what it has seen here.
                self.mark_dirty(0..self.size_bytes()).await?;
            }
            self.write_back_locked_range(0..self.size_bytes()).await?;
            self.discard_buffered(0);
            self.cut_mapping(0).await?;
        }
        // Twice: the first commit makes it durable that clusters were dropped, the
        // second writes their counts.
        self.commit().await?;
        self.commit().await?;
        if self.has_external_data() {
            self.give_data_file_back().await?;
        }
        self.cut_tail().await
    }

    /// Gives back the space of a data file that nothing points at any more.
    async fn give_data_file_back(&self) -> Result<()> {
        let len_bytes = self.data.len_bytes()?;
        let flags = ZeroFlags {
            may_unmap: true,
            ..ZeroFlags::default()
        };
        match self.data_is_raw() {
            // What the file shows is what the guest sees.
            true => self.zero_raw_data(0..len_bytes, flags).await,
            // A hint.
            false => {
                drop(self.data.discard(0, len_bytes).await);
                Ok(())
            }
        }
    }
}
