//! [`Checksums`]: which regions are in memory, and in which state.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use smallvec::SmallVec;
use vellum_format::checksums::Entry;
use vellum_io::{Error, Result};
use vellum_storage::Storage;
use vellum_storage::mutants::{self, Mutant};

use super::page::{Page, regions_of};
use super::page_table::PageTable;
use super::sums_file::SumsFile;
use crate::qcow2::commit::coalesce::{Coalescer, Role};
use crate::qcow2::messages::Messages;
use vellum_io::range_lock::RangeLock;

/// The pages of a request; most have one.
pub(super) type Pages = SmallVec<[Arc<Page>; 2]>;

/// Pages in memory, more or less: 16 MiB, which tell of 16 GiB.
pub(super) const MAX_PAGES: usize = 4096;

/// How far sums can be trusted that do not agree with the bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Trust {
    /// The image is open for writing.
    pub(super) writes: bool,
    /// Nobody has modified the image's file since Vellum closed it.
    pub(super) is_as_left: bool,
}

/// The checksums of an image that is open.
pub(crate) struct Checksums {
    /// The image's file.
    pub(super) file: Arc<dyn Storage>,
    pub(super) sums: SumsFile,
    /// Blocks, in bytes of the image's file, that are changed.
    pub(super) ranges: Arc<RangeLock>,
    pub(super) pages: PageTable,
    /// Settled regions that are about to be written to.
    wanted: Mutex<Vec<Arc<Page>>>,
    opening: Coalescer,
    /// One at a time settles.
    pub(super) settling: async_lock::Mutex<()>,
    /// The clock of those who settle.
    pub(super) now: AtomicU64,
    pub(super) is_watched: AtomicBool,
    /// Since the image was opened, or is being opened.
    pub(super) has_changed: AtomicBool,
    pub(super) writes: bool,
    /// Bytes that do not agree were changed by the disk. Not if another program may have written to the file: there are
    /// some that know nothing of the image's bit and do not clear it either, as QEMU does not when it commits into a
    /// backing file.
    pub(super) is_as_left: AtomicBool,
    /// A flush of one of the files that failed.
    pub(super) failed: OnceLock<Error>,
    messages: Messages,
    /// Reads that were healed.
    healed: AtomicU64,
}

/// Of so many reads that were healed a line is said.
const MOST_LINES: u64 = 16;

impl fmt::Debug for Checksums {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Checksums({:?})", self.sums.0.name())
    }
}

impl Checksums {
    pub(super) fn new(
        file: Arc<dyn Storage>,
        sums: SumsFile,
        trust: Trust,
        messages: Messages,
    ) -> Arc<Self> {
        Arc::new(Checksums {
            file,
            sums,
            ranges: Arc::default(),
            pages: PageTable::default(),
            wanted: Mutex::default(),
            opening: Coalescer::default(),
            settling: async_lock::Mutex::new(()),
            now: AtomicU64::new(0),
            is_watched: AtomicBool::new(false),
            has_changed: AtomicBool::new(false),
            writes: trust.writes,
            is_as_left: AtomicBool::new(trust.is_as_left),
            failed: OnceLock::new(),
            messages,
            healed: AtomicU64::new(0),
        })
    }

    /// Whether what the backing file has, and a block had by its sum, may take the place of what the block has.
    pub(super) fn may_repair(&self) -> bool {
        self.is_as_left.load(Ordering::Relaxed)
    }

    /// Tells of blocks that a reader had from the backing file; `written`: whether they are written
    /// again.
    pub(super) fn tell_of_healed(&self, count: usize, first: u64, written: &Result<bool>) {
        if self.healed.fetch_add(1, Ordering::Relaxed) >= MOST_LINES {
            return;
        }
        let end = match written {
            Ok(true) => "and is written to them again".to_owned(),
            Ok(false) => "and was read instead; they stay as they are".to_owned(),
            Err(error) => format!("and could not be written to them again: {error}"),
        };
        self.messages.say(&format!(
            "{}: checksum mismatch in {count} blocks of 4096 bytes, the first at offset {first} of the file: \
             the disk has changed them. The backing file has what they had, {end}",
            self.file.name(),
        ));
    }

    /// The pages of the regions that a range has bytes of, in order.
    pub(super) async fn pages_of(self: &Arc<Self>, range: &Range<u64>) -> Result<Pages> {
        let mut found = Pages::new();
        for region in regions_of(range) {
            let page = self.pages.get(region);
            let load = || async {
                if self.sums.load(&page).await? {
                    self.messages.say(&format!(
                        "{}: checksums in '{}' are damaged; bytes {} to {} of the image are not compared \
                         before they are written or scrubbed",
                        self.file.name(),
                        self.sums.0.name(),
                        page.bytes().start,
                        page.bytes().end,
                    ));
                }
                Ok::<(), Error>(())
            };
            page.loaded.get_or_try_init(load).await?;
            found.push(page);
        }
        if self.pages.len() > MAX_PAGES {
            self.make_room().await;
        }
        Ok(found)
    }

    /// The first of some regions that may have sums; the others have none, and get none but by
    /// changes that run beside this.
    pub(super) async fn first_with_sums(&self, regions: Range<u64>) -> Result<Option<u64>> {
        let is_before = |found: Option<u64>, end: u64| found.map_or(end, |region| region.min(end));
        let mut end = is_before(self.pages.first_in(&regions), regions.end);
        let settled = self.sums.first_settled(regions.start..end).await?;
        end = is_before(settled, end);
        // A page that has come meanwhile may have had sums, and an entry that was open again.
        end = is_before(self.pages.first_in(&(regions.start..end)), end);
        Ok((end < regions.end).then_some(end))
    }

    /// Opens regions that are about to change: their entries are durably 0. The caller holds their
    /// blocks.
    pub(super) async fn open_regions(&self, pages: &[Arc<Page>]) -> Result<()> {
        let now = self.now.load(Ordering::Relaxed);
        if !self.has_changed.load(Ordering::Relaxed) {
            self.has_changed.store(true, Ordering::Relaxed);
        }
        for page in pages {
            page.changed_at.store(now, Ordering::Relaxed);
        }
        // What a turn that has ended well has opened may have been others' pages: one that had these may
        // have failed before.
        while pages.iter().any(|page| page.is_settled()) {
            let settled = pages.iter().filter(|page| page.is_settled()).cloned();
            self.wanted.lock().extend(settled);
            match self.opening.join().await {
                Role::Follower(result) => result?,
                Role::Leader(leader) => {
                    let wanted = std::mem::take(&mut *self.wanted.lock());
                    leader.end(self.open_wanted(&wanted).await)?;
                }
            }
        }
        Ok(())
    }

    async fn open_wanted(&self, pages: &[Arc<Page>]) -> Result<()> {
        // Rule C1: durable before the first write.
        let entries = pages.iter().map(|page| (page.region, Entry::Open));
        self.sums.write_entries(entries).await?;
        if !mutants::is(Mutant::OpenRegionsLate) {
            self.sums.flush().await?;
        }
        pages.iter().for_each(|page| page.set_settled(false));
        Ok(())
    }

    /// Drops pages that can be had again, and settles others so that they can.
    async fn make_room(self: &Arc<Self>) {
        if self.drop_pages() {
            return;
        }
        let open = self.open_pages(|_| true);
        // What cannot be settled now stays in memory.
        drop(
            self.settle(open.into_iter().take(MAX_PAGES / 2).collect())
                .await,
        );
        self.drop_pages();
    }

    /// Drops pages that nobody uses and that can be had again, but for a half; whether that was
    /// enough.
    fn drop_pages(&self) -> bool {
        self.pages.shrink_to(MAX_PAGES / 2, |page| {
            (page.is_settled() || page.is_blank()) && Arc::strong_count(page) == 1
        });
        self.pages.len() <= MAX_PAGES
    }

    /// Open regions whose sums would be lost with their pages.
    pub(super) fn open_pages(&self, choose: impl Fn(&Page) -> bool) -> Vec<Arc<Page>> {
        let is_open = |page: &Page| !page.is_settled() && !page.is_blank();
        self.pages.choose(|page| is_open(page) && choose(page))
    }
}
