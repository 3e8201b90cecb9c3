//! Flushes, the first change and the last one, and what has to be alone with the image.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use async_lock::Mutex;
use vellum::{Error, ErrorKind, Result, ZeroRequest};
use vellum_io::finish_all;
use vellum_storage::Event;

use super::Core;
use crate::fields;
use crate::layout::Layout;

/// Tables that wait for a flush take at most about so much memory.
const MAX_CHANGED_BYTES: u64 = 4 << 20;

/// Flushes of files run side by side up to so many.
const FILES_AT_ONCE: usize = 16;

/// Who writes tables, one at a time. `C`: what a layout gives out to be written.
#[derive(Debug)]
pub(super) struct Commits<C> {
    /// What a commit has taken and had no room for, to be written by the next one. The data that it leads to
    /// is durable.
    unwritten: Mutex<Option<C>>,
    /// The last commit had no room.
    lacks_room: AtomicBool,
    /// How many commits were begun: one that was begun after a flush was asked for serves that one, too.
    begun: AtomicU64,
    /// How many have ended well, as `begun` counts.
    ended: AtomicU64,
    /// [`Layout::begin_changes`] has ended.
    changing: AtomicBool,
    first: Mutex<()>,
}

impl<C> Default for Commits<C> {
    fn default() -> Self {
        Commits {
            unwritten: Mutex::new(None),
            lacks_room: AtomicBool::default(),
            begun: AtomicU64::default(),
            ended: AtomicU64::default(),
            changing: AtomicBool::default(),
            first: Mutex::default(),
        }
    }
}

impl<L: Layout> Core<L> {
    /// Sees to it that the format knows of changes before there are any.
    pub(super) async fn begin_changes(&self) -> Result<()> {
        // Tables that wait stay bounded, however long the host is full.
        if self.commits.lacks_room.load(Ordering::Relaxed) {
            self.commit_if_much().await?;
        }
        if self.commits.changing.load(Ordering::Acquire) {
            return Ok(());
        }
        let _first = self.commits.first.lock().await;
        if !self.commits.changing.load(Ordering::Acquire) {
            let begun = self.layout.begin_changes().await;
            begun.inspect_err(|error| self.note_failed_barrier(error))?;
            self.commits.changing.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// Whether something was changed since the image was opened, or all changes were ended.
    pub(super) fn is_changing(&self) -> bool {
        self.commits.changing.load(Ordering::Acquire)
    }

    /// Rule 11: what a barrier that failed has lost nobody knows, so no later one may say that all is
    /// well. Whatever else fails on the way to a place for a block has changed nothing that counts.
    pub(super) fn note_failed_barrier(&self, error: &Error) {
        if error.is_failed_sync() {
            self.fail_stop(error);
        }
    }

    /// Makes all that is complete durable, tables too.
    pub(super) async fn commit(&self) -> Result<()> {
        let wanted = self.commits.begun.load(Ordering::SeqCst) + 1;
        let mut unwritten = self.commits.unwritten.lock().await;
        // One that began after the call has made all of it durable.
        if self.commits.ended.load(Ordering::SeqCst) >= wanted {
            return Ok(());
        }
        let number = self.commits.begun.fetch_add(1, Ordering::SeqCst) + 1;
        if let Some(failure) = self.failure.lock().clone() {
            return Err(failure);
        }
        let written = self.write_tables(&mut unwritten).await;
        // Of a write: no barrier fails with that.
        let lacks_room = written
            .as_ref()
            .is_err_and(|error| error.kind() == ErrorKind::NoSpace);
        self.commits.lacks_room.store(lacks_room, Ordering::Relaxed);
        match &written {
            Ok(()) => self.commits.ended.store(number, Ordering::SeqCst),
            Err(_) if lacks_room => {}
            Err(error) => self.fail_stop(error),
        }
        written
    }

    /// Writes what an earlier commit had no room for, and then what has changed since.
    async fn write_tables(&self, unwritten: &mut Option<L::Changes>) -> Result<()> {
        if let Some(changes) = &*unwritten {
            self.layout.write_changes(changes).await?;
        }
        *unwritten = self.layout.take_changes();
        // Rule 1: the data of entries that were taken is durable before them.
        self.barrier().await?;
        if let Some(changes) = &*unwritten {
            self.layout.write_changes(changes).await?;
            *unwritten = None;
            self.barrier().await?;
        }
        Ok(())
    }

    /// Commits where tables that wait take too much memory.
    pub(super) async fn commit_if_much(&self) -> Result<()> {
        match self.layout.changed_bytes() > MAX_CHANGED_BYTES {
            true => self.commit().await,
            false => Ok(()),
        }
    }

    async fn barrier(&self) -> Result<()> {
        self.tell(Event::FlushToDisk).await;
        let flushes = self
            .layout
            .files()
            .iter()
            .map(|file| fields::barrier(&**file));
        finish_all(FILES_AT_ONCE, flushes).await.map(drop)
    }

    pub(super) async fn close(&self) -> Result<()> {
        let _alone = self.changes.alone().await;
        if self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        if self.commits.changing.load(Ordering::Acquire) {
            self.commit().await?;
            let ended = match self.layout.end_changes().await {
                Ok(()) => self.barrier().await,
                failed => failed,
            };
            ended.inspect_err(|error| self.fail_stop(error))?;
            self.commits.changing.store(false, Ordering::Release);
        }
        self.closed.store(true, Ordering::Release);
        for file in self.layout.files() {
            file.close().await?;
        }
        Ok(())
    }

    pub(super) async fn clear(&self) -> Result<()> {
        let _alone = self.changes.alone().await;
        self.check_changeable()?;
        if self.layout.can_clear() {
            self.begin_changes().await?;
            self.commit().await?;
        }
        let cleared = self.layout.clear().await;
        cleared.inspect_err(|error| match error.kind() {
            // Nothing was begun.
            ErrorKind::Unsupported => {}
            _ => self.fail_stop(error),
        })?;
        self.inflated.forget_all();
        Ok(())
    }

    pub(super) async fn resize(&self, size_bytes: u64) -> Result<()> {
        let _alone = self.changes.alone().await;
        self.check_changeable()?;
        if !self.layout.can_resize() {
            let message = "Image format driver does not support resize";
            return Err(self.error(ErrorKind::Unsupported, "resize", message));
        }
        if !size_bytes.is_multiple_of(512) {
            let message = "Invalid image size specified";
            return Err(
                Error::new(ErrorKind::InvalidArgument, "resize", message).target(&*self.name)
            );
        }
        self.layout.check_size(size_bytes)?;
        self.begin_changes().await?;
        self.hide_backing(size_bytes).await?;
        self.commit().await?;
        let resized = self.layout.resize(size_bytes).await;
        resized.inspect_err(|error| match error.kind() {
            // Nothing was begun.
            ErrorKind::Unsupported | ErrorKind::InvalidArgument => {}
            _ => self.fail_stop(error),
        })
    }

    /// What a resize brings into being is zeroes, whatever a longer backing file has there. They come
    /// before the size: whatever interrupts it, the guest never sees what is below.
    async fn hide_backing(&self, size_bytes: u64) -> Result<()> {
        let before_bytes = self.layout.size_bytes();
        let below_bytes = self.backing.as_ref().map_or(0, |below| below.size_bytes());
        let hidden_end = below_bytes.min(size_bytes);
        if hidden_end <= before_bytes {
            return Ok(());
        }
        let hidden_bytes = hidden_end - before_bytes;
        self.coming_bytes.store(size_bytes, Ordering::Release);
        let request = ZeroRequest::default();
        let zeroed = self.write_zeroes(before_bytes, hidden_bytes, request).await;
        self.coming_bytes.store(0, Ordering::Release);
        zeroed
    }
}
