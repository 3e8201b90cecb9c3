//! Makes a seal. It lies behind everything that the image uses, in clusters that are not
//! counted: to every other program it is free space, and to `check` nothing.
//!
//! Invariant: everything is durable before the header says that it is there, so a crash leaves
//! an image without a seal or with all of it (rule 3).

use std::fmt;
use std::sync::Arc;

use futures_util::stream::{FuturesOrdered, StreamExt};
use vellum_format::Header;
use vellum_format::crypto::CryptMethod;
use vellum_format::extension::{Extension, kind};
use vellum_format::features::{Autoclear, Incompatible};
use vellum_format::seal::{
    HASHES_PER_NODE, Hash, LEAF_BYTES, LeafHasher, NODE_BYTES, NODE_GUEST_BYTES, Root, SealPointer,
    Shape, Superblock, TreeBuilder, header_hash,
};
use vellum_io::{Buffer, Buffers, Error, ErrorKind, Io, Result};
use vellum_storage::{Storage, WriteFlags};

use super::area::{SealInfo, SealProgress, slice_bytes, unit_bytes};
use super::content::parallel_chunks;
use super::mapping::Slices;
use crate::luks::GuestEncryption;
use crate::qcow2::Qcow2;
use crate::qcow2::check::{CheckOptions, check};
use crate::qcow2::header::rewrite::{refresh_feature_names, rewrite_header};
use crate::qcow2::image::Image;
use crate::qcow2::integrity::errors::bad_format;
use crate::qcow2::open;

/// Nodes are written when they are so many bytes.
const WRITE_BYTES: usize = 1 << 20;

/// Signs a statement: gives the text of a signature file in minisign's format.
pub type Signer = Arc<dyn Fn(&str) -> Result<String> + Send + Sync>;

vellum_io::with_setters! {
    /// How to seal.
    #[derive(Clone, Default)]
    pub struct SealOptions {
        /// Signs what the seal states; without it nobody vouches for the seal.
        pub signer: Option<Signer>,
        /// Called while the disk is read.
        pub on_progress: Option<SealProgress>,
    }
}

impl fmt::Debug for SealOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealOptions")
            .field("signer", &self.signer.is_some())
            .field("on_progress", &self.on_progress.is_some())
            .finish()
    }
}

impl Qcow2 {
    /// Seals the image, which must be open for writing and used by nobody else: reads
    /// everything that it holds itself, and stores the hashes in the image. The backing file is
    /// not part of it, nor is what snapshots show.
    ///
    /// This ends the use of the image: **it takes no changes afterwards**, whether or not the
    /// call succeeds; what is left to do is [`close`](crate::BlockDevice::close). A crash
    /// meanwhile leaves the image without a seal, or sealed.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use vellum::gate::DenyAll;
    /// use vellum::qcow2::create::{CreateOptions, create};
    /// use vellum::qcow2::seal::{SealOptions, VerifyOptions};
    /// use vellum::qcow2::{OpenOptions, Qcow2};
    /// use vellum::{BlockDevice, Buffer, RequestFlags};
    /// use vellum_io::lane;
    /// use vellum_storage::{MemStorage, Storage};
    ///
    /// let file: Arc<dyn Storage> = Arc::new(MemStorage::new());
    /// # lane::block_on(async {
    /// create(file.clone(), None, &CreateOptions::default().size_bytes(1 << 20)).await?;
    /// let image = Qcow2::open(file.clone(), Arc::new(DenyAll), OpenOptions::default()).await?;
    /// image.write(0, Buffer::copy_of(&[7; 4096]), RequestFlags::default()).await?;
    /// image.seal(SealOptions::default()).await?;
    /// image.close().await?;
    ///
    /// let options = OpenOptions::default();
    /// let refused = Qcow2::open(file.clone(), Arc::new(DenyAll), options.clone()).await;
    /// assert!(refused.is_err(), "it is not to be changed");
    /// let image = Qcow2::open(file, Arc::new(DenyAll), options.read_only(true)).await?;
    /// let report = image.verify(VerifyOptions::default()).await?;
    /// assert_eq!(report.differences, 0);
    /// # Ok::<(), vellum::Error>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] for an image of version 2, or encrypted in the old way;
    /// [`ErrorKind::Corrupt`] for one whose metadata contradicts itself; [`ErrorKind::NoSpace`]
    /// where there is no room for the seal. What the signer says, and the storage.
    pub fn seal(&self, options: SealOptions) -> Io<SealInfo> {
        self.image
            .start_alone(move |image| async move { seal(image, options).await })
    }
}

fn refuse(image: &Image, kind: ErrorKind, message: &str) -> Error {
    Error::new(kind, "seal", message).target(image.name.clone())
}

async fn seal(image: Arc<Image>, options: SealOptions) -> Result<SealInfo> {
    image.check_changeable("seal")?;
    check_sealable(&image)?;
    image.close_image().await?;
    let header = open::read_header(&image.file).await?;
    let marks = Incompatible::DIRTY | Incompatible::CORRUPT;
    if header.incompatible.without(marks) != header.incompatible {
        let message = "The image is marked as dirty or corrupt: 'vellum check -r all' first";
        return Err(refuse(&image, ErrorKind::Corrupt, message));
    }
    let start_bytes = end_of_use(&image).await?;
    let reader = open::reopen_to_read(&image).await?;
    let mut area = Area {
        file: image.file.clone(),
        start_bytes,
        next_bytes: NODE_BYTES as u64,
    };
    let superblock = area.fill(&reader, &header, &options).await?;
    let pointer = SealPointer {
        offset_bytes: start_bytes,
        length_bytes: superblock.length_bytes,
    };
    // Rule 3: all of it is durable before the header leads to it.
    image.file.flush().await?;
    rewrite_header(&image.file, |header| {
        lead_to(header, &pointer);
        Ok(())
    })
    .await?;
    Ok(SealInfo::new(&superblock))
}

/// Has a header lead to a seal.
fn lead_to(header: &mut Header, pointer: &SealPointer) {
    header.remove_extension(kind::SEAL);
    header.extensions.push(Extension::Unknown {
        kind: kind::SEAL,
        data: pointer.encode(),
    });
    header.autoclear = header.autoclear.with(Autoclear::SEALED);
}

fn check_sealable(image: &Image) -> Result<()> {
    let header = image.header();
    if header.version < 3 {
        let message = "Images of version 2 cannot be sealed: 'vellum amend -o compat=1.1' first";
        return Err(refuse(image, ErrorKind::Unsupported, message));
    }
    if header.incompatible.contains(Incompatible::WRITE_LOG) {
        let message = "The last writes are in the image's write log: 'vellum check -r log' first";
        return Err(refuse(image, ErrorKind::InvalidArgument, message));
    }
    match image.encryption {
        GuestEncryption::None | GuestEncryption::Luks { .. } => Ok(()),
        GuestEncryption::Legacy(_) => {
            let message = "Images with AES encryption cannot be sealed: LUKS can";
            Err(refuse(image, ErrorKind::Unsupported, message))
        }
        GuestEncryption::Locked => {
            let message = "An encrypted image is sealed with its key";
            Err(refuse(image, ErrorKind::InvalidArgument, message))
        }
    }
}

/// Where the last cluster ends that the image uses; it must agree with itself.
async fn end_of_use(image: &Image) -> Result<u64> {
    let found = check(image.file.clone(), &CheckOptions::default()).await?;
    if found.corruptions + found.check_errors > 0 {
        let message = "The metadata of the image contradicts itself: 'vellum check -r all' first";
        return Err(refuse(image, ErrorKind::Corrupt, message));
    }
    let cluster = image.geometry.cluster_size_bytes();
    Ok(found
        .image_end_offset
        .next_multiple_of(cluster)
        .max(cluster))
}

/// The place of a seal that is being made.
struct Area {
    file: Arc<dyn Storage>,
    start_bytes: u64,
    /// Where the next node goes, counted from the start.
    next_bytes: u64,
}

impl Area {
    /// Writes both trees and the superblock; nothing leads to them yet.
    async fn fill(
        &mut self,
        image: &Arc<Image>,
        header: &Header,
        options: &SealOptions,
    ) -> Result<Superblock> {
        let content = self.content(image, options).await?;
        let slices = Slices::of(image);
        let mapping = self.mapping(image, &slices).await?;
        let mut superblock = Superblock {
            size_bytes: header.guest_size_bytes(),
            unit_bytes: unit_bytes(header),
            keyed: header.crypt_method != CryptMethod::None,
            detached: false,
            length_bytes: self.next_bytes,
            content,
            mapping,
            mapping_slices: slices.tables * slices.per_table,
            slice_bytes: slice_bytes(header),
            header: self.header_hash(header)?,
            signature: Vec::new(),
        };
        if let Some(sign) = &options.signer {
            superblock.signature = sign(&superblock.statement())?.into_bytes();
        }
        let encoded = superblock.encode();
        let block = encoded.map_err(|error| bad_format("seal", &error))?;
        self.write(0, block).await?;
        Ok(superblock)
    }

    /// The hash of the header that is going to lead here.
    fn header_hash(&self, header: &Header) -> Result<Hash> {
        let mut sealed = header.clone();
        let pointer = SealPointer {
            offset_bytes: self.start_bytes,
            length_bytes: self.next_bytes,
        };
        lead_to(&mut sealed, &pointer);
        refresh_feature_names(&mut sealed);
        let cluster = sealed.encode().and_then(|bytes| header_hash(&bytes));
        cluster.map_err(|error| bad_format("seal", &error).target(self.file.name()))
    }

    async fn content(&mut self, image: &Arc<Image>, options: &SealOptions) -> Result<Option<Root>> {
        let size_bytes = image.size_bytes();
        let unit = unit_bytes(&image.header());
        let hasher = LeafHasher::new(size_bytes, unit, image.encryption.volume_key());
        let hasher = Arc::new(hasher);
        let shape = Shape::new(size_bytes.div_ceil(LEAF_BYTES));
        let mut builder = TreeBuilder::new(shape, self.next_bytes);
        let mut running = FuturesOrdered::new();
        let mut next = image.next_held(0).await;
        loop {
            while let Some(number) = next.filter(|_| running.len() < parallel_chunks()) {
                let leaves = shape.leaves_under(0, number);
                let hashes = image.leaf_hashes(&hasher, leaves);
                running.push_back(async move { (number, hashes.await) });
                next = image.next_held(number + 1).await;
            }
            let Some((number, hashes)) = running.next().await else {
                break;
            };
            builder.push(number, &hashes?);
            if builder.finished_bytes() >= WRITE_BYTES {
                self.append(builder.take_finished()).await?;
            }
            if let Some(report) = &options.on_progress {
                let done = (number + 1) * NODE_GUEST_BYTES;
                report(done.min(size_bytes), size_bytes);
            }
        }
        if let Some(report) = &options.on_progress {
            report(size_bytes, size_bytes);
        }
        self.end(builder).await
    }

    async fn mapping(&mut self, image: &Arc<Image>, slices: &Slices) -> Result<Option<Root>> {
        let shape = Shape::new(slices.tables * slices.per_table);
        let mut builder = TreeBuilder::new(shape, self.next_bytes);
        let mut pending = PendingNode::default();
        let tables = (0..slices.tables).filter(|&index| image.l1.get(index).0 != 0);
        let reads = tables.map(|index| async move { (index, image.slice_hashes(index).await) });
        let mut reads = futures_util::stream::iter(reads).buffered(parallel_chunks());
        while let Some((index, hashes)) = reads.next().await {
            let first = slices.of_table(index).start;
            for (slice, hash) in (first..).zip(hashes?.unwrap_or_default()) {
                pending.put(&mut builder, slice, hash);
            }
            if builder.finished_bytes() >= WRITE_BYTES {
                self.append(builder.take_finished()).await?;
            }
        }
        drop(reads);
        pending.end(&mut builder);
        self.end(builder).await
    }

    async fn end(&mut self, mut builder: TreeBuilder) -> Result<Option<Root>> {
        let (root, _) = builder.finish();
        self.append(builder.take_finished()).await?;
        Ok(root)
    }

    async fn append(&mut self, nodes: Vec<u8>) -> Result<()> {
        let at = self.next_bytes;
        self.next_bytes += nodes.len() as u64;
        self.write(at, nodes).await
    }

    async fn write(&self, at: u64, bytes: Vec<u8>) -> Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let start = self.start_bytes + at;
        let end = start + bytes.len() as u64;
        if !self.file.capabilities().growable && end > self.file.len_bytes()? {
            let message = "There is no room for the seal behind what the image uses";
            return Err(Error::new(ErrorKind::NoSpace, "seal", message).target(self.file.name()));
        }
        let buffers = Buffers::from_iter([Buffer::copy_of(&bytes)]);
        let written = self.file.write(start, buffers, WriteFlags::default());
        written.await.map(drop)
    }
}

/// A hash node that is being filled.
#[derive(Default)]
struct PendingNode {
    number: u64,
    hashes: Vec<Hash>,
}

impl PendingNode {
    fn put(&mut self, builder: &mut TreeBuilder, leaf: u64, hash: Hash) {
        let number = leaf / HASHES_PER_NODE;
        if number != self.number {
            self.end(builder);
            self.number = number;
        }
        let index = (leaf % HASHES_PER_NODE) as usize;
        self.hashes
            .resize(self.hashes.len().max(index), Hash::default());
        self.hashes.push(hash);
    }

    fn end(&mut self, builder: &mut TreeBuilder) {
        let hashes = std::mem::take(&mut self.hashes);
        if !hashes.is_empty() {
            builder.push(self.number, &hashes);
        }
    }
}
