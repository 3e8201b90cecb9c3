//! [`LiveBackup`]: what an image in use showed at one moment, copied to another one.

use std::ops::Range;
use std::pin::pin;
use std::sync::Arc;

use futures_util::future::select;
use vellum::{BlockDevice, Result};

use super::copy_before_write::CopyBeforeWrite;
use super::given_up::{or_given_up, with_grace};
use super::parallel::{self, CopyOutcome, NextPiece};
use crate::copy::{CopyError, Observer, Step};
use crate::job::{JobCommand, JobControl};

/// A backup. What is wanted of the device is copied, and of that what is overwritten
/// meanwhile first.
#[derive(Debug)]
pub struct LiveBackup {
    /// The device as it is below the filter.
    pub source: Arc<dyn BlockDevice>,
    /// What the users of the source go through from before the job begins.
    pub filter: Arc<CopyBeforeWrite>,
    /// How many pieces are in flight at once.
    pub parallel: usize,
}

impl LiveBackup {
    /// Leaves out all but some ranges, which are in order and do not overlap.
    pub fn keep_only(&self, ranges: impl IntoIterator<Item = Range<u64>>) {
        let mut at = 0;
        for range in ranges {
            self.filter.leave_out(&(at..range.start));
            at = range.end;
        }
        self.filter.leave_out(&(at..u64::MAX));
    }

    /// Leaves out what the source does not hold itself.
    ///
    /// # Errors
    /// If the source cannot tell.
    pub async fn keep_only_top(&self, control: &JobControl) -> Result<CopyOutcome, CopyError> {
        let size_bytes = self.source.size_bytes();
        // Where what is not held began, seen from `at`.
        let (mut from, mut at) = (0, 0);
        while at < size_bytes {
            if control.command() == JobCommand::Cancel {
                return Ok(CopyOutcome::GivenUp);
            }
            let status = self.source.block_status(at, size_bytes - at, 0).await;
            let extent = status.map_err(|cause| CopyError {
                step: Step::Status,
                offset_bytes: at,
                cause,
            })?;
            let end = at + extent.len_bytes.max(1);
            if extent.kind.is_present() {
                self.filter.leave_out(&(from..at));
                from = end;
            }
            at = end;
        }
        self.filter.leave_out(&(from..u64::MAX));
        Ok(CopyOutcome::All)
    }

    /// Copies what is wanted, and makes it durable.
    ///
    /// # Errors
    /// What reading and writing meet. The source is as its users made it. It may be tried again.
    pub async fn run(
        &self,
        control: &JobControl,
        observer: &mut dyn Observer,
        total_bytes: u64,
    ) -> Result<CopyOutcome, CopyError> {
        let mut at = 0;
        let look = async || {
            observer.progress(
                total_bytes.saturating_sub(self.filter.todo_bytes()),
                total_bytes,
            );
            self.filter.check()?;
            if let Some(range) = self.filter.next_kept() {
                return Ok(NextPiece::Piece(range));
            }
            Ok(match self.filter.next_todo(at) {
                None => NextPiece::End,
                Some(range) => {
                    at = range.end;
                    NextPiece::Piece(range)
                }
            })
        };
        let copy = |range| self.filter.copy(range);
        let copy = parallel::run(self.parallel, control, look, copy);
        let copied = with_grace(control, copy).await?;
        self.filter.check()?;
        observer.progress(
            total_bytes.saturating_sub(self.filter.todo_bytes()),
            total_bytes,
        );
        if copied == CopyOutcome::GivenUp {
            return Ok(copied);
        }
        match or_given_up(control, self.filter.flush_target()).await {
            Some(flushed) => flushed.map(|()| CopyOutcome::All),
            None => Ok(CopyOutcome::GivenUp),
        }
    }

    /// Whether old bytes are lost: it never succeeds then.
    pub fn is_broken(&self) -> bool {
        self.filter.check().is_err()
    }

    /// What there is to copy now, in bytes.
    pub fn todo_bytes(&self) -> u64 {
        self.filter.todo_bytes()
    }

    /// Copies only what is overwritten, until it is given up.
    ///
    /// # Errors
    /// As [`LiveBackup::run`], where old bytes wait in a fleece.
    pub async fn wait(
        &self,
        control: &JobControl,
        observer: &mut dyn Observer,
    ) -> Result<(), CopyError> {
        let total_bytes = self.source.size_bytes();
        let look = async || {
            let todo_bytes = self.filter.todo_bytes();
            observer.progress(total_bytes - todo_bytes, total_bytes);
            self.filter.check()?;
            if let Some(range) = self.filter.next_kept() {
                return Ok(NextPiece::Piece(range));
            }
            let copied = pin!(self.filter.wait(todo_bytes));
            let stopped = pin!(control.wait_until(|command| command != JobCommand::Run));
            select(copied, stopped).await;
            Ok(NextPiece::Nothing)
        };
        let copy = |range| self.filter.copy(range);
        let copy = parallel::run(self.parallel, control, look, copy);
        with_grace(control, copy).await.map(drop)
    }
}
