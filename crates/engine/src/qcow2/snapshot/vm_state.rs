//! The state of a virtual machine: bytes beyond the end of the disk, in the same
//! mapping, from the first L2 table on that the disk does not need.
//!
//! Invariants:
//! - A snapshot that is taken with a VM state takes these tables away from the disk:
//!   they would only be copied, bit by bit, by the next one that is saved.
//! - Where the area lies follows from the size of the disk, so that does not change
//!   while the area is looked at.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::types::GuestOffset;
use vellum_io::{Buffer, Error, ErrorKind, Io, Result};

use crate::RequestFlags;
use crate::qcow2::device::Qcow2;
use crate::qcow2::image::Image;

const EFBIG: i32 = 27;
const ENOTSUP: i32 = 95;

impl Qcow2 {
    /// Writes a part of the state of the virtual machine, at `offset_bytes` of it. Take
    /// a snapshot with its length
    /// ([`NewSnapshot::vm_state_size_bytes`](super::NewSnapshot)) to keep it; until then
    /// it is as durable as any write without a flush.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] with an external data file,
    /// [`ErrorKind::InvalidArgument`] (`EFBIG`) beyond what the format can map, and as
    /// for any write.
    pub fn save_vm_state(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        self.change(move |image| async move { image.save_vm_state(offset_bytes, buffer).await })
    }

    /// Reads a part of the state of the virtual machine: of an image opened at a
    /// snapshot that one's, otherwise that of the snapshot applied last, or what was
    /// saved since.
    ///
    /// # Errors
    /// As [`Qcow2::save_vm_state`], and as for any read.
    pub async fn load_vm_state(&self, offset_bytes: u64, buffer: Buffer) -> Result<Buffer> {
        let loaded = self.image.load_vm_state(offset_bytes, buffer).await;
        loaded.map_err(|error| self.image.name_error(error))
    }
}

impl Image {
    /// The L1 index from which on there is VM state instead of the disk.
    pub(super) fn vm_state_index(&self) -> u64 {
        self.geometry.l1_entries_for(self.size.visible_bytes())
    }

    /// The guest range of a part of the VM state.
    fn vm_state_range(
        &self,
        operation: &'static str,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> Result<Range<u64>> {
        if self.has_external_data() {
            let message = "images with an external data file have no VM state";
            let error = Error::new(ErrorKind::Unsupported, operation, message);
            return Err(error.with_errno(ENOTSUP));
        }
        let first = self.vm_state_index() * self.geometry.bytes_per_l2_table();
        let start = first.checked_add(offset_bytes);
        let end = start.and_then(|start| start.checked_add(len_bytes));
        match (start, end) {
            (Some(start), Some(end)) if end <= self.geometry.max_size_bytes() => Ok(start..end),
            _ => {
                let message = "the VM state is larger than the image can map";
                let error = Error::new(ErrorKind::InvalidArgument, operation, message);
                Err(error.with_errno(EFBIG).at(offset_bytes))
            }
        }
    }

    async fn save_vm_state(self: &Arc<Self>, offset_bytes: u64, buffer: Buffer) -> Result<Buffer> {
        self.begin_change("save VM state").await?;
        let _one = self.resizing.lock().await;
        let len_bytes = buffer.len() as u64;
        let range = self.vm_state_range("save VM state", offset_bytes, len_bytes)?;
        self.grow_l1(self.geometry.l1_entries_for(range.end))
            .await?;
        self.size.set_addressable(range.end);
        let written = self
            .write(range.start, buffer, RequestFlags::default())
            .await;
        // Nothing of it may wait in memory: it would be written back beyond the end.
        let written_back = self.write_back_range(range).await;
        self.size.set_addressable(self.size.visible_bytes());
        written_back.and(written)
    }

    async fn load_vm_state(self: &Arc<Self>, offset_bytes: u64, buffer: Buffer) -> Result<Buffer> {
        let _one = self.resizing.lock().await;
        let len_bytes = buffer.len() as u64;
        let range = self.vm_state_range("load VM state", offset_bytes, len_bytes)?;
        let reading = self.read_epochs.enter();
        self.read_runs(GuestOffset(range.start), buffer, reading)
            .await
    }
}
