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

use std::ops::Range;
use std::sync::Arc;

use vellum::{BlockDevice, Result};

use super::core::{Broken, CopyGuard, Core, Piece, first};
use super::{FleeceOptions, WhenFull};
use crate::copy::CopyError;

#[derive(Debug)]
pub(super) struct Fleece {
    device: Arc<dyn BlockDevice>,
    max_grains: u64,
    when_full: WhenFull,
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
            Ok(pieces) => self.put(&pieces).await.is_ok(),
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
                state.todo.clear(grain);
                state.kept.set(grain);
            }),
            false => state.used_grains -= count,
        }
        kept
    }

    async fn put(&self, pieces: &[Piece]) -> Result<()> {
        for piece in pieces {
            piece.put(&*self.device).await?;
        }
        Ok(())
    }

    /// Gives the room of some grains back.
    async fn discard(&self, core: &Core, grains: &Range<u64>) {
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
        if let Some(start) = first(&state.kept, grains) {
            let limit = grains.end.min(start + core.most_grains());
            let kept = start..state.kept.run_end(start, limit);
            for grain in kept.clone() {
                state.kept.clear(grain);
                state.sent.set(grain);
            }
            return Next::Kept(kept);
        }
        let has_todo = first(&state.todo, grains).is_some();
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
                    state.todo.clear(grain);
                    state.sent.set(grain);
                }
            }
        }
        drop(claim);
        let sent = self.write(core, &pieces).await;
        if sent.is_ok() {
            core.discard_copied(&range).await;
        }
        // The source may show something else by now: what is in memory is all that there is.
        let lost = sent.is_err() && self.put(&pieces).await.is_err();
        if lost {
            core.give_up(Broken::Copy);
        }
        let mut state = core.lock();
        for grain in grains.clone() {
            state.sent.clear(grain);
            if sent.is_err() && state.broken.is_none() {
                state.kept.set(grain);
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
            Ok(pieces) => self.write(core, &pieces).await,
            Err(error) => Err(error),
        };
        if sent.is_ok() {
            self.discard(core, &grains).await;
            core.discard_copied(&range).await;
        }
        let mut state = core.lock();
        for grain in grains.clone() {
            state.sent.clear(grain);
            match sent.is_ok() {
                true => state.used_grains -= 1,
                false if state.broken.is_none() => state.kept.set(grain),
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
