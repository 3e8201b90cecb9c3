//! Flushes, the first change and the last one, and what has to be alone with the image.

use super::core::Core;
use crate::fields;
use crate::layout::Layout;

use std::sync::atomic::Ordering;
use vellum::{Error, ErrorKind, Result};
use vellum_io::finish_all;
use vellum_storage::Event;

/// Tables that wait for a flush take at most about so much memory.
const MAX_CHANGED_BYTES: u64 = 4 << 20;

/// Flushes of files run side by side up to so many.
const FILES_AT_ONCE: usize = 16;

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
}
