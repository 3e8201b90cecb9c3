//! The one copy loop.
//!
//! The sources are walked piece by piece; up to [`CopyOptions::parallel`] pieces
//! are in flight. Each is read, searched for zeroes, and written. Unless
//! [`CopyOptions::out_of_order`] is set, writes start in the order of their
//! offsets, so that the target's clusters are laid out in guest order; commits write what
//! the target holds already in the order of the source's file (`window.rs`).

mod diff;
mod options;
mod report;
mod salvage;
mod steps;
mod walk;

use std::cell::{Cell, RefCell};
use std::sync::Arc;

use futures_channel::oneshot::Receiver;
use futures_util::stream::{FuturesUnordered, StreamExt};
use vellum::{BlockDevice, Buffer, Io, RequestFlags, Result, ZeroRequest};
use vellum_io::turns::{Turn, Turns};

use crate::offload::{copy_range, share_blocks};
pub use crate::piece::CHUNK_BYTES;
use crate::piece::{Content, Piece};
use crate::rate::RateLimit;
use crate::scan::Scan;
pub use crate::scan::TargetBacking;
use crate::scope::{Differences, Scope};
use crate::sparse::{Sparse, zero_runs};
use crate::window::ReorderWindow;
use crate::worker_lanes::WorkerLanes;

use diff::{Diff, DiffRequest};
pub use options::CopyOptions;
pub use report::{CopyError, Observer, Silent, Step};
use salvage::SalvageLog;
use steps::ProgressSteps;
use walk::count;

/// The smallest piece a salvaging copy gives up on.
const SALVAGE_BYTES: usize = 512;

/// After so many pieces in a row whose blocks could not be shared no more are tried.
const MAX_UNSHARED: u32 = 8;

/// What all pieces of one copy share.
struct Shared<'a> {
    sources: &'a [Arc<dyn BlockDevice>],
    target: &'a Arc<dyn BlockDevice>,
    options: &'a CopyOptions,
    sparse: Option<Sparse>,
    turns: Arc<Turns>,
    /// Lanes that find out what is different.
    workers: RefCell<WorkerLanes>,
    /// The kernel has not refused to copy yet.
    offload: Cell<bool>,
    /// Pieces in a row whose blocks could not be shared.
    unshared: Cell<u32>,
    observer: RefCell<&'a mut dyn Observer>,
    salvage_log: SalvageLog,
    steps: ProgressSteps,
    total_bytes: u64,
}

/// Copies the sources, laid end to end, to the target.
///
/// # Errors
/// The first request of a source or of the target that failed; what was written before stays.
/// With [`CopyOptions::salvage`] a source that cannot be read is none.
pub async fn copy(
    sources: &[Arc<dyn BlockDevice>],
    target: &Arc<dyn BlockDevice>,
    options: &CopyOptions,
    observer: &mut dyn Observer,
) -> Result<(), CopyError> {
    let all_bytes = sources
        .iter()
        .map(|source| source.size_bytes())
        .sum::<u64>();
    let end_bytes = options.len_bytes.unwrap_or(all_bytes).min(all_bytes);
    let mut scan = options.scan(sources, target, end_bytes);
    // As in QEMU, what makes a salvage hard is told by this walk too.
    let total_bytes = match observer.wants_progress() || options.salvage {
        true => count(&mut scan, options, observer).await?,
        // Nobody looks; one who asks all the same is told how far it is in the image.
        false => end_bytes,
    };
    let alignment = u64::from(target.info().request_alignment_bytes).max(512);
    let shared = Shared {
        sources,
        target,
        options,
        sparse: options.sparse(alignment),
        turns: Arc::default(),
        workers: RefCell::default(),
        offload: Cell::new(options.copy_range),
        unshared: Cell::new(0),
        observer: RefCell::new(observer),
        salvage_log: SalvageLog::default(),
        steps: ProgressSteps::default(),
        total_bytes,
    };
    let scan = options.scan(sources, target, end_bytes);
    let copied = shared.copy_all(scan).await;
    shared.workers.into_inner().end().await;
    copied
}

impl Shared<'_> {
    async fn copy_all(&self, mut scan: Scan<'_>) -> Result<(), CopyError> {
        let options = self.options;
        let mut running = FuturesUnordered::new();
        let mut window = ReorderWindow::default();
        let mut limit = RateLimit::new(options.speed.clone());
        let begun = loop {
            let turn = self.turns.take();
            // The first piece goes alone: its writes wait for what the target makes and loads
            // once, and others that come meanwhile could overtake them.
            let alone = turn.number() == 1 && !options.laid_out_in_order;
            let most = if alone { 1 } else { options.parallel };
            let mut ended = Ok(());
            while running.len() >= most.max(1) && ended.is_ok() {
                ended = running.next().await.unwrap_or(Ok(()));
            }
            if ended.is_err() {
                break ended;
            }
            let piece = match self.next_in_window(&mut scan, &mut window).await {
                Ok(Some(piece)) => piece,
                Ok(None) => break Ok(()),
                Err(error) => break Err(error),
            };
            limit.wait_for(piece.len_bytes).await;
            self.steps.begin(&piece, self.counted_bytes(&piece));
            running.push(self.copy_piece(piece, turn));
        };
        // What was begun ends before the copy does, or it would land in what the caller does
        // next with the target.
        let mut result = begun;
        while let Some(ended) = running.next().await {
            result = result.and(ended);
        }
        result
    }

    async fn copy_piece(&self, piece: Piece, turn: Turn) -> Result<(), CopyError> {
        let number = turn.number();
        self.carry_out(piece, turn).await?;
        for done_bytes in self.steps.end(number) {
            self.tell_progress(done_bytes);
        }
        Ok(())
    }

    /// Even a piece that fails ends its turn: the others would wait for ever.
    async fn carry_out(&self, piece: Piece, turn: Turn) -> Result<(), CopyError> {
        if let Scope::Differences(differences) = &self.options.scope {
            return self.copy_differences(differences, piece, turn).await;
        }
        match (piece.content, self.sparse) {
            (Content::Backing, _) => Ok(()),
            (Content::Zero, Some(_)) => {
                self.wait_for(&turn).await;
                let zeroes = self.zero(piece.offset_bytes, piece.len_bytes);
                drop(turn);
                zeroes.await
            }
            (Content::Zero, None) => self.write_known_zeroes(piece, turn).await,
            (Content::Data, _) if self.offload.get() => self.offload(piece, turn).await,
            (Content::Data, _) => {
                if self.tries_to_share() && self.share(&piece, &turn).await {
                    return Ok(());
                }
                let data = self.read(&piece).await;
                self.wait_for(&turn).await;
                self.report_salvage(&piece);
                let written = data.map(|data| self.write_data(piece.offset_bytes, data));
                drop(turn);
                written?.await
            }
        }
    }

    /// Copies what is different of a piece.
    async fn copy_differences(
        &self,
        differences: &Differences,
        piece: Piece,
        turn: Turn,
    ) -> Result<(), CopyError> {
        let diff = self.diff(differences, &piece).await;
        let diff = diff.expect("a comparison that panicked ends the job");
        self.wait_for(&turn).await;
        let at = piece.offset_bytes;
        let written = diff.map(|diff| self.write_differences(at, diff, differences));
        drop(turn);
        written?.await
    }

    /// Has a lane find out what is different of a piece.
    fn diff(&self, differences: &Differences, piece: &Piece) -> Receiver<Result<Diff, CopyError>> {
        let reads_zeroes = piece.content == Content::Zero;
        let request = DiffRequest {
            old: (!reads_zeroes).then(|| self.sources[piece.source].clone()),
            shown: differences.shown.clone(),
            at_bytes: piece.source_offset_bytes,
            offset_bytes: piece.offset_bytes,
            len_bytes: piece.len_bytes,
            unit_bytes: differences.unit_bytes,
        };
        self.workers.borrow_mut().run(move || request.run())
    }

    /// Has the kernel copy a piece, or copies it as usual.
    async fn offload(&self, piece: Piece, turn: Turn) -> Result<(), CopyError> {
        self.wait_for(&turn).await;
        drop(turn);
        if !copy_range(self.sources, self.target, &piece).await {
            self.offload.set(false);
            let data = self.read(&piece).await?;
            self.write_data(piece.offset_bytes, data).await?;
        }
        Ok(())
    }

    fn tries_to_share(&self) -> bool {
        self.options.share_blocks && self.unshared.get() < MAX_UNSHARED
    }

    /// Has source and target share the blocks of a piece, if they can.
    async fn share(&self, piece: &Piece, turn: &Turn) -> bool {
        self.wait_for(turn).await;
        let shared = share_blocks(self.sources, self.target, piece).await;
        self.unshared
            .set(if shared { 0 } else { self.unshared.get() + 1 });
        shared
    }

    /// Starts the writes of what is different; the future waits for them.
    fn write_differences(
        &self,
        offset_bytes: u64,
        diff: Diff,
        differences: &Differences,
    ) -> impl Future<Output = Result<(), CopyError>> + use<> {
        let Diff { mut old, runs } = diff;
        let size_bytes = self.target.size_bytes();
        let mut at = offset_bytes;
        let mut writes = Vec::new();
        let mut zeroes = Vec::new();
        for run in runs {
            let bytes = old.as_mut().map(|old| old.split_to(run.len_bytes));
            match bytes.filter(|_| run.differs) {
                Some(bytes) => {
                    let flags = RequestFlags::default();
                    let compress = differences.may_compress(at, run.len_bytes as u64, size_bytes);
                    let write = match compress {
                        true => self.target.write_compressed(at, bytes, flags),
                        false => self.target.write(at, bytes, flags),
                    };
                    writes.push((at, write));
                }
                None if run.differs => zeroes.push(self.zero(at, run.len_bytes as u64)),
                None => {}
            }
            at += run.len_bytes as u64;
        }
        finish_writes(writes, zeroes)
    }

    async fn wait_for(&self, turn: &Turn) {
        if !self.options.out_of_order {
            turn.wait().await;
        }
    }

    /// Tells what could not be read up to the end of a piece.
    fn report_salvage(&self, piece: &Piece) {
        let end_bytes = piece.offset_bytes + piece.len_bytes;
        self.salvage_log
            .report(end_bytes, &mut **self.observer.borrow_mut());
    }

    fn tell_progress(&self, done_bytes: u64) {
        self.observer
            .borrow_mut()
            .progress(done_bytes, self.total_bytes);
    }

    /// Reads a piece, which may reach into the sources after its own.
    async fn read(&self, piece: &Piece) -> Result<Buffer, CopyError> {
        let mut buffers = Vec::new();
        let mut part = *piece;
        let end = piece.offset_bytes + piece.len_bytes;
        while part.offset_bytes < end {
            let size_bytes = self.sources[part.source].size_bytes();
            let rest_bytes = end - part.offset_bytes;
            part.len_bytes = rest_bytes.min(size_bytes - part.source_offset_bytes);
            if part.len_bytes > 0 {
                buffers.push(self.read_part(&part).await?);
            }
            part.offset_bytes += part.len_bytes;
            part.source += 1;
            part.source_offset_bytes = 0;
        }
        Ok(Buffer::join_all(buffers))
    }

    /// Reads a piece inside one source.
    async fn read_part(&self, piece: &Piece) -> Result<Buffer, CopyError> {
        let source = &self.sources[piece.source];
        let buffer = Buffer::for_read(piece.len_bytes as usize);
        match source.read(piece.source_offset_bytes, buffer).await {
            Ok(buffer) => Ok(buffer),
            Err(_) if self.options.salvage => Ok(self.salvage(piece).await),
            Err(cause) => Err(CopyError {
                step: Step::Read,
                offset_bytes: piece.offset_bytes,
                cause,
            }),
        }
    }

    /// Reads sector by sector and takes what cannot be read as zeroes.
    async fn salvage(&self, piece: &Piece) -> Buffer {
        let source = &self.sources[piece.source];
        let mut whole = Buffer::zeroed(piece.len_bytes as usize);
        let mut at = 0;
        for sector in whole.chunks_mut(SALVAGE_BYTES) {
            let offset = piece.source_offset_bytes + at;
            match source.read(offset, Buffer::for_read(sector.len())).await {
                Ok(bytes) => sector.copy_from_slice(&bytes),
                Err(error) => self.salvage_log.unreadable(piece.offset_bytes + at, error),
            }
            at += sector.len() as u64;
        }
        whole
    }

    /// Starts the writes of a chunk of data in order; the future waits for them.
    fn write_data(
        &self,
        offset_bytes: u64,
        mut data: Buffer,
    ) -> impl Future<Output = Result<(), CopyError>> + use<> {
        let whole = [crate::SparseRun {
            len_bytes: data.len(),
            zero: false,
        }];
        let runs = match self.sparse.filter(|_| self.options.detect_zeroes) {
            Some(sparse) => zero_runs(&data, offset_bytes, sparse),
            None => whole.to_vec(),
        };
        let mut at = offset_bytes;
        let mut writes = Vec::with_capacity(runs.len());
        let mut zeroes = Vec::new();
        for run in runs {
            let bytes = data.split_to(run.len_bytes);
            match run.zero {
                true if self.options.target_is_zero => {}
                true => zeroes.push(self.zero(at, run.len_bytes as u64)),
                false => writes.push((at, self.write(at, bytes))),
            }
            at += run.len_bytes as u64;
        }
        finish_writes(writes, zeroes)
    }

    fn write(&self, offset_bytes: u64, data: Buffer) -> Io<Buffer> {
        let flags = RequestFlags::default();
        match self.options.compressed_clusters_bytes {
            Some(_) => self.target.write_compressed(offset_bytes, data, flags),
            None if self.options.laid_out_in_order => {
                self.target.write_in_order(offset_bytes, data)
            }
            None => self.target.write(offset_bytes, data, flags),
        }
    }

    /// Starts zeroing a range of the target.
    fn zero(
        &self,
        offset_bytes: u64,
        len_bytes: u64,
    ) -> impl Future<Output = Result<(), CopyError>> + use<> {
        let request = ZeroRequest::default().may_unmap(true);
        let target = &self.target;
        let io = match self.options.laid_out_in_order {
            true => target.write_zeroes_in_order(offset_bytes, len_bytes, request),
            false => target.write_zeroes(offset_bytes, len_bytes, request),
        };
        async move {
            io.await.map_err(|cause| CopyError {
                step: Step::Write,
                offset_bytes,
                cause,
            })
        }
    }

    /// Writes zeroes out as data, chunk by chunk (`-S 0`).
    async fn write_known_zeroes(&self, piece: Piece, turn: Turn) -> Result<(), CopyError> {
        self.wait_for(&turn).await;
        let end = piece.offset_bytes + piece.len_bytes;
        let mut at = piece.offset_bytes;
        let mut result = Ok(());
        while at < end && result.is_ok() {
            let len_bytes = (end - at).min(self.options.chunk_bytes());
            let zeroes = Buffer::zeroed(len_bytes as usize);
            let write = self.write(at, zeroes).await;
            result = write.map(drop).map_err(|cause| CopyError {
                step: Step::Write,
                offset_bytes: at,
                cause,
            });
            at += len_bytes;
            if let Some(done_bytes) = self.steps.inside(turn.number(), at - piece.offset_bytes) {
                self.tell_progress(done_bytes);
            }
        }
        result
    }
}

/// Waits for writes and zero requests, all of them; the first error is told.
async fn finish_writes(
    writes: Vec<(u64, Io<Buffer>)>,
    zeroes: Vec<impl Future<Output = Result<(), CopyError>>>,
) -> Result<(), CopyError> {
    let mut result = Ok(());
    for (offset_bytes, write) in writes {
        let failed = |cause| CopyError {
            step: Step::Write,
            offset_bytes,
            cause,
        };
        result = result.and(write.await.map(drop).map_err(failed));
    }
    for zero in zeroes {
        result = result.and(zero.await);
    }
    result
}
