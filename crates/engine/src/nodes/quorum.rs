//! [`Quorum`]: several devices that hold the same, of which so many must agree.
//!
//! Invariants:
//! - What is written reaches every child, and counts as written once so many have it as
//!   must agree. What does not reach one is told.
//! - A flush counts, for each change since the last one, only the children that have the change.
//! - Nothing is asked of the children that each may answer in its own way: discards, and zeroes
//!   that some cannot write at once. They would differ afterwards.
//! - A request that changes something holds its range alone: what races lands in the same
//!   order everywhere, and reads never see children that differ for that reason.
//! - Every request that was begun has ended before its answer: also those of children whose
//!   answer is not needed any more.

mod lacking;
mod votes;

use std::ops::Range;
use std::sync::Arc;

use futures_util::future::join_all;
use parking_lot::Mutex;
use vellum_io::spawn;

use crate::{
    BlockDevice, Buffer, DeviceInfo, Error, ErrorKind, Extent, ExtentKind, Io, RequestFlags,
    Result, ZeroRequest,
};
use lacking::Lacking;
use vellum_io::range_lock::{Mode, RangeLock};
use votes::Ballot;

const ENOTSUP: i32 = 95;

/// How reads are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadPattern {
    /// By what enough children agree on.
    #[default]
    Quorum,
    /// By the first child that can be read.
    Fifo,
}

/// What a [`Quorum`] does about children that differ.
#[derive(Debug, Clone, Copy)]
pub struct QuorumOptions {
    /// So many children must agree.
    pub threshold: usize,
    /// How reads are answered.
    pub read_pattern: ReadPattern,
    /// Children that hold something else than was agreed on get that written.
    pub rewrites: bool,
}

/// One of the devices.
#[derive(Debug, Clone)]
pub struct QuorumChild {
    /// The name of its node, for reports.
    pub name: String,
    /// The device.
    pub device: Arc<dyn BlockDevice>,
}

/// What was asked for when a child was found to be bad.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuorumOperation {
    /// Reads.
    Read,
    /// Writes and zeroes.
    Write,
    /// Flushes.
    Flush,
}

/// What is told of the children.
#[derive(Debug, Clone)]
pub enum QuorumReport {
    /// A child has failed, or holds something else than was agreed on.
    Bad {
        /// The child's name.
        child: String,
        /// What was asked for.
        operation: QuorumOperation,
        /// Where, in bytes.
        range: Range<u64>,
        /// Why it failed, if it did.
        error: Option<String>,
    },
    /// Not enough children agree: the request has failed.
    Failure {
        /// Where, in bytes.
        range: Range<u64>,
    },
}

/// Receives reports, on the lane of the request.
pub type QuorumListener = dyn Fn(QuorumReport) + Send + Sync;

/// Several devices that hold the same; see the module's head.
pub struct Quorum {
    core: Arc<Core>,
}

struct Core {
    children: Vec<QuorumChild>,
    options: QuorumOptions,
    ranges: Arc<RangeLock>,
    lacking: Mutex<Lacking>,
    listener: Box<QuorumListener>,
}

impl std::fmt::Debug for Quorum {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Quorum({} of ", self.core.options.threshold)?;
        write!(f, "{:?})", self.core.children)
    }
}

impl Quorum {
    /// Shows what enough of the children agree on.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidArgument`] unless there are children, of which at least one and
    /// not more than all must agree, and all have the same size.
    pub fn new(
        children: Vec<QuorumChild>,
        options: QuorumOptions,
        listener: impl Fn(QuorumReport) + Send + Sync + 'static,
    ) -> Result<Arc<Self>> {
        let invalid = |message: &str| Err(Error::new(ErrorKind::InvalidArgument, "open", message));
        let Some(first) = children.first() else {
            return invalid("Number of provided children must be 1 or more");
        };
        if options.threshold < 1 {
            return invalid("Parameter 'vote-threshold' expects a value >= 1");
        }
        if options.threshold > children.len() {
            return invalid("threshold may not exceed children count");
        }
        let size_bytes = first.device.size_bytes();
        if children
            .iter()
            .any(|it| it.device.size_bytes() != size_bytes)
        {
            return invalid(
                "Could not refresh total sector count: Input/output error: the children of a \
                 quorum must all have the same size",
            );
        }
        Ok(Arc::new(Quorum {
            core: Arc::new(Core {
                children,
                options,
                ranges: Arc::default(),
                lacking: Mutex::default(),
                listener: Box::new(listener),
            }),
        }))
    }

    fn start<T: 'static, F>(&self, work: impl FnOnce(Arc<Core>) -> F) -> Io<T>
    where
        F: Future<Output = Result<T>> + 'static,
    {
        Io::task(spawn(work(self.core.clone())))
    }

    fn check_discard(&self, offset_bytes: u64, len_bytes: u64) -> Result<()> {
        let refuse = |kind, message: &str| Err(Error::new(kind, "discard", message));
        if self.info().read_only {
            return refuse(ErrorKind::ReadOnly, "the device is read-only");
        }
        match offset_bytes.checked_add(len_bytes) {
            Some(end) if end <= self.size_bytes() => Ok(()),
            _ => refuse(
                ErrorKind::OutOfRange,
                "request beyond the end of the device",
            ),
        }
    }

    /// Has every child change the same.
    fn change(
        &self,
        range: Range<u64>,
        begin: impl Fn(&dyn BlockDevice) -> Io<()> + 'static,
    ) -> Io<()> {
        self.start(|core| async move {
            let _held = core.ranges.acquire(range.clone(), Mode::Exclusive).await;
            let all = core.children.iter().map(|child| begin(&*child.device));
            let results = join_all(all).await;
            core.settle_change(range, results)
        })
    }
}

impl Core {
    fn report_bad(
        &self,
        child: usize,
        operation: QuorumOperation,
        range: &Range<u64>,
        error: Option<&Error>,
    ) {
        (self.listener)(QuorumReport::Bad {
            child: self.children[child].name.clone(),
            operation,
            range: range.clone(),
            error: error.map(Error::to_string),
        });
    }

    /// Tells of the children that failed: which these are, and why.
    fn failures(
        &self,
        operation: QuorumOperation,
        range: &Range<u64>,
        results: Vec<Result<()>>,
    ) -> (Vec<usize>, Vec<Error>) {
        let failed = results.into_iter().enumerate();
        let failed = failed.filter_map(|(child, result)| Some((child, result.err()?)));
        failed
            .inspect(|(child, error)| self.report_bad(*child, operation, range, Some(error)))
            .unzip()
    }

    /// What became of a change: it was made if enough children say so.
    fn settle_change(&self, range: Range<u64>, results: Vec<Result<()>>) -> Result<()> {
        let (lack, errors) = self.failures(QuorumOperation::Write, &range, results);
        if self.children.len() - lack.len() < self.options.threshold {
            (self.listener)(QuorumReport::Failure { range });
            return Err(votes::most_common(errors));
        }
        if !lack.is_empty() {
            self.lacking.lock().note(lack);
        }
        Ok(())
    }

    /// Has every child make durable what it has, and so each change that enough of them have.
    async fn flush(&self) -> Result<()> {
        let changes = self.lacking.lock().changes();
        let all = self.children.iter().map(|child| child.device.flush());
        let results = join_all(all).await;
        let (failed, errors) = self.failures(QuorumOperation::Flush, &(0..0), results);
        let flushed = (0..self.children.len()).filter(|child| !failed.contains(child));
        let flushed: Vec<usize> = flushed.collect();
        let mut lacking = self.lacking.lock();
        if !lacking.reached(&flushed, self.options.threshold) {
            return Err(votes::most_common(errors));
        }
        lacking.flushed(changes);
        Ok(())
    }

    /// The first child that can be read answers.
    async fn read_first(&self, range: Range<u64>, mut buffer: Buffer) -> Result<Buffer> {
        let len_bytes = buffer.len();
        let mut failures = Vec::new();
        for (number, child) in self.children.iter().enumerate() {
            match child.device.read(range.start, buffer).await {
                Ok(read) => return Ok(read),
                Err(error) => {
                    self.report_bad(number, QuorumOperation::Read, &range, Some(&error));
                    failures.push(error);
                }
            }
            buffer = Buffer::for_read(len_bytes);
        }
        (self.listener)(QuorumReport::Failure { range });
        Err(votes::most_common(failures))
    }

    /// What enough children agree on.
    async fn read_all(&self, range: Range<u64>, buffer: Buffer) -> Result<Buffer> {
        let len_bytes = buffer.len();
        let mut first = Some(buffer);
        let reads = self.children.iter().map(|child| {
            let buffer = first.take();
            let buffer = buffer.unwrap_or_else(|| Buffer::for_read(len_bytes));
            child.device.read(range.start, buffer)
        });
        let results = join_all(reads).await;
        let ballot = Ballot::new(results);
        for (child, error) in ballot.failures() {
            self.report_bad(child, QuorumOperation::Read, &range, Some(error));
        }
        if ballot.read() < self.options.threshold {
            (self.listener)(QuorumReport::Failure { range });
            return Err(ballot.into_failure());
        }
        if ballot.votes() < self.options.threshold {
            let message = format!(
                "only {} of {} children agree on what is there, and {} must",
                ballot.votes(),
                self.children.len(),
                self.options.threshold
            );
            let error = Error::new(ErrorKind::Io, "read", message).at(range.start);
            (self.listener)(QuorumReport::Failure { range });
            return Err(error.target("quorum"));
        }
        let outvoted = ballot.outvoted();
        for &child in &outvoted {
            self.report_bad(child, QuorumOperation::Read, &range, None);
        }
        let winner = ballot.into_winner();
        if self.options.rewrites && !outvoted.is_empty() {
            let rewrites = outvoted.iter().map(|&child| {
                let bytes = Buffer::copy_of(&winner);
                let flags = RequestFlags::default();
                self.children[child].device.write(range.start, bytes, flags)
            });
            for (rewritten, &child) in join_all(rewrites).await.iter().zip(&outvoted) {
                if let Err(error) = rewritten {
                    self.report_bad(child, QuorumOperation::Write, &range, Some(error));
                }
            }
        }
        Ok(winner)
    }

    async fn read(&self, range: Range<u64>, buffer: Buffer) -> Result<Buffer> {
        // Whoever writes to what it has read must not undo what others write.
        let mode = match self.options.rewrites {
            true => Mode::Exclusive,
            false => Mode::Shared,
        };
        let _held = Arc::clone(&self.ranges).acquire(range.clone(), mode).await;
        match self.options.read_pattern {
            ReadPattern::Fifo => self.read_first(range, buffer).await,
            ReadPattern::Quorum => self.read_all(range, buffer).await,
        }
    }

    /// Zeroes where all children know of zeroes, else data.
    async fn block_status(&self, offset_bytes: u64, len_bytes: u64) -> Result<Extent> {
        let asked = self
            .children
            .iter()
            .map(|child| child.device.block_status(offset_bytes, len_bytes, u32::MAX));
        let mut shown = Extent::new(len_bytes, ExtentKind::Zero);
        for answer in join_all(asked).await {
            let Ok(extent) = answer else {
                // A read will tell.
                shown.kind = ExtentKind::Data;
                continue;
            };
            shown.len_bytes = shown.len_bytes.min(extent.len_bytes);
            if !extent.kind.is_zero() {
                shown.kind = ExtentKind::Data;
            }
        }
        Ok(shown)
    }
}

fn range_of(offset_bytes: u64, len_bytes: u64) -> Range<u64> {
    offset_bytes..offset_bytes.saturating_add(len_bytes)
}

impl BlockDevice for Quorum {
    fn info(&self) -> DeviceInfo {
        let mut all = self.core.children.iter().map(|child| child.device.info());
        let mut info = all
            .next()
            .unwrap_or_else(|| unreachable!("there is a child"));
        let directory = |name: &str| name.rsplit_once('/').map(|(front, _)| front.to_owned());
        let first = directory(&info.name);
        for other in all {
            // What an image names without a directory lies in the one that all are in.
            if directory(&other.name) != first {
                info.name = r#"json:{"driver": "quorum"}"#.to_owned();
            }
            info.read_only |= other.read_only;
            info.has_zero_init &= other.has_zero_init;
            info.request_alignment_bytes = info
                .request_alignment_bytes
                .max(other.request_alignment_bytes);
            info.discard_alignment_bytes = info
                .discard_alignment_bytes
                .max(other.discard_alignment_bytes);
        }
        DeviceInfo {
            format: "quorum",
            cluster_size_bytes: None,
            growable: false,
            ..info
        }
    }

    fn size_bytes(&self) -> u64 {
        self.core.children[0].device.size_bytes()
    }

    fn read(&self, offset_bytes: u64, buffer: Buffer) -> Io<Buffer> {
        let range = range_of(offset_bytes, buffer.len() as u64);
        self.start(|core| async move { core.read(range, buffer).await })
    }

    fn write(&self, offset_bytes: u64, buffer: Buffer, flags: RequestFlags) -> Io<Buffer> {
        let range = range_of(offset_bytes, buffer.len() as u64);
        let bytes = Buffer::copy_of(&buffer);
        let written = self.change(range, move |child| {
            let write = child.write(offset_bytes, Buffer::copy_of(&bytes), flags);
            Io::task(spawn(async move { write.await.map(drop) }))
        });
        Io::start(async move { written.await.map(|()| buffer) })
    }

    fn write_zeroes(&self, offset_bytes: u64, len_bytes: u64, request: ZeroRequest) -> Io<()> {
        if request.no_fallback {
            let error = Error::from_errno("write zeroes", ENOTSUP).at(offset_bytes);
            return Io::ready(Err(error.target("quorum")));
        }
        self.change(range_of(offset_bytes, len_bytes), move |child| {
            child.write_zeroes(offset_bytes, len_bytes, request)
        })
    }

    fn discard(&self, offset_bytes: u64, len_bytes: u64) -> Io<()> {
        // A hint: of what is discarded each child would keep, or lose, another part.
        Io::ready(self.check_discard(offset_bytes, len_bytes))
    }

    fn flush(&self) -> Io<()> {
        self.start(|core| async move { core.flush().await })
    }

    fn block_status(&self, offset_bytes: u64, len_bytes: u64, _max_depth: u32) -> Io<Extent> {
        self.start(|core| async move { core.block_status(offset_bytes, len_bytes).await })
    }

    fn truncate(&self, _size_bytes: u64) -> Io<()> {
        let message = "Image format driver does not support resize";
        Io::ready(Err(Error::new(ErrorKind::Unsupported, "resize", message)))
    }

    fn close(&self) -> Io<()> {
        self.start(|core| async move {
            let all = core.children.iter().map(|child| child.device.close());
            join_all(all).await.into_iter().collect()
        })
    }
}

#[cfg(test)]
mod tests;
