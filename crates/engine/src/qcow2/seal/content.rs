//! What an image itself holds of a range of leaves, and their hashes.

use std::ops::Range;
use std::sync::Arc;

use vellum_format::seal::{Hash, LEAF_BYTES, LeafHasher, NODE_GUEST_BYTES};
use vellum_format::types::GuestOffset;
use vellum_io::lane::{compute, compute_threads};
use vellum_io::{Buffer, Io, Result};

use crate::qcow2::image::Image;
use crate::qcow2::mapping::lookup::{MappingRun, RunKind};

/// What is worth another thread.
const PIECE_BYTES: usize = 128 << 10;

/// Which units of leaves an image holds itself.
#[derive(Debug, Clone)]
pub(super) struct Held {
    first_leaf: u64,
    masks: Vec<u8>,
    unit_bytes: u64,
}

impl Held {
    /// None of those of some leaves.
    pub(super) fn none(hasher: &LeafHasher, leaves: &Range<u64>) -> Held {
        Held {
            first_leaf: leaves.start,
            masks: vec![0; (leaves.end - leaves.start) as usize],
            unit_bytes: hasher.unit_bytes(),
        }
    }

    /// All of those of some leaves.
    pub(super) fn all(hasher: &LeafHasher, leaves: &Range<u64>) -> Held {
        let masks = leaves.clone().map(|leaf| hasher.whole(leaf)).collect();
        Held {
            masks,
            ..Held::none(hasher, leaves)
        }
    }

    /// Notes what a run of the mapping says.
    pub(super) fn note(&mut self, run: &MappingRun) {
        if matches!(run.kind, RunKind::Unallocated { .. }) {
            return;
        }
        let start = run.guest.bytes();
        let units = start / self.unit_bytes..(start + run.len_bytes).div_ceil(self.unit_bytes);
        let per_leaf = LEAF_BYTES / self.unit_bytes;
        for unit in units {
            let index = (unit / per_leaf).checked_sub(self.first_leaf);
            let mask = index.and_then(|index| self.masks.get_mut(index as usize));
            if let Some(mask) = mask {
                *mask |= 1 << (unit % per_leaf);
            }
        }
    }

    /// The bits of a leaf.
    pub(super) fn of(&self, leaf: u64) -> u8 {
        let index = leaf.checked_sub(self.first_leaf);
        let mask = index.and_then(|index| self.masks.get(index as usize));
        mask.copied().unwrap_or_default()
    }
}

/// The guest bytes of some leaves of a disk of `size_bytes`.
pub(super) fn guest_of(leaves: &Range<u64>, size_bytes: u64) -> Range<u64> {
    let edge = |leaf: u64| leaf.saturating_mul(LEAF_BYTES).min(size_bytes);
    edge(leaves.start)..edge(leaves.end)
}

/// The hash of a leaf, whose bytes may end with the disk.
pub(super) fn hash_leaf(hasher: &LeafHasher, leaf: u64, content: &[u8], held: &Held) -> Hash {
    if content.len() as u64 == LEAF_BYTES {
        return hasher.hash(leaf, content, held.of(leaf));
    }
    let mut padded = [0; LEAF_BYTES as usize];
    padded[..content.len()].copy_from_slice(content);
    hasher.hash(leaf, &padded, held.of(leaf))
}

/// Whether the leaves of a range are hashed sooner by several threads.
pub(super) fn worth_threads(len_bytes: usize) -> bool {
    len_bytes >= 2 * PIECE_BYTES && compute_threads() > 1
}

/// The hashes of leaves whose bytes are `bytes`, which may end with the disk; of those that
/// `wanted` does not want, anything.
pub(super) fn hash_piece(
    hasher: &LeafHasher,
    first_leaf: u64,
    bytes: &[u8],
    held: &Held,
    wanted: impl Fn(u64) -> bool,
) -> Vec<Hash> {
    let leaves = (first_leaf..).zip(bytes.chunks(LEAF_BYTES as usize));
    let hash = |(leaf, content): (u64, &[u8])| match wanted(leaf) {
        true => hash_leaf(hasher, leaf, content, held),
        false => Hash::default(),
    };
    leaves.map(hash).collect()
}

/// The hashes of the leaves from `first_leaf` on whose bytes are `bytes`; what is long is hashed
/// on all cores.
pub(super) async fn hash_leaves(
    hasher: &Arc<LeafHasher>,
    first_leaf: u64,
    mut bytes: Buffer,
    held: Held,
    wanted: impl Fn(u64) -> bool + Send + Sync + Clone + 'static,
) -> (Buffer, Vec<Hash>) {
    let threads = compute_threads().min(bytes.len() / PIECE_BYTES);
    if threads <= 1 {
        let hashes = hash_piece(hasher, first_leaf, &bytes, &held, wanted);
        return (bytes, hashes);
    }
    let leaf_bytes = LEAF_BYTES as usize;
    let piece_bytes = bytes.len().div_ceil(threads).next_multiple_of(leaf_bytes);
    let held = Arc::new(held);
    let mut running = Vec::with_capacity(threads);
    let mut first = first_leaf;
    while bytes.len() > piece_bytes {
        let piece = bytes.split_to(piece_bytes);
        let (hasher, held, wanted) = (hasher.clone(), held.clone(), wanted.clone());
        running.push(compute(move || {
            let hashes = hash_piece(&hasher, first, &piece, &held, wanted);
            (piece, hashes)
        }));
        first += (piece_bytes / leaf_bytes) as u64;
    }
    // This thread would only wait.
    let last = hash_piece(hasher, first, &bytes, &held, wanted);
    let mut pieces = Vec::with_capacity(running.len() + 1);
    let mut hashes = Vec::new();
    for piece in running {
        let (piece, its_hashes) = piece.await;
        pieces.push(piece);
        hashes.extend(its_hashes);
    }
    pieces.push(bytes);
    hashes.extend(last);
    (Buffer::join_all(pieces), hashes)
}

impl Image {
    /// The bytes of a range of leaves as far as the disk goes, and which of them the image holds
    /// itself, both by one look at the mapping.
    pub(super) async fn read_leaves(
        self: &Arc<Self>,
        hasher: &LeafHasher,
        leaves: &Range<u64>,
        buffer: Buffer,
    ) -> Result<(Buffer, Held)> {
        let mut held = Held::none(hasher, leaves);
        let reading = self.read_epochs.enter();
        let from = GuestOffset(leaves.start * LEAF_BYTES);
        let read = self.read_noted_runs(from, buffer, reading, |run| held.note(run));
        let buffer = read.await?;
        Ok((buffer, held))
    }

    /// Bytes of a range of leaves, as far as the disk goes.
    pub(super) fn leaves_len_bytes(&self, leaves: &Range<u64>) -> u64 {
        let guest = guest_of(leaves, self.size_bytes());
        guest.end - guest.start
    }
}

/// Chunks that are read and hashed at the same time.
pub(super) fn parallel_chunks() -> usize {
    (2 * compute_threads()).clamp(4, 64)
}

impl Image {
    /// The first hash node from `from` on of which the image holds something itself, or whose
    /// mapping cannot be told.
    pub(super) async fn next_held(&self, from: u64) -> Option<u64> {
        let mut at = from.saturating_mul(NODE_GUEST_BYTES);
        while at < self.size_bytes() {
            let run = self.first_run(GuestOffset(at), self.size_bytes() - at);
            match run.await {
                Ok(run) if matches!(run.kind, RunKind::Unallocated { .. }) => at += run.len_bytes,
                _ => return Some(at / NODE_GUEST_BYTES),
            }
        }
        None
    }

    /// The hashes of some leaves, of which one hash node leads to all. Begun at once: others may wait for
    /// the tables that it loads.
    pub(super) fn leaf_hashes(
        self: &Arc<Self>,
        hasher: &Arc<LeafHasher>,
        leaves: Range<u64>,
    ) -> Io<Vec<Hash>> {
        let (image, hasher) = (self.clone(), hasher.clone());
        Io::start(async move { image.hash_leaves_under(hasher, leaves).await })
    }

    async fn hash_leaves_under(
        self: &Arc<Self>,
        hasher: Arc<LeafHasher>,
        leaves: Range<u64>,
    ) -> Result<Vec<Hash>> {
        let len_bytes = self.leaves_len_bytes(&leaves);
        let from = GuestOffset(leaves.start * LEAF_BYTES);
        let run = self.first_run(from, len_bytes).await?;
        if run.len_bytes == len_bytes && matches!(run.kind, RunKind::Zero { .. }) {
            return Ok(leaves.map(|leaf| hasher.zeroes(leaf)).collect());
        }
        let buffer = Buffer::for_read(len_bytes as usize);
        let (bytes, held) = self.read_leaves(&hasher, &leaves, buffer).await?;
        let hashing = compute(move || hash_piece(&hasher, leaves.start, &bytes, &held, |_| true));
        Ok(hashing.await)
    }
}
