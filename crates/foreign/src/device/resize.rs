//! A device gets another size.

use std::sync::atomic::Ordering;

use vellum::{Error, ErrorKind, Result, ZeroRequest};

use super::core::Core;
use crate::layout::Layout;

impl<L: Layout> Core<L> {
    pub(super) async fn resize(&self, size_bytes: u64) -> Result<()> {
        let _alone = self.changes.alone().await;
        self.check_changeable()?;
        if !self.layout.can_resize() {
            let message = "Image format driver does not support resize";
            return Err(self.error(ErrorKind::Unsupported, "resize", message));
        }
        if !size_bytes.is_multiple_of(512) {
            let message = "Invalid image size specified";
            return Err(
                Error::new(ErrorKind::InvalidArgument, "resize", message).target(&*self.name)
            );
        }
        self.layout.check_size(size_bytes)?;
        self.begin_changes().await?;
        self.hide_backing(size_bytes).await?;
        self.commit().await?;
        let resized = self.layout.resize(size_bytes).await;
        resized.inspect_err(|error| match error.kind() {
            // Nothing was begun.
            ErrorKind::Unsupported | ErrorKind::InvalidArgument => {}
            _ => self.fail_stop(error),
        })
    }

    /// What a resize brings into being is zeroes, whatever a longer backing file has there. They come
    /// before the size: whatever interrupts it, the guest never sees what is below.
    async fn hide_backing(&self, size_bytes: u64) -> Result<()> {
        let before_bytes = self.layout.size_bytes();
        let below_bytes = self.backing.as_ref().map_or(0, |below| below.size_bytes());
        let hidden_end = below_bytes.min(size_bytes);
        if hidden_end <= before_bytes {
            return Ok(());
        }
        let hidden_bytes = hidden_end - before_bytes;
        self.coming_bytes.store(size_bytes, Ordering::Release);
        let request = ZeroRequest::default();
        let zeroed = self.write_zeroes(before_bytes, hidden_bytes, request).await;
        self.coming_bytes.store(0, Ordering::Release);
        zeroed
    }
}
