//! [`Fleece`]: a place of bounded size, and fast, for old bytes on their way to a slow target.
//!
//! A change waits until the old bytes are in the fleece, no longer; from there they are sent to
//! the target. What nobody overwrites is sent from the source, and no change waits for the
//! target then either: it waits until the old bytes are read.
//!
//! Invariants:
//! - A grain is *kept* from the moment at which all of its old bytes are in the fleece until it
//!   is *sent*, and sent until the target has them; a copy that fails has it kept again, or to
//!   do. So each grain of which the target lacks something is one of the three.
//! - Of the fleece no more is used than its bound, but for what a failed copy gives back.
//! - What a grain that is given back held is discarded before another change could use its room.
//! - What is read back from the fleece is compared with its hash: changes do not wait for a sync of the fleece, so its
//!   disk may lose what was written there.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use parking_lot::Mutex;
use vellum::{BlockDevice, Error, ErrorKind, Result};

use super::core::{Broken, CopyGuard, Core, Piece};
use super::{FleeceOptions, WhenFull};
use crate::copy::{CopyError, Step};

#[derive(Debug)]
pub(super) struct Fleece {
    device: Arc<dyn BlockDevice>,
    max_grains: u64,
    when_full: WhenFull,
    grain_bytes: u64,
    /// Of the grains that are kept, or sent and not yet discarded.
    hashes: Mutex<HashMap<u64, blake3::Hash>>,
}

/// What is sent next.
enum Next {
    /// Grains to do, which are claimed.
    Claimed(CopyGuard),
    /// Grains that were kept.
    Kept(Range<u64>),
    /// Somebody else is copying.
    Wait,
    Nothing,
}

impl Fleece {
    pub(super) fn new(options: FleeceOptions, grain_bytes: u64) -> Fleece {
        Fleece {
            device: options.device,
            max_grains: options.max_bytes / grain_bytes,
            when_full: options.when_full,
            grain_bytes,
            hashes: Mutex::default(),
        }
    }

    /// Keeps the old bytes of grains that are claimed; `false` if that cannot be.
    pub(super) async fn keep(&self, core: &Core, grains: &Range<u64>) -> bool {
        let count = grains.end - grains.start;
        let has_room = {
            let mut state = core.lock();
            let has_room = state.used_grains + count <= self.max_grains;
            if has_room {
                state.used_grains += count;
            }
            has_room
        };
        if !has_room {
            if self.when_full == WhenFull::Fail {
                core.give_up(Broken::Full);
            }
            return false;
        }
        let kept = match core.read_all(&*core.view, core.bytes(grains)).await {
            Ok(pieces) => self.put(&pieces, grains).await.is_ok(),
            // Whoever copies it straight to the target tells of it.
            Err(_) => false,
        };
        if !kept {
            self.discard(core, grains).await;
        }
        let mut state = core.lock();
        match kept {
            // Nobody wants it any more.
            true if state.broken.is_some() => {}
            true => grains.clone().for_each(|grain| {
                state.todo.remove(grain);
                state.kept.insert(grain);
            }),
            false => state.used_grains -= count,
        }
        kept
    }

    /// Writes all bytes of some grains to the fleece, and notes their hashes.
    async fn put(&self, pieces: &[Piece], grains: &Range<u64>) -> Result<()> {
        for piece in pieces {
            piece.put(&*self.device).await?;
        }
        let hashes = self.hashes_of(pieces);
        self.hashes.lock().extend(grains.clone().zip(hashes));
        Ok(())
    }

    /// The hashes of the grains that some pieces are of, which begin and end with a grain.
    fn hashes_of(&self, pieces: &[Piece]) -> Vec<blake3::Hash> {
        let mut hashes = Vec::new();
        let mut hasher = blake3::Hasher::new();
        for part in pieces
            .iter()
            .flat_map(|piece| piece.parts(self.grain_bytes))
        {
            part.add_to(&mut hasher);
            if part.end_bytes.is_multiple_of(self.grain_bytes) {
                hashes.push(hasher.finalize());
                hasher.reset();
            }
        }
        if hasher.count() > 0 {
            // The last grain of the device is shorter.
            hashes.push(hasher.finalize());
        }
        hashes
    }

    /// Fails if the fleece gives other bytes than were put there.
    fn compare(&self, pieces: &[Piece], grains: &Range<u64>) -> Result<(), CopyError> {
        let found = self.hashes_of(pieces);
        let noted = self.hashes.lock();
        let mut both = grains.clone().zip(&found);
        match both.find(|(grain, hash)| noted.get(grain) != Some(*hash)) {
            None => Ok(()),
            Some((grain, _)) => {
                let message = "the file where old bytes wait has lost some of them; look at the disk that it lies on \
                               (x-vellum-fleecing names another folder), and begin the backup again";
                Err(CopyError {
                    step: Step::Read,
                    offset_bytes: grain * self.grain_bytes,
                    cause: Error::new(ErrorKind::Io, "read", message),
                })
            }
        }
    }

    /// Gives the room of some grains back.
    async fn discard(&self, core: &Core, grains: &Range<u64>) {
        {
            let mut hashes = self.hashes.lock();
            for grain in grains.clone() {
                hashes.remove(&grain);
            }
        }
        let range = core.bytes(grains);
        // Nothing is kept there a second time, so what stays takes only room on the host.
        let _ = self
            .device
            .discard(range.start, range.end - range.start)
            .await;
    }

    /// Has the old bytes of some grains in the target.
    pub(super) async fn send(&self, core: &Arc<Core>, grains: Range<u64>) -> Result<(), CopyError> {
        loop {
            let changed = core.changed.listen();
            match self.next(core, &grains) {
                Next::Claimed(claim) => self.send_from_source(core, claim).await?,
                Next::Kept(kept) => self.send_kept(core, kept).await?,
                Next::Wait => changed.await,
                Next::Nothing => return Ok(()),
            }
        }
    }

    fn next(&self, core: &Arc<Core>, grains: &Range<u64>) -> Next {
        let mut state = core.lock();
        if let Some(start) = state.kept.find(grains.clone(), true) {
            let limit = grains.end.min(start + core.most_grains());
            let kept = start..state.kept.run_end(start, limit);
            for grain in kept.clone() {
                state.kept.remove(grain);
                state.sent.insert(grain);
            }
            return Next::Kept(kept);
        }
        let has_todo = state.todo.find(grains.clone(), true).is_some();
        drop(state);
        match (has_todo, core.try_claim(grains)) {
            (_, Some(claim)) => Next::Claimed(claim),
            (true, None) => Next::Wait,
            (false, None) => Next::Nothing,
        }
    }

    /// Sends grains that are claimed, which they are until they are read.
    async fn send_from_source(&self, core: &Arc<Core>, claim: CopyGuard) -> Result<(), CopyError> {
        let grains = claim.grains.clone();
        let range = core.bytes(&grains);
        let pieces = core.read_all(&*core.view, range.clone()).await?;
        {
            let mut state = core.lock();
            if state.broken.is_none() {
                for grain in grains.clone() {
                    state.todo.remove(grain);
                    state.sent.insert(grain);
                }
            }
        }
        drop(claim);
        let sent = self.write(core, &pieces).await;
        if sent.is_ok() {
            core.discard_copied(&range).await;
        }
        // The source may show something else by now: what is in memory is all that there is.
        let lost = sent.is_err() && self.put(&pieces, &grains).await.is_err();
        if lost {
            core.give_up(Broken::Copy);
        }
        let mut state = core.lock();
        for grain in grains.clone() {
            state.sent.remove(grain);
            if sent.is_err() && state.broken.is_none() {
                state.kept.insert(grain);
                state.used_grains += 1;
            }
        }
        drop(state);
        core.changed.notify(usize::MAX);
        sent
    }

    /// Sends grains that were kept.
    async fn send_kept(&self, core: &Core, grains: Range<u64>) -> Result<(), CopyError> {
        let range = core.bytes(&grains);
        let sent = match core.read_all(&*self.device, range.clone()).await {
            Ok(pieces) => match self.compare(&pieces, &grains) {
                Ok(()) => self.write(core, &pieces).await,
                Err(error) => {
                    core.give_up(Broken::Copy);
                    Err(error)
                }
            },
            Err(error) => Err(error),
        };
        if sent.is_ok() {
            self.discard(core, &grains).await;
            core.discard_copied(&range).await;
        }
        let mut state = core.lock();
        for grain in grains.clone() {
            state.sent.remove(grain);
            match sent.is_ok() {
                true => state.used_grains -= 1,
                false if state.broken.is_none() => state.kept.insert(grain),
                false => {}
            }
        }
        drop(state);
        core.changed.notify(usize::MAX);
        sent
    }

    async fn write(&self, core: &Core, pieces: &[Piece]) -> Result<(), CopyError> {
        for piece in pieces {
            core.write_piece(piece).await?;
        }
        Ok(())
    }
}
