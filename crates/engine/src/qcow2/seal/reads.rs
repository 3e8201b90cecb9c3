//! Reads and block status that agree with the seal, or fail.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::seal::{HASHES_PER_NODE, Hash, LEAF_BYTES, NOTHING};
use vellum_io::{Buffer, Error, ErrorKind, Result};

use super::content::{guest_of, hash_leaf, hash_leaves, worth_threads};
use super::state::{SealedReads, leaves_of};
use super::tree::{BadNode, hash_in};
use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{MappingRun, RunKind};

const EIO: i32 = 5;

impl Image {
    /// Reads a range that is inside the disk, and compares the leaves that it has bytes of.
    pub(crate) async fn read_verified(
        self: &Arc<Self>,
        offset_bytes: u64,
        buffer: Buffer,
    ) -> Result<Buffer> {
        let Some(seal) = &self.seal else {
            let reading = self.read_epochs.enter();
            let from = vellum_format::types::GuestOffset(offset_bytes);
            return self.read_runs(from, buffer, reading).await;
        };
        let leaves = leaves_of(&(offset_bytes..offset_bytes + buffer.len() as u64));
        let len_bytes = self.leaves_len_bytes(&leaves);
        let inside = (offset_bytes - leaves.start * LEAF_BYTES) as usize;
        if inside == 0 && len_bytes == buffer.len() as u64 {
            return self.read_whole_leaves(seal, leaves, buffer).await;
        }
        let whole = Buffer::for_read(len_bytes as usize);
        let whole = self.read_whole_leaves(seal, leaves, whole).await?;
        let mut buffer = buffer;
        let end = inside + buffer.len();
        buffer.copy_from_slice(&whole[inside..end]);
        Ok(buffer)
    }

    async fn read_whole_leaves(
        self: &Arc<Self>,
        seal: &SealedReads,
        leaves: Range<u64>,
        buffer: Buffer,
    ) -> Result<Buffer> {
        let (buffer, held) = self.read_leaves(&seal.hasher, &leaves, buffer).await?;
        if !worth_threads(buffer.len()) {
            self.compare_leaves(seal, leaves.clone(), |leaf| {
                let start = ((leaf - leaves.start) * LEAF_BYTES) as usize;
                let end = (start + LEAF_BYTES as usize).min(buffer.len());
                hash_leaf(&seal.hasher, leaf, &buffer[start..end], &held)
            })
            .await?;
            return Ok(buffer);
        }
        let skip: Arc<[bool]> = leaves.clone().map(|leaf| seal.may_skip(leaf)).collect();
        let first = leaves.start;
        let wanted = move |leaf: u64| !skip[(leaf - first) as usize];
        let hashing = hash_leaves(&seal.hasher, first, buffer, held, wanted);
        let (buffer, hashes) = hashing.await;
        let hash = |leaf| hashes[(leaf - first) as usize];
        self.compare_leaves(seal, leaves, hash).await?;
        Ok(buffer)
    }

    /// Compares those of some leaves that were not compared before.
    async fn compare_leaves(
        &self,
        seal: &SealedReads,
        leaves: Range<u64>,
        hash: impl Fn(u64) -> Hash,
    ) -> Result<()> {
        let mut at = leaves.start;
        while at < leaves.end {
            let number = at / HASHES_PER_NODE;
            let end = ((number + 1) * HASHES_PER_NODE).min(leaves.end);
            if (at..end).any(|leaf| !seal.may_skip(leaf)) {
                let node = seal.tree.hashes(number).await;
                let node = node.map_err(|bad| self.bad_node(&bad))?;
                for leaf in (at..end).filter(|leaf| !seal.may_skip(*leaf)) {
                    if hash(leaf) != hash_in(node.as_deref(), leaf) {
                        return Err(self.differs(leaf..leaf + 1, "the content"));
                    }
                    seal.note(leaf);
                }
            }
            at = end;
        }
        Ok(())
    }

    /// Compares what a run of the mapping says without its bytes: that there are zeroes, or that
    /// the image holds nothing.
    pub(crate) async fn verify_run(self: &Arc<Self>, run: &MappingRun) -> Result<()> {
        let Some(seal) = &self.seal else {
            return Ok(());
        };
        let (start, end) = (run.guest.bytes(), run.guest.bytes() + run.len_bytes);
        let is_held = match run.kind {
            RunKind::Unallocated { .. } => false,
            RunKind::Zero { .. } => true,
            RunKind::Data { .. } | RunKind::Compressed(_) => return Ok(()),
        };
        let around = leaves_of(&(start..end));
        // Leaves that the run has only a part of are read.
        let whole_end = match end == self.size_bytes() {
            true => around.end,
            false => end / LEAF_BYTES,
        };
        let whole = start.div_ceil(LEAF_BYTES)..whole_end.max(start.div_ceil(LEAF_BYTES));
        let edges = (around.start..whole.start.min(around.end)).chain(whole.end..around.end);
        for leaf in edges.filter(|leaf| !seal.may_skip(*leaf)) {
            let leaves = leaf..leaf + 1;
            let scratch = Buffer::for_read(self.leaves_len_bytes(&leaves) as usize);
            self.read_whole_leaves(seal, leaves, scratch).await?;
        }
        match is_held {
            true => self.verify_zeroes(seal, whole).await,
            false => self.verify_nothing(seal, whole).await,
        }
    }

    async fn verify_zeroes(&self, seal: &SealedReads, leaves: Range<u64>) -> Result<()> {
        let mut at = leaves.start;
        while at < leaves.end {
            let number = at / HASHES_PER_NODE;
            let end = ((number + 1) * HASHES_PER_NODE).min(leaves.end);
            if (at..end).any(|leaf| !seal.may_skip(leaf)) {
                let node = seal.tree.hashes(number).await;
                let node = node.map_err(|bad| self.bad_node(&bad))?;
                for leaf in at..end {
                    if hash_in(node.as_deref(), leaf) != seal.hasher.zeroes(leaf) {
                        return Err(self.differs(leaf..leaf + 1, "the mapping"));
                    }
                    seal.note(leaf);
                }
            }
            at = end;
        }
        Ok(())
    }

    async fn verify_nothing(&self, seal: &SealedReads, leaves: Range<u64>) -> Result<()> {
        let mut at = leaves.start;
        while at < leaves.end {
            let next = seal.tree.next_present(at / HASHES_PER_NODE).await;
            let Some(number) = next.map_err(|bad| self.bad_node(&bad))? else {
                return Ok(());
            };
            at = at.max(number * HASHES_PER_NODE);
            let end = ((number + 1) * HASHES_PER_NODE).min(leaves.end);
            if at < end {
                let node = seal.tree.hashes(number).await;
                let node = node.map_err(|bad| self.bad_node(&bad))?;
                for leaf in at..end {
                    if hash_in(node.as_deref(), leaf) != NOTHING {
                        return Err(self.differs(leaf..leaf + 1, "the mapping"));
                    }
                }
            }
            at = end.max(at);
        }
        Ok(())
    }

    fn differs(&self, leaves: Range<u64>, what: &str) -> Error {
        let Range { start, end } = guest_of(&leaves, self.size_bytes());
        let message =
            format!("{what} of the guest's bytes {start:#x} to {end:#x} differs from the seal");
        self.seal_error(start, message)
    }

    fn bad_node(&self, bad: &BadNode) -> Error {
        let Range { start, end } = guest_of(&bad.leaves, self.size_bytes());
        let why = &bad.why;
        let message = format!("the guest's bytes {start:#x} to {end:#x} cannot be verified: {why}");
        self.seal_error(start, message)
    }

    fn seal_error(&self, at: u64, message: String) -> Error {
        Error::new(ErrorKind::Corrupt, "verify", message)
            .with_errno(EIO)
            .target(self.name.clone())
            .at(at)
    }
}
