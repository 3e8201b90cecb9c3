//! Makes sums count: those of regions that have come to rest, and all at the close.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use vellum_format::checksums::Superblock;
use vellum_io::{Result, lane, spawn, spawn_to_completion};

use super::attach::rename_at_close;
use super::page::Page;
use super::pages::Checksums;
use vellum_io::range_lock::Mode;

/// How often it is looked for regions that have come to rest: one is settled that nobody has
/// changed for one to two of these.
const INTERVAL: Duration = Duration::from_secs(2);
/// How long a close waits until a later change is sure to have another time, where the file system notes fractions of a
/// second ([`vellum_storage::Storage::modified_at`]).
const CLOCK_WAIT: Duration = Duration::from_millis(60);
/// Regions that are held and settled at a time.
const AT_ONCE: usize = 64;

impl Checksums {
    /// Settles those of some open regions that nobody is changing.
    pub(super) async fn settle(self: &Arc<Self>, pages: Vec<Arc<Page>>) -> Result<()> {
        let checksums = self.clone();
        // Entries that are on their way keep their regions held, whoever waits for this.
        spawn_to_completion(async move {
            let _one = checksums.settling.lock().await;
            for pages in pages.chunks(AT_ONCE) {
                checksums.settle_some(pages).await?;
            }
            Ok(())
        })
        .await
    }

    /// Passes on how a flush has ended. After one that failed nothing is settled any more: what it
    /// should have made durable may be lost, and the next one would not tell.
    pub(super) fn believe(&self, flushed: Result<()>) -> Result<()> {
        if let Err(error) = &flushed {
            drop(self.failed.set(error.clone()));
        }
        flushed
    }

    async fn settle_some(&self, pages: &[Arc<Page>]) -> Result<()> {
        self.failed.get().cloned().map_or(Ok(()), Err)?;
        let mut turns = Vec::with_capacity(pages.len());
        let mut held = Vec::with_capacity(pages.len());
        for page in pages {
            let turn = self.ranges.try_acquire(page.bytes(), Mode::Exclusive);
            if let Some(turn) = turn.filter(|_| !page.is_settled()) {
                turns.push(turn);
                held.push(page.clone());
            }
        }
        if held.is_empty() {
            return Ok(());
        }
        let entries = self.sums.write_pages(&held).await?;
        // Rule C2: data and sums are durable before the entry.
        self.believe(self.file.flush().await)?;
        self.believe(self.sums.flush().await)?;
        // A flush that somebody else asked for may have failed meanwhile.
        self.failed.get().cloned().map_or(Ok(()), Err)?;
        // Before they may be on disk: the next change opens the region again.
        held.iter().for_each(|page| page.set_settled(true));
        self.sums.write_entries(entries).await
    }

    /// Settles what has come to rest, as long as there is something that has not.
    pub(super) fn watch(self: &Arc<Self>) {
        if !self.is_watched.swap(true, Ordering::SeqCst) {
            let watch = RestWatch {
                checksums: Arc::downgrade(self),
            };
            drop(spawn(async move { watch.run().await }));
        }
    }

    /// Settles everything, under another identity if something has changed, and closes both files.
    pub(super) async fn close(self: Arc<Self>) -> Result<()> {
        let left = self.end_use().await;
        let closed = self.file.close().await;
        let sums = self.sums.0.close().await;
        left.and(closed).and(sums)
    }

    /// As [`Checksums::close`], but the files stay open.
    pub(super) async fn end_use(self: &Arc<Self>) -> Result<()> {
        // After a flush that has failed nothing is settled either.
        let renamed = match self.failed.get() {
            None => rename_at_close(self).await,
            Some(_) => Ok(()),
        };
        let settled = self.settle(self.open_pages(|_| true)).await;
        let flushed = self.sums.flush().await;
        let whole = settled.and(renamed).and(flushed);
        match whole {
            Ok(()) => self.leave().await,
            Err(error) => Err(error),
        }
    }

    /// Writes down when the image's file was modified last, for the next opening. Nothing is written to it after this.
    async fn leave(&self) -> Result<()> {
        if !self.writes || !self.may_repair() || self.failed.get().is_some() {
            return Ok(());
        }
        let left_at = self.left_at().await?;
        match self.sums.superblock().await? {
            Some(superblock) => {
                let superblock = Superblock {
                    left_at,
                    ..superblock
                };
                self.sums.begin(superblock).await
            }
            None => Ok(()),
        }
    }
}

impl Checksums {
    /// Returns when the image's file was modified last. A moment after that it is not known yet: a write within the
    /// granularity of the file system's clock would leave the same time.
    async fn left_at(&self) -> Result<Option<u64>> {
        let mut left_at = self.file.modified_at()?;
        if left_at.is_none() {
            lane::sleep(CLOCK_WAIT).await;
            left_at = self.file.modified_at()?;
        }
        Ok(left_at)
    }
}

/// Settles regions that have come to rest; over even if its lane ends first.
struct RestWatch {
    checksums: Weak<Checksums>,
}

impl RestWatch {
    async fn run(mut self) {
        loop {
            lane::sleep(INTERVAL).await;
            let Some(checksums) = self.checksums.upgrade() else {
                return;
            };
            let now = checksums.now.fetch_add(1, Ordering::Relaxed);
            let rests = |page: &Page| page.changed_at.load(Ordering::Relaxed) < now;
            // What fails now is tried again.
            drop(checksums.settle(checksums.open_pages(rests)).await);
            if checksums.open_pages(|_| true).is_empty() {
                checksums.is_watched.store(false, Ordering::SeqCst);
                // A change may have seen the mark a moment ago.
                let is_done = checksums.open_pages(|_| true).is_empty()
                    || checksums.is_watched.swap(true, Ordering::SeqCst);
                if is_done {
                    self.checksums = Weak::new();
                    return;
                }
            }
        }
    }
}

impl Drop for RestWatch {
    fn drop(&mut self) {
        if let Some(checksums) = self.checksums.upgrade() {
            checksums.is_watched.store(false, Ordering::SeqCst);
        }
    }
}
