//! [`LiveMirror`]: a device in use, brought into another one and kept there: a mirror, or the
//! commit of an image into a layer below it.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use vellum::{BlockDevice, Result, ZeroRequest};
use vellum_io::lane::sleep;
use vellum_storage::mutants::{self, Mutant};

use super::dirty::DirtyMap;
use super::given_up::{self, or_given_up, with_grace};
use super::mirror::{Mirror, Pace};
use super::parallel::{self, CopyOutcome, NextPiece};
use crate::copy::{CopyError, Step};
use crate::job::JobControl;
use crate::piece::Content;
use crate::scope::look_above;

/// How many bytes may be dirty when users are held up for the last round: with more, one
/// more round is made beside them first.
const SHORT_ROUND_BYTES: u64 = 4 << 20;
/// So many rounds are made beside users who go on at full speed; then they wait for copies
/// of what they write.
const MAX_ROUNDS: u32 = 8;
/// Bytes that are zeroed at once.
const ZEROED_BYTES: u64 = 256 << 20;

/// What of the source the target is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MirrorPart {
    /// What the first so many layers hold: 1 for the image alone, 2 for it and its backing
    /// file, and so on. The next one below is the target (a commit).
    Layers(u32),
    /// All that it shows.
    All,
}

/// What is copied of what is there when the job begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitialSync {
    /// Everything.
    Everything,
    /// What some layer holds; the target reads as zeroes already.
    Present,
    /// What the first so many layers hold.
    Layers(u32),
    /// Nothing.
    Nothing,
}

/// How a mirror is made.
#[derive(Debug, Clone)]
pub struct LiveMirrorOptions {
    /// What is copied at all.
    pub part: MirrorPart,
    /// How many pieces are in flight at once.
    pub parallel: usize,
    /// Zeroes need take no space in the target.
    pub unmap: bool,
    /// Whoever writes waits until the target has it, from the first copy on.
    pub write_blocking: bool,
}

/// A mirror of a device that is in use. Once it was given up nothing more can be made of it.
#[derive(Debug)]
pub struct LiveMirror {
    dirty: Arc<DirtyMap>,
    mirror: Arc<Mirror>,
    options: LiveMirrorOptions,
}

/// What others may ask of a mirror, and have it do, while it runs.
#[derive(Debug, Clone)]
pub struct MirrorHandle(Arc<Mirror>);

impl MirrorHandle {
    /// Bytes that have been copied, and bytes that are being copied or wait for it.
    pub fn progress(&self) -> (u64, u64) {
        self.0.progress()
    }

    /// Whether writers wait for copies because somebody asked for that.
    pub fn is_write_blocking(&self) -> bool {
        self.0.pace() == Pace::Demanded
    }

    /// Has writers wait for copies from now on, however long these take.
    pub fn block_writes(&self) {
        self.0
            .change_pace(&[Pace::Free, Pace::Converging], Pace::Demanded);
    }

    /// Has nobody wait for copies any more: the job is given up.
    pub fn release(&self) {
        let all = [Pace::Free, Pace::Converging, Pace::Demanded];
        self.0.change_pace(&all, Pace::Over);
    }
}

impl LiveMirror {
    /// A mirror of `source`, whose users go through a [`super::Tracker`] with `dirty`, in
    /// `target`, which nobody else writes to. A target below the source that is shorter
    /// grows.
    ///
    /// # Errors
    /// If the target cannot be made as long as the source.
    pub async fn new(
        source: Arc<dyn BlockDevice>,
        target: Arc<dyn BlockDevice>,
        dirty: Arc<DirtyMap>,
        options: LiveMirrorOptions,
    ) -> Result<Self> {
        let size_bytes = source.size_bytes();
        if options.part != MirrorPart::All && target.size_bytes() < size_bytes {
            target.truncate(size_bytes).await?;
        }
        let how = (options.part, options.unmap);
        let mirror = Mirror::new(source, target, how, dirty.clone());
        dirty.follow(&mirror);
        Ok(LiveMirror {
            dirty,
            mirror,
            options,
        })
    }

    /// For those who look at it while it runs.
    pub fn handle(&self) -> MirrorHandle {
        MirrorHandle(self.mirror.clone())
    }

    /// Whether the target is longer or shorter than it has to be.
    pub fn is_of_other_size(&self) -> bool {
        let (source, target) = (&self.mirror.view, &self.mirror.target);
        self.options.part == MirrorPart::All && source.size_bytes() != target.size_bytes()
    }

    /// Whether the target has all that the source shows, and is kept so.
    pub fn is_in_sync(&self) -> bool {
        self.mirror.pace() == Pace::Demanded && self.mirror.progress().1 == 0
    }

    /// Has the target read as zeroes. This comes before [`LiveMirror::begin`].
    ///
    /// # Errors
    /// What writing to it meets.
    pub async fn zero_target(&self, control: &JobControl) -> Result<CopyOutcome, CopyError> {
        let size_bytes = self.mirror.view.size_bytes();
        let mut at = 0;
        while at < size_bytes {
            let len_bytes = ZEROED_BYTES.min(size_bytes - at);
            let request = ZeroRequest::default().may_unmap(self.options.unmap);
            let zeroes = self.mirror.target.write_zeroes(at, len_bytes, request);
            let Some(zeroed) = or_given_up(control, zeroes).await else {
                return Ok(CopyOutcome::GivenUp);
            };
            zeroed.map_err(|cause| CopyError {
                step: Step::Write,
                offset_bytes: at,
                cause,
            })?;
            at += len_bytes;
        }
        Ok(CopyOutcome::All)
    }

    /// Calls dirty what is to be copied of what is there now.
    ///
    /// # Errors
    /// If the source cannot tell.
    pub async fn begin(
        &self,
        initial: InitialSync,
        control: &JobControl,
    ) -> Result<CopyOutcome, CopyError> {
        let size_bytes = self.mirror.view.size_bytes();
        let mut at = match initial {
            InitialSync::Everything => {
                self.dirty.mark(0, size_bytes);
                size_bytes
            }
            InitialSync::Nothing => size_bytes,
            InitialSync::Present | InitialSync::Layers(_) => 0,
        };
        while at < size_bytes {
            let looked = self.is_wanted(initial, at, size_bytes - at);
            let Some(looked) = or_given_up(control, looked).await else {
                return Ok(CopyOutcome::GivenUp);
            };
            let (is_wanted, len_bytes) = looked.map_err(|cause| CopyError {
                step: Step::Status,
                offset_bytes: at,
                cause,
            })?;
            if is_wanted {
                self.dirty.mark(at, len_bytes);
            }
            at += len_bytes;
        }
        if self.options.write_blocking {
            self.mirror.change_pace(&[Pace::Free], Pace::Demanded);
        }
        Ok(CopyOutcome::All)
    }

    async fn is_wanted(&self, initial: InitialSync, at: u64, len: u64) -> Result<(bool, u64)> {
        let view: Arc<dyn BlockDevice> = self.mirror.view.clone();
        if let InitialSync::Layers(layers) = initial {
            let (content, len_bytes) = look_above(&view, at, len, layers).await?;
            return Ok((!matches!(content, Content::Backing), len_bytes));
        }
        let extent = view.block_status(at, len, u32::MAX).await?;
        Ok((extent.kind.is_present(), extent.len_bytes.clamp(1, len)))
    }

    /// Copies what is dirty, round by round, until that is so little that users may be held
    /// up for it. It takes so many rounds at most, however fast they write: where rounds
    /// make no headway, users wait from then on until what they write is copied too.
    ///
    /// # Errors
    /// What reading and writing meet. The source is as it was, and what could not be copied
    /// is dirty.
    pub async fn catch_up(&self, control: &JobControl) -> Result<CopyOutcome, CopyError> {
        let mut rounds = 0;
        loop {
            let before = self.dirty.dirty_bytes();
            if before == 0 {
                self.mirror.settle().await;
                if self.dirty.dirty_bytes() == 0 {
                    return Ok(CopyOutcome::All);
                }
            }
            let copied = self.round(control).await;
            if !matches!(copied, Ok(CopyOutcome::All)) {
                // Nobody need wait for a copy that is worth nothing.
                self.relax();
                return copied;
            }
            let left = self.dirty.dirty_bytes();
            if left <= SHORT_ROUND_BYTES {
                return Ok(CopyOutcome::All);
            }
            rounds += 1;
            if rounds >= MAX_ROUNDS || left > before / 2 {
                self.mirror.change_pace(&[Pace::Free], Pace::Converging);
            }
        }
    }

    /// Copies what is dirty now, once; users go on at full speed.
    ///
    /// # Errors
    /// As [`LiveMirror::catch_up`].
    pub async fn keep_up(&self, control: &JobControl) -> Result<CopyOutcome, CopyError> {
        self.round(control).await
    }

    /// Has users wait for copies no longer, unless somebody asked for that.
    pub fn relax(&self) {
        self.mirror.change_pace(&[Pace::Converging], Pace::Free);
    }

    /// Makes the target durable.
    ///
    /// # Errors
    /// If it cannot be.
    pub async fn flush(&self) -> Result<(), CopyError> {
        self.mirror.target.flush().await.map_err(|cause| CopyError {
            step: Step::Write,
            offset_bytes: 0,
            cause,
        })
    }

    /// Copies what is dirty, and makes the target durable, beside users who write: what is
    /// left to [`LiveMirror::finish`] is what they write while this ends. There is no limit
    /// on its speed.
    ///
    /// # Errors
    /// As [`LiveMirror::catch_up`], and if the target cannot be made durable.
    pub async fn draw_near(&self) -> Result<()> {
        let caught_up = self.catch_up(&JobControl::new()).await;
        caught_up.map_err(|error| error.cause)?;
        self.mirror.target.flush().await
    }

    /// Waits until something is dirty.
    pub async fn wait_for_writes(&self) {
        self.dirty.wait().await;
    }

    /// Copies what is still dirty, and makes the target durable. While it runs no user of
    /// the source may write, so there is no limit on its speed. From then on the target shows
    /// what the source does.
    ///
    /// # Errors
    /// As [`LiveMirror::catch_up`], and if the target cannot be made durable.
    pub async fn finish(&self) -> Result<()> {
        let control = JobControl::new();
        loop {
            self.round(&control).await.map_err(|error| error.cause)?;
            // What a user did not wait for may still be on its way.
            self.mirror.settle().await;
            if self.dirty.dirty_bytes() == 0 {
                break;
            }
        }
        match mutants::is(Mutant::SwitchUnflushed) {
            true => Ok(()),
            false => self.mirror.target.flush().await,
        }
    }

    /// As [`LiveMirror::finish`], unless that takes longer than `limit`: then what was begun
    /// goes on by itself, and users may write again. Whether it has finished.
    ///
    /// # Errors
    /// As [`LiveMirror::finish`].
    pub async fn finish_within(&self, limit: Duration) -> Result<bool> {
        match select(pin!(self.finish()), pin!(sleep(limit))).await {
            Either::Left((finished, _)) => finished.map(|()| true),
            Either::Right(_) => Ok(false),
        }
    }

    /// Ends it, complete or not: none of its requests touches the source any more on return,
    /// and nobody waits for copies. Whether none touches the target either; otherwise this
    /// gets to be so later, which [`LiveMirror::left_target`] waits for.
    pub async fn end(&self) -> bool {
        self.handle().release();
        given_up::leave(&self.mirror.view, &self.mirror.target).await
    }

    /// Waits until no request of an ended mirror is on its way to the target.
    pub async fn left_target(&self) {
        given_up::cut_off(&self.mirror.target).await;
    }

    /// How long the next piece may be: less where there is little in a second.
    fn piece_bytes(&self, control: &JobControl) -> u64 {
        let usual_bytes = self.mirror.request_bytes();
        match control.speed().get() {
            0 => usual_bytes,
            bytes_per_second => usual_bytes.min(bytes_per_second / 4),
        }
    }

    /// Copies what is dirty now, once. What a job that is given up has begun may go on, where
    /// it takes long.
    async fn round(&self, control: &JobControl) -> Result<CopyOutcome, CopyError> {
        let mut at = 0;
        let look = async || {
            let limit_bytes = self.piece_bytes(control);
            Ok(match self.dirty.next_from(at, limit_bytes) {
                None => NextPiece::End,
                Some(range) => {
                    at = range.end;
                    NextPiece::Piece(range)
                }
            })
        };
        let number = self.mirror.next_round();
        let bring = |range| self.mirror.bring(range, number);
        let round = parallel::run(self.options.parallel, control, look, bring);
        with_grace(control, round).await
    }
}

#[cfg(test)]
mod tests {
    use vellum_io::lane::sleep;
    use vellum_io::lane::{block_on, yield_now};
    use vellum_io::spawn;

    use super::*;
    use crate::job::JobCommand;
    use crate::live::blocked_device::BlockedDevice;

    async fn some_turns() {
        for _ in 0..50 {
            yield_now().await;
        }
    }

    async fn mirror(source: &Arc<BlockedDevice>, target: &Arc<BlockedDevice>) -> LiveMirror {
        let options = LiveMirrorOptions {
            part: MirrorPart::All,
            parallel: 4,
            unmap: true,
            write_blocking: false,
        };
        let dirty = DirtyMap::new(4096);
        let job = LiveMirror::new(source.clone(), target.clone(), dirty, options).await;
        job.expect("a job")
    }

    /// Begins to copy; the result says how that ended, and whether nothing was left behind.
    async fn begin(
        source: &Arc<BlockedDevice>,
        target: &Arc<BlockedDevice>,
        control: &Arc<JobControl>,
    ) -> vellum_io::JoinHandle<(CopyOutcome, bool, LiveMirror)> {
        let (job, control) = (mirror(source, target).await, control.clone());
        let copying = spawn(async move {
            let begun = job.begin(InitialSync::Everything, &control).await;
            assert_eq!(begun.expect("a beginning"), CopyOutcome::All);
            let copied = job.catch_up(&control).await.expect("a copy");
            let ended = job.end().await;
            (copied, ended, job)
        });
        some_turns().await;
        copying
    }

    #[test]
    fn a_job_that_is_given_up_waits_for_what_it_is_writing_but_not_for_ever() {
        block_on(async {
            let (source, target) = (BlockedDevice::new(1, true), BlockedDevice::new(2, false));
            let control = Arc::new(JobControl::new());
            let copying = begin(&source, &target, &control).await;
            control.set(JobCommand::Cancel);
            let begun = std::time::Instant::now();
            let (copied, ended, job) = copying.await;
            assert!(begun.elapsed() < Duration::from_secs(1));
            assert_eq!((copied, ended), (CopyOutcome::GivenUp, false));
            let mut left = Box::pin(job.left_target());
            assert!(
                futures_util::FutureExt::now_or_never(left.as_mut()).is_none(),
                "a write may land at any time"
            );
            target.open();
            left.await;
            assert_eq!(target.first_byte().await, 1);
        });
    }

    #[test]
    fn what_a_round_that_took_too_long_has_not_begun_is_left_to_the_next_one() {
        block_on(async {
            let (source, target) = (BlockedDevice::new(1, true), BlockedDevice::new(2, false));
            let job = mirror(&source, &target).await;
            let short = Duration::from_millis(10);
            for _ in 0..3 {
                job.dirty.mark(0, 4096);
                assert!(!job.finish_within(short).await.expect("no failure"));
            }
            target.open();
            job.finish().await.expect("a copy");
            // The one that was on its way, and the one that is needed.
            assert_eq!(job.handle().progress(), (2 * 4096, 0));
            assert_eq!(target.first_byte().await, 1);
        });
    }

    #[test]
    fn what_was_not_read_yet_is_never_written_once_the_job_is_given_up() {
        block_on(async {
            let (source, target) = (BlockedDevice::new(1, false), BlockedDevice::new(2, true));
            let control = Arc::new(JobControl::new());
            let copying = begin(&source, &target, &control).await;
            control.set(JobCommand::Cancel);
            some_turns().await;
            let opening = source.clone();
            drop(spawn(async move {
                sleep(2 * given_up::GRACE).await;
                opening.open();
            }));
            let (copied, ended, _job) = copying.await;
            assert_eq!((copied, ended), (CopyOutcome::GivenUp, true));
            some_turns().await;
            assert_eq!(target.first_byte().await, 2);
        });
    }
}
