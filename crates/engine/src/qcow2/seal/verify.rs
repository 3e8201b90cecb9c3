//! Compares everything that a seal vouches for with the image, on all cores, and names the guest
//! ranges where they differ.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use futures_util::stream::{FuturesOrdered, StreamExt};
use vellum_format::seal::{
    HASHES_PER_NODE, Hash, LEAF_BYTES, LeafHasher, NODE_GUEST_BYTES, NOTHING, Node, Shape,
};
use vellum_format::types::GuestOffset;
use vellum_io::{Error, ErrorKind, Io, Result};

use super::area::{SealInfo, SealProgress, Sealed, is_sealed, unit_bytes};
use super::content::{guest_of, parallel_chunks};
use super::mapping::Slices;
use super::tree::{BadNode, Tree, hash_in};
use crate::qcow2::Qcow2;
use crate::qcow2::image::Image;
use crate::qcow2::open;

/// What a [`Difference`] is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DifferenceKind {
    /// The guest's bytes are others, or cannot be read.
    Content,
    /// The image holds bytes where it held none when it was sealed, or the reverse.
    Allocation,
    /// An L1 entry, or the L2 table that it leads to, is another.
    Mapping,
    /// The header is another.
    Header,
    /// The seal itself is damaged, so that what is below cannot be compared.
    Seal,
}

impl DifferenceKind {
    /// The name in reports.
    pub fn name(self) -> &'static str {
        match self {
            DifferenceKind::Content => "content",
            DifferenceKind::Allocation => "allocation",
            DifferenceKind::Mapping => "mapping",
            DifferenceKind::Header => "header",
            DifferenceKind::Seal => "seal",
        }
    }
}

/// A guest range where image and seal differ.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// What it is about.
    pub kind: DifferenceKind,
    /// The guest's bytes that are concerned. Those of tables can lie behind the end of the disk.
    pub guest: Range<u64>,
    /// What is wrong, for people.
    pub reason: String,
}

/// Receives differences as they are found: first those of the content, by their offsets, then
/// those of the mapping.
pub type DifferenceSink = Arc<dyn Fn(&Difference) + Send + Sync>;

vellum_io::with_setters! {
    /// How to verify.
    #[derive(Clone, Default)]
    pub struct VerifyOptions {
        /// Called for each difference; neighbours of one kind are one.
        pub on_difference: Option<DifferenceSink>,
        /// Called while the disk is read.
        pub on_progress: Option<SealProgress>,
    }
}

impl fmt::Debug for VerifyOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VerifyOptions")
            .field("on_difference", &self.on_difference.is_some())
            .field("on_progress", &self.on_progress.is_some())
            .finish()
    }
}

/// What verifying has found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct VerifyReport {
    /// Differences, neighbours of one kind being one; 0: all is as it was sealed.
    pub differences: u64,
    /// Guest bytes that are concerned, those of several differences counted several times.
    pub differing_bytes: u64,
    /// What the seal says of itself; `None` where that is damaged.
    pub seal: Option<SealInfo>,
}

impl Qcow2 {
    /// Compares the image with its seal: everything that it holds itself, its mapping and its
    /// header. The image is best opened read-only and with
    /// [`VerifyReads::Off`](super::VerifyReads::Off): damage does not keep it from being opened
    /// then.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] where the image has no seal. What cannot be read is a
    /// difference.
    pub fn verify(&self, options: VerifyOptions) -> Io<VerifyReport> {
        let image = self.image.clone();
        Io::start(async move { verify(&image, options).await })
    }

    /// Whether reads of this image are compared with its seal, so that nobody must read its data
    /// without it.
    pub fn verifies_reads(&self) -> bool {
        self.image.seal.is_some()
    }
}

async fn verify(opened: &Image, options: VerifyOptions) -> Result<VerifyReport> {
    let header = open::read_header(&opened.file).await?;
    if !is_sealed(&header) {
        let message = "The image has no seal";
        return Err(
            Error::new(ErrorKind::InvalidArgument, "verify", message).target(opened.name.clone())
        );
    }
    let size_bytes = header.guest_size_bytes();
    let mut found = Found::new(options.on_difference);
    let sealed = match Sealed::read(&opened.file, &header).await {
        Ok(sealed) => sealed,
        Err(error) => {
            found.add(DifferenceKind::Seal, 0..size_bytes, error.message());
            return Ok(found.end(None));
        }
    };
    let info = Some(SealInfo::new(&sealed.superblock));
    if let Some(fault) = sealed.header_fault(&opened.file, &header).await? {
        found.add(DifferenceKind::Header, 0..size_bytes, fault);
        if sealed.superblock.size_bytes != size_bytes {
            // Nothing can be told leaf by leaf.
            return Ok(found.end(info));
        }
    }
    let image = open::reopen_to_read(opened).await?;
    let hasher = LeafHasher::new(
        size_bytes,
        unit_bytes(&header),
        image.encryption.volume_key(),
    );
    let content = Content {
        tree: sealed.content(&image.file),
        shape: sealed.superblock.content_shape(),
        hasher: Arc::new(hasher),
        image: image.clone(),
    };
    content
        .verify(&mut found, options.on_progress.as_ref())
        .await;
    let tree = sealed.mapping(&image.file);
    verify_mapping(&image, &tree, &mut found).await;
    Ok(found.end(info))
}

/// Differences, joined where they are neighbours.
pub(super) struct Found {
    sink: Option<DifferenceSink>,
    last: Option<Difference>,
    report: VerifyReport,
}

impl Found {
    pub(super) fn new(sink: Option<DifferenceSink>) -> Found {
        Found {
            sink,
            last: None,
            report: VerifyReport::default(),
        }
    }

    pub(super) fn add(&mut self, kind: DifferenceKind, guest: Range<u64>, reason: &str) {
        if let Some(last) = &mut self.last
            && last.kind == kind
            && last.guest.end == guest.start
            && last.reason == reason
        {
            last.guest.end = guest.end;
            return;
        }
        self.tell();
        self.last = Some(Difference {
            kind,
            guest,
            reason: reason.to_owned(),
        });
    }

    fn tell(&mut self) {
        if let Some(last) = self.last.take() {
            self.report.differences += 1;
            self.report.differing_bytes += last.guest.end.saturating_sub(last.guest.start);
            if let Some(sink) = &self.sink {
                sink(&last);
            }
        }
    }

    pub(super) fn end(mut self, seal: Option<SealInfo>) -> VerifyReport {
        self.tell();
        self.report.seal = seal;
        self.report
    }

    /// Compares the hash of a leaf.
    pub(super) fn compare(&mut self, guest: Range<u64>, now: Hash, sealed: Hash) {
        if now == sealed {
            return;
        }
        let (kind, reason) = match (now, sealed) {
            (NOTHING, _) => (
                DifferenceKind::Allocation,
                "the image holds nothing where it was sealed with data",
            ),
            (_, NOTHING) => (
                DifferenceKind::Allocation,
                "the image holds data where it was sealed with none",
            ),
            _ => (DifferenceKind::Content, "the content differs"),
        };
        self.add(kind, guest, reason);
    }
}

/// A hash node with the leaves' hashes of the image as it is now.
enum Chunk {
    Compared(Option<Arc<Node>>, std::result::Result<Vec<Hash>, Error>),
    Bad(BadNode),
}

/// What is needed to compare the content.
struct Content {
    tree: Tree,
    shape: Shape,
    hasher: Arc<LeafHasher>,
    image: Arc<Image>,
}

impl Content {
    async fn verify(&self, found: &mut Found, progress: Option<&SealProgress>) {
        let size_bytes = self.image.size_bytes();
        let mut running = FuturesOrdered::new();
        let mut next = Some(0);
        loop {
            while let Some(from) = next.filter(|_| running.len() < parallel_chunks()) {
                let Some((number, node)) = self.next(from).await else {
                    next = None;
                    break;
                };
                next = Some(match &node {
                    Ok(_) => number + 1,
                    Err(bad) => bad.leaves.end.div_ceil(HASHES_PER_NODE).max(number + 1),
                });
                running.push_back(async move { (number, self.chunk(number, node).await) });
            }
            let Some((number, chunk)) = running.next().await else {
                break;
            };
            self.compare(number, chunk, found).await;
            if let Some(report) = progress {
                let done = (number + 1).saturating_mul(NODE_GUEST_BYTES);
                report(done.min(size_bytes), size_bytes);
            }
        }
        if let Some(report) = progress {
            report(size_bytes, size_bytes);
        }
    }

    /// The next hash node that the tree has, or of whose leaves the image holds something.
    async fn next(&self, from: u64) -> Option<(u64, Result<Option<Arc<Node>>, BadNode>)> {
        let held = self.image.next_held(from).await;
        let number = match self.tree.next_present(from).await {
            Ok(Some(present)) => Some(held.map_or(present, |held| held.min(present))),
            Ok(None) => held,
            Err(bad) => {
                let first = bad.leaves.start / HASHES_PER_NODE;
                let clear = held.filter(|held| *held < first);
                return Some(match clear {
                    Some(held) => (held, self.tree.hashes(held).await),
                    None => (first.max(from), Err(bad)),
                });
            }
        };
        let number = number?;
        Some((number, self.tree.hashes(number).await))
    }

    async fn chunk(&self, number: u64, node: Result<Option<Arc<Node>>, BadNode>) -> Chunk {
        match node {
            Err(bad) => Chunk::Bad(bad),
            Ok(node) => {
                let leaves = self.shape.leaves_under(0, number);
                let hashes = self.image.leaf_hashes(&self.hasher, leaves).await;
                Chunk::Compared(node, hashes)
            }
        }
    }

    async fn compare(&self, number: u64, chunk: Chunk, found: &mut Found) {
        let leaves = self.shape.leaves_under(0, number);
        match chunk {
            Chunk::Bad(bad) => {
                found.add(DifferenceKind::Seal, self.guest(&bad.leaves), &bad.why);
            }
            Chunk::Compared(node, Ok(hashes)) => {
                for (leaf, now) in leaves.zip(hashes) {
                    let guest = self.guest(&(leaf..leaf + 1));
                    found.compare(guest, now, hash_in(node.as_deref(), leaf));
                }
            }
            Chunk::Compared(node, Err(_)) => self.one_by_one(node, leaves, found).await,
        }
    }

    /// Compares leaves some of which cannot be read.
    async fn one_by_one(&self, node: Option<Arc<Node>>, leaves: Range<u64>, found: &mut Found) {
        if let Some(error) = self.unmapped(&leaves).await {
            found.add(
                DifferenceKind::Content,
                self.guest(&leaves),
                error.message(),
            );
            return;
        }
        for leaf in leaves {
            let guest = self.guest(&(leaf..leaf + 1));
            match self.image.leaf_hashes(&self.hasher, leaf..leaf + 1).await {
                Ok(hashes) => {
                    let now = hashes.first().copied().unwrap_or_default();
                    found.compare(guest, now, hash_in(node.as_deref(), leaf));
                }
                Err(error) => found.add(DifferenceKind::Content, guest, error.message()),
            }
        }
    }

    /// Why neither the first nor the last of some leaves has a mapping, if it is the same: then
    /// it is a table.
    async fn unmapped(&self, leaves: &Range<u64>) -> Option<Error> {
        let error_at = async |leaf: u64| {
            let run = self.image.first_run(GuestOffset(leaf * LEAF_BYTES), 1);
            run.await.err()
        };
        let first = error_at(leaves.start).await?;
        let last = error_at(leaves.end.checked_sub(1)?).await?;
        (first.message() == last.message()).then_some(first)
    }

    fn guest(&self, leaves: &Range<u64>) -> Range<u64> {
        guest_of(leaves, self.image.size_bytes())
    }
}

/// Up to which slice a tree is known to have no hashes, counted from the one that was asked for last.
#[derive(Debug, Default)]
struct Gap {
    end: u64,
}

impl Gap {
    /// Whether the tree has no hash for some slices, which lie behind those of the call before.
    async fn holds(&mut self, tree: &Tree, slices: &Range<u64>) -> bool {
        if slices.end > self.end {
            let next = tree.next_present(slices.start / HASHES_PER_NODE).await;
            self.end = match next {
                Ok(Some(number)) => number * HASHES_PER_NODE,
                Ok(None) => u64::MAX,
                Err(_) => 0,
            };
        }
        slices.end <= self.end
    }
}

/// Compares the L1 table and all L2 tables.
async fn verify_mapping(image: &Arc<Image>, tree: &Tree, found: &mut Found) {
    let slices = Slices::of(image);
    let used = (0..slices.tables).filter(|index| image.has_l1_entry(*index));
    let reads = futures_util::stream::iter(used);
    let reads = reads.map(|index| async move { image.slice_hashes(index).await });
    let mut reads = reads.buffered(parallel_chunks());
    let (mut gap, mut told) = (Gap::default(), 0);
    for index in 0..slices.tables {
        let of_table = slices.of_table(index);
        let now = match image.has_l1_entry(index) {
            true => reads.next().await.unwrap_or(Ok(None)),
            false if gap.holds(tree, &of_table).await => continue,
            false => Ok(None),
        };
        told = verify_table(&slices, tree, (of_table, told), &now, found).await;
    }
}

/// Compares the slices of a table, whose hashes are `now`, from the one on to which damage of the tree has been
/// told. Returns to which one it has been told afterwards.
async fn verify_table(
    slices: &Slices,
    tree: &Tree,
    (of_table, mut told): (Range<u64>, u64),
    now: &Result<Option<Vec<Hash>>>,
    found: &mut Found,
) -> u64 {
    let first = of_table.start;
    for slice in of_table.start.max(told)..of_table.end {
        if slice < told {
            continue;
        }
        let sealed = match tree.hashes(slice / HASHES_PER_NODE).await {
            Ok(node) => hash_in(node.as_deref(), slice),
            Err(bad) => {
                told = bad.leaves.end;
                let guest = slices.guest(&bad.leaves);
                found.add(DifferenceKind::Seal, guest, &bad.why);
                continue;
            }
        };
        let why = match now {
            Ok(now) => {
                let now = now
                    .as_ref()
                    .and_then(|now| now.get((slice - first) as usize));
                (now.copied().unwrap_or(NOTHING) != sealed).then_some("the tables differ")
            }
            Err(error) => Some(error.message()),
        };
        if let Some(why) = why {
            let guest = slices.guest(&(slice..slice + 1));
            found.add(DifferenceKind::Mapping, guest, why);
        }
    }
    told
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    #[test]
    fn neighbours_of_a_kind_are_one() {
        let told: Arc<Mutex<Vec<Difference>>> = Arc::default();
        let sink = told.clone();
        let mut found = Found::new(Some(Arc::new(move |difference: &Difference| {
            sink.lock().push(difference.clone());
        })));
        found.compare(0..4096, [1; 32], [1; 32]);
        found.compare(4096..8192, [1; 32], [2; 32]);
        found.compare(8192..12288, [1; 32], [2; 32]);
        found.compare(12288..16384, NOTHING, [2; 32]);
        found.compare(20480..24576, [1; 32], [2; 32]);
        let report = found.end(None);
        assert_eq!((report.differences, report.differing_bytes), (3, 16384));
        let ranges: Vec<_> = told
            .lock()
            .iter()
            .map(|d| (d.kind, d.guest.clone()))
            .collect();
        assert_eq!(
            ranges,
            [
                (DifferenceKind::Content, 4096..12288),
                (DifferenceKind::Allocation, 12288..16384),
                (DifferenceKind::Content, 20480..24576),
            ]
        );
    }
}
