//! A guest's read that meets a block which the disk has changed gets the backing file's bytes, if
//! these are what the block had: that is what its checksum says. They are written to the block again
//! if the image is open for writing.
//!
//! Invariants:
//! - Nothing here runs before a read has failed.
//! - Nothing is taken from the backing file if another program may have written to the image: what the block has
//!   now may be the newer, and nobody knows.
//! - What is written has the sum that the block has at that moment, so it undoes no newer write.
//! - A change waits for none here: a close that waits for the change would wait for both.

use std::sync::Arc;

use vellum_format::checksums::{BLOCK_BYTES, sum_of};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result, spawn_to_completion};

use super::pages::Checksums;
use crate::qcow2::image::{Image, RunningChange};
use crate::qcow2::mapping::lookup::MappingRun;
use crate::qcow2::read::data::read_padded;

/// Whether a read failed because the disk has changed what it reads.
pub(in crate::qcow2) fn is_mismatch(error: &Error) -> bool {
    error.kind() == ErrorKind::ChecksumMismatch
}

/// A block and the bytes that it had.
type Healed = (u64, Buffer);

impl Image {
    /// Whether a read that fails may be worth another way: something has checksums.
    pub(in crate::qcow2) fn may_heal(&self) -> bool {
        self.checksums.is_some() || self.backing_chain.may_heal
    }

    /// Reads a run of data, which begins at `host`, once more, after `error`: block by block, with
    /// the backing file's bytes where they are those of a damaged block.
    pub(in crate::qcow2) async fn read_healing(
        self: &Arc<Self>,
        run: &MappingRun,
        host: u64,
        error: Error,
    ) -> Result<Buffer> {
        // In smaller clusters a block belongs to several guest ranges.
        let is_one = self.geometry.cluster_size_bytes() >= BLOCK_BYTES;
        let checksums = self.checksums.as_ref();
        let Some(checksums) =
            checksums.filter(|sums| is_one && !self.is_encrypted() && sums.may_repair())
        else {
            return Err(error);
        };
        let mut healed = Vec::new();
        let read = self
            .read_each_block(run, host, checksums, &mut healed)
            .await;
        if !healed.is_empty() {
            self.write_healed(checksums, healed).await;
        }
        read
    }

    async fn read_each_block(
        &self,
        run: &MappingRun,
        host: u64,
        checksums: &Arc<Checksums>,
        healed: &mut Vec<Healed>,
    ) -> Result<Buffer> {
        let end = host + run.len_bytes;
        let mut pieces = Vec::new();
        let mut at = host;
        while at < end {
            let block = at / BLOCK_BYTES * BLOCK_BYTES;
            let next = end.min(block + BLOCK_BYTES);
            let piece = Buffers::from_iter([Buffer::for_read((next - at) as usize)]);
            let read = self.data.read(at, piece).into_single().await;
            pieces.push(match read {
                Err(error) if is_mismatch(&error) => {
                    // The run may begin inside of the block; the cluster does not.
                    let guest = (run.guest.bytes() + block).checked_sub(host);
                    let bytes = self.backing_of_block(block, guest, checksums).await;
                    let bytes = bytes.ok_or(error)?;
                    let part = (at - block) as usize..(next - block) as usize;
                    let part = Buffer::copy_of(&bytes[part]);
                    healed.push((block, bytes));
                    part
                }
                read => read?,
            });
            at = next;
        }
        Ok(Buffer::join_all(pieces))
    }

    /// What the backing file has for a block that the guest sees at `guest`, if the block had it.
    async fn backing_of_block(
        &self,
        block: u64,
        guest: Option<u64>,
        checksums: &Arc<Checksums>,
    ) -> Option<Buffer> {
        let buffer = Buffer::for_read(BLOCK_BYTES as usize);
        // If that cannot be read, the first error says more.
        let bytes = read_padded(self.backing.as_ref(), guest?, buffer).await;
        let bytes = bytes.ok()?;
        let sum = checksums.sum(block).await.ok()?;
        (sum == sum_of([&bytes[..]])).then_some(bytes)
    }

    /// Writes blocks again, durably, if the image can be changed now, and tells of them. A failure
    /// is not the reader's: it has its bytes.
    async fn write_healed(self: &Arc<Self>, checksums: &Arc<Checksums>, healed: Vec<Healed>) {
        let (count, first) = (healed.len(), healed[0].0);
        let change = match self.read_only {
            true => None,
            false => RunningChange::try_begin(self),
        };
        let written = match change.filter(|_| !self.has_ended()) {
            None => Ok(false),
            Some(change) => {
                let checksums = checksums.clone();
                // What is written is written to its end.
                spawn_to_completion(async move {
                    let _change = change;
                    checksums.repair_blocks(healed).await
                })
                .await
            }
        };
        checksums.tell_of_healed(count, first, &written);
    }
}
