//! Writes straight from a guest's memory, which it may change meanwhile.
//!
//! Invariant: the bytes are handed on as they are, once. Whatever does more with them (notes them in
//! a log, encrypts, sums up, keeps them until their cluster is whole, writes them with others'
//! around them) gets a copy, which is nobody else's.

use std::sync::Arc;

use vellum_format::types::GuestOffset;
use vellum_io::shared_memory::{SharedBuffer, SharedBuffers, total_len};
use vellum_io::{Buffer, Result};
use vellum_storage::WriteFlags;

use crate::RequestFlags;
use crate::luks::GuestEncryption;
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::RunKind;
use vellum_io::range_lock::Mode;

impl Image {
    /// Whether a write may go straight from a guest's memory, where it goes in place.
    pub(crate) fn may_overwrite_from(&self, offset_bytes: u64, from: &[SharedBuffer]) -> bool {
        self.hands_writes_on()
            && !from.is_empty()
            && self
                .check_range("write", offset_bytes, total_len(from) as u64)
                .is_ok()
    }

    /// Whether nothing here looks at what is written, and nobody wants to be told of steps.
    fn hands_writes_on(&self) -> bool {
        self.write_log.get().is_none()
            && self.checksums.is_none()
            && self.listener.is_none()
            && matches!(self.encryption, GuestEncryption::None)
    }

    /// Writes what a guest's memory holds; the range was checked.
    pub(crate) async fn guest_write_from(
        self: &Arc<Self>,
        offset_bytes: u64,
        from: SharedBuffers,
    ) -> Result<()> {
        if self.hands_writes_on() && self.overwrite_from(offset_bytes, &from).await? {
            return Ok(());
        }
        let mut data = Buffer::for_read(total_len(&from));
        let mut at = 0;
        for piece in &from {
            piece.copy_to(0, &mut data[at..at + piece.len()]);
            at += piece.len();
        }
        drop(from);
        let flags = RequestFlags::default();
        // Boxed: a write in place would carry the room.
        Box::pin(self.guest_write(offset_bytes, data, flags)).await?;
        Ok(())
    }

    /// Writes all of it in place, as `write_in_place` does with a buffer; `false` if it has another
    /// place to go, and nothing was done.
    async fn overwrite_from(self: &Arc<Self>, at: u64, from: &[SharedBuffer]) -> Result<bool> {
        self.begin_change("write").await?;
        let len_bytes = total_len(from) as u64;
        let _shared = self
            .guest_ranges
            .acquire(at..at + len_bytes, Mode::Shared)
            .await;
        self.check_still_inside(at..at + len_bytes)?;
        if self.bitmaps.is_tracking() {
            self.mark_dirty(at..at + len_bytes).await?;
        }
        let view = self.view_to_write(GuestOffset(at), len_bytes).await?;
        let [run] = &view[..] else {
            return Ok(false);
        };
        let RunKind::Data { host, copied: true } = run.kind else {
            return Ok(false);
        };
        if run.len_bytes != len_bytes {
            return Ok(false);
        }
        let flags = WriteFlags::default();
        match self.data.write_from(host.bytes(), from, flags) {
            Some(written) => written.await.map(|()| true),
            None => Ok(false),
        }
    }
}
