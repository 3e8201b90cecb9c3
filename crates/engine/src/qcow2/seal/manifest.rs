//! A seal in a file of its own: a hash tree over what a guest sees of any device, backing files
//! and all. It says nothing of mapping and header, so a copy in another format agrees with it.

use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{FuturesOrdered, StreamExt};
use vellum_format::seal::{
    HASHES_PER_NODE, Hash, LEAF_BYTES, LeafHasher, NODE_BYTES, NODE_GUEST_BYTES, Shape, Superblock,
    TreeBuilder,
};
use vellum_io::lane::compute;
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Result};
use vellum_storage::{Storage, WriteFlags};

use super::area::SealInfo;
use super::build::SealOptions;
use super::content::{Held, guest_of, hash_piece, parallel_chunks};
use super::tree::{Tree, hash_in};
use super::verify::{DifferenceKind, Found, VerifyOptions, VerifyReport};
use crate::BlockDevice;
use crate::qcow2::header::load::read_bytes;
use crate::qcow2::integrity::errors::bad_format;

/// Nodes are written when they are so many bytes.
const WRITE_BYTES: usize = 1 << 20;

/// Reads all of `device` and writes its manifest into `file`, which is empty.
///
/// # Errors
/// What the device, the file and the signer report; the file is of no use then.
pub async fn make_manifest(
    device: &Arc<dyn BlockDevice>,
    file: &Arc<dyn Storage>,
    options: &SealOptions,
) -> Result<SealInfo> {
    let leaves = Leaves::of(device);
    let mut builder = TreeBuilder::new(leaves.shape, NODE_BYTES as u64);
    let mut at = NODE_BYTES as u64;
    let nodes = leaves.shape.leaves.div_ceil(HASHES_PER_NODE);
    let mut running = FuturesOrdered::new();
    let mut next = 0;
    loop {
        while next < nodes && running.len() < parallel_chunks() {
            running.push_back(leaves.hashes(leaves.shape.leaves_under(0, next)));
            next += 1;
        }
        let number = next - running.len() as u64;
        let Some(hashes) = running.next().await else {
            break;
        };
        builder.push(number, &hashes?);
        if builder.finished_bytes() >= WRITE_BYTES {
            at += write(file, at, builder.take_finished()).await?;
        }
        if let Some(report) = &options.on_progress {
            let done = (number + 1).saturating_mul(NODE_GUEST_BYTES);
            report(done.min(leaves.size_bytes), leaves.size_bytes);
        }
    }
    let (content, length_bytes) = builder.finish();
    write(file, at, builder.take_finished()).await?;
    let mut superblock = Superblock {
        size_bytes: leaves.size_bytes,
        unit_bytes: LEAF_BYTES as u32,
        keyed: false,
        detached: true,
        length_bytes,
        content,
        mapping: None,
        mapping_slices: 0,
        slice_bytes: NODE_BYTES as u32,
        header: Hash::default(),
        signature: Vec::new(),
    };
    if let Some(sign) = &options.signer {
        superblock.signature = sign(&superblock.statement())?.into_bytes();
    }
    let encoded = superblock.encode();
    let block = encoded.map_err(|error| bad_format("seal", &error))?;
    write(file, 0, block).await?;
    file.flush().await?;
    Ok(SealInfo::new(&superblock))
}

async fn write(file: &Arc<dyn Storage>, at: u64, bytes: Vec<u8>) -> Result<u64> {
    let len_bytes = bytes.len() as u64;
    if len_bytes > 0 {
        let buffers = Buffers::from_iter([Buffer::copy_of(&bytes)]);
        file.write(at, buffers, WriteFlags::default()).await?;
    }
    Ok(len_bytes)
}

/// Compares all that a guest sees of `device` with the manifest in `file`.
///
/// # Errors
/// [`ErrorKind::InvalidImage`] where the file is no manifest. What cannot be read of the device
/// is a difference, and so is a damaged part of the manifest.
pub async fn verify_manifest(
    device: &Arc<dyn BlockDevice>,
    file: &Arc<dyn Storage>,
    options: &VerifyOptions,
) -> Result<VerifyReport> {
    let superblock = read_superblock(file).await?;
    let leaves = Leaves::of(device);
    let mut found = Found::new(options.on_difference.clone());
    let info = Some(SealInfo::new(&superblock));
    if superblock.size_bytes != leaves.size_bytes {
        let reason = format!(
            "the disk has {} bytes, and had {}",
            leaves.size_bytes, superblock.size_bytes
        );
        found.add(DifferenceKind::Header, 0..leaves.size_bytes, &reason);
        return Ok(found.end(info));
    }
    let area = (file.clone(), 0);
    let (len_bytes, shape) = (superblock.length_bytes, superblock.content_shape());
    let tree = Tree::new(area, len_bytes, shape, superblock.content);
    leaves.verify(&tree, &mut found, options).await;
    Ok(found.end(info))
}

async fn read_superblock(file: &Arc<dyn Storage>) -> Result<Superblock> {
    let no_manifest = |why: String| {
        let message = format!("This is no manifest, or a damaged one: {why}");
        Error::new(ErrorKind::InvalidImage, "read manifest", message).target(file.name())
    };
    let block = read_bytes(file, 0, NODE_BYTES as u64).await?;
    let superblock = Superblock::decode(&block).map_err(|error| no_manifest(error.to_string()))?;
    match superblock.detached {
        true => Ok(superblock),
        false => Err(no_manifest("it is the seal of an image".to_owned())),
    }
}

/// The leaves of a device.
struct Leaves {
    device: Arc<dyn BlockDevice>,
    size_bytes: u64,
    shape: Shape,
    hasher: Arc<LeafHasher>,
}

impl Leaves {
    fn of(device: &Arc<dyn BlockDevice>) -> Leaves {
        let size_bytes = device.size_bytes();
        Leaves {
            device: device.clone(),
            size_bytes,
            shape: Shape::new(size_bytes.div_ceil(LEAF_BYTES)),
            hasher: Arc::new(LeafHasher::new(size_bytes, LEAF_BYTES as u32, None)),
        }
    }

    fn guest(&self, leaves: &Range<u64>) -> Range<u64> {
        guest_of(leaves, self.size_bytes)
    }

    /// The hashes of some leaves, of which one hash node leads to all.
    async fn hashes(&self, leaves: Range<u64>) -> Result<Vec<Hash>> {
        let guest = self.guest(&leaves);
        let len_bytes = guest.end - guest.start;
        let status = self.device.block_status(guest.start, len_bytes, u32::MAX);
        let extent = status.await?;
        if extent.kind.is_zero() && extent.len_bytes == len_bytes {
            return Ok(leaves.map(|leaf| self.hasher.zeroes(leaf)).collect());
        }
        let buffer = Buffer::for_read(len_bytes as usize);
        let bytes = self.device.read(guest.start, buffer).await?;
        let hasher = self.hasher.clone();
        let held = Held::all(&hasher, &leaves);
        let hashing = compute(move || hash_piece(&hasher, leaves.start, &bytes, &held, |_| true));
        Ok(hashing.await)
    }

    async fn verify(&self, tree: &Tree, found: &mut Found, options: &VerifyOptions) {
        let nodes = self.shape.leaves.div_ceil(HASHES_PER_NODE);
        let mut running = FuturesOrdered::new();
        let mut next = 0;
        // Where a damaged node was told of last.
        let mut told = 0;
        loop {
            while next < nodes && running.len() < parallel_chunks() {
                running.push_back(self.hashes(self.shape.leaves_under(0, next)));
                next += 1;
            }
            let number = next - running.len() as u64;
            let Some(hashes) = running.next().await else {
                break;
            };
            let leaves = self.shape.leaves_under(0, number);
            match tree.hashes(number).await {
                Err(bad) if leaves.start >= told => {
                    told = bad.leaves.end;
                    found.add(DifferenceKind::Seal, self.guest(&bad.leaves), &bad.why);
                }
                Err(_) => {}
                Ok(node) => match hashes {
                    Ok(hashes) => {
                        for (leaf, now) in leaves.zip(hashes) {
                            let sealed = hash_in(node.as_deref(), leaf);
                            found.compare(self.guest(&(leaf..leaf + 1)), now, sealed);
                        }
                    }
                    Err(_) => self.one_by_one(leaves, node.as_deref(), found).await,
                },
            }
            if let Some(report) = &options.on_progress {
                let done = (number + 1).saturating_mul(NODE_GUEST_BYTES);
                report(done.min(self.size_bytes), self.size_bytes);
            }
        }
    }

    /// Compares leaves some of which cannot be read.
    async fn one_by_one(
        &self,
        leaves: Range<u64>,
        node: Option<&vellum_format::seal::Node>,
        found: &mut Found,
    ) {
        for leaf in leaves {
            let guest = self.guest(&(leaf..leaf + 1));
            match self.hashes(leaf..leaf + 1).await {
                Ok(hashes) => {
                    let now = hashes.first().copied().unwrap_or_default();
                    found.compare(guest, now, hash_in(node, leaf));
                }
                Err(error) => found.add(DifferenceKind::Content, guest, error.message()),
            }
        }
    }
}
